"""Decision and records -> what each logger can show next to scalars: the table, pictures, a layout of charts.

This file changes when a logging library does. None of them is imported: a logger is recognized by the methods of its
class, since Lightning's dummy loggers (of ``fast_dev_run``, and of ranks other than zero) answer to any method.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Board(NamedTuple):
    """How a logger, or a folder, shows the table and a picture; both may raise."""

    setup: Callable[[Decision, str, int], object]
    """Shows a decision, whose table as Markdown is the text, at a step."""
    picture: Callable[[Image, str, int], object]
    """Shows a picture of this name, such as ``epoch_0003``, at a step."""


@dataclass
class Boards:
    """The loggers of one run, each shown what it can show. Nothing here raises: a logger that fails is dropped.

    For the process of global rank zero. Scalars do not come through here: they are logged with the epoch's metrics.

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
        named = functools.partial(with_stage, stage=self.stage)
        for logger in self.loggers:
            name = type(logger).__name__
            try:
                if board := _board_of(logger, named):
                    self._boards.append((name, board))
            except Exception as error:  # noqa: BLE001 - a logger's failure must not fail the training
                _warn(name, error)
        if not self._boards and self.folder is not None:
            self._boards.append((str(self.folder), _files_in(self.folder, named)))

    def log_setup(self, decision: Decision, step: int = 0) -> None:
        """Show the table, the layout of the charts and the predicted picture: once per run, after the decision.

        Call it before anything is measured: what drawing loads is then in memory already.

        Args:
            decision: what was predicted and chosen.
            step: the Trainer's step, more than 0 if a run is resumed.
        """
        self._show(lambda board: board.setup(decision, markdown(decision), step))
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

    def _draw(self, picture: Picture, name: str, step: int) -> None:
        if not self._boards:
            return
        try:
            drawn = draw(picture)
        except Exception as error:  # noqa: BLE001 - such as a Pillow that was built without fonts
            self._boards.clear()
            if isinstance(error, ModuleNotFoundError):
                text = (
                    'MemGuard draws no figures: they need Pillow, as in pip install "lightning-memguard[tensorboard]".'
                )
                warnings.warn(text, stacklevel=2)
            else:
                _warn("picture", error)
            return
        self._show(lambda board: board.picture(drawn, name, step))

    def _show(self, show: Callable[[_Board], object]) -> None:
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


def _board_of(logger: Any, named: Callable[[str], str]) -> _Board | None:
    """Return the board that shows tables and pictures on this logger; None if no board of ours is known to work.

    ``named`` makes the names of an evaluation.
    """
    if _has(logger, "log_table", "log_image"):  # Weights & Biases: no Markdown
        return _Board(
            lambda decision, _, step: logger.log_table(named(_SETUP), **_table("columns", decision), step=step),
            lambda picture, _, step: logger.log_image(named(_PICTURE), [picture], step),
        )
    experiment = logger.experiment
    if _has(experiment, "add_text", "add_image", "add_custom_scalars"):
        return _tensorboard(experiment, getattr(logger, "_prefix", ""), named)
    if _has(logger, "run_id") and _has(experiment, "log_text", "log_image"):  # MLflow: artifacts, which have no step
        log, run = experiment, logger.run_id
        return _Board(
            lambda _, text, _step: log.log_text(run, text, f"memguard/{named(SETUP_NAME)}"),
            lambda image, name, _step: log.log_image(run, image, f"memguard/{named(f'peak_{name}.png')}"),
        )
    if _has(experiment, "log_text", "log_image", "log_table", "log_html"):  # Comet: Assets, and Graphics

        def show_setup(decision: Decision, text: str, step: int) -> None:
            table = _table("headers", decision)
            experiment.log_table(named("memguard_setup.csv"), table["data"], headers=table["headers"])
            experiment.log_text(text, step=step)

        return _Board(
            show_setup, lambda picture, _, step: experiment.log_image(picture, name=named(_PICTURE), step=step)
        )
    table = getattr(experiment, "metrics_file_path", None)
    return _files_in(Path(table).parent, named) if isinstance(table, str) and "://" not in table else None


def _has(thing: object, *methods: str) -> bool:
    return all(hasattr(type(thing), method) for method in methods)


def _table(heads: str, decision: Decision) -> dict[str, Any]:
    """The table, with the sentences under it as rows."""
    heading, rows = setup_rows(decision)
    return {heads: list(heading), "data": [list(row) for row in rows]}


def _files_in(folder: Path, named: Callable[[str], str]) -> _Board:
    """Files, for a CSV logger and for runs without a logger; the newest picture replaces the one before."""

    def write(name: str, how: Callable[[Path], object]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{name}"
        how(unfinished)
        unfinished.replace(folder / name)  # no reader sees half of it

    return _Board(
        lambda _, text, _step: write(named(SETUP_NAME), lambda to: to.write_text(text, encoding="utf-8")),
        lambda picture, _, _step: write(named(PICTURE_NAME), lambda to: picture.save(to, "png")),
    )


def _tensorboard(writer: SummaryWriter, prefix: str, named: Callable[[str], str]) -> _Board:
    """`torch.utils.tensorboard.SummaryWriter` and tensorboardX's: a layout of charts, text, images by step."""

    def show_setup(decision: Decision, text: str, step: int) -> None:
        writer.add_text(named(_SETUP), text, step)
        if not _has_layout(writer):
            writer.add_custom_scalars(layout(decision, prefix))

    def show_picture(picture: Image, _: str, step: int) -> None:
        import numpy as np

        writer.add_image(named(_PICTURE), np.asarray(picture), step, dataformats="HWC")

    return _Board(show_setup, show_picture)


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
