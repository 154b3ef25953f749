"""The signature of a step: equal at every batch size, and another if the model, precision, optimizer or data is."""

from __future__ import annotations

import hashlib

from lightning_memguard.core.trace.trace import Trace

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
