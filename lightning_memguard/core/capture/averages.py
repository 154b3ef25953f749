"""By how many elements a step on real tensors averages, such as tokens that are not padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MEAN = 1  # at::Reduction::Mean


@dataclass(frozen=True)
class Average:
    """One division.

    Attributes:
        count: what a sum is divided by.
        elements: how many there are by shape; a smaller count leaves some out, and None depends on values alone.
    """

    count: float
    elements: int | None

    @property
    def is_full(self) -> bool:
        """Whether it averages over all elements."""
        return self.count == self.elements


class Averages(TorchDispatchMode):
    """Notes the divisions that make one number with a gradient, in order, while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: list[tuple[Any, int | None]] = []

    def found(self) -> list[Average]:
        """What was noted."""
        return [Average(float(count), elements) for count, elements in self._found]

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if not (args and isinstance(args[0], torch.Tensor) and args[0].requires_grad):
            return output  # a metric's
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            if args[3] == _MEAN:
                self._found.append((output[1].detach().clone(), args[1].numel()))
        elif isinstance(output, torch.Tensor) and output.dim() == 0:
            if name == "div":
                divisor = args[1]
                self._found.append(
                    (divisor.detach(), None) if isinstance(divisor, torch.Tensor) else (divisor, divisor)
                )
            elif name == "mean" or "loss" in name or name.startswith("binary_cross_entropy"):
                self._found.append((args[0].numel(), args[0].numel()))
        return output
