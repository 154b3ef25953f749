"""Fake tensors whose operators cost little if they were called the same way before, as layers and steps repeat.

Torch's own cache spends most of an operator's time on its keys. Here a key is what the tensors' shapes say, and a
result is made from its template.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.torch_port import DisableTorchFunction, FakeTensor, FakeTensorMode, OpOverload

_MOST_TEMPLATES = 50_000
_Key = tuple[object, ...]


class _Result(NamedTuple):
    """How to make one result: one of the tensors that the operator was given, a view of it, or a tensor of its own."""

    place: int  # of the tensor given; -1 if it has memory of its own
    is_same: bool
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


_Template = _Result | list[Any] | tuple[Any, ...] | None


class _CannotRepeatError(Exception):
    """Raised if the effect of an operator does not follow from its key."""


class RepeatingFakeMode(FakeTensorMode):
    """`FakeTensorMode`, faster."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.cache_enabled = False  # torch's own, which takes longer than most operators
        self._fields: dict[torch.device, dict[str, Any]] = {}  # of a new fake tensor, by device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing inside is compiled, and leaving it out takes time

    def run(self, func: OpOverload, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator on fake tensors."""
        if not _may_repeat(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default and _is_whole(args[0]):
            return self._made(_result_like(args[0], -1), ())
        given: list[Tensor] = []
        key: list[object] = [func, torch.get_default_dtype()]
        try:
            self._describe(args, key, given)
            if kwargs:
                self._describe([*kwargs.items()], key, given)
            template = _templates.get(known := tuple(key), _MISSING)
        except (_CannotRepeatError, TypeError):  # such as an argument without a hash
            return super().__torch_dispatch__(func, types, args, kwargs)
        if template is not _MISSING:
            return self._made(template, given)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if known not in _refused and len(_templates) < _MOST_TEMPLATES:
            try:
                _templates[known] = self._template_of(out, given, set())
            except _CannotRepeatError:
                _refused.add(known)
        return out

    def _describe(self, values: Sequence[Any], key: list[object], given: list[Tensor]) -> None:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or not _is_plain(value):
                    raise _CannotRepeatError
                given.append(value)
                key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
            elif kind in _SEQUENCES:
                key += (kind, len(value))
                self._describe(value, key, given)
            elif kind in _NUMBERS_AND_KINDS:
                key += (kind, value)
            else:
                raise _CannotRepeatError

    def _template_of(self, out: object, given: Sequence[Tensor], own: set[int]) -> _Template:
        if out is None:
            return None
        if isinstance(out, (list, tuple)):  # some are named tuples
            items = [self._template_of(item, given, own) for item in out]
            return tuple(items) if isinstance(out, tuple) else items
        for place, tensor in enumerate(given):
            if out is tensor:
                return _Result(place, True)
        if type(out) is not FakeTensor or not _is_plain(out) or out.requires_grad:
            raise _CannotRepeatError
        address = port.storage_id(out.untyped_storage())
        for place, tensor in enumerate(given):
            if port.storage_id(tensor.untyped_storage()) == address:
                return _result_like(out, place)
        if address in own or out.untyped_storage().nbytes() != _bytes_of(out):
            raise _CannotRepeatError
        own.add(address)
        return _result_like(out, -1)

    def _made(self, template: Any, given: Sequence[Tensor]) -> Any:
        if type(template) is not _Result:
            return None if template is None else type(template)([self._made(item, given) for item in template])
        if template.is_same:
            return given[template.place]
        _, _, shape, stride, offset, dtype, device = template
        with DisableTorchFunction():
            if template.place < 0:
                meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                owner = given[template.place]
                storage = owner.untyped_storage()
                views_are_normal = torch.is_inference_mode_enabled() and not owner.is_inference()
                with torch.inference_mode(False) if views_are_normal else contextlib.nullcontext():
                    meta = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride)
        fake = port.without_address(self, meta, device)
        if device not in self._fields:
            self._fields[device] = dict(vars(FakeTensor(self, meta, device)))
        fake.__dict__.update(self._fields[device])
        return fake


_MISSING = object()
_templates: dict[_Key, _Template] = {}  # of all modes of the process: its captures differ in the batch size alone
_refused: set[_Key] = set()
_SEQUENCES = (list, tuple, torch.Size)
_NUMBERS_AND_KINDS = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _is_whole(real: Tensor) -> bool:
    """Whether a real tensor is plain, on the CPU, and all of its storage."""
    if type(real) is not Tensor or real.device.type != "cpu" or not _is_plain(real) or real.requires_grad:
        return False
    return real.untyped_storage().nbytes() == _bytes_of(real)


def _result_like(out: Any, place: int) -> _Result:
    return _Result(place, False, tuple(out.shape), out.stride(), out.storage_offset(), out.dtype, out.device)


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of the smallest storage that holds a tensor."""
    if tensor.storage_offset():
        return -1
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@functools.cache
def _may_repeat(func: object) -> bool:
    """Whether the result of an operator follows from the shapes it is given."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    return not {torch.Tag.data_dependent_output, torch.Tag.inplace_view}.intersection(func.tags) and (
        func is torch.ops.aten.index.Tensor or torch.Tag.dynamic_output_shape not in func.tags
    )
