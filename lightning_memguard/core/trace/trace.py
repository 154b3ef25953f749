"""What one training step allocates and frees, in order: the noun that all later stages start from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from lightning_memguard.core.trace.scratch import ByteRange, Moment, Scratch

Action = Literal["alloc", "free"]

Method = Literal["fake", "worst-case", "real", "states"]
"""How a trace was obtained, best first.

``fake``: the step ran on fake tensors. ``worst-case``: the same, and some operator whose result depends on values was
given its largest result. ``real``: the step ran on real tensors at small sizes, on a copy. ``states``: no step could
be run; only parameters, buffers, gradients and optimizer state are known.
"""

PARTS = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "activations",
    "batch",
    "temporaries",
    "workspaces",
)
"""What a block of memory is for. ``workspaces`` is scratch that a kernel takes and gives back inside one operator."""

OPTIONAL_PARTS = ("callbacks", "communication")
"""Named only where they hold bytes: what the Trainer's other callbacks keep (copies of the model), and what ranks that
train together exchange (buckets of gradients)."""

Shapes = tuple[tuple[int, ...], ...]
"""Of a batch's tensors, in order."""

CASES = ("low", "point", "high")
"""At least, most likely, at most: the sizes of a block that is not known exactly, such as a convolution's workspace."""


class Event(NamedTuple):
    """One block of memory taken or given back.

    A tuple, since a replay at another batch size makes tens of thousands of them.

    ``nbytes`` is what was asked for, before any rounding, and stands on the free as on the alloc.
    ``block`` joins the two. ``module`` is the dotted path of the module that was running
    (empty outside any), ``operator`` the torch operator, such as ``aten.convolution.default``. ``case`` is empty, or
    one of `CASES` for a block whose size is not known exactly: it stands three times, once for each case. ``source`` is
    the line of the model's code behind it, as ``"<file>:<line>:<function>"``: of the forward pass, in the backward pass
    too; empty where none is.
    """

    action: Action
    block: int
    nbytes: int
    part: str = "temporaries"
    phase: str = "forward"
    step: int = 0
    module: str = ""
    operator: str = ""
    stream: int = 0
    case: str = ""
    source: str = ""


@dataclass(frozen=True)
class Kernel:
    """One call of an operator whose kernel takes scratch by a rule.

    The rule may step and bend with the batch size as no polynomial does, so growth fits what the rule is given.

    Attributes:
        operator: such as ``"aten.embedding_dense_backward.default"``.
        numbers: all sizes, strides and whole numbers among its arguments and results, in order.
        rest: what else it was given.
        scratch: the rule, as a function of such numbers.
    """

    operator: str
    numbers: tuple[int, ...]
    rest: Hashable
    scratch: Callable[[Sequence[int]], Scratch] = field(compare=False)


class ScratchSpan(NamedTuple):
    """Where in a trace the events of a kernel's scratch stand: ``events[start:end]``.

    ``place`` says which of its moments they are: -1 those before any result, else those after the result of that place;
    ``None`` those after all. ``like`` is an event that could stand there.
    """

    start: int
    end: int
    kernel: int
    place: int | None
    like: Event


@dataclass(frozen=True)
class Trace:
    """The events of a few consecutive training steps at one batch size.

    ``device`` is a torch device type such as ``"cpu"`` or ``"cuda"``. ``notes`` says in plain words what
    the trace had to assume. ``kernels`` and ``scratch_spans`` tell which events are scratch, and by which rule.
    """

    batch_size: int
    device: str
    method: Method
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    scratch_spans: tuple[ScratchSpan, ...] = ()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def only(self, case: str) -> Trace:
        """The events as they are in one of `CASES`; this very trace where nothing is uncertain."""
        if not any(event.case for event in self.events):
            return self
        events = tuple(event for event in self.events if event.case in ("", case))
        return replace(self, events=events, kernels=(), scratch_spans=())

    def plus(self, parts: Mapping[str, int]) -> Trace:
        """The events with blocks in front, by part and bytes, that stand there all the while."""
        free = 1 + max((event.block for event in self.events), default=0)
        blocks = (
            Event("alloc", free + index, nbytes, part, "setup") for index, (part, nbytes) in enumerate(parts.items())
        )
        return replace(self, events=(*blocks, *self.events), kernels=(), scratch_spans=()) if parts else self

    def __len__(self) -> int:
        return len(self.events)


def moments_of(scratch: Scratch, place: int | None) -> tuple[Moment, ...]:
    """A kernel's moments at one place among its results, as `ScratchSpan` counts them."""
    if place is None:
        return scratch.after
    return scratch.before if place < 0 else scratch.between.get(place, ())


def scratch_events(moments: Sequence[Moment], first_block: int, like: Event) -> list[Event]:
    """Take and give back what a kernel takes, moment by moment.

    Args:
        moments: what is alive together, in order.
        first_block: number of the first block; the next ones count down from it.
        like: an event that stands where these will; phase, step, module, operator and stream are taken from it.
    """
    events: list[Event] = []
    block = first_block
    for moment in moments:
        taken: list[Event] = []
        for size in moment if isinstance(moment, tuple) and not isinstance(moment, ByteRange) else (moment,):
            cases = zip(CASES, size, strict=True) if isinstance(size, ByteRange) else (("", size),)
            for case, nbytes in cases:
                if nbytes:
                    taken.append(
                        like._replace(action="alloc", block=block, nbytes=nbytes, part="workspaces", case=case)
                    )
                    block -= 1
        events += taken
        events += [event._replace(action="free") for event in reversed(taken)]
    return events
