"""The trace of a step with many layers, from those with a few."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_memguard.core.trace.depth import BASE, DEPTHS, deepening_of
from lightning_memguard.core.trace.scratch import Scratch
from lightning_memguard.core.trace.trace import Event, Kernel, ScratchSpan, Trace
from lightning_memguard.core.trace.work import Work
from lightning_memguard.errors import CannotTraceError


class Step:
    """A step with some layers: each has a weight, keeps an activation of the batch, and takes scratch."""

    def __init__(self, layers: int, batch_size: int = 4) -> None:
        self.events: list[Event] = []
        self.spans: list[ScratchSpan] = []
        self.kernels: list[Kernel] = []
        self.layers, self.batch_size, self.blocks, self.scratch = layers, batch_size, 0, 0

    def alloc(self, nbytes: int, part: str, phase: str, module: str = "", operator: str = "") -> int:
        self.events.append(Event("alloc", self.blocks, nbytes, part, phase, 0, module, operator))
        self.blocks += 1
        return self.blocks - 1

    def free(self, block: int, phase: str, module: str = "") -> None:
        made = next(each for each in self.events if each.block == block)
        self.events.append(made._replace(action="free", phase=phase, module=module, operator=""))

    def kernel(self, nbytes: int, phase: str, module: str, operator: str, *numbers: int) -> None:
        start, like = len(self.events), Event("alloc", 0, 0, "workspaces", phase, 0, module, operator)
        self.scratch -= 1
        taken = like._replace(block=self.scratch, nbytes=nbytes)
        self.events += [taken, taken._replace(action="free")]
        self.kernels.append(Kernel(operator, numbers, (), lambda _: Scratch(after=((nbytes,),))))
        self.spans.append(ScratchSpan(start, start + 2, len(self.kernels) - 1, None, like))

    def trace(self, *, stacks_activations: bool = False) -> Trace:
        names = [f"body.{layer}.mlp" for layer in range(self.layers)]
        embedding, *_ = [self.alloc(64 + 8 * (n == 1), "parameters", "setup") for n in range(self.layers + 2)]
        kept = []
        for name in names:
            self.kernel(self.batch_size, "forward", name, "aten.mm", self.batch_size)
            kept.append(self.alloc(8 * self.batch_size, "activations", "forward", name, "aten.mm"))
        if stacks_activations:
            self.free(self.alloc(self.layers * self.batch_size, "temporaries", "forward", "", "aten.stack"), "forward")
        gradients = []
        for layer in reversed(range(self.layers)):
            gradients.append(self.alloc(64, "gradients", "backward", names[layer], "aten.t"))
            self.free(kept[layer], "backward", names[layer])
        norms = [self.alloc(4, "temporaries", "optimizer", "", "aten._foreach_norm") for _ in gradients]
        self.kernel(4 * self.layers, "optimizer", "", "aten.stack", *[1] * self.layers)
        for block in (*norms, *gradients, embedding):
            self.free(block, "optimizer")
        work = tuple(Work("float32", 10 * self.batch_size, 4 * self.batch_size) for _ in names)
        trace = Trace(self.batch_size, "cuda", "fake", tuple(self.events), scratch_spans=tuple(self.spans))
        return replace(trace, kernels=tuple(self.kernels), work=(*work, Work("", 0, 8 * self.layers, True)))


def test_many_layers_are_as_if_they_were_captured_at_the_size_of_the_few_and_at_others() -> None:
    """Blocks, layers and positions count on; a kernel over all layers takes more; the first weight is another."""
    known = deepening_of([Step(layers).trace() for layers in DEPTHS], "body")
    for batch_size in (4, 32):
        base, wanted = Step(BASE, batch_size).trace(), Step(9, batch_size).trace()
        found = known.at(base, 9)
        assert known.fits(base)
        assert (found.events, found.scratch_spans, found.work) == (wanted.events, wanted.scratch_spans, wanted.work)
        scratch = [[each.scratch(each.numbers) for each in trace.kernels] for trace in (found, wanted)]
        assert scratch[0] == scratch[1]


def test_a_step_without_scratch_or_work_is_one_too() -> None:
    """As one on a device whose kernels have no rules: there are no kernels at any depth."""
    few, base, more, wanted = (Trace(4, "mps", "fake", plain(layers)) for layers in (*DEPTHS, 9))
    assert deepening_of([few, base, more], "body").at(base, 9).events == wanted.events


def plain(layers: int) -> tuple[Event, ...]:
    return tuple(Event("alloc", layer, 64, "parameters", "setup", module=f"body.{layer}") for layer in range(layers))


def test_a_tensor_of_all_layers_is_refused_as_it_may_grow_with_the_batch() -> None:
    with pytest.raises(CannotTraceError, match="grow with the batch"):
        deepening_of([Step(layers).trace(stacks_activations=True) for layers in DEPTHS], "body")


def test_layers_that_differ_are_refused() -> None:
    traces = [Step(layers).trace() for layers in DEPTHS]
    last = [each._replace(nbytes=1) if each.module.startswith("body.2") else each for each in traces[2].events]
    with pytest.raises(CannotTraceError):
        deepening_of([*traces[:2], replace(traces[2], events=tuple(last))], "body")


def test_a_step_that_runs_otherwise_at_another_size_does_not_fit() -> None:
    known = deepening_of([Step(layers).trace() for layers in DEPTHS], "body")
    other = Step(BASE, 1).trace()
    assert not known.fits(replace(other, events=(*other.events, Event("alloc", 999, 8))))


def test_a_trace_whose_blocks_do_not_follow_is_refused() -> None:
    """The same events, but the last frees a block of another size."""
    known, other = deepening_of([Step(layers).trace() for layers in DEPTHS], "body"), Step(BASE).trace()
    *events, last = other.events
    with pytest.raises(CannotTraceError, match="do not follow"):
        known.at(replace(other, events=(*events, last._replace(block=1))), 9)
