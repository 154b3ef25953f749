"""A run -> its report: the page in its log directory, tables and pictures in its loggers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightning_memguard.core.capture.capture import isolated
from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.core.isolation.pool import ChildPool
from lightning_memguard.core.layers.layers import LayerTable
from lightning_memguard.core.simulation.fake import run_on_one_thread
from lightning_memguard.report.loggers import Boards
from lightning_memguard.report.page import write_report
from lightning_memguard.report.page_data import CurvePoint, Report, curve_of
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.facts.run_facts import RunFacts, Stage
from lightning_memguard.training.run.profile import RunProfile

if TYPE_CHECKING:
    from pytorch_lightning.loggers import Logger

FOLDER = "memguard"  # below default_root_dir, if no logger has a folder of its own


@dataclass(frozen=True)
class Page:
    """A run's page: where it is written, and what of it stays the same during the run."""

    folder: Path
    report: Report
    stage: Stage

    def write(self, decision: Decision, records: Sequence[EpochRecord]) -> Path:
        """Write it again.

        Raises:
            MemGuardError: its folder cannot be written to.
        """
        report = replace(self.report, decision=decision, records=tuple(records))
        return write_report(self.folder, report, self.stage)[0]


def page_of(title: str, profile: RunProfile, decision: Decision) -> Page | None:
    """The page of a run; None if it leaves no files, see `folder_of`.

    A child makes its report: traces are large, and none stays in the run's own process.
    """
    folder = folder_of(profile.facts)
    if folder is None:
        return None
    make = functools.partial(_report, title, profile, decision)
    with ChildPool[int, Report](lambda _: make(), most=1, begin=run_on_one_thread, trusted=True) as pool:
        report = pool.result(0).value or make()
    return Page(folder, report, profile.facts.stage)


def _report(title: str, profile: RunProfile, decision: Decision) -> Report:
    size = decision.batch_size
    trace = attempt(lambda: profile.trace_at(size)).value
    settings = profile.prediction.settings if trace else None
    curve = attempt(lambda: _curve(profile.unpacked(), decision)).value or ()
    layers = attempt(lambda: _layers(profile, size)).value
    return Report(title, decision, trace, settings, curve, layers=layers).without_trace()


def folder_of(facts: RunFacts) -> Path | None:
    """Return the folder for a run's files: next to its first logger's, as for checkpoints; else one of their own.

    None if the run leaves no files, or the folder is not local.
    """
    if not facts.leaves_files:
        return None
    found = (attempt(functools.partial(_folder_of_logger, logger)).value for logger in facts.loggers)
    folder = next(filter(None, found), f"{facts.default_root_dir}/{FOLDER}")
    return None if "://" in folder else Path(folder)


def boards_of(facts: RunFacts) -> Boards | None:
    """Return the boards on which a run's loggers show more than scalars; None if it leaves no files."""
    return Boards(facts.loggers, folder_of(facts), facts.stage) if facts.leaves_files else None


def _folder_of_logger(logger: Logger) -> str:
    """`log_dir` if it has one; else, as in Lightning's ModelCheckpoint, made of directory, name and version."""
    folder = getattr(logger, "log_dir", None)
    if folder or not logger.save_dir:
        return str(folder or "")
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return f"{logger.save_dir}/{logger.name}/{version}"


def _curve(profile: RunProfile, decision: Decision) -> Sequence[CurvePoint]:
    """Peaks at other sizes, if they are arithmetic: a capture for each would keep the training waiting."""
    known = profile.prediction.scalable and profile.prediction.growth is not None
    return curve_of(profile.footprint_at, decision) if known else ()


def _layers(profile: RunProfile, batch_size: int) -> LayerTable | None:
    program = cast("LightningProgram", profile.prediction.program)
    known = profile.prediction.method in ("fake", "worst-case", "sampled")
    return isolated(lambda: program.layer_table(batch_size)) if known else None
