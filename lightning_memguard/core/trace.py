"""What one training step allocates and frees, in order: the noun that all later stages start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


class Event(NamedTuple):
    """One block of memory taken or given back.

    A tuple, since a replay at another batch size makes tens of thousands of them.

    ``nbytes`` is what was asked for, before any rounding, and stands on the free as on the alloc.
    ``block`` joins the two. ``module`` is the dotted path of the module that was running
    (empty outside any), ``operator`` the torch operator, such as ``aten.convolution.default``.
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


@dataclass(frozen=True)
class Trace:
    """The events of a few consecutive training steps at one batch size.

    ``device`` is a torch device type such as ``"cpu"`` or ``"cuda"``. ``notes`` says in plain words what
    the trace had to assume.
    """

    batch_size: int
    device: str
    method: Method
    events: tuple[Event, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)
