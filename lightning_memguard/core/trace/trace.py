"""Allocations and frees of one training step, in order: the record that all later stages start from."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, cast

from typing_extensions import Self

from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.kept import Kept
from lightning_memguard.core.trace.scratch import Block, Moment, Plans, Scratch, likely_bytes
from lightning_memguard.core.trace.work import TRANSFER, Work
from lightning_memguard.units import MIB

Action = Literal["alloc", "free"]

Method = Literal["compiled", "fake", "worst-case", "sampled", "valued", "answered", "real", "cut", "states"]
"""How a trace was obtained, best first.

``compiled``: the step ran on fake tensors as torch.compile compiles it. ``fake``: the step ran on fake tensors, all of
it as written. ``worst-case``: the same, and an operator whose result depends on values was given its largest result.
``sampled``: the same, and such an operator was given a result as large as real batches had. ``valued``: the step ran on
fake tensors, and values of a real batch and of random numbers were known. ``answered``: the same, and what the step
reads of other values was read in a real run of it on the CPU. ``real``: the step ran on real batches, on a copy.
``cut``: the step was stopped as time was up; it takes at least what was recorded. ``states``: no step could be run;
only parameters, buffers, gradients and optimizer state are known.
"""

PARTIAL: tuple[Method, ...] = ("cut", "states")
"""Methods that tell only part of what a step takes."""

OF_VALUES: tuple[Method, ...] = ("valued", "answered", "real")
"""Methods by which a step reads the values of a batch."""

RUN: tuple[Method, ...] = ("answered", "real")
"""Methods that run the step for real."""

TIME_WAS_UP = "time was up (max_setup_seconds)"
NOT_COMPILED = "what torch.compile makes of the step was not captured"
"""Why less than a whole step is known, as notes and reasons say it."""

PARTS = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "batch", "temporaries", "workspaces")
"""Purposes of a block of memory. ``workspaces`` is scratch that a kernel allocates and frees inside one operator."""

OPTIONAL_PARTS = ("callbacks", "communication", "gathered", "checkpoint", "prefetched", "workers")
"""Parts listed only if they have bytes: memory of the Trainer's other callbacks (copies of the model), buffers that
ranks send and receive through (DDP's buckets of gradients), parameters gathered from all ranks while a layer runs, the
buffer that a checkpoint is written to; on the CPU, batches that worker processes have ready, and these processes."""

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a batch's tensors, in order."""

Share = tuple[tuple[int, ...], int]
"""How large a result was whose size depends on values: counts, and the largest that each could be."""

Shares = tuple[tuple[tuple[str, str], tuple[Share, ...]], ...]
"""The shares of a run, by operator and line, call by call."""

Answers = tuple[tuple[str, tuple[float, ...]], ...]
"""Values that a run read from its tensors (`.item()`, `if tensor:`), by line, in order."""

NoteKind = Literal["uncompiled", "largest result", "values later", "computed numbers", "no validation", "refused"]
"""Which assumption it is, where code asks: the step calls torch.compile and is predicted as written; an operator was
given its largest result; a later step was not captured, as it needs values; the step reads whole numbers that it
computes, perhaps sizes; validation is not in the prediction; the
device refuses a request of the step, which catches the error."""


class Note(str):
    """An assumption in plain words, for people; code reads its kind."""

    __slots__ = ("kind",)
    kind: NoteKind

    def __new__(cls, kind: NoteKind, text: str) -> Self:
        """Name a text."""
        note = super().__new__(cls, text)
        note.kind = kind
        return note

    def __reduce__(self) -> tuple[type[Note], tuple[str, str]]:
        return Note, (self.kind, str(self))


def is_note(note: str, kind: NoteKind) -> bool:
    """Whether an assumption is of a kind."""
    return isinstance(note, Note) and note.kind == kind


WORTH_A_NOTE = MIB
"""Less is not named, and counts all the same."""

CASES = ("low", "point", "high", "first")
"""Sizes (at least, most likely, at most) of a block that is not known exactly, such as a convolution's workspace.

``first`` is what is likely, but for the workspaces of the first forward pass, which are others that are as plausible
there: a larger block that is freed before the second can leave a smaller reserve, by filling gaps better. A trace can
also be asked for ``backward``: what is likely, without the workspaces of forward convolutions."""

WAITS = "record_stream"
"""The operator of a placeholder: of a free block whose memory waits for another stream (``record_stream``).

It counts as reserved, not as allocated, and gives way when memory is short: PyTorch then waits for the stream."""


class Event(NamedTuple):
    """One block of memory allocated or freed; a tuple, since a trace at another batch size makes tens of thousands.

    ``nbytes`` is the size requested, before any rounding, on the free as on the alloc; ``block`` joins the two.
    ``module`` is the dotted path of the module that was running (empty outside any), ``operator`` the torch operator,
    such as ``aten.convolution.default``. ``case`` is empty, or one of `CASES` for a block whose size is not known
    exactly: it occurs once for each case. ``otherwise`` are the sizes that are requested in turn if
    ``nbytes`` does not fit, as PyTorch goes on to cuDNN's next plan. ``source`` is the line of the model's code that
    caused it, as ``"<file>:<line>:<function>"``; in the backward pass that of the forward pass; empty if there is none.
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
    otherwise: tuple[int, ...] = ()

    @property
    def change(self) -> int:
        """Bytes by which the event raises what is allocated; below zero if it frees."""
        return self.nbytes if self.action == "alloc" else -self.nbytes


@dataclass(frozen=True)
class Kernel:
    """One call of an operator whose kernel takes scratch by a rule.

    The rule may follow the batch size as no polynomial does, so growth fits the numbers that the rule is given.

    Attributes:
        operator: such as ``"aten.embedding_dense_backward.default"``.
        numbers: all sizes, strides and whole numbers among its arguments and results, in order.
        rest: its other arguments.
        scratch: the rule, as a function of such numbers.
    """

    operator: str
    numbers: tuple[int, ...]
    rest: Hashable
    scratch: Callable[[Sequence[int]], Scratch] = field(compare=False)


class ScratchSpan(NamedTuple):
    """Span of a trace with the events of a kernel's scratch: ``events[start:end]``.

    ``place`` says which of its moments they are: -1 those before any result, else those after the result of that place;
    ``None`` those after all. ``like`` is an event that could be there.
    """

    start: int
    end: int
    kernel: int
    place: int | None
    like: Event


@dataclass(frozen=True)
class Trace:
    """The events of a few consecutive training steps at one batch size.

    ``device`` is a torch device type such as ``"cpu"`` or ``"cuda"``. ``notes`` are assumptions in plain words.
    ``kernels`` and ``scratch_spans`` say which events are scratch, and by which rule. ``batch`` is the shapes and bytes
    of the largest batch that the step was given, if it was noted. ``held_at`` is the place among the events at which
    `holding` puts blocks. ``shares`` is noted in real runs, and ``seconds`` is the processor time that the run took.
    ``answers`` is noted where something would be compiled; ``draws`` if the step drew numbers that sizes may depend on.
    ``kept`` is what each batch leaves behind, and ``work`` what one batch and one optimizer step compute. ``recurs``
    means that its last steps are those in which work recurs. ``counts_steps`` means that a schedule does, and that
    nothing asked how many there will be.
    """

    batch_size: int
    device: str
    method: Method
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    scratch_spans: tuple[ScratchSpan, ...] = ()
    batch: tuple[Shapes, int] | None = None
    held_at: int = 0
    shares: Shares = field(default=(), compare=False)
    seconds: float = field(default=0.0, compare=False)
    kept: tuple[Kept, ...] = field(default=(), compare=False)
    work: Sequence[Work] = field(default=(), compare=False, repr=False)
    recurs: bool = field(default=False, compare=False)
    counts_steps: bool = field(default=False, compare=False)
    answers: Answers = field(default=(), compare=False, repr=False)
    draws: bool = field(default=False, compare=False)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def has_note(self, kind: NoteKind) -> bool:
        """Whether one of its notes is of a kind."""
        return any(is_note(note, kind) for note in self.notes)

    def only(self, case: str) -> Trace:
        """The events of one of `CASES`, or of a mixture of them; the same trace if nothing is uncertain."""
        if not any(event.case for event in self.events):
            return self
        mixed = _MIXED.get(case)
        events = tuple(event for event in self.events if event.case in ("", mixed(event) if mixed else case))
        return replace(self, events=events, kernels=(), scratch_spans=())

    def plus(self, parts: Mapping[str, int]) -> Trace:
        """The trace with a block for each part in front, of these bytes, that is never freed."""
        return self._with_blocks(0, parts.items())

    def holding(self, blocks: Collection[tuple[str, int]]) -> Trace:
        """The trace with blocks, by part and bytes, that the run has on its device throughout."""
        return self._with_blocks(self.held_at, blocks)

    def like_later(self, batches: int) -> Trace | None:
        """Return a step like the first, that finds what it leaves; None if its ``batches`` were not recorded whole.

        Gradients are there until the backward pass begins; at least they are not, and at most they stay.
        """
        events = [event for event in self.events if event.step < batches]
        if len(events) == len(self.events):
            return None
        left = {event.block: event for event in events if event.action == "alloc"}
        for event in events:
            if event.action == "free":
                left.pop(event.block, None)
        states, gradients = (
            [each for each in left.values() if each.part == part] for part in ("optimizer_state", "gradients")
        )
        first = 1 + max((event.block for event in events), default=0)
        there = [each._replace(block=first + place) for place, each in enumerate(gradients)]
        found = [each._replace(case=case) for case in ("point", "high") for each in there]
        made = {each.block for each in states}
        rest = [event for event in events if event.block not in made]
        begins = next((place for place, event in enumerate(rest) if event.phase == "backward"), len(rest))
        freed = [each._replace(action="free") for each in found if each.case == "point"]
        held = rest[: self.held_at], states, found, rest[self.held_at : begins], freed, rest[begins:]
        return replace(self, events=tuple(itertools.chain(*held)), kernels=(), scratch_spans=())

    def alive_between_steps(self, *, gradients: bool) -> Iterator[tuple[str, int]]:
        """Yield the bytes on the device between two training steps by part, without the module's own."""
        parts = {"optimizer_state", *OPTIONAL_PARTS, *(["gradients"] if gradients else [])}
        events = self.only("high").events
        alive = {event.block: event for event in events if event.action == "alloc" and event.part in parts}
        for event in events:
            if event.action == "free":
                alive.pop(event.block, None)
        yield from ((event.part, event.nbytes) for event in alive.values())

    @property
    def open_workspaces(self) -> Counter[tuple[bool, int]]:
        """Workspaces that a library keeps from its first call on, by whether that was in the backward pass, and bytes.

        The threads of the forward and the backward pass have their own.
        """
        alive: dict[int, Event] = {}
        for event in self.only("point").events:
            if event.action == "free":
                alive.pop(event.block, None)
            elif event.part == "workspaces" and event.phase != "setup":
                alive[event.block] = event
        return Counter((event.phase == "backward", event.nbytes) for event in alive.values())

    def _with_blocks(self, place: int, blocks: Collection[tuple[str, int]]) -> Trace:
        if not blocks:
            return self
        first = 1 + max((event.block for event in self.events), default=0)
        held = [Event("alloc", block, size, part, "setup") for block, (part, size) in enumerate(blocks, first)]
        events = (*self.events[:place], *held, *self.events[place:])
        return replace(self, events=events, kernels=(), scratch_spans=())

    @property
    def moved_bytes(self) -> int:
        """Activations of a batch that wait on the host for their backward pass, in bytes."""
        return int(sum(each.nbytes * each.calls for each in self.work if each.kind == TRANSFER))

    def __len__(self) -> int:
        return len(self.events)


def _is_forward_scratch(event: Event) -> bool:
    return event.part == "workspaces" and event.phase == "forward" and "convol" in event.operator


def _is_first_scratch(event: Event) -> bool:
    return event.step == 0 and _is_forward_scratch(event)


_MIXED: dict[str, Callable[[Event], str]] = {
    "first": lambda event: "first" if _is_first_scratch(event) else "point",
    "backward": lambda event: "low" if _is_forward_scratch(event) else "point",
}


def moments_of(scratch: Scratch, place: int | None) -> tuple[Moment, ...]:
    """A kernel's moments at one place among its results, as `ScratchSpan` counts them."""
    if place is None:
        return scratch.after
    return scratch.before if place < 0 else scratch.between.get(place, ())


def scratch_events(moments: Sequence[Moment], first_block: int, like: Event) -> list[Event]:
    """The events of a kernel's scratch, moment by moment.

    Blocks with which a moment and the next one begin alike are the same blocks and stay; all but the moment's last.

    Args:
        moments: what is alive together, in order.
        first_block: number of the first block; the next ones count down from it.
        like: an event at their place; phase, step, module, operator and stream are taken from it.
    """
    events: list[Event] = []
    block, like = first_block, like._replace(part="workspaces")
    alive: list[tuple[Block, list[Event]]] = []
    for moment in (*moments, ()):
        together = cast("tuple[Block, ...]", (moment,) if isinstance(moment, int | Range | Plans) else moment)
        stay = 0
        while stay < min(len(alive) - 1, len(together)) and alive[stay][0] == together[stay]:
            stay += 1
        for _, taken in reversed(alive[stay:]):
            events += [event._replace(action="free") for event in reversed(taken)]
        del alive[stay:]
        for wanted in together[stay:]:
            otherwise = wanted.otherwise if isinstance(wanted, Plans) else ()
            sizes = [size for size in _by_case(wanted, in_first_pass=_is_first_scratch(like)) if size[1]]
            taken = [
                like._replace(action="alloc", block=block - place, nbytes=nbytes, case=case, otherwise=otherwise)
                for place, (case, nbytes) in enumerate(sizes)
            ]
            block -= len(taken)
            events += taken
            alive.append((wanted, taken))
    return events


def _by_case(block: Block, *, in_first_pass: bool) -> Iterable[tuple[str, int]]:
    """Sizes by case (`CASES`); one that is known has no case."""
    size = block.size if isinstance(block, Plans) else block
    if in_first_pass and isinstance(block, Plans) and block.first:
        return zip(CASES, (*block.size, block.first), strict=True)
    if isinstance(size, Range) and not size.is_exact:
        return zip(CASES[:3], size, strict=True)
    return (("", likely_bytes(size)),)


# -- the signature of a step: equal at every batch size, and another if the model, precision, optimizer or data is

SIGNED_SIZE = 8  # the batch size at which events are compared; what is asked for may be any
_LEAST_BYTES = 4096  # smaller blocks are counters and logged values, which a Trainer has and a plan has not
_PHASES = ("forward", "backward", "optimizer")


def signature_of(trace: Trace) -> str:
    """Return a hash of a step's events at the batch size `SIGNED_SIZE`, without scratch, whose size the GPU decides."""
    content = hashlib.sha256()
    for event in trace.events:
        if event.nbytes >= _LEAST_BYTES and event.phase in _PHASES and not event.case and event.part != "workspaces":
            content.update(f"{event.action} {event.phase} {event.nbytes}\n".encode())
    return content.hexdigest()[:16]
