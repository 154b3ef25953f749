"""One call of an operator -> a `Kernel`: its rule by name, and its numbers apart, so that others can take their place.

It holds nothing of torch's: dtypes and devices are there by name, and tensors as how many numbers describe them. A
trace can be read and replayed where torch is not loaded; it is once a rule is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_memguard.core.kernels.arguments import Call, is_on_host
from lightning_memguard.core.trace.scratch import NONE, CpuTarget, CudaTarget, Scratch
from lightning_memguard.core.trace.trace import Kernel


class Placeholder(NamedTuple):
    """Placeholder for a whole number, or for a tensor with this many dimensions and this dtype, on the host or not."""

    dimensions: int = -1
    dtype: str = ""
    on_host: bool = False


class TorchName(NamedTuple):
    """A dtype, device, layout or memory format by its name, such as ``"torch.float32"`` or ``"cuda:0"``."""

    name: str


@dataclass(frozen=True)
class RuleTemplate:
    """A rule by its operator, and the arguments and results of one call with all numbers taken out."""

    operator: str
    names: tuple[str, ...]
    arguments: tuple[object, ...]
    results: tuple[object, ...]
    target: CpuTarget | CudaTarget

    def __call__(self, numbers: Sequence[int]) -> Scratch:
        """Ask the rule for the scratch of the call with other numbers."""
        from lightning_memguard.core.kernels import table

        left = iter(numbers)
        arguments = dict(zip(self.names, _restore_numbers(self.arguments, left), strict=True))
        rule = table.rule(self.operator, self.target)
        return rule(Call(arguments, _restore_numbers(self.results, left), self.target)) if rule else NONE


def kernel_of(name: str, call: Call[Any]) -> Kernel:
    """Return a call as a record whose rule can be asked again with other numbers."""
    numbers: list[int] = []
    arguments, results = (
        _extract_numbers(tuple(values), numbers) for values in (call.arguments.values(), call.results)
    )
    again = RuleTemplate(name.split(".")[1], tuple(call.arguments), arguments, results, call.target)
    return Kernel(name, tuple(numbers), (arguments, results), again)


def _extract_numbers(value: object, numbers: list[int]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        numbers += value.shape
        numbers += value.stride()
        return Placeholder(value.dim(), str(value.dtype), is_on_host(value))
    if type(value) is int:
        numbers.append(value)
        return Placeholder()
    if isinstance(value, (list, tuple)):
        return tuple([_extract_numbers(item, numbers) for item in value])
    if isinstance(value, float):
        return "nan" if math.isnan(value) else float(value)  # one nan is not another's equal
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return TorchName(str(value))
    return value if isinstance(value, (bool, str, type(None))) else type(value).__name__  # no rule reads anything else


def _restore_numbers(value: object, numbers: Iterator[int]) -> Any:
    import torch

    if isinstance(value, Placeholder):
        if not value.dtype:
            return next(numbers)
        shape = [next(numbers) for _ in range(value.dimensions)]
        stride = [next(numbers) for _ in range(value.dimensions)]
        tensor: Any = torch.empty_strided(shape, stride, dtype=_named(value.dtype), device="meta")
        tensor.on_host = value.on_host  # read by `is_on_host`
        return tensor
    if isinstance(value, TorchName):
        return _named(value.name)
    if isinstance(value, tuple):
        return [_restore_numbers(item, numbers) for item in value]
    return value


def _named(name: str) -> Any:
    import torch

    return getattr(torch, name.removeprefix("torch.")) if name.startswith("torch.") else torch.device(name)
