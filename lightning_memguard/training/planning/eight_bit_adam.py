"""The states of bitsandbytes' 8-bit Adam, to predict with if bitsandbytes is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class EightBitAdam(Optimizer):
    """Optimizer with the state of ``bitsandbytes.optim.AdamW8bit``; for predictions only, since it updates nothing.

    Two moments of a byte an element, and for each 256 of them a float32 scale; 32 bits for tensors below 4096
    elements; two tables of 256 float32 for all. The update is one kernel that takes nothing. Read in bitsandbytes 0.49,
    ``Optimizer2State.init_state`` in bitsandbytes/optim/optimizer.py (blocks had 2048 elements before 0.45).
    """

    block_elements = 256
    min_8bit_elements = 4096

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.tables: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the states of parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._states_of(parameter)
        return loss

    def _states_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        small = parameter.numel() < self.min_8bit_elements
        dtype = torch.float32 if small else torch.uint8
        moments = {f"state{at}": torch.zeros_like(parameter, dtype=dtype) for at in (1, 2)}
        if small:
            return moments
        blocks = -(-parameter.numel() // self.block_elements)
        for at in (1, 2):
            if f"qmap{at}" not in self.tables:
                self.tables[f"qmap{at}"] = parameter.new_empty(256, dtype=torch.float32)
            moments[f"absmax{at}"] = parameter.new_zeros(blocks, dtype=torch.float32)
        return {**moments, **self.tables}
