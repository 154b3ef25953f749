"""Each operator that a part of a step runs -> how the samples lie in what it returns, or a refusal.

The parts of a step must run one program: the first that runs writes down its operators, their numbers and the layouts
of their results, and every other part has to follow it. A number that depends on the size of the part in any way that
was not seen differs between parts of different sizes, and refuses the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memguard.core.kernels.arguments import operands
from lightning_memguard.training.rescue import rules
from lightning_memguard.training.rescue.elsewhere import Elsewhere, storage_of, version_of
from lightning_memguard.training.rescue.sample_layout import (
    CONSTANT,
    WHOLE,
    Layout,
    Refused,
    Waits,
    get,
    piece,
    put,
    refuse,
)

_READS = {"_local_scalar_dense", "is_nonzero", "equal", "allclose"}


@dataclass(frozen=True)
class Entry:
    """One operator of the program that all parts run, or a function of torch's: what it takes, and what it returns.

    ``draws`` says how the random numbers of a function lie.
    """

    func: Any
    numbers: tuple[Any, ...]
    layouts: tuple[Layout, ...]
    shapes: tuple[tuple[int | None, ...], ...]  # None: the samples' dimension
    draws: tuple[rules.Drawn | None, ...] = ()

    @classmethod
    def of(cls, func: object, numbers: tuple[Any, ...], outs: list[torch.Tensor], layouts: list[Layout]) -> Entry:
        """Write down a call."""
        shapes = tuple(rules.shape_of(t, o) for t, o in zip(outs, layouts, strict=True))
        return cls(func, numbers, tuple(layouts), shapes)

    def is_same(self, func: object, numbers: tuple[Any, ...], outs: list[torch.Tensor]) -> bool:
        """Whether a call in another part is this one."""
        shapes = tuple(rules.shape_of(t, o) for t, o in zip(outs, self.layouts, strict=False))
        return (self.func, self.numbers, self.shapes) == (func, numbers, shapes) and len(outs) == len(self.layouts)


@dataclass
class Script:
    """The program: its operators, and the tensors that it takes from elsewhere."""

    entries: list[Entry] = field(default_factory=list)
    outside: Elsewhere = field(default_factory=Elsewhere)
    arrangements: list[int] = field(default_factory=list)  # of its sorts and packings; 0 is that of the batch
    complete: bool = False


class Flow(TorchDispatchMode):
    """Follows one pass over one part, between `begin` and `end`.

    Attributes:
        token: of the pass; layouts of other passes do not count.
        quiet: whether operators of our own run.
        recomputes: whether a backward pass runs.
        idle: whether operators are not followed: in a backward pass, except for code in activation checkpoints and in
            custom functions.
        custom_returned: the tensors that the custom function returned whose backward pass runs; None if none does.
        sized: the layout of what a factory makes from a size of the part, while it runs.
        changes: known ways in which the step in parts is another one, by the user's leave.
        writes: to tensors that outlive the pass, and what these were before.
        extends: whether this pass writes the program that the others follow.
        noted: by storage, the tensors whose versions were noted before an attempt that failed; None if none did.
    """

    def __init__(self, total: int, constants: Iterable[torch.Tensor], *, lenient: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total, self.lenient = total, lenient
        self.changes: dict[str, None] = {}
        self.script = Script()
        self.quiet = self.idle = self.recomputes = False
        self.sized: Layout | None = None
        self.start = self.stop = 0
        self.writes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.pending = self.extends = False
        self.noted: dict[int, list[torch.Tensor]] | None = None
        known = [*constants]
        self._constants, self._storages = {id(each) for each in known}, {storage_of(each) for each in known}
        self.token: object = None
        self.custom_returned: list[tuple[torch.Tensor, Layout | None]] | None = None
        self.drawn: list[rules.Drawn | None] = []  # how random numbers lie, since this was cleared; None: constants
        self.to_draw: Iterator[rules.Drawn | None] = iter(())
        self._restart()

    def _restart(self) -> None:
        self.place = 0
        self.script.outside.begin()
        self._changed: dict[int, tuple[int, bool]] = {}  # storages of constants: how often written to, with samples?
        self._written: list[tuple[str, list[torch.Tensor], list[int]]] = []  # whose versions count up after an operator
        self._new: set[int] = set()  # storages of tensors that were made from values of Python
        self._raw: set[int] = set()  # storages that nothing was written to yet
        self._placed: dict[int, torch.Tensor] = {}  # by storage, those that places were written over
        self._arranged: list[tuple[Any, torch.Tensor]] = []  # what this pass has sorted, or packed

    # -- a pass

    def begin(self, start: int, stop: int, *, extends: bool = False) -> None:
        """A pass over some samples begins."""
        self.undo_writes()
        self.token = object()
        self.start, self.stop, self.extends = start, stop, extends
        self.pending = False
        self._restart()

    def undo_writes(self) -> None:
        """Restore the tensors that a pass has written to."""
        with torch.no_grad():
            for tensor, value in self.writes.values():
                tensor.copy_(value)
        self.writes.clear()

    def finish(self) -> None:
        """The pass has reached the end of its program.

        Raises:
            Refused: another part has not.
        """
        self.check_writes()
        same = self.is_single or self.place == len(self.script.entries)
        if self.script.complete and not (same and len(self._arranged) == len(self.script.arrangements)):
            raise Refused("parts of its batch run different operators")
        self.script.complete = True

    @property
    def samples(self) -> int:
        """How many the part has."""
        return self.stop - self.start

    @property
    def is_single(self) -> bool:
        """Whether the part is one sample, of which `Reductions` says how it lies in what functions return."""
        return self.samples == 1

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer."""
        return id(tensor) in self._constants

    def mark_new(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was made in this pass, from values of Python: the step may write to it."""
        if id(tensor) not in self._constants:
            self._new.add(storage_of(tensor))

    def layout(self, tensor: torch.Tensor) -> Layout:
        """How the samples lie in a tensor."""
        found = get(tensor, self.token)
        if found is None:
            return self._from_elsewhere(tensor)
        if self._changed and found.kind in ("constant", "whole"):
            return self._as_changed(tensor, found)
        if self._placed and found.kind == "rows":
            with self.silent():
                if storage_of(tensor) in self._placed:
                    raise refuse("it reads a tensor over which places of samples were written")
        return found

    def known(self, tensor: torch.Tensor) -> Layout | None:
        """The layout that a tensor was given in this pass; None if it has none."""
        return get(tensor, self.token)

    def kind(self, value: object) -> str:
        """The kind of a tensor's layout; empty if it has none."""
        layout = get(value, self.token) if isinstance(value, torch.Tensor) else None
        return "" if layout is None else layout.kind

    def put(self, tensor: torch.Tensor, layout: Layout) -> None:
        """Set how the samples lie in a tensor."""
        put(tensor, self.token, layout)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Run operators of our own."""
        before, self.quiet = self.quiet, True
        try:
            yield
        finally:
            self.quiet = before

    def _as_changed(self, tensor: torch.Tensor, found: Layout) -> Layout:
        """Return the layout of a constant of which a view was written to."""
        count, samples = self._changed.get(storage_of(tensor), (0, False))
        if not count:
            return found
        if samples:
            raise refuse("it reads a tensor into a part of which samples were written")
        return WHOLE.waiting(self.pending)

    def _from_elsewhere(self, tensor: torch.Tensor) -> Layout:
        """Return the layout of a tensor that no operator of this pass has made: it must be the same in each part."""
        if id(tensor) in self._constants:
            return self._as_changed(tensor, CONSTANT) if self._changed else CONSTANT
        if self.recomputes:
            return self._recomputed(tensor)
        with self.silent():
            self.script.outside.take(tensor, extends=self.extends and not self.script.complete)
        put(tensor, self.token, CONSTANT)
        return CONSTANT

    def _recomputed(self, tensor: torch.Tensor) -> Layout:
        """Return the layout of a tensor read in the backward pass; in a custom function, refuse an unknown one."""
        if self.custom_returned is None:
            return CONSTANT
        for known, layout in self.custom_returned:
            if layout is not None and storage_of(known) == storage_of(tensor) and known.shape == tensor.shape:
                return layout
        if tensor.dim() == 0 and not tensor.requires_grad:
            return CONSTANT  # a number of Python's
        raise refuse("the backward pass of a custom autograd function takes a tensor that is not known from before")

    # -- an operator

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.quiet or self.idle or func.namespace == "profiler":
            return func(*args, **kwargs)
        if self._written:
            self.check_writes()
        info = rules.info_of(func)
        if info.name in ("detach", "alias"):  # saving a tensor for the backward pass detaches it
            layout = get(args[0], self.token) if self.is_single else self.layout(args[0])
            out = func(*args, **kwargs)
            if layout is not None:
                put(out, self.token, layout)
            return out
        if info.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        if self.is_single and not self.recomputes:
            return self._run_single(info, args, kwargs)
        tensors = [*operands([args, kwargs])]
        call = rules.OperatorCall(
            info, args, kwargs, tensors, [self.layout(tensor) for tensor in tensors], self.samples
        )
        self._before(call)
        return self._after(call, self._run_random(call) if info.draws else func(*args, **kwargs))

    def _after(self, call: rules.OperatorCall, out: object) -> Any:
        """Say how the samples lie in what an operator has returned."""
        info = call.info
        call.outs = [*operands(out)]
        layouts = self._layouts(call)
        self._follow(call, layouts)
        for tensor, layout in zip(call.outs, layouts, strict=True):
            if info.written and any(tensor is each for each in call.tensors):
                self._after_write(call, tensor, layout)
            put(tensor, self.token, layout)
            if info.empties and tensor.numel():
                self._raw.add(storage_of(tensor))
        return out

    def run_as_one(self, func: object, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run an operator that is made of others as one that has a rule; autograd sees the others."""
        info, tensors = rules.info_of(func), [*operands(args)]
        call = rules.OperatorCall(info, args, {}, tensors, [self.layout(tensor) for tensor in tensors], self.samples)
        if not self.is_single or self.recomputes:
            self._before(call)
        with self.silent():
            out = self._draw_own(kernel, call) if "dropout" in call.arguments else kernel(*args)
        return out if self.is_single and not self.recomputes else self._after(call, out)

    def _before(self, call: rules.OperatorCall) -> None:
        """Refuse what must not run, and keep what it writes to."""
        self.pending |= call.pending
        self._check(call)
        if self._raw:  # memory that no operator has written to: an unknown kernel may have
            written = {storage_of(tensor) for tensor in call.written()} if call.info.written else set()
            read = self._raw.intersection(map(storage_of, call.tensors)) - written
            if read and call.info.name not in rules.VIEWS:
                raise refuse(f"{call.info.name} reads what a kernel has written that does not go through PyTorch")
            self._raw -= written
        if call.info.written:
            self._before_write(call)
            if self.noted is not None:
                self._note_versions(call)

    def _run_single(self, info: rules.Info, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator for one sample; `Reductions` says how it lies in what a function returns."""
        tensors = [*operands([args, kwargs])]
        call = rules.OperatorCall(
            info, args, kwargs, tensors, [get(each, self.token) or CONSTANT for each in tensors], 1
        )
        self._check(call)
        if info.written:
            self._before_write(call)
        drawn = next(self.to_draw, None) if info.draws else None
        return info.func(*args, **kwargs) if drawn is None else self._draw(info.func, call, drawn)

    def _check(self, call: rules.OperatorCall) -> None:
        """Refuse functions that must not run at all."""
        if call.info.namespace.startswith(("c10d", "_c10d")):
            raise refuse(f"{call.info.name} talks to the other ranks")
        if call.info.name in _READS and call.is_tracked:
            if call.kinds - {"constant", "whole"}:
                raise refuse("it reads values of single samples as Python numbers")
            if call.pending:
                raise Waits
        if not rules.fits_ragged(call):
            raise refuse(f"{call.info.name} combines different samples")
        values = rules.sorted_by(call)
        if values is not None:
            call.arranged = self._arrangement(call, values)

    def _arrangement(self, call: rules.OperatorCall, values: torch.Tensor) -> int:
        """Number the order into which a sort or a packing brings samples: equal values have the same order."""
        what = (call.info.func, "sort" in call.info.name and call.numbers(), call.of(values).arranged)
        with self.silent():
            before = [n for n, (key, known) in enumerate(self._arranged) if key == what and torch.equal(known, values)]
            found, place = self.script.arrangements, len(self._arranged)
            if self.recomputes:
                return found[before[0]] if before else len(found) + 1
            self._arranged.append((what, values.detach().clone()))
        if place == len(found) and self.extends and not self.script.complete:
            found.append(found[before[0]] if before else place + 1)
        number = found[place] if place < len(found) else 0  # place + 1 of the first sort of the program into this order
        if number <= place and number - 1 not in before:
            raise refuse(f"{call.info.name} sorts in another way in other parts of its batch")
        return number

    def _layouts(self, call: rules.OperatorCall) -> list[Layout]:
        expands = call.info.name == "expand" and call.kinds == {"whole"}
        if self.sized is not None and expands:
            rules.check_gradient("expand", call.tensors[0], call.layouts[0])
        if self.sized is not None and (expands or not call.is_tracked or call.info.name.startswith("new_")):
            call.makes = all(fits(each, self.sized, self.samples) for each in call.outs)
        if call.makes and self.sized is not None:
            found = [self.sized] * len(call.outs)
        elif not call.is_tracked:
            found = [CONSTANT] * len(call.outs)
        else:
            found = self._layouts_from_arguments(call)
        return [each.waiting(call.pending) for each in found]

    def _layouts_from_arguments(self, call: rules.OperatorCall) -> list[Layout]:
        """Return the layouts that follow from those of the arguments; only the first part works them out."""
        if self.recomputes:
            return rules.layouts_of(call)
        if self.place < len(self.script.entries):
            return [*self.script.entries[self.place].layouts]
        if not self.extends or self.script.complete:
            raise refuse(f"parts of its batch run different operators: {call.info.name}")
        try:
            return rules.layouts_of(call)
        except rules.BatchNorm as norm:
            if not self.lenient:
                raise refuse(str(norm)) from None
            self.changes.setdefault("batch norm normalizes each part by its own statistics")
            return [norm.layout, *[CONSTANT] * (len(call.outs) - 1)]

    def _follow(self, call: rules.OperatorCall, layouts: list[Layout]) -> None:
        """Write the operator down, or compare it with what the first part ran."""
        if self.recomputes:
            return
        place, self.place = self.place, self.place + 1
        if place < len(self.script.entries):
            if not self.script.entries[place].is_same(call.info.func, call.numbers(), call.outs):
                raise refuse(f"{call.info.name} depends on how many samples there are, or on their values")
        elif self.script.complete or not self.extends:
            raise refuse(f"parts of its batch run different operators: {call.info.name}")
        else:
            known = [each.waiting(False) for each in layouts]
            self.script.entries.append(Entry.of(call.info.func, call.numbers(), call.outs, known))
        for tensor, layout in zip(call.outs, layouts, strict=True):
            if layout.has_samples and not layout.ragged and not fits(tensor, layout, self.samples):
                raise refuse(f"{call.info.name} returns rows that do not belong to samples")

    # -- writes

    def _before_write(self, call: rules.OperatorCall) -> None:
        for tensor in call.written():
            if self._is_outside(tensor):
                key = storage_of(tensor)
                if key not in self.writes:
                    with self.silent(), torch.no_grad():
                        whole = (tensor if tensor._base is None else tensor._base).detach()
                        self.writes[key] = whole, whole.clone()

    def _note_versions(self, call: rules.OperatorCall) -> None:
        """Note how often tensors were written to that were noted before the step; batch norm's are never counted."""
        if "batch_norm" in call.info.name or self.noted is None:
            return
        for tensor in call.written():
            if self._is_outside(tensor) and tensor.numel():
                known = self.noted.get(storage_of(tensor))
                if known is None:
                    raise refuse(f"{call.info.name} writes to a tensor whose value before the step is not known")
                self._written.append((call.info.name, known, [version_of(each) for each in known]))

    def check_writes(self) -> None:
        """Refuse writes that the versions of tensors do not count: whether a failed attempt made them is unknown."""
        written, self._written = self._written, []
        for name, known, versions in written:
            if [version_of(each) for each in known] == versions:
                raise refuse(f"{name} writes to a tensor through `.data`, so its value before the step is not known")

    def _after_write(self, call: rules.OperatorCall, tensor: torch.Tensor, layout: Layout) -> None:
        if call.info.name in rules.VIEWS:  # `transpose_` and its like
            return
        before = next(o for t, o in zip(call.tensors, call.layouts, strict=True) if t is tensor)
        if layout.has_samples and self._is_outside(tensor, fresh=True):
            raise refuse(f"{call.info.name} writes samples into a tensor that outlives the step")
        if before.is_aligned(layout):
            return
        if layout.kind == "order" and not tensor._is_view():  # all of it is written
            self._placed[storage_of(tensor)] = tensor
            return
        if before.has_samples:
            raise refuse(f"{call.info.name} writes something else over samples")
        count, samples = self._changed.get(storage_of(tensor), (0, False))
        samples |= layout.has_samples
        if samples and (tensor._is_view() or count):
            raise refuse(f"{call.info.name} writes samples into a part of a tensor")
        self._changed[storage_of(tensor)] = count + 1, samples

    def _is_outside(self, tensor: torch.Tensor, *, fresh: bool = False) -> bool:
        """Whether a tensor outlives this pass: a parameter, a buffer, an attribute; if ``fresh``, one in `writes`."""
        key = storage_of(tensor)
        if key in self._new:
            return False
        if key in self._storages or (fresh and key in self.writes):
            return True
        return self.script.outside.has_taken(key)

    # -- random numbers

    def _run_random(self, call: rules.OperatorCall) -> Any:
        rows = next((layout for layout in call.layouts if layout.kind == "rows"), None)
        layout = self.sized or rows
        drawn = None if layout is None else rules.drawn_like(call, layout)
        self.drawn.append(drawn)
        if drawn is None:
            return call.info.func(*call.args, **call.kwargs)
        return self._draw(call.info.func, call, drawn)

    def _draw(self, func: Callable[..., Any], call: rules.OperatorCall, drawn: rules.Drawn) -> Any:
        """Draw the whole batch's random numbers, and take those of this part."""
        if call.kwargs.get("generator") is not None:
            raise refuse(f"{call.info.name} draws from a generator of its own")
        with self.silent():
            out = rules.draw_whole(
                call, drawn, self.total, lambda whole: piece(whole, drawn.layout, self.start, self.stop, self.total)
            )
        return self._draw_own(func, call) if out is None else out

    def _draw_own(self, func: Callable[..., Any], call: rules.OperatorCall) -> Any:
        if not call.is_random():
            return func(*call.args, **call.kwargs)
        if not self.lenient:
            raise refuse(f"{call.info.name} draws random numbers for each sample, and not those of the whole batch")
        self.changes.setdefault("random numbers, such as dropout masks, are drawn for each part")
        devices = {t.device for t in call.tensors if t.device.type == "cuda"}
        with torch.random.fork_rng([device.index or 0 for device in devices]):
            out = func(*call.args, **call.kwargs)
        for device in devices or {torch.device("cpu")}:  # what is drawn later is the same in each part
            torch.rand((), device=device)
        return out


def fits(tensor: torch.Tensor, layout: Layout, samples: int) -> bool:
    """Whether the dimension of a layout has the size that the part's samples take."""
    return layout.dim < tensor.dim() and tensor.shape[layout.dim] == layout.outer * samples * layout.inner


def by_storage(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    """Tensors by the memory that they share."""
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(storage_of(tensor), []).append(tensor)
    return found
