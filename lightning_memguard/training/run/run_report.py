"""A run -> what it leaves to look at: the page in its log directory, tables and pictures in its loggers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.layers.layers import LayerTable
from lightning_memguard.report.loggers import Boards
from lightning_memguard.report.page import write_report
from lightning_memguard.report.page_data import Report, curve_of
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.adapter.ranks import tried
from lightning_memguard.training.run.tune import Look, Tuning

FOLDER = "memguard"  # below default_root_dir, where no logger has a folder of its own


@dataclass(frozen=True)
class Page:
    """A run's page: where it is written, and what of it stays while the run goes on."""

    folder: Path
    report: Report

    def write(self, decision: Decision, records: Sequence[EpochRecord]) -> Path:
        """Write it anew.

        Raises:
            MemGuardError: its folder cannot be written to.
        """
        path, _ = write_report(self.folder, replace(self.report, decision=decision, records=tuple(records)))
        return path


def page_of(trainer: Any, module: Any, tuning: Tuning) -> Page | None:
    """The page of a run; None where it leaves no files, see `folder_of`."""
    folder = folder_of(trainer)
    return Page(folder, _report(type(module).__name__, tuning)) if folder else None


def folder_of(trainer: Any) -> Path | None:
    """Where a run's files go: beside its first logger's, as checkpoints do; without a logger, a folder of their own.

    None for a trial run (``fast_dev_run``, ``barebones``), on ranks other than zero, and where the folder is not local.
    """
    if not _is_shown(trainer):
        return None
    for logger in trainer.loggers:
        folder = tried(functools.partial(_folder_of_logger, logger)).value
        if folder:
            return _local(folder)
    return _local(f"{trainer.default_root_dir}/{FOLDER}")


def boards_of(trainer: Any) -> Boards | None:
    """What the loggers of a run show beside scalars; None for a trial run and on ranks other than zero."""
    return Boards(trainer.loggers, folder_of(trainer)) if _is_shown(trainer) else None


def _is_shown(trainer: Any) -> bool:
    return trainer.is_global_zero and not (trainer.fast_dev_run or trainer.barebones)


def _folder_of_logger(logger: Any) -> str:
    """`log_dir` where it has one; else as Lightning's ModelCheckpoint makes it of directory, name and version."""
    folder = getattr(logger, "log_dir", None)
    if folder or not logger.save_dir:
        return str(folder or "")
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return f"{logger.save_dir}/{logger.name}/{version}"


def _local(folder: str) -> Path | None:
    return None if "://" in folder else Path(folder)


def _report(title: str, tuning: Tuning) -> Report:
    look, decision = tuning.look, tuning.decision
    if look is None or decision.footprint is None:
        return Report(title, decision)
    size = decision.batch_size
    trace = tried(lambda: look.trace_at(size)).value
    return Report(
        title,
        decision,
        trace,
        look.prediction.settings if trace else None,
        tried(lambda: _curve(look, decision)).value or (),
        layers=tried(lambda: _layers(look, size)).value,
    )


def _curve(look: Look, decision: Decision) -> Any:
    """Peaks at other sizes, where they are arithmetic: a capture for each would keep the training waiting."""
    known = look.prediction.scalable and look.prediction.growth is not None
    return curve_of(look.footprint_at, decision) if known else ()


def _layers(look: Look, batch_size: int) -> LayerTable | None:
    program = look.prediction.program
    fake = look.prediction.method in ("fake", "worst-case")
    return program.layer_table(batch_size) if fake and isinstance(program, LightningProgram) else None
