"""Memory that batches of a captured run leave behind, by the attribute that holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torchmetrics import Metric

from lightning_memguard.core.capture.holders import Holder, Use, holdings, roots_of, use_of
from lightning_memguard.core.trace.kept import Kept

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule


def find_kept(
    left: Mapping[int, tuple[int, str]],
    module: LightningModule,
    others: Iterable[object],
    when: Literal["step", "validation"],
) -> tuple[Kept, ...]:
    """Name what holds the memory that one batch left behind, the most first.

    Args:
        left: bytes and line of code by the address of the storage, see `Recorder.left_by`.
        module: the module's copy that ran the batch.
        others: the user's objects whose code may empty what the module holds: callbacks.
        when: which batches leave it.
    """
    holders: dict[str, Holder] = {}
    lines: dict[str, Counter[str]] = {}
    graphs, missing = set(), dict(left)
    for holder, thing, _, in_graph in holdings(roots_of(module)):
        address = thing.untyped_storage()._cdata if isinstance(thing, torch.Tensor) else 0
        if address in missing:
            nbytes, line = missing.pop(address)
            holders[holder.name] = holder
            lines.setdefault(holder.name, Counter())[line] += nbytes
            graphs |= {holder.name} if in_graph else set()
    for nbytes, line in missing.values():
        lines.setdefault("", Counter())[line] += nbytes
    found = []
    for name, made in lines.items():
        use = _use_of(holders[name], module, others) if name else Use(is_conditional=True)
        made_at, _, number = made.most_common(1)[0][0].rpartition(":")[0].rpartition(":")
        line, lasts = use.line or f"{Path(made_at).name}:{number}", not (use.is_conditional or use.is_cleared)
        found.append(Kept(name, line, name in graphs, when, lasts, sum(made.values())))
    return tuple(sorted((each for each in found if each.fixed_bytes), key=lambda kept: -kept.fixed_bytes))


def _use_of(holder: Holder, module: LightningModule, others: Iterable[object]) -> Use:
    """Of a metric's list, how the module uses the metric: Lightning resets those that are passed to ``self.log``."""
    if not isinstance(holder.owner, Metric):
        use = use_of(holder, (module, *others))
        is_bounded = getattr(getattr(holder.owner, holder.attribute, None), "maxlen", None) is not None
        return replace(use, is_cleared=use.is_cleared or is_bounded)
    names = holder.name.split(".")[1:-1]
    used = [use_of(Holder(holder.name, name, module), others) for name in names]
    return replace(used[0], is_cleared=any(use.is_cleared for use in used)) if used else Use()


def kept_where(kept: Iterable[Kept]) -> str:
    """Say in brackets where memory is left, as a part of a sentence; empty if unknown."""
    return "".join(f" (`{each.holder}`, {each.line})" if each.holder else f" ({each.line})" for each in [*kept][:1])
