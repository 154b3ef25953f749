"""How the samples of a batch lie in a tensor of one of its parts, and what stops a step from being done in parts."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, replace
from typing import Literal

import torch

_OWN = ("/lightning_memguard/", "/torch/", "/lightning/", "/pytorch_lightning/", "/contextlib.py", "/lightning_fabric/")


class Refused(BaseException):
    """The step in parts would be another step, or it cannot be shown that it is the same; the message says why.

    Attributes:
        raised: how many there were in this process; one that the user's code has caught shows here.
    """

    raised = 0

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        Refused.raised += 1


class Waits(BaseException):
    """A value of the whole batch was read to which the other parts have yet to add."""


def refuse(reason: str) -> Refused:
    """A refusal that names the line of the user's program that runs now."""
    return Refused(f"{reason}{_line(traceback.extract_stack(sys._getframe(1)))}")


def refuse_after(reason: str, error: BaseException) -> Refused:
    """A refusal that names the line that raised an exception."""
    return Refused(f"{reason}{_line(traceback.extract_tb(error.__traceback__))}")


def _line(frames: traceback.StackSummary) -> str:
    own = [frame for frame in frames if not any(part in frame.filename for part in _OWN)]
    if not own:
        return ""
    where = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}"
    return f" ({where}: `{own[-1].line[:80]}`)" if own[-1].line else f" ({where})"


Kind = Literal["rows", "order", "packing", "sum", "max", "min", "whole", "constant"]


@dataclass(frozen=True)
class Layout:
    """How a part's tensor relates to the tensor that one step on the whole batch has in its place.

    Attributes:
        kind: ``"rows"``: some of its samples; the whole tensor is those of all parts, one after the other.
            ``"order"``: places of samples within the part, which may only be used to index.
            ``"packing"``: ``PackedSequence.batch_sizes``, which only functions of packed sequences may take.
            ``"sum"``, ``"max"``, ``"min"``: the part's contribution to a reduction.
            ``"whole"``: the same tensor, computed from values of the whole batch. ``"constant"``: the same tensor.
        dim: where the samples are; its size is ``outer`` x samples x ``inner``.
        ragged: how many rows each sample has depends on values, as after a boolean mask.
        pending: computed from a value of the whole batch that is not known yet.
        arranged: which sort or packing put the samples in this order; 0: they are in the batch's. The whole tensor
            has them in an order of its own, so that only tensors of one arrangement are aligned.
        into: of ``"order"``: in which arrangement its values are places; of ``"packing"``: of what was packed.
    """

    kind: Kind
    dim: int = 0
    outer: int = 1
    inner: int = 1
    ragged: bool = False
    pending: bool = False
    arranged: int = 0
    into: int = 0

    @property
    def has_samples(self) -> bool:
        """Whether some dimension of it is that of the samples."""
        return self.kind in ("rows", "order", "packing")

    @property
    def is_joined(self) -> bool:
        """Whether the whole tensor is those of all parts, one after the other."""
        return self.kind == "rows" and not self.arranged

    @property
    def is_partial(self) -> bool:
        """Whether the other parts have yet to contribute."""
        return self.kind in ("sum", "max", "min")

    def at(self, dim: int) -> Layout:
        """The layout with its samples in another dimension."""
        return self if dim == self.dim else replace(self, dim=dim)

    def waiting(self, pending: bool) -> Layout:
        """The layout of a value that is known, or not."""
        return self if pending == self.pending else replace(self, pending=pending)

    def place(self) -> tuple[int, int, int]:
        """Properties that tensors of one arrangement share if they are to be aligned by sample."""
        return self.dim, self.outer, self.inner

    def is_aligned(self, other: Layout) -> bool:
        """Whether tensors of the same rank are aligned by sample."""
        return self.kind == other.kind and (self.arranged, self.place()) == (other.arranged, other.place())


CONSTANT, WHOLE = Layout("constant"), Layout("whole")


def piece(tensor: torch.Tensor, layout: Layout, start: int, stop: int, of: int) -> torch.Tensor:
    """The samples from ``start`` to ``stop`` of a whole tensor with ``of`` samples."""
    if layout.outer == 1:
        return tensor.narrow(layout.dim, start * layout.inner, (stop - start) * layout.inner)
    split: torch.Tensor = tensor.unflatten(layout.dim, (layout.outer, of, layout.inner))
    return split.narrow(layout.dim + 1, start, stop - start).flatten(layout.dim, layout.dim + 2)


def join(parts: list[torch.Tensor], layout: Layout) -> torch.Tensor:
    """The whole tensor from those of its parts."""
    if layout.outer == 1:
        return torch.cat(parts, layout.dim)
    split = [part.unflatten(layout.dim, (layout.outer, -1, layout.inner)) for part in parts]
    return torch.cat(split, layout.dim + 1).flatten(layout.dim, layout.dim + 2)


def get(tensor: torch.Tensor, token: object) -> Layout | None:
    """The layout that a tensor was given while ``token`` was that of the pass; None if it has none."""
    found: tuple[object, Layout] | None = getattr(tensor, _KEY, None)
    return found[1] if found is not None and found[0] is token else None


def put(tensor: torch.Tensor, token: object, layout: Layout) -> None:
    """Give a tensor a layout."""
    setattr(tensor, _KEY, (token, layout))


def forget(tensor: object) -> None:
    """Take a tensor's layout away."""
    vars(tensor).pop(_KEY, None)


# An attribute, since it lives as long as the tensor does in C++: weak references end when Python lets go of it.
_KEY = "_memguard_layout"
