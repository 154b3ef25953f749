"""A run -> the Report that its page shows, and all of its data for programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_memguard.core.decision.decision import Budget, Decision, HostUse, prediction_of
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.timeline import Timeline
from lightning_memguard.report.words import COLORS

if TYPE_CHECKING:
    from lightning_memguard.core.layers.layers import Layer, LayerTable

_POINTS = 8  # of the curve, or some more


@dataclass(frozen=True)
class CurvePoint:
    """The peak at one batch size.

    Attributes:
        batch_size: number of samples in the batch.
        peak_device_bytes: see `Footprint`.
        most_device_bytes: the upper bound of the peak, which is compared with the budget.
    """

    batch_size: int
    peak_device_bytes: int
    most_device_bytes: int


@dataclass(frozen=True)
class Report:
    """All that the page shows; it leaves out what is empty or None.

    Attributes:
        title: what the page is about, such as the name of the model.
        decision: the batch size, and why.
        timeline: live bytes while the step runs; without columns if its events are not known.
        curve: peaks at several batch sizes, see `curve_of`.
        records: predicted versus measured, by epoch.
        layers: the table by layer.
    """

    title: str
    decision: Decision
    timeline: Timeline = field(default_factory=lambda: Timeline(0))
    curve: Sequence[CurvePoint] = ()
    records: Sequence[EpochRecord] = ()
    layers: LayerTable | None = None


def curve_of(footprint_at: Callable[[int], Footprint], decision: Decision) -> tuple[CurvePoint, ...]:
    """Peaks at several batch sizes: from small ones to a third beyond the chosen one, and the requested size."""
    last = max(math.ceil(decision.batch_size * 4 / 3), decision.requested_batch_size, 2)
    sizes = {max(1, round(last * place / _POINTS)) for place in range(1, _POINTS + 1)}
    sizes |= {1, decision.batch_size, decision.requested_batch_size} - {0}
    footprints = map(footprint_at, sorted(sizes))
    return tuple(CurvePoint(each.batch_size, each.peak_device_bytes, each.most_device_bytes) for each in footprints)


def shown_parts(timeline: Timeline) -> list[str]:
    """The parts of a timeline from the bottom of its picture to the top."""
    return [*(part for part in COLORS if part in timeline.parts), *(set(timeline.parts) - set(COLORS))]


def report_data(report: Report) -> dict[str, Any]:
    """Return the page's content as plain data with the unit of every quantity in its name."""
    decision, (footprint, budget) = report.decision, prediction_of(report.decision)
    sizes = "batch_size", "loader_batch_sizes", "requested_batch_size", "accumulate_grad_batches"
    more = "validation_batch_size", "steps_per_epoch", "requested_steps_per_epoch"
    return {
        "title": report.title,
        "decision": picked(decision, *sizes, *more, "outcome", "limited_by", "reason", "fits", "verdict"),
        "footprint": footprint_data(footprint),
        "retries": vars(decision.retries) if decision.retries else None,
        "budget": budget_data(budget),
        "host": _host_data(decision.host) if decision.host else None,
        "timeline": _timeline_data(report.timeline) if report.timeline.parts else None,
        "curve": [vars(point) for point in report.curve],
        "epochs": [_record_data(record) for record in report.records],
        "layers": [layer_data(layer) for layer in report.layers or ()],
        "layers_batch_size": report.layers.batch_size if report.layers else None,
    }


def _host_data(host: HostUse) -> dict[str, Any]:
    return {
        "parts_bytes": dict(host.parts),
        "most_bytes": host.most_bytes,
        "budget": budget_data(host.budget) if host.budget else None,
        "shared_memory_bytes": host.shared_bytes,
        "shared_memory": budget_data(host.shared_budget) if host.shared_budget else None,
    }


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    return {
        "event_count": timeline.event_count,
        "event_positions": timeline.positions,
        "parts_bytes": {part: timeline.parts[part] for part in shown_parts(timeline)},
        "reserved_bytes": timeline.reserved or None,
        "modules": [event.module for event in timeline.events],
        "operators": [event.operator for event in timeline.events],
        "phases": [vars(span) for span in timeline.spans],
    }


def _record_data(record: EpochRecord) -> dict[str, Any]:
    measured = record.measured
    return {
        **picked(record, "epoch", "batch_size", "loader_batch_sizes"),
        "offloaded_steps": record.offloaded,
        "predicted_peak_device_bytes": record.predicted.peak_device_bytes,
        "predicted_peak_reserved_bytes": record.predicted.peak_reserved_bytes,
        "predicted_parts_bytes": dict(record.predicted.parts),
        "expected_peak_bytes": record.expected_bytes,
        "measured_peak_bytes": measured.peak_bytes,
        "measured_source": measured.source,
        "measured_process_bytes": measured.process_bytes,
        "predicted_host_bytes": record.predicted_host_bytes or None,
        "measured_host_bytes": measured.host_bytes,
        "measured_parts_bytes": dict(measured.parts),
        "measured_peak_allocated_bytes": measured.peak_allocated_bytes,
        **picked(measured, "alloc_retries", "ooms"),
        "measured_peak_reserved_bytes": measured.peak_reserved_bytes,
        "error_ratio": record.error_ratio if record.has_error else None,
        "headroom_bytes": record.headroom_bytes,
    }


# -- records as plain data, with the unit of every quantity in its name: what JSON files and answers hold


def footprint_data(footprint: Footprint) -> dict[str, Any]:
    """The memory of a step at one batch size."""
    return {
        **picked(footprint, "batch_size", "device"),
        **picked(footprint, "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "most_device_bytes"),
        "low": dict(vars(footprint.low)) if footprint.low else None,
        "high": dict(vars(footprint.high)) if footprint.high else None,
        "parts_bytes": dict(footprint.parts),
        **picked(footprint, "phase", "module", "operator", "method", "correction_bytes", "learned_from"),
        "step_seconds": footprint.step_seconds and footprint.step_seconds.as_dict(),
        "notes": list(footprint.notes),
    }


def budget_data(budget: Budget) -> dict[str, Any]:
    """Return the fields of a budget, with the bytes usable after the margin."""
    return {**vars(budget), "usable_bytes": budget.usable_bytes}


def layer_data(layer: Layer) -> dict[str, Any]:
    """A row of the table by layer."""
    return {
        **picked(layer, "name", "type", "output_shape", "calls", "parameters", "trainable_parameters"),
        **picked(layer, "parameter_bytes", "activation_bytes", "flops", "multiply_adds", "shared_with"),
    }


def picked(record: object, *names: str) -> dict[str, Any]:
    """Return the named fields of a record, in this order."""
    return {name: getattr(record, name) for name in names}
