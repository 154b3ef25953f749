"""Fake tensors whose values are known: made in the step, or held by the module, and computed from nothing else.

Libraries branch on them: whether a mask is causal, how full a queue is, whether a codebook was initialized. The mode
keeps such values while they are small, by storage: views and writes in place then need no rules of their own.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.kernels.arguments import operands
from lightning_memguard.core.simulation.repeated import RepeatingFakeMode
from lightning_memguard.core.torch_port import DisableTorchFunction, FakeTensor, OpOverload, no_dispatch, tree_map

T = TypeVar("T")
Luck = Literal["", "least", "most"]
"""Random numbers as they come, or the least or the most that a step may see."""

MOST_ELEMENTS = 2**22  # that one operator reads and makes: a mask of 2,000 x 2,000
MOST_BYTES = 2**27  # of all values at a time


class _Effect(enum.Enum):
    """Effect of an operator on known values."""

    NOTHING = enum.auto()
    VIEWS = enum.auto()  # shares its argument's storage, and so its value
    MAKES = enum.auto()  # from its arguments alone, whatever is in their memory
    COMPUTES = enum.auto()
    WRITES = enum.auto()
    SPOILS = enum.auto()  # what it writes is unknown
    ASKS = enum.auto()  # its result is not a tensor
    SIZES = enum.auto()  # its result has as many elements as the values say


@dataclass
class _Value:
    """Content of one fake storage; made when it is first asked for, as an optimizer's zeros never are."""

    nbytes: int
    make: Callable[[], torch.UntypedStorage]
    storage: torch.UntypedStorage | None = None
    owned: bool = True  # no other object holds it
    writes: list[Callable[[torch.UntypedStorage], object]] = field(default_factory=list)  # to do once it is made
    seen: tuple[object, Tensor | None] = (None, None)  # by a tensor of this layout, last

    @property
    def held_bytes(self) -> int:
        return self.nbytes if self.storage is not None else 0

    def made(self) -> torch.UntypedStorage:
        storage = self.make()
        for write in self.writes:
            write(storage)
        return storage


class KnownFakeMode(RepeatingFakeMode):
    """Fake tensors that know the values of constants. Torch's own know those of single numbers on the CPU."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self._values: dict[int, _Value] = {}  # by address of the fake storage
        self._held_bytes = 0
        self._overwritten: dict[int, torch.UntypedStorage] = {}  # real ones, whose fake copies were written to
        self.seed: int | None = None  # of random numbers whose values are known, too
        self.luck: Luck = ""
        self._draws = 0
        self.answers: list[bool] = []  # to questions about unknown values, the next one last
        self._no_numbers: Any = WeakTensorKeyDictionary()  # where a tensor is NaN or infinite
        self.compared: Callable[..., None] | None = None  # called with what single known values are compared with

    def may_turn_const(self, t: Tensor) -> bool:
        """Return False: values are kept here."""
        del t
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and compute its result if all that it reads is known."""
        kwargs = kwargs or {}
        is_drawn = self.seed is not None and draws(func)
        kind = _kind_of_draw(func, args) if is_drawn else _kind(func)
        if kind is _Effect.VIEWS and type(args[0]) is not Tensor:
            kind = _Effect.NOTHING
        if kind is _Effect.NOTHING:
            return self.run(func, types, args, kwargs)
        if kind is _Effect.MAKES:
            out = self.run(func, types, args, kwargs)
            maker = _maker(func, args, kwargs)
            self._keep_maker(out, self._seeded(maker) if is_drawn else maker)
            return out
        if kind is _Effect.SIZES:
            args = self._with_known_masks(func, args)
        if kind is not _Effect.SPOILS and self._knows_all(func, args, kwargs):
            return self._computed(kind, func, types, args, kwargs)
        if kind in (_Effect.SPOILS, _Effect.WRITES):
            for tensor in _written(func, args, kwargs):
                self.forget(tensor)
        if kind is _Effect.ASKS and self.answers:
            return self.answers.pop()
        if func is _aten._local_scalar_dense.default and args[0] in self._no_numbers:
            note_check()
            return False
        out = self.run(func, types, args, kwargs)
        if _asks_for_no_number(func, args):
            self._no_numbers[out] = None
        elif func is _aten.any.default and args[0] in self._no_numbers:  # which a step warns of, and goes on
            note_check()
            self._keep_maker(out, lambda empty: empty.zero_())
        return out

    # -- values

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor, on the CPU; not to be written to. None if it is unknown."""
        value = self._value_behind(tensor)
        if value is None or value.storage is None:
            return None
        layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        if value.seen[0] != layout:
            value.seen = layout, _laid_over(value.storage, tensor)
        return value.seen[1]

    def set_value(self, fake: Tensor, real: Tensor) -> None:
        """Keep a value that others may hold, too."""
        if isinstance(real, FakeTensor) or real.device.type != "cpu" or real.layout is not torch.strided:
            return
        if real.numel() <= MOST_ELEMENTS:
            self._keep(fake, real.detach(), owned=False)

    def note_write(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Note a write into the first argument that is not run.

        Returns:
            Whether that will do: if a known value changes in another way than by numbers, the operator has to run.
        """
        if func in _FILLS and _covers_its_storage(args[0]):
            self._keep_maker(args[0], _maker(func, args, {}))
            return True
        value = self._values.get(port.storage_id(args[0].untyped_storage())) if self._values else None
        if value is None:
            return True
        written, *numbers = args
        whole = written.is_floating_point() and _covers_its_storage(written)
        if kwargs or not whole or not all(type(number) in (int, float) for number in numbers):
            return False
        dtype, shape, stride = written.dtype, written.shape, written.stride()
        if value.storage is None:
            value.writes.append(lambda storage: func(_seen_as(storage, dtype, 0, shape, stride), *numbers))
        else:
            self._own(written)
            _compute(func, self._real(written), *numbers)
        return True

    def forget(self, tensor: Tensor) -> None:
        """Forget the values in the memory of a tensor."""
        storage = tensor.untyped_storage()
        if not isinstance(tensor, FakeTensor):
            self._overwritten[port.storage_id(storage)] = storage
        elif port.storage_id(storage) in self._values:
            self._drop(port.storage_id(storage), self._values[port.storage_id(storage)])

    def _value_behind(self, tensor: Tensor) -> _Value | None:
        value = self._values.get(port.storage_id(tensor.untyped_storage()))
        if value is None or value.nbytes != tensor.untyped_storage().nbytes() or tensor.is_conj() or tensor.is_neg():
            return None
        if value.storage is None:
            value.storage = _compute(value.made)
            self._held_bytes += value.nbytes
        return value

    def _real(self, tensor: Tensor) -> Tensor:
        """The value of a tensor that an operator reads.

        Raises:
            LookupError: it is unknown.
        """
        value = self.value_of(tensor) if isinstance(tensor, FakeTensor) else tensor
        if value is None:
            raise LookupError
        return value

    def _knows_all(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        first = args[0] if args else None
        if type(first) is FakeTensor and func not in _OVERWRITES and not self._has_value(first):
            return False  # nearly always
        written_whole = func in _OVERWRITES and _covers_its_storage(first)
        read = list[Tensor]()
        for tensor in operands([args[1:] if written_whole else args, kwargs]):
            read.append(tensor)
            if isinstance(tensor, FakeTensor):
                if not self._has_value(tensor):
                    return False
            elif type(tensor) is not Tensor or tensor.device.type != "cpu" or self._is_overwritten(tensor):
                return False
        if any(not isinstance(tensor, FakeTensor) for tensor in _written(func, args, kwargs)):
            return False  # of other code
        elements = sum(tensor.numel() for tensor in (*read, *operands(args[:1] if written_whole else ())))
        return 0 < elements <= MOST_ELEMENTS

    def _has_value(self, fake: Tensor) -> bool:
        return port.storage_id(fake.untyped_storage()) in self._values

    def _is_overwritten(self, real: Tensor) -> bool:
        return bool(self._overwritten) and port.storage_id(real.untyped_storage()) in self._overwritten

    def _drop(self, address: int, value: _Value) -> None:
        if self._values.get(address) is value:
            del self._values[address]
            self._held_bytes -= value.held_bytes

    def _keep(self, fake: Tensor, real: Tensor, *, owned: bool) -> None:
        whole, nbytes = real.untyped_storage(), fake.untyped_storage().nbytes()
        if whole.nbytes() != nbytes or real.stride() != fake.stride() or real.storage_offset() != fake.storage_offset():
            whole, owned = torch.UntypedStorage(nbytes), True
            _laid_over(whole, fake).copy_(real)
        self._put(fake, _Value(nbytes, lambda: whole, whole, owned))

    def _keep_maker(self, fake: object, make: Callable[[Tensor], Tensor]) -> None:
        if type(fake) is not FakeTensor or not 0 < fake.numel() <= MOST_ELEMENTS:
            return
        shape, stride, dtype, nbytes = fake.shape, fake.stride(), fake.dtype, fake.untyped_storage().nbytes()

        def make_storage() -> torch.UntypedStorage:
            return make(torch.empty_strided(shape, stride, dtype=dtype)).untyped_storage()

        self._put(fake, _Value(nbytes, make_storage))

    def _put(self, fake: Tensor, value: _Value) -> None:
        storage = fake.untyped_storage()
        self.forget(fake)
        if self._held_bytes + value.held_bytes <= MOST_BYTES:
            self._held_bytes += value.held_bytes
            self._values[port.storage_id(storage)] = value
            weakref.finalize(storage, self._drop, port.storage_id(storage), value).atexit = False

    # -- operators

    def _computed(
        self, kind: _Effect, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of an operator that reads known values alone."""
        if self.compared and func in _COMPARISONS and args[0].numel() == 1:
            self.compared(args[1], period=func in _DIVISIONS)
        written = _written(func, args, kwargs)
        try:
            for tensor in written:
                self._own(tensor)
            operation = self._seeded(func) if self.seed is not None and draws(func) else func
            real = _compute(operation, *self._on_cpu(args), **self._on_cpu(kwargs))
        except Exception:  # noqa: BLE001 - such as a kernel that the CPU lacks for a dtype
            for tensor in written:
                self.forget(tensor)
            return self.run(func, types, args, kwargs)
        if kind is _Effect.ASKS:
            return real
        if kind is _Effect.SIZES:
            with self:
                device = next(operands(args)).device
                out = tree_map(lambda each: torch.empty(each.shape, dtype=each.dtype, device=device), real)
        else:
            out = self.run(func, types, args, kwargs)
        if kind is not _Effect.WRITES:
            for fake, value in zip(operands(out), operands(real), strict=True):
                if value.numel() <= MOST_ELEMENTS and fake.shape == value.shape:
                    _compute(self._keep, fake, value, owned=kind is not _Effect.VIEWS)
        return out

    def _seeded(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """Return what draws the same numbers each time, whatever else was drawn: sizes that differ draw alike."""
        self._draws += 1
        number = (self.seed or 0) * _MOST_DRAWS + self._draws

        def seeded(*args: object, **kwargs: object) -> Any:
            state = torch.default_generator.get_state()
            torch.default_generator.manual_seed(number)
            try:
                return by_luck(self.luck, draw, *args, **_without_generators(kwargs))
            finally:
                torch.default_generator.set_state(state)

        return seeded

    def _own(self, tensor: Tensor) -> None:
        """Give a tensor that is written to a value of its own."""
        value = self._value_behind(tensor)
        if value is None:  # all of it is overwritten
            whole = torch.UntypedStorage(tensor.untyped_storage().nbytes())
            self._put(tensor, _Value(whole.nbytes(), lambda: whole, whole))
        elif not value.owned and value.storage is not None:
            value.storage, value.owned, value.seen = _compute(value.storage.clone), True, (None, None)

    def _on_cpu(self, given: object) -> Any:
        if isinstance(given, Tensor):
            return self._real(given)
        if isinstance(given, (list, tuple)):
            return [self._on_cpu(item) for item in given]
        if isinstance(given, Mapping):
            return {name: self._on_cpu(item) for name, item in given.items()}
        return torch.device("cpu") if isinstance(given, torch.device) else given

    def _with_known_masks(self, func: OpOverload, args: Sequence[Any]) -> Sequence[Any]:
        """Replace known boolean masks of an index by the indices of the elements they keep."""
        if func is not _aten.index.Tensor:
            return args
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8) and self._knows_all(func, [index], {}):
                with self:
                    indices += _aten.nonzero.default(index).unbind(1)
            else:
                indices.append(index)
        return args[0], indices


def note_check() -> None:
    """Called where a step checks values, and is assumed to find nothing wrong; a recorder patches it."""


def _asks_for_no_number(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether an operator tells where a tensor is NaN or infinite."""
    if func in (_aten.isnan.default, _aten.isinf.default):
        return True
    return args[0] is args[1] if func is _aten.ne.Tensor else func is _aten.eq.Scalar and abs(args[1]) == math.inf


def _compute(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Run operators for real, unseen by modes."""
    with DisableTorchFunction(), no_dispatch(), torch.inference_mode(False), torch.no_grad():
        return function(*args, **kwargs)


def known_value(tensor: Tensor) -> Tensor | None:
    """The value of a fake tensor that is known, on the CPU."""
    mode = getattr(tensor, "fake_mode", None)
    return mode.value_of(tensor) if isinstance(mode, KnownFakeMode) else None


def give_value(fake: Tensor, real: Tensor) -> None:
    """Let a fake tensor have the values of a real one of its shape."""
    mode = getattr(fake, "fake_mode", None)
    if isinstance(mode, KnownFakeMode):
        _compute(mode.set_value, fake, real)


def suppose(fake: FakeTensor, change: Callable[[Tensor], object]) -> None:
    """Let a fake tensor have the values of one that was full of ones before a change."""
    if isinstance(fake.fake_mode, KnownFakeMode) and fake.numel() <= MOST_ELEMENTS:
        ones = _compute(torch.ones, fake.shape, dtype=fake.dtype)
        _compute(change, ones)
        _compute(fake.fake_mode.set_value, fake, ones)


def forget_written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Forget the values that an operator would overwrite; it does not run."""
    for tensor in _written(func, args, kwargs):
        mode = getattr(tensor, "fake_mode", None)
        if isinstance(mode, KnownFakeMode):
            mode.forget(tensor)


def _laid_over(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """A storage as a tensor sees it."""
    return _compute(_seen_as, storage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())


def _seen_as(storage: torch.UntypedStorage, dtype: torch.dtype, *layout: object) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, *layout)


def _covers_its_storage(tensor: object) -> bool:
    if type(tensor) is not FakeTensor or not tensor.numel():
        return False
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes() and 0 not in tensor.stride()


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes into."""
    if func in _WRITES_UNSAID:
        return [*operands([args, kwargs])]
    places, names = _writes(func)
    return [*operands([[args[place] for place in places if place < len(args)], [kwargs.get(name) for name in names]])]


@functools.cache
def _writes(func: OpOverload) -> tuple[list[int], list[str]]:
    arguments = port.schema_of(func).arguments
    found = [(place, a.name) for place, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    return [place for place, _ in found], [name for _, name in found]


def _maker(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """Writes what an operator makes into an empty tensor."""
    number = _NUMBERS.get(func.overloadpacket)
    if number is not None:
        filled = number(*args)  # without the tensor that was only asked for its shape
        return lambda empty: empty.fill_(filled)
    no_tensors = tree_map(lambda leaf: torch.device("cpu") if isinstance(leaf, torch.device) else leaf, dict(kwargs))
    no_tensors |= {"pin_memory": False} if "pin_memory" in no_tensors else {}
    no_tensors = _without_generators(no_tensors)
    if any(True for _ in operands(args[:1])):  # random numbers in its shape
        rest = args[1:]
        return lambda empty: empty.copy_(func(empty, *rest, **no_tensors))
    return lambda empty: empty.copy_(func(*args, **no_tensors))


_NUMBERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.zeros, _aten.zeros_like, _aten.new_zeros, _aten.zero_), lambda *_: 0),
    **dict.fromkeys((_aten.ones, _aten.ones_like, _aten.new_ones), lambda *_: 1),
    **dict.fromkeys((_aten.full, _aten.full_like, _aten.fill_), lambda _, number, *__: number),
    _aten.new_full: lambda _, __, number, *___: number,
}
_FILLS = frozenset({_aten.zero_.default, _aten.fill_.Scalar})
_DIVISIONS = frozenset({_aten.remainder.Scalar, _aten.fmod.Scalar, _aten.floor_divide.Scalar})
_COMPARISONS = _DIVISIONS | {getattr(_aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_OVERWRITES = _FILLS | {_aten.copy_.default, _aten.fill_.Tensor}
_SPECIAL: dict[OpOverload, _Effect] = {
    **dict.fromkeys((_aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default), _Effect.ASKS),
    **dict.fromkeys((_aten.lift_fresh.default, _aten.lift.default), _Effect.VIEWS),
} | {
    getattr(packet, overload): _Effect.SIZES
    for packet in (
        *(_aten.nonzero, _aten.masked_select, _aten.index, _aten._unique2, _aten.unique_dim),
        *(_aten.unique_consecutive, _aten.bincount, _aten.repeat_interleave),
    )
    for overload in {"default", "Tensor"}.intersection(packet.overloads())
}
# Their schemas do not say that they write into running statistics.
_WRITES_UNSAID = frozenset(
    getattr(_aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats")
)


def _without_generators(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, torch.Generator) else value for name, value in kwargs.items()}


_MOST_DRAWS = 1 << 20  # of one seed


def by_luck(luck: Luck, draw: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Draw random numbers; if ``luck`` says so, the least or most of many draws, as a step that draws few may see."""
    out = draw(*args, **kwargs)
    if not luck or not isinstance(out, Tensor) or out.is_complex() or not 0 < out.numel() <= _MOST_BY_LUCK:
        return out
    drawn = torch.stack([out.clone(), *(draw(*args, **kwargs).clone() for _ in range(_TIMES))])
    return out.copy_(drawn.amin(0) if luck == "least" else drawn.amax(0))


_MOST_BY_LUCK = 1 << 10  # elements: more are never all so lucky
_TIMES = 255


@functools.cache
def draws(func: object) -> bool:
    """Whether an operator draws random numbers."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return False
    return torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket is _aten.random_


def _kind_of_draw(func: OpOverload, args: Sequence[Any]) -> _Effect:
    tensors = [*operands(args)]
    if port.schema_of(func).is_mutable:
        return _Effect.MAKES if len(tensors) == 1 and _covers_its_storage(args[0]) else _Effect.SPOILS
    is_like = len(tensors) == 1 and port.packet_name(func).endswith("_like")
    return _Effect.MAKES if is_like or not tensors else _Effect.COMPUTES


@functools.cache
def _kind(func: object) -> _Effect:
    if func in _SPECIAL:
        return _SPECIAL[func]
    if not isinstance(func, OpOverload):
        return _Effect.NOTHING
    return _kind_of_write(func) if port.schema_of(func).is_mutable or func in _WRITES_UNSAID else _kind_of_result(func)


def _is_computable(func: OpOverload) -> bool:
    return func.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in func.tags


def _kind_of_write(func: OpOverload) -> _Effect:
    if func in _WRITES_UNSAID or not _is_computable(func) or func is _aten.resize_.default:
        return _Effect.SPOILS
    return _Effect.NOTHING if torch.Tag.inplace_view in func.tags else _Effect.WRITES


def _kind_of_result(func: OpOverload) -> _Effect:
    schema = port.schema_of(func)
    makes_tensors = any("Tensor" in str(result.type) for result in schema.returns)
    if not makes_tensors or not _is_computable(func) or "empty" in port.packet_name(func):
        return _Effect.NOTHING
    if func.overloadpacket in _NUMBERS or not any("Tensor" in str(argument.type) for argument in schema.arguments):
        return _Effect.MAKES
    return _Effect.VIEWS if any(result.alias_info is not None for result in schema.returns) else _Effect.COMPUTES
