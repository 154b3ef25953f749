"""One call of an operator, as rules get it, and their answer: the memory its kernel takes from PyTorch's allocator.

The schema names the arguments, in every overload alike: no rule depends on their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from lightning_memguard.core.trace.scratch import NONE, Block, CpuTarget, CudaTarget, Moment, Scratch, Tensor

Target = TypeVar("Target", bound=CpuTarget | CudaTarget)
_Target_co = TypeVar("_Target_co", bound=CpuTarget | CudaTarget, covariant=True)


@dataclass(frozen=True)
class Call(Generic[_Target_co]):
    """One call of an operator, as its rule sees it.

    Attributes:
        arguments: by their names in the operator's schema, in its order, defaults filled in.
        results: those of its results that are tensors.
        target: what it runs on.
    """

    arguments: Mapping[str, Any]
    results: Sequence[Tensor]
    target: _Target_co

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """An argument that not all operators of the rule have; None if it is missing."""
        return self.arguments.get(name)

    @property
    def first(self) -> Tensor:
        """The first argument, of operators that agree on its meaning but not on its name."""
        return next(iter(self.arguments.values()))  # type: ignore[no-any-return]

    @property
    def result(self) -> Tensor:
        """The first result."""
        return self.results[0]


CpuCall = Call[CpuTarget]
CudaCall = Call[CudaTarget]
Rule = Callable[[Call[Target]], Scratch]


class Rules(dict[str, Rule[Target]]):
    """Rules by operator, as ``aten`` names it; each operator has one at most."""

    def of(self, *operators: str) -> Callable[[Rule[Target]], Rule[Target]]:
        """Decorator: register a rule for these operators."""

        def register(rule: Rule[Target]) -> Rule[Target]:
            self.join(dict.fromkeys(operators, rule))
            return rule

        return register

    def join(self, *families: Mapping[str, Rule[Target]]) -> Rules[Target]:
        """Add the rules of these families.

        Raises:
            ValueError: an operator has a rule already.
        """
        for family in families:
            if twice := sorted(self.keys() & family.keys()):
                raise ValueError(f"More than one rule for {', '.join(twice)}.")
            self.update(family)
        return self


def checked(rule: Rule[Target]) -> Rule[Target]:
    """A rule that answers `NONE` for tensors without strides or with unknown sizes: no rule knows their scratch."""

    def ask(call: Call[Target]) -> Scratch:
        tensors = operands([*call.arguments.values(), *call.results])
        return rule(call) if call.results and all(map(_is_plain, tensors)) else NONE

    return ask


def _is_plain(tensor: Tensor) -> bool:
    strided = not tensor.is_nested and str(tensor.layout) == "torch.strided"
    return strided and {*map(type, tensor.shape)} <= {int}


def operands(value: object) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results: in lists, tuples and dicts, which are all that it takes."""
    if type(value) in _NOT_TENSORS:
        return
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from operands(item)
    elif hasattr(value, "untyped_storage") and hasattr(value, "element_size"):
        yield cast("Tensor", value)


def is_torch(*version: int) -> bool:
    """Whether this is that version of torch or a newer one."""
    from lightning_memguard.core import torch_port as port

    return version <= port.VERSION


def dtype_of(tensor: Tensor) -> str:
    """The name of a tensor's dtype, such as ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor is the CPU's; one that is restored without a device keeps that it was."""
    known = getattr(tensor, "on_host", None)
    if known is None:
        device = getattr(tensor, "fake_device", None) or tensor.device  # the former is fast
        known = device.type == "cpu"
    return bool(known)


_NOT_TENSORS = frozenset((int, float, bool, str, type(None)))


def dimension(dim: int, tensor: Tensor) -> int:
    """A dimension counted from the front."""
    return dim % tensor.dim() if tensor.dim() else 0


def dimensions(dim: int | Sequence[int] | None, tensor: Tensor) -> frozenset[int]:
    """The dimensions that are reduced: all, if none is named."""
    count = tensor.dim()
    named = [dim] if isinstance(dim, int) else dim or range(count)
    return frozenset(each % count for each in named) if count else frozenset()


def moments(blocks: Iterable[Iterable[Block]]) -> tuple[Moment, ...]:
    """Return the blocks that are alive together, moment by moment, without empty blocks and empty moments."""
    alive = (tuple(block for block in moment if block) for moment in blocks)
    return tuple(moment for moment in alive if moment)


def after(*blocks: Iterable[Block], kept: int = 0) -> Scratch:
    """Scratch taken while all results are alive, moment by moment."""
    taken = moments(blocks)
    return Scratch(after=taken, kept=kept) if taken or kept else NONE
