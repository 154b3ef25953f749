"""Predicts the memory of a PyTorch Lightning training step, and picks the batch size that fits.

The public names are loaded on first use, so that importing this package imports neither torch nor Lightning.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_memguard._version import __version__ as __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_memguard.core.decision.decision import Budget, Decision
    from lightning_memguard.core.decision.record import EpochRecord
    from lightning_memguard.core.replay.footprint import Footprint
    from lightning_memguard.errors import CannotResizeLoaderError, CannotTraceError, DoesNotFitError, MemGuardError
    from lightning_memguard.training.data.length_sampler import LengthBatchSampler
    from lightning_memguard.training.offload.engine import offload_activations
    from lightning_memguard.training.planning.estimate import estimate
    from lightning_memguard.training.planning.lengths import batch_sizes
    from lightning_memguard.training.planning.ways import ways_to_train
    from lightning_memguard.training.run.callback import MemGuard

__all__ = [
    "Budget",
    "CannotResizeLoaderError",
    "CannotTraceError",
    "Decision",
    "DoesNotFitError",
    "EpochRecord",
    "Footprint",
    "LengthBatchSampler",
    "MemGuard",
    "MemGuardError",
    "batch_sizes",
    "estimate",
    "offload_activations",
    "ways_to_train",
]

# Type checkers read the imports above; at run time this says the same.
_HOMES = {
    "Budget": "lightning_memguard.core.decision.decision",
    "CannotResizeLoaderError": "lightning_memguard.errors",
    "CannotTraceError": "lightning_memguard.errors",
    "Decision": "lightning_memguard.core.decision.decision",
    "DoesNotFitError": "lightning_memguard.errors",
    "EpochRecord": "lightning_memguard.core.decision.record",
    "Footprint": "lightning_memguard.core.replay.footprint",
    "LengthBatchSampler": "lightning_memguard.training.data.length_sampler",
    "MemGuard": "lightning_memguard.training.run.callback",
    "MemGuardError": "lightning_memguard.errors",
    "batch_sizes": "lightning_memguard.training.planning.lengths",
    "estimate": "lightning_memguard.training.planning.estimate",
    "offload_activations": "lightning_memguard.training.offload.engine",
    "ways_to_train": "lightning_memguard.training.planning.ways",
}

_FUNCTIONS = ("batch_sizes", "estimate", "offload_activations", "ways_to_train")

if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes every misspelt name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(_HOMES[name]), name)
        except (AttributeError, ImportError) as error:
            value = _unavailable(error)
            if name not in _FUNCTIONS or value is None:
                raise
        globals()[name] = value  # from now on the name is found without asking here
        return value


def _unavailable(error: Exception) -> Callable[..., object] | None:
    """Stand in for a function that needs a name this torch lacks: it can be imported; a call says what is missing."""
    from lightning_memguard.core.foreign import missing_in
    from lightning_memguard.errors import CannotTraceError

    reason = missing_in(error)

    def refuse(*_: object, **__: object) -> object:
        raise CannotTraceError(f"{reason}: nothing can be estimated.")

    return refuse if reason else None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
