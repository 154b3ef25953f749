"""Records -> plain data for programs, with the unit of every quantity in its name: what JSON files and answers hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.replay.footprint import Footprint, Peak

if TYPE_CHECKING:
    from lightning_memguard.core.layers.layers import Layer


def footprint_data(footprint: Footprint) -> dict[str, Any]:
    """The memory of a step at one batch size."""
    return {
        "batch_size": footprint.batch_size,
        "device": footprint.device,
        "peak_allocated_bytes": footprint.peak_allocated_bytes,
        "peak_reserved_bytes": footprint.peak_reserved_bytes,
        "peak_device_bytes": footprint.peak_device_bytes,
        "most_device_bytes": footprint.most_device_bytes,
        "low": _peak_data(footprint.low),
        "high": _peak_data(footprint.high),
        "parts_bytes": dict(footprint.parts),
        "phase": footprint.phase,
        "module": footprint.module,
        "operator": footprint.operator,
        "method": footprint.method,
        "notes": list(footprint.notes),
    }


def _peak_data(peak: Peak | None) -> dict[str, int] | None:
    return None if peak is None else dict(vars(peak))


def budget_data(budget: Budget) -> dict[str, Any]:
    """What a device offers."""
    return {**vars(budget), "usable_bytes": budget.usable_bytes}


def layer_data(layer: Layer) -> dict[str, Any]:
    """A row of the table by layer."""
    return {
        "name": layer.name,
        "type": layer.type,
        "output_shape": layer.output_shape,
        "calls": layer.calls,
        "parameters": layer.parameters,
        "trainable_parameters": layer.trainable_parameters,
        "parameter_bytes": layer.parameter_bytes,
        "activation_bytes": layer.activation_bytes,
        "flops": layer.flops,
        "multiply_adds": layer.multiply_adds,
        "shared_with": layer.shared_with,
    }
