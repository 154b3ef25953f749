"""A module's fake copy: the same module on tensors that have a shape, a dtype and a device, but no memory.

The reason to change is torch's fake tensors. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import copy
import importlib
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from lightning_memguard.core.capture.batch import KnownValues
from lightning_memguard.errors import CannotTraceError

_aten = torch.ops.aten


class ValueNeededError(CannotTraceError):
    """The step takes another way depending on a value, and a fake tensor has none."""


class UnknownFloat(float):
    """What ``.item()`` gives for a float that nobody knows: fit to be logged and printed, not to be compared."""

    def _refuse(self, *_: object) -> bool:
        raise ValueNeededError("The step compares the value of a tensor (`.item()`), which only a real run can give.")

    def __neg__(self) -> UnknownFloat:
        return UnknownFloat(-float(self))

    def __abs__(self) -> UnknownFloat:
        return UnknownFloat(abs(float(self)))

    def __add__(self, other: float) -> UnknownFloat:
        return UnknownFloat(float(self) + float(other))

    def __sub__(self, other: float) -> UnknownFloat:
        return UnknownFloat(float(self) - float(other))

    def __mul__(self, other: float) -> UnknownFloat:
        return UnknownFloat(float(self) * float(other))

    def __truediv__(self, other: float) -> UnknownFloat:
        return UnknownFloat(float(self) / float(other))

    def __rsub__(self, other: float) -> UnknownFloat:
        return UnknownFloat(float(other) - float(self))

    def __rtruediv__(self, other: float) -> UnknownFloat:
        return UnknownFloat(float(other) / float(self))

    __radd__, __rmul__ = __add__, __mul__
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = float.__hash__


# -- the copy


class _FakeCopy(TorchFunctionMode):
    """While this is on, ``copy.deepcopy`` makes fake copies of tensors.

    Those whose storages are in ``moving`` live on ``device``; where several share a storage, so do their copies.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device, moving: Counter[int]) -> None:
        super().__init__()
        self.mode = mode
        self.device = device
        self.moving = moving
        self.bases: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch._C.TensorBase.clone:  # how a Parameter is deep-copied
            return self._fake(args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        address = _address(tensor)
        device = self.device if address in self.moving or tensor.is_meta else tensor.device
        if self.moving[address] < 2:
            return fake_like(tensor, self.mode, device)
        with self.mode, torch.no_grad():
            base = self.bases.get(address)
            if base is None or base.dtype != tensor.dtype:
                length = tensor.untyped_storage().nbytes() // tensor.element_size()
                base = self.bases[address] = torch.empty(length, dtype=tensor.dtype, device=device)
            return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A fake tensor of the same shape, strides and dtype."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return mode.from_tensor(tensor, static_shapes=True)
    with mode, torch.no_grad():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_copy(
    module: nn.Module, mode: FakeTensorMode, device: torch.device, instead: Mapping[int, object] | None = None
) -> nn.Module:
    """Copy a module without its memory: parameters and buffers become fake tensors on ``device``.

    Datasets, loaders and arrays that hang on the module are shared, not copied; so is what cannot be copied at all.

    Args:
        module: any module; it is left as it was.
        mode: the fake tensors' mode.
        device: where the copy's parameters and buffers live.
        instead: by ``id``, what the copy shall hold in place of an object that the module holds.

    Returns:
        The copy. Nothing done to its tensors, lists or counters reaches the module.
    """
    moving = Counter(_address(tensor) for tensor in (*module.parameters(), *module.buffers()))
    # Were the mode on meanwhile, a real Parameter's `.data` would already be fake, with another storage.
    with unset_fake_temporarily(), _FakeCopy(mode, device, moving):
        module_copy = real_copy(module, instead)
        for mine, theirs in zip(module.parameters(), module_copy.parameters(), strict=True):
            _copy_attributes(mine, theirs)
    return module_copy


def _address(tensor: torch.Tensor) -> int:
    """The storage behind a tensor; -1 for those of a lazy module that has not seen a batch."""
    return -1 if torch.nn.parameter.is_lazy(tensor) else tensor.untyped_storage()._cdata


def _copy_attributes(parameter: torch.Tensor, module_copy: torch.Tensor) -> None:
    """What users hang on parameters, such as ``no_decay``: a deep copy of a Parameter leaves it behind."""
    for name, value in vars(parameter).items():
        vars(module_copy).setdefault(name, copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value)


def real_copy(module: nn.Module, instead: Mapping[int, object] | None = None) -> nn.Module:
    """Deep-copy a module, but share its datasets and whatever refuses to be copied (locks, files, generators)."""
    module_copy = _copied(module, instead)
    if is_compiled(module):
        _COPIES_OF_COMPILED.add(module_copy)
    return module_copy


def _copied(module: nn.Module, instead: Mapping[int, object] | None) -> nn.Module:
    memo = {**{id(value): value for value in _data_attributes(module)}, **(instead or {})}
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:  # noqa: BLE001 - a deep copy can fail in any way; find what refuses, and share it
        for child in reversed(list(module.modules())):  # the innermost first, so that only what refuses is shared
            values = (value for name, value in vars(child).items() if name not in _OWN_DICTS)
            memo |= {id(value): value for value in values if not _can_be_copied(value, memo)}
        return copy.deepcopy(module, dict(memo))


# A module's own: these hold what must never be shared with the user's module.
_OWN_DICTS = ("_parameters", "_buffers", "_modules")


def _data_attributes(module: nn.Module) -> Iterator[object]:
    for child in module.modules():
        for value in vars(child).values():
            items = (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            )
            yield from (item for item in items if isinstance(item, (Dataset, DataLoader, np.ndarray)))


def _can_be_copied(value: object, memo: dict[int, object]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # noqa: BLE001 - any refusal counts
        return False
    return True


# -- running under fake tensors


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Give Python's, NumPy's and torch's random generators back as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users do draw from the global one
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - as above


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` or ``Module.compile`` was used on a module, on a part of it, or on what it copies."""
    return module in _COPIES_OF_COMPILED or any(
        isinstance(child, torch._dynamo.OptimizedModule) or child._compiled_call_impl is not None
        for child in module.modules()
    )


_COPIES_OF_COMPILED: WeakSet[nn.Module] = WeakSet()  # a copy forgets `Module.compile`


@contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Run what is inside on fake tensors, compiled modules eagerly."""
    with ExitStack() as exits:
        exits.enter_context(torch.compiler.set_stance("force_eager"))
        exits.enter_context(_modules_can_move())
        for home in _KNOWS_FOREACH:  # lists of types that `foreach` is used for
            types = [*home._foreach_supported_types, FakeTensor]
            exits.enter_context(mock.patch.object(home, "_foreach_supported_types", types))
        exits.enter_context(mode)
        yield


_KNOWS_FOREACH = [importlib.import_module(name) for name in ("torch.optim.optimizer", "torch.utils._foreach_utils")]


@contextmanager
def _modules_can_move() -> Iterator[None]:
    """Let ``module.to(...)`` work on fake parameters: torch swaps them in place, which their weak references forbid.

    Checked on torch 2.9 to 2.13 (``Module._apply``, the branch for ``FakeTensor``).
    """
    original = nn.Module._apply
    moved: dict[
        int, tuple[nn.Parameter, nn.Parameter]
    ] = {}  # parameters may be tied; old ones are held, ids stay unique

    def apply(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        own = [*self._parameters.values(), *self._buffers.values()]
        if not any(isinstance(tensor, FakeTensor) for tensor in own):
            return original(self, fn, recurse)  # type: ignore[no-untyped-call, no-any-return]
        if recurse:
            for child in self.children():
                child._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                self._parameters[name] = move(parameter, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    def move(parameter: nn.Parameter, fn: Any) -> nn.Parameter:
        with torch.no_grad():
            result = fn(parameter)
        if result is parameter or (result.device == parameter.device and result.dtype == parameter.dtype):
            return parameter
        if id(parameter) not in moved:
            moved[id(parameter)] = parameter, nn.Parameter(result, parameter.requires_grad)
            _copy_attributes(parameter, moved[id(parameter)][1])
        return moved[id(parameter)][1]

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function on behalf of a step that may run on fake tensors.

    Three things differ there: a fake tensor cannot be deep-copied by torch's own way (it would make a real storage);
    a float that is read (to be logged, as a rule) has no value; and the rows of a packed sequence, which the step
    reads, are known. ``float(tensor)`` must give a plain float, so a comparison of that one goes unseen;
    ``tensor.item()``, the usual way, does not.
    """
    if args and isinstance(args[0], FakeTensor):
        if func is torch.Tensor.__deepcopy__:
            return _copy_fake(*args)
        if func in _READS_FLOAT and args[0].is_floating_point() and args[0].constant is None:
            return UnknownFloat(1.0) if func is torch.Tensor.item else 1.0
        if func is _PACK_PADDED:
            data, rows = func(*args, **kwargs)
            return data, rows.as_subclass(KnownValues)
    return func(*args, **kwargs)


_PACK_PADDED = torch._VF._pack_padded_sequence
_READS_FLOAT = (torch.Tensor.item, torch.Tensor.__float__)


def _copy_fake(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]  # type: ignore[no-any-return]


# Operators that write into their first argument and give it back, with nothing else to tell of a fake tensor. Torch's
# own fake dispatch would take some 0.1 ms to say so; an optimizer step is little else.
_WRITES_FIRST = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "sqrt_", "zero_", "fill_")
    for overload in getattr(_aten, name).overloads()
    if overload not in ("out", "t")  # "t" writes lists, not tensors
)


def known_result(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of an operator where it can be told without running it, else None."""
    if func in _WRITES_FIRST and type(args[0]) is FakeTensor and args[0].constant is None:
        return args[0]
    return None


def only_writes(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator makes nothing, and torch has no fake kernel that says so: it would ask for a device."""
    return func in _ONLY_WRITES and bool(args[0]) and isinstance(args[0][0], FakeTensor)


_ONLY_WRITES = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("_fused_sgd_", "_fused_adagrad_")
    for overload in getattr(_aten, name).overloads()
    if overload in ("default", "tensor_lr")
)


# -- the largest result of operators whose result depends on values


def assumption(func: Any) -> str:
    """What is assumed of an operator whose result `worst_case_result` made up."""
    taken = "minlength bins" if func is _aten.bincount.default else "its largest result"
    return f"{func} was taken to give {taken}"


def worst_case_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The largest result an operator can have where its size depends on values: a mask keeps everything.

    Raises:
        ValueNeededError: no such bound is known, or the value itself is asked for.
    """
    rule = _WORST_CASE.get(func)
    if rule is None:
        raise ValueNeededError(f"{func} needs the values of its input, which only a real run can give.")
    return rule(*args, **kwargs)


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.numel(), x.dim()), dtype=torch.long)


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.new_empty((math.prod(torch.broadcast_shapes(x.shape, mask.shape)),))


def _index(x: torch.Tensor, indices: list[torch.Tensor | None]) -> torch.Tensor:
    """Each boolean mask becomes the indices of all its elements, and torch's own rule does the rest."""
    expanded: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            kept = index.new_empty((index.numel(),), dtype=torch.long)
            expanded.extend([kept] * index.dim())
        else:
            expanded.append(index)
    return _aten.index.Tensor(x, expanded)  # type: ignore[no-any-return]


def _unique(x: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x.new_empty((x.numel(),)),
        x.new_empty(x.shape, dtype=torch.long),
        x.new_empty((x.numel(),), dtype=torch.long),
    )


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor:
    """Values above ``minlength`` would add bins; who gives one has none, as torchmetrics, which counts classes so."""
    if not minlength:
        raise ValueNeededError(
            "aten.bincount without `minlength` has as many bins as its largest value, which only a real run knows."
        )
    return x.new_empty((minlength,), dtype=torch.long if weights is None else torch.double)


def _pack_padded(x: torch.Tensor, _: torch.Tensor, batch_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples are as long as the longest. The rows at each step are real: the step reads them."""
    steps, rows = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    data = x.new_empty((steps * rows, *x.shape[2:]))
    with unset_fake_temporarily():
        return data, torch.full((steps,), rows)


_WORST_CASE: dict[Any, Any] = {
    _aten.bincount.default: _bincount,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique,
    _aten._pack_padded_sequence.default: _pack_padded,
}
