"""Memory that grows while a run goes on, in words: what is left behind, where, and the epoch at which memory ends."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.trace.kept import Kept, RunsOut
from lightning_memguard.units import format_bytes

_MOST_NAMED = 3


def kept_words(decision: Decision) -> str:
    """Warn of a run whose steps leave memory behind until none is left; empty if it lasts to the end of the run."""
    end, budget, kept = decision.runs_out_at, decision.budget, [each for each in decision.kept if each.lasts]
    if end is None or budget is None or not kept:
        return ""
    sizes = {"step": decision.batch_size, "validation": decision.validation_batch_size or decision.batch_size}
    of_step = [each for each in kept if each.when == kept[0].when][:_MOST_NAMED]
    nbytes = sum(each.bytes_at(sizes[each.when]) for each in of_step)
    batch = "training batch" if kept[0].when == "step" else "validation batch"
    return (
        f"Each {batch} leaves {format_bytes(nbytes)} behind, in {places(of_step)}: the memory of {budget.device} "
        f"({format_bytes(budget.free_bytes)}) ends at batch {end.step} of epoch {end.epoch}. {_remedy(of_step)}"
    )


def places(kept: Sequence[Kept]) -> str:
    """Name the attributes that hold memory, and the lines that put it there: ``"`self.outputs` (model.py:41)"``."""
    return ", ".join(f"`{each.holder}` ({each.line})" if each.holder else f"tensors of {each.line}" for each in kept)


def _remedy(kept: Sequence[Kept]) -> str:
    if kept[0].holder.startswith("the cache of"):
        return "Give that cache a `maxsize`."
    keep = "`.detach()` what is kept, which holds its graph," if kept[0].has_graph else "Keep less there (`.item()`),"
    return f"{keep} or clear it at the end of each epoch."


def grown_words(kept: Kept, end: RunsOut, device: str) -> str:
    """Warn of memory that was seen to grow from epoch to epoch, until the device has none left in an epoch."""
    cause = f"{places([kept])}. {_remedy([kept])}" if kept.holder else "Python objects of the process."
    return (
        f"Each epoch leaves {format_bytes(kept.fixed_bytes)} more behind, and the memory of {device} ends in epoch "
        f"{end.epoch}. It is held by {cause}"
    )
