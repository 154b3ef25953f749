"""Memory that a run leaves behind until none is left, in words."""

from __future__ import annotations

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.trace.kept import places
from lightning_memguard.units import format_bytes


def kept_words(decision: Decision) -> str:
    """Warn of memory that is left behind until none is left; empty if the run ends before that."""
    end, budget, kept = decision.runs_out_at, decision.budget, [each for each in decision.kept if each.lasts]
    if end is None or budget is None or not kept:
        return ""
    when = kept[0].when
    named = [each for each in kept if each.when == when][:_MOST_NAMED]
    size = (when == "validation" and decision.validation_batch_size) or decision.batch_size
    nbytes = format_bytes(sum(each.bytes_at(size) for each in named))
    who = {"step": "training batch", "validation": "validation batch", "epoch": "epoch"}[when]
    moment = f"in epoch {end.epoch}" if when == "epoch" else f"at batch {end.step} of epoch {end.epoch}"
    begun = f"Each {who} leaves {nbytes} behind"
    ended = f"; the memory of {'the host' if kept[0].on_host else budget.device} ends {moment}."
    if not places(named[:1]):
        return f"{begun}, in Python objects of the process{ended}"
    keep = "`.detach()` what is kept, which holds its graph" if named[0].has_graph else "Keep less there (`.item()`)"
    keep = "Give that cache a `maxsize`" if named[0].holder.startswith("the cache of") else keep
    return f"{begun}{places(named)}{ended} {keep}, or clear it at the end of each epoch."


_MOST_NAMED = 3
