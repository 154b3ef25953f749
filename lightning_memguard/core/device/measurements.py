"""Predicted and measured peaks of earlier runs on this machine's GPUs: lines of JSON in the user's cache folder.

Nothing leaves the machine. The file may be deleted at any time, and copied to another machine to plan by.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch

from lightning_memguard.core.device.host import or_none
from lightning_memguard.core.device.nvml import driver_version
from lightning_memguard.core.replay.learned import Learned, Sighting
from lightning_memguard.errors import MemGuardError

_MOST_LINES = 2000  # some 1 MB; then the older half goes
_MOST_SECONDS = 5.0  # for other processes that write
_OF_ONE_SIZE = 5  # the latest measurements of a step at one batch size count


@dataclass(frozen=True)
class Setting:
    """Hardware and software on which the peak of a step depends, apart from the step itself."""

    gpu: str
    driver: str
    torch: str
    cuda: str
    cudnn: str
    allocator: str

    def difference(self, other: Setting) -> str:
        """Name what differs: ``"cudnn 91002 instead of 92000"``; empty if nothing does."""
        pairs = ((field.name, getattr(other, field.name), getattr(self, field.name)) for field in fields(self))
        changed = (each for each in pairs if each[1] != each[2])
        return ", ".join(f"{name} {theirs or 'unset'} instead of {ours or 'unset'}" for name, theirs, ours in changed)


def setting_of(device: torch.device) -> Setting | None:
    """Read the setting of a CUDA device; None for another device.

    Raises:
        RuntimeError: it cannot be used.
    """
    if device.type != "cuda":
        return None
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    driver, cuda = or_none(driver_version) or "", torch.version.cuda or ""
    return Setting(torch.cuda.get_device_name(device), driver, torch.__version__, cuda, cudnn_settings(), settings)


def cudnn_settings() -> str:
    """The version of cuDNN, and which of its algorithms may be chosen."""
    cudnn: Any = torch.backends.cudnn
    if not cudnn.enabled:
        return "off"
    choices = {
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        "without tf32": cudnn.conv.fp32_precision != "tf32",
    }
    return " ".join([str(cudnn.version() or ""), *(name for name, chosen in choices.items() if chosen)])


@dataclass(frozen=True)
class Measurement:
    """The peak of one run at one batch size.

    Attributes:
        run: names the run; a later measurement of the same run replaces this one.
        time: when, as ISO 8601.
        module: the name of the module's class, for people.
        step: its signature, see `lightning_memguard.core.trace.trace.signature_of`.
        precision: as Lightning names it.
        batch_size: samples on this rank.
        predicted_bytes: the peak on the device, without any correction.
        measured_bytes: the peak on the device.
        measured_reserved_bytes: what the allocator had reserved of it; the rest are CUDA's context and libraries.
        workspace_bytes: of the predicted peak, what is scratch of kernels.
        setting: what it ran on.
        predicted_step_seconds: the time of a step, without any correction; 0 if it is not known.
        step_seconds: the time that it took; 0 if it is not known.
        ran_out: whether the run ended since memory ran out: ``measured_bytes`` is what there was, which was too little.
    """

    run: str
    time: str
    module: str
    step: str
    precision: str
    batch_size: int
    predicted_bytes: int
    measured_bytes: int
    measured_reserved_bytes: int
    workspace_bytes: int
    setting: Setting
    predicted_step_seconds: float = 0.0
    step_seconds: float = 0.0
    ran_out: bool = False

    @classmethod
    def read(cls, line: str) -> Measurement | None:
        """Read a line of the file; None if it is damaged, or another version wrote it."""
        try:
            values = json.loads(line)
            found = cls(**{**values, "setting": Setting(**values["setting"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        texts = [*asdict(found.setting).values(), found.run, found.time, found.module, found.step, found.precision]
        sizes = found.batch_size, found.predicted_bytes, found.measured_bytes
        others = found.measured_reserved_bytes, found.workspace_bytes
        seconds = found.predicted_step_seconds, found.step_seconds
        if not ({*map(type, seconds)} <= {int, float} and all(0 <= each < math.inf for each in seconds)):
            return None
        typed = (
            {*map(type, texts)} == {str}
            and {type(found.ran_out)} == {bool}
            and {*map(type, (*sizes, *others))} == {int}
        )
        return found if typed and min(sizes) > 0 and min(others) >= 0 and max(*sizes, *others) < 1 << 63 else None


def default_path() -> Path:
    """Return the file below the user's cache folder; ``XDG_CACHE_HOME`` moves it.

    Raises:
        MemGuardError: the user has no home directory.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise MemGuardError(f"{error} Set XDG_CACHE_HOME to a folder for measurements.") from None
    return cache / "lightning-memguard" / "measurements.jsonl"


def _locked(file: IO[str]) -> bool:
    """Lock a file; False if another process has it locked.

    Raises:
        OSError: the file system cannot lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Store:
    """The file of measurements. Several processes may read and write it at once."""

    path: Path

    def add(self, measurement: Measurement) -> None:
        """Append a measurement; when the file has grown long, the older ones go.

        Raises:
            OSError: the file cannot be written or locked, or others have held it for seconds.
        """
        line = f"{json.dumps(asdict(measurement))}\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            if len(lines) > _MOST_LINES:
                shorter = self.path.with_suffix(".new")  # in its place at once, for readers that take no lock
                shorter.write_text("".join(lines[-_MOST_LINES // 2 :]), encoding="utf-8")
                shorter.replace(self.path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_suffix(".lock").open("w") as file:
            patience = time.monotonic() + _MOST_SECONDS
            while not _locked(file):
                if time.monotonic() > patience:
                    raise BlockingIOError(f"{self.path} is in use")
                time.sleep(0.01)
            yield

    def read(self) -> tuple[list[Measurement], int]:
        """Return the measurements, the oldest first and each run's last, and the number of damaged lines.

        Raises:
            MemGuardError: there is a file, and it cannot be read.
        """
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise MemGuardError(f"The measurements in {self.path} cannot be read: {error.strerror}.") from error
        found, damaged = dict[tuple[str, int], Measurement](), 0
        for line in filter(None, map(str.strip, text.splitlines())):
            each = Measurement.read(line)
            if each is None:
                damaged += 1
                continue
            found.pop((each.run, each.batch_size), None)
            found[each.run, each.batch_size] = each
        return [*found.values()], damaged

    def clear(self) -> None:
        """Delete the file.

        Raises:
            OSError: it cannot be deleted.
        """
        for path in (self.path, *map(self.path.with_suffix, (".lock", ".new"))):
            path.unlink(missing_ok=True)


def learned_from(measurements: Iterable[Measurement], step: str, where: str = "this GPU") -> Learned:
    """Return what measurements of a step tell; of each batch size the latest count.

    A run that ran out of memory tells that the step takes more than there was, unless one has run since, or this was
    predicted.
    """
    by_size: dict[int, list[Measurement]] = {}
    for each in measurements:
        known = by_size.setdefault(each.batch_size, []) if each.step == step else []
        known[:] = [other for other in known if not other.ran_out]
        if not each.ran_out or each.measured_bytes > each.predicted_bytes:
            known.append(each)
    by_size = {size: [each for each in known if each.ran_out] or known for size, known in by_size.items() if known}
    sightings = []
    for size, of_size in by_size.items():
        found = sorted(of_size[-_OF_ONE_SIZE:], key=lambda each: each.measured_bytes / each.predicted_bytes)
        middle, timed = found[len(found) // 2], [each for each in found if each.step_seconds]
        ratios = sorted(e.step_seconds / e.predicted_step_seconds for e in timed if e.predicted_step_seconds)
        ratio = ratios[len(ratios) // 2] if ratios else None
        sightings.append(Sighting(size, middle.predicted_bytes, middle.measured_bytes, len(found), ratio))
    return Learned(step, tuple(sightings), where)
