"""Memory of the host that a run takes next to its steps: worker processes, /dev/shm, pinned batches, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_memguard.core.decision.decision import Budget, HostUse
from lightning_memguard.core.range import NOTHING, Range
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.training.data.workers import Workers
from lightning_memguard.units import format_bytes


@dataclass(frozen=True)
class HostSide:
    """Memory of a run on the host. On the CPU, where the host is the device, workers count as the run's own.

    Attributes:
        workers: processes that prepare its batches; None if there are none.
        kept_bytes: memory of this process that forked workers keep while training changes it.
        budget: what the host offers; None on the CPU, where it is the device.
        shared: what /dev/shm offers; None without one.
        ranks: ranks that share this host.
    """

    workers: Workers | None = None
    kept_bytes: int = 0
    budget: Budget | None = None
    shared: Budget | None = None
    ranks: int = 1

    def with_workers(self, footprint: Footprint, validation_size: int) -> Footprint:
        """Return the footprint with what workers take, if the host is the device."""
        if self.workers is None or self.budget:
            return footprint
        ahead = self.workers.ahead_bytes(footprint.batch_size, validation_size)
        own = self._workers_bytes(footprint.batch_size, validation_size)
        return footprint.plus(ahead, "prefetched").plus_range(own, "workers")

    def _workers_bytes(self, batch_size: int, validation_size: int) -> Range[int]:
        if self.workers is None:
            return NOTHING
        return self.workers.own_bytes(batch_size, validation_size) + Range.exactly(self.kept_bytes)

    def use_at(
        self, batch_size: int, validation_size: int, held: Mapping[str, int], less: Mapping[str, int]
    ) -> HostUse | None:
        """Memory of the host that a batch size takes; None if that is nothing, or all of it is the device's.

        Args:
            batch_size: of the training.
            validation_size: of the validation; 0 without one.
            held: bytes by part that are not the workers'.
            less: bytes that other ways of saving need less, by how.
        """
        workers, sizes = self.workers, (batch_size, validation_size)
        shared = workers.shared_bytes(*sizes) if workers else 0
        if self.budget is None and not shared:
            return None
        _, likely, most = self._workers_bytes(*sizes)
        pinned = workers.pinned_bytes(*sizes) if workers else 0
        parts = {"prefetched": shared, "pinned": pinned, "workers": likely, **held}
        present = {part: nbytes for part, nbytes in parts.items() if nbytes}
        if not present:
            return None
        saved = held.get("checkpoint", 0)
        others = saved - saved // self.ranks  # of ranks that save nothing, which have a share each
        whole = sum(present.values()) + most - likely - others
        remedies = workers.remedies(*sizes) if workers else ()
        of_saving = tuple(f"{how} needs {format_bytes(nbytes)} less" for how, nbytes in less.items() if nbytes)
        late = workers.late_bytes(*sizes) if workers else 0
        parts = present if self.budget else {}
        return HostUse(parts, whole, self.budget, shared, self.shared, remedies, of_saving, late)
