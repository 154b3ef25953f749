"""State that a step may change, noted before the step -> the same state again, or the reason it is not known.

Python's state is noted by reference: each mutable container that the module reaches (a cell) is copied shallowly. Of
tensors the version counters are noted; only tensors that steps are known to change in place are copied.

Not seen: state inside of generators, iterators and files; attributes of PyTorch's own layers other than ``training``;
modules that are not registered; containers more than eight deep; and changes that keep the length, inside of containers
and arrays too large to copy before every step. Batch norm's statistics belong to the code that runs the parts.

Private names of Lightning were checked on 2.5.0 to 2.6.6, those of torchmetrics on 1.9.
"""

from __future__ import annotations

import contextlib
import enum
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter, itemgetter, setitem
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lightning_memguard.errors import MemGuardError
from lightning_memguard.training.facts.lightning_types import lightning_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_MOST_CELLS, _MOST_DEPTH = 5_000, 8
_WALKED = 256  # entries of a container that may hold further cells; in a longer list, the last ones are looked at
_COPIED = 10_000  # entries of a container that is copied before every step; of a longer one, the length is noted
_SMALL_BYTES, _SMALL_TOTAL_BYTES = 64 << 10, 1 << 20  # copied while it is not known which tensors change
_COPIED_BYTES = 64 << 20  # tensors known to change in place: at most so much is copied before each step

_PLAIN = frozenset([int, float, complex, bool, str, bytes, type(None), type, FunctionType, MethodType, torch.dtype])
_NO_STATE = (type, torch.Tensor, nn.Module, enum.Enum, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_FOREIGN = frozenset(["Trainer", "Logger", "Optimizer", "Strategy", "Dataset", "DataLoader", "LightningDataModule"])
_LIBRARIES = re.compile(  # their objects have state of their own: connections, locks, caches
    r"(torch|(pytorch_)?lightning(_fabric|_memguard)?|numpy|builtins|functools|inspect|typing|logging|_?thread(ing)?|re|"
    r"concurrent|multiprocessing|asyncio|weakref|pathlib|datetime|tqdm|rich|wandb|mlflow|comet_ml|neptune|clearml|aim|"
    r"tensorboardX?)(\.|$)"
)
_CHANGED = ("training", "_current_fx_name")  # attributes that every module has, or that Lightning sets
_ABSENT = object()
_VERSION = attrgetter("_version")


class _Kind(NamedTuple):
    """How a kind of container is noted and put back."""

    save: Callable[[Any], Any]
    pairs: Callable[[Any], Iterable[tuple[Any, Any]]]  # of what was saved
    put: Callable[[Any, Any], object]
    live: Callable[[Any], Iterable[tuple[Any, Any]]]  # of the container now
    replace: Callable[[Any, Any, Any], None] = setitem
    label: str = "{0}[{1!r}]"
    compares: bool = True  # copies of it, by ``==``


class _Cell(NamedTuple):
    """A mutable container that the module reaches."""

    kind: _Kind
    container: Any
    name: str
    depth: int  # of further cells that may be listed below it
    root: int  # the tree of cells that it is in

    def label(self, key: object) -> str:
        return self.kind.label.format(self.name, key)


class _Held(NamedTuple):
    """A tensor in a cell before a step."""

    tensor: torch.Tensor
    version: int
    copy: torch.Tensor | None
    cell: _Cell
    key: Any


class RandomStates(NamedTuple):
    """States of the global generators of Python and NumPy, and of torch's; None if they were not noted."""

    python: tuple[Any, ...] | None
    numpy: tuple[Any, ...] | None
    torch: list[bytes] | None


_NOT_NOTED = RandomStates(None, None, None)
EVERYWHERE = frozenset(RandomStates._fields)


class Noted(NamedTuple):
    """State before a step; what it means is worked out if the step fails."""

    results: Any  # Lightning's collection of logged values
    collection: dict[str, Any]
    logged: list[tuple[str, Any, dict[str, Any]]]
    batch: Any
    in_batch: list[tuple[_Kind, Any, Any]]  # its containers, and a copy of each
    of_batch: int  # tensors
    cells: list[_Cell]
    saved: list[Any]
    tensors: list[torch.Tensor]  # of the batch, parameters, and those in cells
    versions: list[int]
    copies: dict[int, torch.Tensor | None]  # of some tensors, by ``id``
    random: RandomStates

    @property
    def held(self) -> list[_Held]:
        """The tensors in cells."""
        versions = {id(tensor): version for tensor, version in zip(self.tensors, self.versions, strict=True)}
        return [
            _Held(each, versions[id(each)], self.copies.get(id(each)), cell, key)
            for cell, saved in zip(self.cells, self.saved, strict=True)
            for key, each in _entries(cell, saved)
            if isinstance(each, torch.Tensor)
        ]

    def put_back(self) -> None:
        """Make everything as it was; this may be done again and again."""
        if self.results is not None:
            self.results.clear()
            _put_dict(vars(self.results), self.collection)
        for key, result, values in self.logged:
            self.results[key] = result
            _put_dict(vars(result), values)
        for cell, saved in zip(self.cells, self.saved, strict=True):
            cell.kind.put(cell.container, saved)
        for kind, container, saved in self.in_batch:
            kind.put(container, saved)
        for held in self.held:
            if held.copy is not None and (held.version < 0 or _version(held.tensor) != held.version):
                with torch.inference_mode(held.tensor.is_inference()), torch.no_grad():
                    held.tensor.copy_(held.copy)
        if self.random.torch is not None:
            for generator, state in zip(_generators(), self.random.torch, strict=False):
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        if self.random.python is not None:
            random.setstate(self.random.python)
        if self.random.numpy is not None:
            name, keys, *rest = self.random.numpy
            np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002 - users draw from it

    def tensors_left(self) -> Iterator[Left]:
        """Yield the tensors that Python's state has gained since, or that were changed in place."""
        seen = {id(cell.container) for cell in self.cells}
        changed = {id(held.tensor) for held in self.held if _has_changed(held)}
        for cell, saved in zip(self.cells, self.saved, strict=True):
            before = dict(cell.kind.pairs(saved))
            same = {id(each) for value in before.values() for each in _flat(value)} - changed
            for key, value in cell.kind.live(cell.container):
                if value.__class__ not in _PLAIN and (value is not before.get(key, _ABSENT) or changed):
                    for left in _left(value, cell.label(key), partial(cell.kind.replace, cell.container, key), seen):
                        if id(left.tensor) not in same:
                            yield left

    def unknown_draws(self) -> list[str]:
        """The generators whose states were not noted; see `random_states`."""
        return [field for field, state in zip(RandomStates._fields, self.random, strict=True) if state is None]


@dataclass(frozen=True)
class Left:
    """A tensor that a step has left in Python's state.

    Attributes:
        name: for messages, such as ``self.outputs[3]``.
        tensor: the tensor.
        replace: puts another one in its place.
    """

    name: str
    tensor: torch.Tensor
    replace: Callable[[torch.Tensor], None]


class StepState:
    """Notes what a step may change in its Trainer and its module, and puts it back."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._connector: Any = trainer._logger_connector
        self._module = module
        self._own = frozenset(vars(lightning_of(module).LightningModule()))  # attributes that the user did not set
        self._changing: set[tuple[str, Any]] = set()  # places of tensors that steps change in place
        self._busy: set[str] = set()  # names of cells that change from step to step
        self._draws: set[str] = set()  # from where steps draw random numbers, by the fields of `RandomStates`
        self._steps = 0
        self.is_thorough = False  # whether more was noted, to learn from
        self._last: Noted | None = None
        self._list()

    # -- before a step

    def note(self, results: Any, batch: object, *, draws: bool = False) -> Noted:
        """Return the state before a step.

        Args:
            results: Lightning's collection of the values that the step logs, or None.
            batch: the batch of the step.
            draws: note the states of Python's and NumPy's generators in any case.
        """
        self._steps += 1
        self.is_thorough = is_thorough = not self._steps & (self._steps - 1)  # at powers of two
        if is_thorough:
            self._list()
        saved, in_cells = self._save()
        in_batch, in_it = _of_batch(batch)
        tensors = [*in_it, *self._every_parameter, *in_cells]
        try:
            versions, copies = [*map(_VERSION, tensors)], is_thorough or bool(self._changing)
        except RuntimeError:  # an inference tensor does not count
            versions, copies = [*map(_version, tensors)], True
        noted = Noted(
            results,
            {} if results is None else vars(results).copy(),
            [(key, each, vars(each).copy()) for key, each in results.items()] if results else [],
            batch,
            in_batch,
            len(in_it),
            self._cells,
            saved,
            tensors,
            versions,
            {},
            random_states(EVERYWHERE if draws or is_thorough else self._draws),
        )
        if copies:
            self._copy(noted, is_thorough=is_thorough)
        self._last = noted if is_thorough else None
        return noted

    def _list(self) -> None:
        """List all that a step may change."""
        if any(map(is_lazy, self._module.parameters())):
            raise MemGuardError("lazy layers get their parameters in the first step")
        self._parameters = {name: p for name, p in self._module.named_parameters() if not p.is_inference()}
        self._every_parameter = [*self._parameters.values()]
        self._trees: list[list[_Cell]] = []
        self._known: set[int] = set()  # by ``id``, the containers of all cells
        layers, without_buffers = [], []
        for path, each in self._module.named_modules():
            name, attributes = f"self.{path}".removesuffix("."), vars(each)
            is_users = not type(each).__module__.startswith("torch.nn.")
            if is_users:
                self._plant(_SIZE, attributes, name)
                self._plant(_kind_of_names(attributes, self._is_users), attributes, name)
            else:
                layers.append(attributes)
            if each._buffers and not isinstance(each, _BatchNorm):
                self._plant(_BUFFERS, each._buffers, name)
            elif is_users and not each._buffers:
                without_buffers.append(each._buffers)
        for source in {cls.__module__: None for cls in type(self._module).__mro__ if not _is_library(cls)}:
            names = vars(sys.modules[source])
            self._plant(_kind_of_names(names, _is_global_state), names, source)
        self._plant(_NO_BUFFERS, without_buffers, "buffers")
        self._plant(_TRAINING, layers, "training")
        self._plant(_REQUIRES_GRAD, self._every_parameter, "requires_grad")
        connector = vars(self._connector)
        self._plant(_kind_of_names(connector, lambda key, _: key == "_current_fx"), connector, "logging")
        self._sort()

    def _is_users(self, key: str, _: object) -> bool:
        return key in _CHANGED or (key not in self._own and not key.startswith("_jit"))

    def _plant(self, kind: _Kind, container: object, name: str) -> None:
        self._trees.append([_Cell(kind, container, name, _MOST_DEPTH, len(self._trees))])
        self._grow(len(self._trees) - 1)

    def _grow(self, index: int) -> None:
        """List the cells below a root."""
        self._known.difference_update(id(cell.container) for cell in self._trees[index])
        root = self._trees[index][0]
        self._known.add(id(root.container))
        self._trees[index] = tree = [root]
        _walk_below(root, tree, self._known)

    def _sort(self) -> None:
        """Find the cells of plain values, which hardly ever change: one comparison shows that they did not."""
        every = [cell for tree in self._trees for cell in tree]
        ranks = [
            0 if cell.name not in self._busy and _is_calm(cell) else _RANKS.get(cell.kind.pairs, 2) for cell in every
        ]
        self._cells = [cell for rank in range(4) for cell, its in zip(every, ranks, strict=True) if its == rank]
        self._ends = [sum(rank <= last for rank in ranks) for last in range(3)]
        self._calls = [(cell.kind.save, cell.container) for cell in self._cells]
        self._calm = [save(container) for save, container in self._calls[: self._ends[0]]]
        self._classes: list[type] = []
        self._at: list[list[int]] = [[], [], [], []]

    def _save(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Copy all cells, those that are new among them; return also the tensors in them."""
        for _ in range(_MOST_DEPTH):
            try:
                saved = [save(container) for save, container in self._calls]
            except KeyError:  # an attribute is gone
                self._list()
                continue
            calm, mappings, walked = self._ends
            if calm == len(saved) and _equal(saved, self._calm):
                return saved, []
            if not _equal(saved[:calm], self._calm):
                pairs = zip(self._cells, saved, self._calm, strict=False)
                changed = [cell for cell, now, before in pairs if not _equal(now, before)]
                if any(cell.kind.save in (len, any) for cell in changed):
                    self._list()
                else:
                    self._busy.update(cell.name for cell in changed)
                    self._sort()
                continue
            below = [*map(dict.values, saved[calm:mappings]), *saved[mappings:walked]]
            values = [*chain.from_iterable(below)]
            if len(values) > _WALKED:
                values = [*chain.from_iterable(each if len(each) <= _WALKED else [*each][-_WALKED:] for each in below)]
            tensors, is_new = self._look(values)
            if not is_new or not (grown := self._grown(saved)):
                return saved, tensors
            for root in grown:
                self._grow(root)
            self._sort()
        raise RuntimeError("the module's attributes differ each time they are read")

    def _look(self, values: list[Any]) -> tuple[list[torch.Tensor], bool]:
        """Return the tensors among some values, and whether there may be containers that are not known."""
        if (classes := [*map(type, values)]) != self._classes:  # where what is follows from the classes
            self._classes, self._at = classes, [[], [], [], []]
            for at, cls in enumerate(classes):
                if cls not in _PLAIN and (place := _place_by_class(cls)) is not None:
                    self._at[place].append(at)
        tensors, tuples, objects, containers = self._at
        found = [values[at] for at in tensors]
        ids = [id(values[at]) for at in containers] + [id(vars(values[at])) for at in objects]
        is_new = not self._known.issuperset(ids)
        for each in _flat(tuple([values[at] for at in tuples])) if tuples else ():
            if isinstance(each, torch.Tensor):
                found.append(each)
            is_new = is_new or _is_new(each, self._known)
        return found, is_new

    def _grown(self, saved: list[Any]) -> set[int]:
        """Return the roots of cells that are new."""
        if len(self._cells) >= _MOST_CELLS:
            return set()
        return {
            cell.root
            for cell, values in zip(self._cells, saved, strict=True)
            if cell.depth and _length(cell, values) <= _WALKED
            for _, each in _entries(cell, values)
            if _is_new(each, self._known)
        }

    def _copy(self, noted: Noted, *, is_thorough: bool) -> None:
        """Copy the tensors that steps may change in place."""
        small, most = _SMALL_TOTAL_BYTES, _COPIED_BYTES
        for each, _, _, cell, key in noted.held:
            is_changing = (cell.name, key) in self._changing
            if not (is_thorough or is_changing or each.is_inference()) or isinstance(each, nn.Parameter):
                continue
            nbytes = each.numel() * each.element_size()
            if is_changing and 0 < nbytes <= most:
                most, noted.copies[id(each)] = most - nbytes, _copy(each)
            elif 0 < nbytes <= min(small, _SMALL_BYTES) and id(each) not in noted.copies:
                small, noted.copies[id(each)] = small - nbytes, _copy(each)

    # -- after it

    def obstacle(self, noted: Noted) -> str:
        """Return why the state before a failed step cannot be put back, or nothing if it can."""
        self._draws.update(EVERYWHERE)  # from now on, it is known
        pairs = zip(noted.tensors, noted.versions, strict=True)
        is_changed = [_version(tensor) != version for tensor, version in pairs]
        if any(is_changed[: noted.of_batch]):
            return "it changed its batch in place before it failed, and the batch before is not known"
        for name, changed in zip(self._parameters, is_changed[noted.of_batch :], strict=False):
            if changed:
                return _unknown(f"the parameter `{name}` in place")
        for held in noted.held:
            if held.copy is None and _version(held.tensor) != held.version:
                self._changing.add((held.cell.name, held.key))
                name = held.cell.label(held.key)
                is_buffer = held.cell.kind is _BUFFERS
                return _unknown(f"the buffer `{name[5:]}` in place" if is_buffer else f"the tensor `{name}` in place")
        known = {id(cell.container) for cell in noted.cells}
        for cell, saved in zip(noted.cells, noted.saved, strict=True):
            is_longer = isinstance(cell.container, list) and cell.kind is _LARGE and len(cell.container) > saved
            if cell.kind is _LARGE and len(cell.container) != saved and not is_longer:
                return _unknown(f"`{cell.name}`")
            is_walked = cell.depth and cell.kind.compares and _length(cell, saved) <= _WALKED
            for key, each in _entries(cell, saved) if is_walked and len(known) < _MOST_CELLS else ():
                if _is_new(each, known):
                    return f"`{cell.label(key)}` is new, and its contents before the step are not known"
        return ""

    def watch(self) -> None:
        """Learn from a step that succeeded which tensors steps change in place, and whether they draw in Python."""
        last, self._last = self._last, None
        if last is not None:
            self._changing.update((each.cell.name, each.key) for each in last.held if _has_changed(each))
            pairs = zip(RandomStates._fields, last.random, random_states(), strict=True)
            self._draws.update(field for field, before, now in pairs if before != now)

    def replace_numbers(self, plain: Callable[[Any], Any]) -> None:
        """Replace what a step has left in Python's state by what a function makes of it."""
        self._list()
        for cell in self._cells:
            for key, value in [*cell.kind.live(cell.container)]:
                if (number := plain(value)) is not value:
                    cell.kind.replace(cell.container, key, number)


def random_states(where: Collection[str] = EVERYWHERE) -> RandomStates:
    """Return the states of global generators, which can be compared."""
    if not where:
        return _NOT_NOTED
    python = random.getstate() if "python" in where else None
    numpy: Any = np.random.get_state() if "numpy" in where else None  # noqa: NPY002 - users draw from the global one
    of_torch = [each.get_state().numpy().tobytes() for each in _generators()] if "torch" in where else None
    return RandomStates(python, numpy and (numpy[0], numpy[1].tobytes(), *numpy[2:]), of_torch)


def _generators() -> list[torch.Generator]:
    on_gpu = torch.cuda.is_initialized() and torch.cuda.default_generators[torch.cuda.current_device()]
    return [torch.default_generator, *([on_gpu] if on_gpu else ())]


# -- tensors


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor does not count
        return -1


def _has_changed(held: _Held) -> bool:
    if held.version < 0 and held.copy is not None:
        return not torch.equal(held.tensor, held.copy)
    return _version(held.tensor) != held.version


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    with contextlib.suppress(RuntimeError), torch.no_grad():  # there may be no memory for it
        return tensor.detach().clone()
    return None


def _unknown(what: str) -> str:
    return f"it changed {what} before it failed, and the value before is not known"


def _flat(value: object) -> Iterator[Any]:
    """Yield a value, or those in a tuple."""
    if isinstance(value, tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _left(value: object, name: str, replace: Callable[[Any], None], seen: set[int]) -> Iterator[Left]:
    """Yield the tensors in a value, and in the containers in it that were not seen."""
    if isinstance(value, torch.Tensor):
        yield Left(name, value, replace)
    elif isinstance(value, tuple):
        items = list(value)

        def rebuild(index: int, item: object) -> None:
            items[index] = item
            replace(type(value)(*items) if hasattr(value, "_fields") else tuple(items))

        for index, each in enumerate(value):
            yield from _left(each, f"{name}[{index}]", partial(rebuild, index), seen)
    elif (found := _container(value)) is not None and id(found[1]) not in seen:
        kind, container = found
        seen.add(id(container))
        for key, each in kind.live(container):
            yield from _left(each, kind.label.format(name, key), partial(kind.replace, container, key), seen)


# -- cells


def _of_batch(batch: object) -> tuple[list[tuple[_Kind, Any, Any]], Collection[torch.Tensor]]:
    """Return the containers of a batch, with a copy of each, and its tensors."""
    if (kind := _FLAT.get(type(batch))) is not None:
        saved = kind.save(batch)
        values = saved.values() if kind is _DICT else saved
        if {*map(type, values)} == {torch.Tensor}:
            return [(kind, batch, saved)], values
    cells: list[_Cell] = []
    tensors: list[torch.Tensor] = []
    _walk(batch, "batch", _MOST_DEPTH, 0, cells, set(), tensors)
    return [(cell.kind, cell.container, cell.kind.save(cell.container)) for cell in cells], tensors


def _walk(
    value: object,
    name: str,
    depth: int,
    root: int,
    cells: list[_Cell],
    seen: set[int],
    tensors: list[torch.Tensor] | None = None,
) -> None:
    """List the containers in a value, and its tensors."""
    for each in _flat(value):
        if isinstance(each, torch.Tensor):
            if tensors is not None:
                tensors.append(each)
        elif (found := _container(each)) is not None and id(found[1]) not in seen and len(seen) < _MOST_CELLS:
            seen.add(id(found[1]))
            cells.append(_Cell(*found, name, depth - 1, root))
            _walk_below(cells[-1], cells, seen, tensors)


def _walk_below(cell: _Cell, cells: list[_Cell], seen: set[int], tensors: list[torch.Tensor] | None = None) -> None:
    pairs = [*cell.kind.pairs(cell.kind.save(cell.container))]
    for key, value in pairs if cell.depth and (len(pairs) <= _WALKED or tensors is not None) else ():
        if value.__class__ not in _PLAIN:
            _walk(value, cell.label(key), cell.depth, cell.root, cells, seen, tensors)


def _length(cell: _Cell, saved: Any) -> int:
    """How many entries of a cell may hold further cells."""
    return 0 if cell.kind.pairs is _nothing else len(saved)


def _entries(cell: _Cell, saved: object) -> Iterator[tuple[Any, Any]]:
    """Yield what was saved of a cell, by key, but for plain values; of a long list, the last ones."""
    pairs = [*cell.kind.pairs(saved)]
    for key, value in pairs if len(pairs) <= _WALKED else pairs[-_WALKED:]:
        if value.__class__ not in _PLAIN:
            for each in _flat(value):
                yield key, each


def _is_new(value: object, known: set[int]) -> bool:
    """Whether a value is a container that is not known."""
    return value.__class__ not in _PLAIN and (found := _container(value)) is not None and id(found[1]) not in known


def _is_calm(cell: _Cell) -> bool:
    values = (each for _, value in cell.kind.pairs(cell.kind.save(cell.container)) for each in _flat(value))
    return cell.kind.compares and not any(isinstance(each, torch.Tensor) for each in values)


def _equal(now: object, before: object) -> bool:
    try:
        return bool(now == before)
    except Exception:  # noqa: BLE001 - tensors and arrays do not compare; neither do some of the users' objects
        return False


# -- kinds of cells


def _container(value: Any) -> tuple[_Kind, Any] | None:
    """Return how a value is noted, and what is noted of it."""
    cls: Any = type(value)
    kind = _kind_of(cls)
    if kind is _ARRAY and value.nbytes > _SMALL_BYTES:
        return None
    if kind in (_DICT, _LIST, _SET) and len(value) > _COPIED:
        return _LARGE, value
    return None if kind is None else (kind, vars(value) if kind is _OBJECT else value)


@lru_cache(maxsize=1024)
def _kind_of(cls: type) -> _Kind | None:
    for base, kind in _KINDS.items():
        if issubclass(cls, base):
            return kind
    names = {each.__name__ for each in cls.__mro__}
    is_metric = "Metric" in names  # it is not registered: a module lists its own
    if not is_metric and (issubclass(cls, _NO_STATE) or _is_library(cls) or names & _FOREIGN):
        return None
    if cls.__dictoffset__:
        return _OBJECT
    return _SLOTS if any("__slots__" in vars(each) for each in cls.__mro__) else None


def _place_by_class(cls: Any) -> int | None:
    """Where `_look` lists values of a class: with tensors, tuples, objects or containers."""
    if issubclass(cls, (torch.Tensor, tuple)):
        return int(issubclass(cls, tuple))
    kind = _kind_of(cls)
    return None if kind is None else 2 if kind is _OBJECT else 3


def _is_library(cls: type) -> bool:
    return _LIBRARIES.match(cls.__module__) is not None


def _nothing(*_: object) -> tuple[()]:
    return ()


def _put_dict(container: dict[Any, Any], saved: dict[Any, Any]) -> None:
    for key in [key for key in container if key not in saved]:
        del container[key]
    for key, value in saved.items():
        if container.get(key, _ABSENT) is not value:
            container[key] = value
    if [*container] != [*saved]:  # the order
        for key, value in saved.items():
            del container[key]
            container[key] = value


def _put_list(container: list[Any], saved: tuple[Any, ...]) -> None:
    if len(container) != len(saved) or any(now is not then for now, then in zip(container, saved, strict=True)):
        container.clear()
        container.extend(saved)


def _put_set(container: set[Any], saved: frozenset[Any]) -> None:
    if container != saved:
        container.clear()
        container.update(saved)


def _put_large(container: object, length: int) -> None:
    if isinstance(container, list):
        del container[length:]


def _put_training(modules: list[dict[str, Any]], saved: list[bool]) -> None:
    for attributes, training in zip(modules, saved, strict=True):
        attributes["training"] = training


def _put_requires_grad(parameters: list[nn.Parameter], saved: list[bool]) -> None:
    for parameter, requires_grad in zip(parameters, saved, strict=True):
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


def _slots(thing: object) -> dict[str, Any]:
    names = (vars(cls).get("__slots__", ()) for cls in type(thing).__mro__)
    flat = [name for each in names for name in ((each,) if isinstance(each, str) else each)]
    return {name: getattr(thing, name) for name in flat if hasattr(thing, name)}


def _put_slots(thing: object, saved: dict[str, Any]) -> None:
    for name in _slots(thing).keys() - saved.keys():
        object.__delattr__(thing, name)
    for name, value in saved.items():
        object.__setattr__(thing, name, value)


def _kind_of_names(container: dict[str, Any], fits: Callable[[str, Any], bool]) -> _Kind:
    """Return how some of the names in a dictionary are noted."""
    keys = [key for key, value in container.items() if fits(key, value)]
    known, noted = frozenset(container), frozenset(keys)

    def live(container: dict[str, Any]) -> list[tuple[str, Any]]:
        return [
            (key, each) for key, each in container.items() if key in noted or (key not in known and fits(key, each))
        ]

    def put(container: dict[str, Any], saved: tuple[Any, ...]) -> None:
        for key, _ in live(container):
            if key not in known:
                del container[key]
        for key, value in zip(keys, saved, strict=False):
            if container.get(key, _ABSENT) is not value:
                container[key] = value

    save = itemgetter(*keys, keys[0]) if keys else _nothing  # of a single key, it would return no tuple
    return _Kind(save, partial(zip, keys), put, live, label="{0}.{1}")


def _is_global_state(key: str, value: object) -> bool:
    return not key.startswith("__") and isinstance(value, (int, float, str, type(None), dict, list, set, deque))


_DICT = _Kind(dict, dict.items, _put_dict, lambda each: [*each.items()])
_OBJECT = _DICT._replace(label="{0}.{1}")
_BUFFERS = _DICT._replace(label="{0}.{1}", replace=dict.__setitem__)
_LIST = _Kind(tuple, enumerate, _put_list, lambda each: [*enumerate(each)])
_SET = _Kind(frozenset, _nothing, _put_set, _nothing)
_SLOTS = _Kind(_slots, dict.items, _put_slots, lambda each: _slots(each).items(), object.__setattr__, "{0}.{1}")
_SIZE = _Kind(len, _nothing, lambda *_: None, _nothing)  # all is listed again if it changes
_NO_BUFFERS = _SIZE._replace(save=any, put=lambda modules, _: [buffers.clear() for buffers in modules])
_TRAINING = _SIZE._replace(save=lambda layers: [*map(itemgetter("training"), layers)], put=_put_training)
_REQUIRES_GRAD = _SIZE._replace(
    save=lambda parameters: [*map(attrgetter("requires_grad"), parameters)], put=_put_requires_grad
)
_OPAQUE = _Kind(len, _nothing, _put_large, _nothing, compares=False)
_LARGE = _OPAQUE
_ARRAY = _OPAQUE._replace(save=np.copy, put=np.copyto)
_RANKS: dict[Any, int] = {dict.items: 1, _nothing: 3}  # the order of cells that are not calm
_FLAT: dict[type, _Kind] = {tuple: _LIST, list: _LIST, dict: _DICT}
_KINDS: dict[type, _Kind] = {
    dict: _DICT,
    list: _LIST,
    deque: _LIST,
    set: _SET,
    np.ndarray: _ARRAY,
    torch.Generator: _OPAQUE._replace(save=torch.Generator.get_state, put=torch.Generator.set_state),
    random.Random: _OPAQUE._replace(save=random.Random.getstate, put=random.Random.setstate),
    np.random.RandomState: _OPAQUE._replace(save=np.random.RandomState.get_state, put=np.random.RandomState.set_state),
    np.random.Generator: _OPAQUE._replace(
        save=attrgetter("bit_generator.state"), put=lambda each, state: setattr(each.bit_generator, "state", state)
    ),
}
