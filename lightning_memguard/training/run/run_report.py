"""A run -> its report, and the folder for its files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_memguard.core.capture.capture import isolated, trusted_child
from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.replay.timeline import Timeline, timeline_of
from lightning_memguard.report.page import PAGE_NAME
from lightning_memguard.report.page_data import CurvePoint, Report, curve_of
from lightning_memguard.training.facts.ranks import attempt
from lightning_memguard.training.facts.run_facts import RunFacts
from lightning_memguard.training.run.profile import RunProfile

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.loggers import Logger

    from lightning_memguard.core.layers.layers import LayerTable

FOLDER = "memguard"  # below default_root_dir, if no logger has a folder of its own


def report_of(title: str, profile: RunProfile, decision: Decision) -> Report:
    """The report of a run before its first step. A child makes it: traces are large, and none stays in this process."""

    def make(_: int) -> Report:
        size, settings = decision.batch_size, profile.prediction.settings
        timeline = attempt(lambda: timeline_of(profile.trace_at(size), settings)).value or Timeline(0)
        curve = attempt(lambda: _curve(profile.unpacked(), decision)).value or ()
        return Report(title, decision, timeline, curve, layers=attempt(lambda: _layers(profile, size)).value)

    with trusted_child(make) as child:
        return child.ask(0)


def folder_of(trainer: Trainer, facts: RunFacts, folders: MutableMapping[Trainer, Path]) -> Path | None:
    """Return the folder for a run's files: next to its first logger's, as for checkpoints; else a ``version_N``.

    All runs of a Trainer share one, noted in ``folders``; only a fit that does not resume gets the next if there was
    a fit. None if the run leaves no files, or the folder is not local.
    """
    if not facts.leaves_files:
        return None
    found = (attempt(functools.partial(_folder_of_logger, logger)).value for logger in facts.loggers)
    folder = next(filter(None, found), None)
    if "://" in (folder or facts.default_root_dir):
        return None
    if folder:
        return Path(folder)
    own = folders.get(trainer)
    if own is None or (facts.stage == "fit" and not trainer.ckpt_path and (own / PAGE_NAME).exists()):
        own = folders[trainer] = _next_version(Path(facts.default_root_dir) / FOLDER)
    return own


def _next_version(parent: Path) -> Path:
    """Make the next ``version_N``, as Lightning's loggers number theirs; of several processes, each gets its own."""
    numbers = [each.name.removeprefix("version_") for each in parent.glob("version_*")]
    number = max((int(each) for each in numbers if each.isdecimal()), default=-1)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):
            (folder := parent / f"version_{number}").mkdir(parents=True)
            return folder


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
    program = profile.run.program
    known = profile.prediction.method in ("fake", "worst-case", "sampled") and not profile.prediction.stopped
    return isolated(lambda: program.layer_table(batch_size)) if known else None
