"""Tensors that no operator of a part has made, but that it takes from elsewhere: each part must take the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_memguard.training.rescue.sample_layout import refuse

_COPIED_BYTES = 1 << 16  # smaller tensors that appear from nowhere are copied
_ALIKE_BYTES = 1 << 28  # constants that appear from nowhere are compared up to this size


class Elsewhere:
    """The tensors that parts take from elsewhere, in the order in which they do."""

    def __init__(self) -> None:
        self._noted: list[_Outside] = []
        self._taken = 0

    def begin(self) -> None:
        """A part begins."""
        self._taken = 0

    def take(self, tensor: torch.Tensor, *, extends: bool) -> None:
        """The part takes a tensor, which is noted if it ``extends`` what is known, and else compared.

        Raises:
            Refused: another part has taken another one.
        """
        place, self._taken = self._taken, self._taken + 1
        if extends and place == len(self._noted):
            self._noted.append(_Outside.of(tensor))
        elif place >= len(self._noted) or not self._noted[place].is_same(tensor):
            raise refuse("a tensor that is not of the batch differs from part to part")

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, as the first part took them."""
        return [each.tensor for each in self._noted]

    def has_taken(self, storage: int) -> bool:
        """Whether the part that runs has taken a tensor of this memory; see `storage_of`."""
        return any(storage == storage_of(each.tensor) for each in self._noted[: self._taken])


@dataclass(frozen=True)
class _Outside:
    """A tensor, as the first part found it."""

    tensor: torch.Tensor
    version: int
    value: torch.Tensor | None  # of a small one, which the step may write to, and which is put back then

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Outside:
        is_small = tensor.layout == torch.strided and tensor.numel() * tensor.element_size() <= _COPIED_BYTES
        return cls(tensor, version_of(tensor), tensor.detach().clone() if is_small else None)

    def is_same(self, tensor: torch.Tensor) -> bool:
        """Whether another part has taken this tensor, or one of its values."""
        if (tensor is self.tensor or _views_same(tensor, self.tensor)) and version_of(tensor) == self.version:
            return True
        known = self.tensor if self.value is None else self.value
        if self.value is None and tensor is self.tensor:
            return False
        if (tensor.shape, tensor.dtype, tensor.device) != (known.shape, known.dtype, known.device):
            return False
        if tensor.numel() * tensor.element_size() > _ALIKE_BYTES:
            return False
        if tensor.is_floating_point():
            return bool(torch.isclose(tensor, known, rtol=0, atol=0, equal_nan=True).all())
        return bool((tensor == known).all())


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors share which are in the same memory."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; tensors made in inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _views_same(tensor: torch.Tensor, known: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or known.layout != torch.strided:
        return False
    return (
        tensor.data_ptr() == known.data_ptr() != 0 and tensor.shape == known.shape and tensor.stride() == known.stride()
    )
