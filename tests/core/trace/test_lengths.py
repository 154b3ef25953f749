"""A step's trace at a batch size and length nobody ran: each event's bytes are fitted over both sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.capture import Captures, capture
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.trace.growth import Growth, grow
from lightning_memguard.core.trace.kept import Kept
from lightning_memguard.core.trace.lengths import ShapeGrowth, grow_by_length
from lightning_memguard.core.trace.scratch import Scratch
from lightning_memguard.core.trace.trace import Event, Kernel, ScratchSpan, Trace, moments_of, scratch_events
from lightning_memguard.errors import CannotTraceError

LENGTHS = (8, 16, 24, 40)
Bytes = Callable[[int, int], int]


def trace_of(n: int, *nbytes: int) -> Trace:
    """One block for each number of bytes."""
    return Trace(n, "cpu", "fake", tuple(Event("alloc", block, size) for block, size in enumerate(nbytes)))


def grown(*nbytes: Bytes, lengths: Sequence[int] = LENGTHS) -> ShapeGrowth:
    """Fit blocks of these bytes at (batch size, length)."""
    growths = {at: grow([trace_of(n, *(each(n, at) for each in nbytes)) for n in (4, 8, 16)]) for at in lengths}
    return grow_by_length(growths)


def sizes_at(growth: ShapeGrowth, length: int, batch_size: int) -> list[int]:
    return [event.nbytes for event in growth.at(length).at(batch_size)]


def test_what_belongs_to_tokens_and_pairs_of_tokens_grows_with_both():
    growth = grown(lambda n, at: 10 + 3 * n * at, lambda n, at: n * at * at, lambda n, at: at * at, lambda n, at: 7)
    assert sizes_at(growth, 100, 5) == [1510, 50_000, 10_000, 7]


@given(st.lists(st.integers(0, 9), min_size=9, max_size=9), st.integers(1, 500), st.integers(1, 500))
def test_every_polynomial_of_these_powers_is_found(factors: list[int], batch_size: int, length: int):
    def nbytes(n: int, at: int) -> int:
        powers = [n**i * at**j for i in range(3) for j in range(3)]
        return sum(factor * power for factor, power in zip(factors, powers, strict=True))

    assert sizes_at(grown(nbytes), length, batch_size) == [nbytes(batch_size, length)]


def test_it_reproduces_what_it_was_fitted_to():
    traces = {at: [trace_of(n, 2 * n * at, at) for n in (4, 8)] for at in LENGTHS}
    growth = grow_by_length({at: grow(each) for at, each in traces.items()})
    for at, captured in traces.items():
        for trace in captured:
            assert growth.at(at).at(trace.batch_size).events == trace.events


def test_what_shrinks_with_the_length_does_and_never_below_zero():
    growth = grown(lambda n, at: n * (64 - at))
    assert sizes_at(growth, 60, 2) == [8]
    assert sizes_at(growth, 70, 2) == [0]


# Kernels' scratch follows rules


def rounded(numbers: Sequence[int]) -> Scratch:
    """As much as its number, in blocks of 100; nothing below 1000."""
    return Scratch(before=(-(-numbers[0] // 100) * 100,)) if numbers[0] >= 1000 else Scratch()


def with_scratch(n: int, at: int) -> Trace:
    like = Event("alloc", 0, 0, operator="op")
    kernel = Kernel("op", (3 * n * at, 5), "", rounded)
    scratch = scratch_events(moments_of(rounded(kernel.numbers), -1), -1, like)
    span = ScratchSpan(1, 1 + len(scratch), 0, -1, like)
    events = (Event("alloc", 0, 50), *scratch, Event("alloc", 1, n * at), Event("alloc", 2, at))
    return Trace(n, "cuda", "fake", events, kernels=(kernel,), scratch_spans=(span,))


@pytest.mark.parametrize(("batch_size", "length"), [(7, 11), (7, 101), (50, 8), (4, 200)])
def test_scratch_is_asked_again_at_the_length(batch_size: int, length: int):
    """It is there at some shapes only, which moves the events behind it."""
    growth = grow_by_length({at: grow([with_scratch(n, at) for n in (4, 8, 64)]) for at in LENGTHS})
    assert growth.at(length).at(batch_size).events == with_scratch(batch_size, length).events


# What is refused


def test_three_lengths_check_no_square():
    with pytest.raises(CannotTraceError, match=r"needs captures at 4 lengths or more; got \[8, 16, 24\]"):
        grown(lambda n, at: n * at, lengths=LENGTHS[:3])


def test_what_is_not_a_polynomial_is_refused():
    with pytest.raises(CannotTraceError, match="not linear or quadratic in the length: captured at 8, 16, 24, 40"):
        grown(lambda n, at: n * at**3)


def test_another_kernel_at_some_lengths_is_refused():
    growths = {at: grow([trace_of(n, *(n * at,) * (1 + (at > 16))) for n in (4, 8)]) for at in LENGTHS}
    with pytest.raises(CannotTraceError, match="runs differently at lengths 8 and 24: at one it allocates more often"):
        grow_by_length(growths)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kept": (Kept("self.losses", "net.py:3", True, "step", True, 8),)}, "memory behind"),
        ({"notes": ("x",)}, "ass"),
    ],
)
def test_what_is_not_fitted_is_refused(change: dict[str, object], words: str):
    growths = {at: grow([trace_of(n, n * at) for n in (4, 8)]) for at in LENGTHS}
    changed = replace(growths[40], template=replace(growths[40].template, **change))  # type: ignore[arg-type]
    with pytest.raises(CannotTraceError, match=words):
        grow_by_length({**growths, 40: changed})


# A model


class Attention(nn.Module):
    """Embeds tokens and positions, and attends with scores that are written out."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(50, 16), nn.Embedding(512, 16)
        self.all_three, self.out = nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        hidden = self.token(ids) + self.place(torch.arange(length, device=ids.device))
        query, key, value = self.all_three(hidden).chunk(3, dim=-1)
        hidden_later = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        scores = (query @ key.transpose(1, 2)).masked_fill(hidden_later, float("-inf"))
        return self.out(scores.softmax(-1) @ value)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def test_a_step_of_attention_is_known_byte_by_byte_where_it_was_not_captured():
    gpu, model = gpus.find("A100 80GB"), Attention()

    def program(length: int) -> LoopProgram:
        batches = batches_from_one(torch.zeros(2, length, dtype=torch.long))
        rest = loss_of, torch.optim.AdamW, torch.device("cuda"), "bf16-mixed", True, gpu
        return LoopProgram(model, batches, *rest)

    programs = {length: program(length) for length in (*LENGTHS, 33, 200)}
    with Captures(*programs.values()):

        def growth_at(length: int) -> Growth:
            return grow([capture(programs[length], n, "fake") for n in (4, 8)])

        growth = grow_by_length({length: growth_at(length) for length in LENGTHS})
        for length, batch_size in ((33, 5), (200, 64)):
            captured = capture(programs[length], batch_size, "fake")
            assert growth.at(length).at(batch_size).events == captured.events
