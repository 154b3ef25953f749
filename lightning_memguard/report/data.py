"""Records -> plain data for programs, with the unit of every quantity in its name: what JSON files and answers hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.replay.footprint import Footprint

if TYPE_CHECKING:
    from lightning_memguard.core.layers.layers import Layer


def footprint_data(footprint: Footprint) -> dict[str, Any]:
    """The memory of a step at one batch size."""
    return {
        **picked(footprint, "batch_size", "device"),
        **picked(footprint, "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "most_device_bytes"),
        "low": dict(vars(footprint.low)) if footprint.low else None,
        "high": dict(vars(footprint.high)) if footprint.high else None,
        "parts_bytes": dict(footprint.parts),
        **picked(footprint, "phase", "module", "operator", "method", "correction_bytes", "learned_from"),
        "step_seconds": footprint.step_seconds and footprint.step_seconds._asdict(),
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
