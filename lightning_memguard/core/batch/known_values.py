"""Integers whose values follow from the batch size alone: known beside tensors that are fake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memguard.core import foreign

_FACTORY_NAMES = ("arange", "empty", "eye", "full", "ones", "rand", "randn", "randperm", "zeros")
_FACTORIES = frozenset(getattr(torch, name) for name in _FACTORY_NAMES)  # their numbers are sizes: the result is fake
_pad_packed = foreign.find("torch._VF._pad_packed_sequence")  # what `pad_packed_sequence` calls, in torch 2.9 to 2.13


class KnownValues(torch.Tensor):
    """Integers whose values are known although the other tensors are fake: they follow from the batch size alone.

    What is computed from them alone is known too; what is computed from them and fake tensors is fake.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        alone = all(isinstance(leaf, cls) for leaf in leaves if isinstance(leaf, torch.Tensor))
        known = alone and func not in _FACTORIES and not _moves(func, args, kwargs or {})
        args, kwargs = tree_map(_plain if known else _plain_or_int, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func is _pad_packed and isinstance(args[0], FakeTensor):
                return _pad(*args)
            if not known:
                return func(*args, **kwargs)
            with unset_fake_temporarily():
                return tree_map(_as_known, func(*args, **kwargs))


def _moves(func: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """Whether a function takes a tensor off the CPU."""
    wanted = [*(args[1:2] if func is torch.Tensor.to else ()), kwargs.get("device")]
    devices = [torch.device(where) for where in wanted if isinstance(where, (str, torch.device))]
    return func is torch.Tensor.cuda or any(device.type != "cpu" for device in devices)


def _as_known(value: object) -> object:
    integers = type(value) is torch.Tensor and not value.is_floating_point()
    return value.as_subclass(KnownValues) if integers else value  # type: ignore[attr-defined]


def _plain(value: object) -> object:
    return value.as_subclass(torch.Tensor) if isinstance(value, KnownValues) else value


def _plain_or_int(value: object) -> object:
    return int(value) if isinstance(value, KnownValues) and not value.dim() else _plain(value)


def _pad(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, padding: float, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_pad_packed_sequence`` in Python, after ATen/native/PackedSequence.cpp, which writes into memory."""
    rows: list[int] = sizes.tolist()
    output = data.new_full((length, rows[0], *data.shape[1:]), padding)
    start = offset = 0
    for step, row in enumerate(rows, start=1):
        if step == len(rows) or rows[step] != row:
            count = (step - start) * row
            output[start:step, :row].copy_(data[offset : offset + count].view(step - start, row, *data.shape[1:]))
            start, offset = step, offset + count
    with unset_fake_temporarily():
        lengths = (sizes.unsqueeze(1) > torch.arange(rows[0])).sum(0).as_subclass(KnownValues)
    return (output.transpose(0, 1) if batch_first else output), lengths
