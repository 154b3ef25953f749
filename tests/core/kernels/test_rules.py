"""All rules: one for an operator, by the argument names of its schema, whatever the tensors are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_memguard.core.kernels import attention, table
from lightning_memguard.core.kernels.arguments import Call, Rules
from lightning_memguard.core.trace.scratch import NONE, CpuTarget, CudaTarget, Scratch

DISPATCHED = frozenset(torch._C._dispatch_get_all_op_names())
H200, T4 = CudaTarget((9, 0), 132), CudaTarget((7, 5), 40, deterministic=True)
ALL = [
    *(
        pytest.param(name, CpuTarget(threads=2), id=f"cpu {name}")
        for name in table.CPU
        if hasattr(torch.ops.aten, name)
    ),
    *(pytest.param(name, H200, id=f"cuda {name}") for name in table.CUDA),
]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


ODD: list[torch.Tensor] = [
    tensor(),
    tensor(0),
    tensor(1),
    tensor(0, 4),
    tensor(3, 0, 2),
    tensor(2, 0, 4, 4),
    tensor(1, 1, 1, 1),
    tensor(2, 3, 4, 5).permute(3, 1, 0, 2),
    tensor(1).expand(4, 4),
    tensor(0, 8, 2, 2, 2),
    tensor(5, dtype=torch.bool),
    tensor(2, 2, dtype=torch.long),
]


# -- one rule for an operator


def test_two_rules_for_one_operator_are_refused() -> None:
    first, second = Rules[CudaTarget](), Rules[CudaTarget]()
    first.of("mm", "bmm")(lambda _: NONE)
    second.of("mm")(lambda _: NONE)
    with pytest.raises(ValueError, match="More than one rule for mm"):
        Rules[CudaTarget]().join(first, second)
    with pytest.raises(ValueError, match="More than one rule for bmm"):
        first.of("bmm")(lambda _: NONE)


# -- arguments by name


class Read(dict[str, Any]):
    """Arguments that note which of them a rule reads, whether it is there or not."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__(arguments)
        self.optional: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.optional.add(name)
        return super().get(name, default)


def overloads(name: str) -> Iterator[Any]:
    """The overloads that allocate their results, without those of TorchScript and those for named dimensions."""
    packet = getattr(torch.ops.aten, name)
    for overload in (getattr(packet, each) for each in packet.overloads()):
        written = any(argument.is_out for argument in overload._schema.arguments)
        if overload.name() in DISPATCHED and not written and "name" not in overload._overloadname:
            yield overload


def given(overload: Any, one: torch.Tensor, *, number: int, flag: bool) -> dict[str, Any]:
    """Arguments of the types in the schema: one tensor, one number, one flag in all their places."""
    values: dict[str, Any] = {
        "Tensor": one,
        "Optional[Tensor]": one if flag else None,
        "List[Tensor]": [one, one],
        "List[Optional[Tensor]]": [one],
        "int": number,
        "Optional[int]": number,
        "List[int]": [1] * max(1, one.dim() - 2),
        "Optional[List[int]]": [number] if flag else None,
        "bool": flag,
        "Optional[bool]": flag,
        "List[bool]": [flag] * 4,
    }
    return {argument.name: values.get(str(argument.type)) for argument in overload._schema.arguments}


@pytest.mark.parametrize(("name", "target"), ALL)
def test_a_rule_reads_the_arguments_that_its_operators_have(name: str, target: Any) -> None:
    rules = table.CPU if isinstance(target, CpuTarget) else table.CUDA
    known = {argument.name for each in rules if rules[each] is rules[name] for argument in schema_of(each)}
    one = tensor(2, 4, 6, 6)
    assert list(overloads(name))
    for overload in overloads(name):
        arguments = Read(given(overload, one, number=1, flag=True))
        rules[name](Call(arguments, [one, one, one], target))  # a name that it must have, but has not, is a KeyError
        assert arguments.optional <= known


def schema_of(name: str) -> list[Any]:
    return [argument for overload in overloads(name) for argument in overload._schema.arguments]


# -- odd tensors


def taken(scratch: Scratch) -> list[Any]:
    moments = (*scratch.before, *scratch.after, *(moment for each in scratch.between.values() for moment in each))
    return [block for moment in moments for block in (moment if type(moment) is tuple else (moment,))]


@pytest.mark.parametrize("name", sorted(table.CUDA.keys() - attention.RULES.keys()))
def test_no_rule_fails_on_odd_tensors(name: str) -> None:
    """Scalars, nothing at all, single elements, any strides: never an error, never a block of no size."""
    for odd in ODD:
        for overload in overloads(name):
            for number, flag in ((1, True), (2, False), (-1, True)):
                arguments = given(overload, odd, number=number, flag=flag)
                for results in ([odd], [odd, odd], [odd, odd, odd], []):
                    for target in (H200, T4):
                        scratch = rule(name, target)(Call(arguments, results, target))
                        assert all(b > 0 for b in taken(scratch) if isinstance(b, int))
                        assert scratch.kept >= 0


def rule(name: str, target: CudaTarget) -> Any:
    return table.rule(name, target)
