"""Memory that batches of a captured run leave behind, by the attribute that holds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
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
    batches: int,
    module: LightningModule,
    others: Iterable[object],
    when: Literal["step", "validation"],
) -> tuple[Kept, ...]:
    """Name what holds the memory that some batches left behind (`Recorder.left_by`), the most first.

    ``others`` are objects whose code may empty what the module holds: the user's callbacks.
    """
    lines: dict[Holder, Counter[str]] = {}
    graphs, missing = set(), dict(left)
    for holder, thing, _, in_graph in holdings(roots_of(module)):
        address = thing.untyped_storage()._cdata if isinstance(thing, torch.Tensor) else 0
        if address in missing:
            nbytes, line = missing.pop(address)
            lines.setdefault(holder, Counter())[line] += nbytes
            graphs |= {holder} if in_graph else set()
    for nbytes, line in missing.values():
        lines.setdefault(Holder(""), Counter())[line] += nbytes
    found = []
    for holder, made in lines.items():
        use = _use_of(holder, module, others)
        file, _, number = made.most_common(1)[0][0].rpartition(":")[0].rpartition(":")
        line, lasts = use.line or f"{Path(file).name}:{number}", not (use.is_conditional or use.is_cleared)
        found.append(Kept(holder.name, line, holder in graphs, when, lasts, sum(made.values()) // batches))
    return tuple(sorted(found, key=lambda kept: -kept.fixed_bytes))


def _use_of(holder: Holder, module: LightningModule, others: Iterable[object]) -> Use:
    """Of a metric's list, how the module uses the metric: Lightning resets those that are passed to ``self.log``."""
    if isinstance(holder.owner, Metric):
        used = [use_of(Holder("", name, module), others) for name in holder.name.split(".")[1:-1]]
        return used[0]._replace(is_cleared=any(use.is_cleared for use in used)) if used else Use()
    use, value = use_of(holder, (module, *others)), getattr(holder.owner, holder.attribute, None)
    is_bounded = getattr(value, "maxlen", None) is not None or not holder.name
    return use._replace(is_cleared=use.is_cleared or is_bounded)
