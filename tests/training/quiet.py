"""A Trainer that prints, logs and saves nothing, for one epoch on the CPU."""

from __future__ import annotations

import importlib
from typing import Any


def quiet_trainer(*callbacks: Any, package: str = "pytorch_lightning", **settings: Any) -> Any:
    """Make one of either Lightning; ``settings`` are arguments of `Trainer` that differ."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return importlib.import_module(package).Trainer(**{**quiet, **settings}, callbacks=list(callbacks))
