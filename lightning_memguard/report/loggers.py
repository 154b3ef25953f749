"""Decision and records -> what each logger can show next to scalars: the table, pictures, a layout of charts.

This file changes when a logging library does. None of them is imported: a logger is recognized by the methods of its
class, since Lightning's dummy loggers (of ``fast_dev_run``, and of ranks other than zero) answer to any method.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import EpochRecord
from lightning_memguard.report.decision_table import markdown, setup_rows
from lightning_memguard.report.figure import Picture, draw, picture_of_epoch, picture_of_setup
from lightning_memguard.report.words import with_stage
from lightning_memguard.units import MIB

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.tensorboard import SummaryWriter

SETUP_NAME, PICTURE_NAME = "memguard_setup.md", "memguard_peak.png"

_SETUP, _PICTURE = "memguard/setup", "memguard/peak"
_EPOCHS_ALWAYS_DRAWN = 16
_CHANGE_TO_DRAW = 0.01
_MOST_TO_READ = 8 * MIB  # a layout is at the start; a run that is resumed may have left gigabytes of events


@dataclass(frozen=True)
class _Board(ABC):
    """A logger or a folder, where a run's table and pictures go, each by its ``name``; any method may raise.

    An evaluation's are named after its ``stage``.
    """

    target: Any
    stage: str = "fit"

    def named(self, name: str) -> str:
        """The name of something that is shown of this stage."""
        return with_stage(name, self.stage)

    @abstractmethod
    def show_setup(self, decision: Decision, text: str, step: int) -> None:
        """Show the decision, whose table as Markdown is ``text``."""

    @abstractmethod
    def show_picture(self, picture: Image, name: str, step: int) -> None: ...


@dataclass
class Boards:
    """The loggers of one run, each shown what it can show. Nothing here raises: a logger that fails is dropped.

    For the process of global rank zero. Scalars do not come through here: they go to every logger by ``log_metrics``.

    Args:
        loggers: the Trainer's.
        folder: where files go if no logger takes the table and pictures; None for nowhere. The names are
            ``memguard_setup.md`` and ``memguard_peak.png``, the most recent one; a CSV logger gets the same next to its
            ``metrics.csv``.
        stage: what runs; any but ``"fit"`` is part of the names of files and of what loggers show.
    """

    loggers: Iterable[Any]
    folder: Path | None = None
    stage: str = "fit"
    _boards: list[tuple[str, _Board]] = field(default_factory=list, init=False, repr=False)
    _epochs: int = field(default=0, init=False, repr=False)
    _last_drawn_bytes: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        for logger in self.loggers:
            name = type(logger).__name__
            try:
                if board := _board_of(logger, self.stage):
                    self._boards.append((name, board))
            except Exception as error:  # noqa: BLE001 - a logger's failure must not fail the training
                _warn(name, error)
        if not self._boards and self.folder is not None:
            self._boards.append((str(self.folder), _Folder(self.folder, self.stage)))

    def log_setup(self, decision: Decision, step: int = 0, kind: str = "training") -> None:
        """Show the table, the layout of the charts and the predicted picture: once per run, after the decision.

        Call it before anything is measured: what drawing loads is then in memory already.

        Args:
            decision: what was predicted and chosen.
            step: the Trainer's step, more than 0 if a run is resumed.
            kind: what runs, if the decision's phase does not say so.
        """
        self._show(lambda board: board.show_setup(decision, markdown(decision, kind), step))
        self._draw(picture_of_setup(decision), "setup", step)

    def log_epoch(self, record: EpochRecord, step: int) -> None:
        """Show predicted versus measured as a picture, for each epoch that has something new to show.

        That is each of the first 16; after these, one whose measured peak differs by more than 1 % from that of the
        last picture, and the 32nd, 64th, ...: runs of ten thousand short epochs exist, and a picture has 50 KB.
        """
        self._epochs += 1
        last, now = self._last_drawn_bytes, record.measured.peak_bytes
        few = self._epochs <= _EPOCHS_ALWAYS_DRAWN or self._epochs.bit_count() == 1
        if few or abs(now - last) > _CHANGE_TO_DRAW * last:
            self._draw(picture_of_epoch(record), f"epoch_{record.epoch:04}", step)
            self._last_drawn_bytes = now

    def _draw(self, picture: Picture | None, name: str, step: int) -> None:
        if picture is None or not self._boards:
            return
        try:
            drawn = draw(picture)
        except Exception as error:  # noqa: BLE001 - such as a Pillow that was built without fonts
            self._boards.clear()
            _warn("picture", error)
            return
        self._show(lambda board: board.show_picture(drawn, name, step))

    def _show(self, show: Callable[[_Board], None]) -> None:
        """Call it for every board; one that fails is not called again."""
        for each in list(self._boards):
            name, board = each
            try:
                show(board)
            except Exception as error:  # noqa: BLE001 - a logger's failure must not fail the training
                _warn(name, error)
                self._boards.remove(each)


def _warn(name: str, error: Exception) -> None:
    why = f"{type(error).__name__}: {error}"
    warnings.warn(f"MemGuard's table and pictures are missing from {name}: {why}", stacklevel=2)


def _board_of(logger: Any, stage: str) -> _Board | None:
    """Return the board that shows tables and pictures on this logger; None if no board of ours is known to work."""
    if _has(logger, "log_table", "log_image"):
        return _WeightsAndBiases(logger, stage)
    experiment = logger.experiment
    if _has(experiment, "add_text", "add_image", "add_custom_scalars"):
        return _TensorBoard(logger, stage)
    if _has(logger, "run_id") and _has(experiment, "log_text", "log_image"):
        return _MLflow(logger, stage)
    if _has(experiment, "log_text", "log_image", "log_table", "log_html"):
        return _Comet(logger, stage)
    table = getattr(experiment, "metrics_file_path", None)
    if isinstance(table, str) and "://" not in table:
        return _Folder(Path(table).parent, stage)
    return None


def _has(thing: object, *methods: str) -> bool:
    return all(hasattr(type(thing), method) for method in methods)


class _TensorBoard(_Board):
    """`torch.utils.tensorboard.SummaryWriter` and tensorboardX's: a layout of charts, text, images by step."""

    def show_setup(self, decision: Decision, text: str, step: int) -> None:
        writer = self.target.experiment
        writer.add_text(self.named(_SETUP), text, step)
        if not _has_layout(writer):
            writer.add_custom_scalars(layout(decision, getattr(self.target, "_prefix", "")))

    def show_picture(self, picture: Image, name: str, step: int) -> None:  # noqa: ARG002 - one tag, by step
        import numpy as np

        image = np.asarray(picture)
        self.target.experiment.add_image(self.named(_PICTURE), image, step, dataformats="HWC")


def layout(decision: Decision, prefix: str | None = "") -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's Custom Scalars page: predicted, measured and the limit in one chart; the margin; parts stacked.

    Args:
        decision: what was predicted and chosen.
        prefix: what the logger puts before each name (Lightning 2.6 keeps it as ``_prefix``).
    """
    start = f"{prefix}-memguard/" if prefix else "memguard/"

    def chart(kind: str, *names: str) -> list[Any]:
        return [kind, [f"{start}{name}_gib" for name in names]]

    peaks = chart("Multiline", "predicted_peak", "actual_peak", "limit", "usable")
    charts = {
        "Peak: predicted, measured and limit (GiB)": peaks,
        "Measured peak and safety margin (GiB)": chart("Margin", "actual_peak", "usable", "limit"),
        "Parts at the predicted peak, stacked (GiB)": ["Multiline", [f"{start}stacked/.*"]],  # a regular expression
    }
    if decision.footprint is not None and decision.footprint.high is not None:
        title = "Measured peak within the predicted range (GiB)"
        charts[title] = chart("Margin", "actual_peak", "predicted_low", "predicted_high")
    return {"memguard": charts}


def _has_layout(writer: SummaryWriter) -> bool:
    """Whether the run has a layout: the user's, or ours of an earlier fit. TensorBoard shows only one."""
    folder = getattr(writer, "log_dir", None) or getattr(writer, "logdir", None)
    if not folder or "://" in str(folder):
        return False
    writer.flush()
    for file in Path(folder).glob("events.out.tfevents.*"):
        with file.open("rb") as stream:
            if b"custom_scalars__config__" in stream.read(_MOST_TO_READ):
                return True
    return False


class _WeightsAndBiases(_Board):
    """Lightning's `WandbLogger`: a table, with the sentences as rows since a run shows no Markdown, and images."""

    def show_setup(self, decision: Decision, text: str, step: int) -> None:  # noqa: ARG002 - no Markdown
        heading, rows = setup_rows(decision)
        data = [list(row) for row in rows]
        self.target.log_table(self.named(_SETUP), columns=list(heading), data=data, step=step)

    def show_picture(self, picture: Image, name: str, step: int) -> None:  # noqa: ARG002 - one key, by step
        self.target.log_image(self.named(_PICTURE), [picture], step)


class _MLflow(_Board):
    """Lightning's `MLFlowLogger` and its `MlflowClient`: artifacts of the run, in a folder of ours."""

    def show_setup(self, decision: Decision, text: str, step: int) -> None:  # noqa: ARG002 - a file has no step
        self.target.experiment.log_text(self.target.run_id, text, f"memguard/{self.named(SETUP_NAME)}")

    def show_picture(self, picture: Image, name: str, step: int) -> None:  # noqa: ARG002 - a file has no step
        file = self.named(f"peak_{name}.png")
        self.target.experiment.log_image(self.target.run_id, picture, f"memguard/{file}")


class _Comet(_Board):
    """Comet's `CometExperiment`: the table under Assets, the same as text, images under Graphics."""

    def show_setup(self, decision: Decision, text: str, step: int) -> None:
        heading, rows = setup_rows(decision)
        self.target.experiment.log_table(
            self.named("memguard_setup.csv"), [list(row) for row in rows], headers=list(heading)
        )
        self.target.experiment.log_text(text, step=step)

    def show_picture(self, picture: Image, name: str, step: int) -> None:  # noqa: ARG002 - one name, by step
        self.target.experiment.log_image(picture, name=self.named(_PICTURE), step=step)


class _Folder(_Board):
    """Files, for a CSV logger and for runs without a logger."""

    target: Path

    def show_setup(self, decision: Decision, text: str, step: int) -> None:  # noqa: ARG002 - a file has no step
        self.target.mkdir(parents=True, exist_ok=True)
        (self.target / self.named(SETUP_NAME)).write_text(text, encoding="utf-8")

    def show_picture(self, picture: Image, name: str, step: int) -> None:  # noqa: ARG002 - the newest replaces it
        self.target.mkdir(parents=True, exist_ok=True)
        unfinished = self.target / f".{self.named(PICTURE_NAME)}"
        picture.save(unfinished, "png")
        unfinished.replace(self.target / self.named(PICTURE_NAME))  # no reader sees half of it
