"""A run that has ended with an error -> what its memory was held by, and whether a loader's worker died of it."""

from __future__ import annotations

import re
import sys
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from signal import Signals
from traceback import walk_tb
from types import ModuleType
from typing import TYPE_CHECKING

import psutil
from torch import Tensor, nn

from lightning_memguard.core.batch.nesting import LISTS
from lightning_memguard.core.capture.recorder import gradients_of, part_bytes, states_of
from lightning_memguard.core.decision.decision import HostUse
from lightning_memguard.core.device.host import available_memory, or_none
from lightning_memguard.core.device.out_of_memory import causes_of
from lightning_memguard.core.objects import entries_of, walk
from lightning_memguard.report.failure import FRAMES, worker_words
from lightning_memguard.training.facts.ranks import attempt

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


def held_elsewhere(trainer: Trainer, module: LightningModule, error: BaseException) -> dict[str, int]:
    """Return the bytes on the run's device that are not a part of its step, by who keeps them, the most first."""
    optimizers = trainer.optimizers
    own = [*module.parameters(), *module.buffers(), *gradients_of(optimizers, module), *states_of(optimizers)]
    held: dict[str, list[Tensor]] = {"": own}
    for name, value in _attributes(trainer, module):
        tensors = [*_tensors(value)]
        graphs = " with the graphs of its tensors" if any(tensor.grad_fn is not None for tensor in tensors) else ""
        held[f"`{name}`{graphs}"] = tensors
    variables = vars(sys.modules.get("__main__", ModuleType("")))
    outputs = variables.get("Out"), *(variables.get("_" * count) for count in (1, 2, 3))
    held["the notebook's `Out[]`"] = [*_tensors(outputs)]
    for name in ("last_exc", "last_value"):  # since Python 3.12, and before
        if getattr(sys, name, error) is not error:
            held[f"an earlier error's frames (`sys.{name}`)"] = [*_in_frames(getattr(sys, name))]
    held[FRAMES] = [*_in_frames(error)]
    nbytes = part_bytes(held, trainer.strategy.root_device.type)
    del nbytes[""]
    return dict(sorted(nbytes.items(), key=lambda item: -item[1]))


def _attributes(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, object]]:
    """The tensors, and containers of some, that are attributes of the module, its children and the callbacks."""
    owners = {f"{type(module).__name__}{path and '.'}{path}": child for path, child in module.named_modules()}
    owners |= {type(each).__name__: each for each in (*trainer.callbacks, trainer.datamodule) if each}  # type: ignore[attr-defined]
    own = vars(nn.Module())
    for owner, thing in owners.items():
        for name, value in [*getattr(thing, "__dict__", {}).items()]:
            if name not in own and isinstance(value, (Tensor, dict, UserDict, *LISTS)):
                yield f"{owner}.{name}", value


def _in_frames(error: BaseException) -> Iterator[Tensor]:
    for each in causes_of(error):
        for frame, _ in walk_tb(each.__traceback__):
            yield from _tensors(dict(frame.f_locals))


def _tensors(tree: object) -> Iterator[Tensor]:
    """The tensors in containers; not those of objects in them, which lead to datasets and Trainers."""
    return (each for each in walk([tree], entries_of) if isinstance(each, Tensor))


# -- workers

_FULL = re.compile(r"unable to (?:allocate shared memory|write to file </torch|resize file </torch|mmap)[^\n]*")


def worker_note(error: BaseException, host: HostUse | None, kills_before: int | None) -> str:
    """Say why a loader's worker died of memory; empty for other errors. ``kills_before``: `oom_kills` at setup."""
    text = "\n".join(map(str, causes_of(error)))
    # the loader may have caught the error that names the signal
    frames = [frame for each in causes_of(error) for frame, _ in walk_tb(each.__traceback__)]
    codes = [worker.exitcode or 0 for frame in frames for worker in frame.f_locals.get("failed_workers", ())]
    signals = {Signals(-code).name for code in codes if code < 0}
    is_full = "SIGBUS" in signals or "signal: Bus error" in text or ("DataLoader worker" in text and _FULL.search(text))
    if not is_full and "SIGKILL" not in signals and "signal: Killed" not in text:
        return ""
    kills = oom_kills()
    others = attempt(  # the memory that they do not share with this process
        lambda: sum(each.rss - each.shared for each in map(psutil.Process.memory_info, psutil.Process().children()))
    )
    return worker_words(
        psutil.disk_usage("/dev/shm").total if is_full else None,  # noqa: S108 - nothing is written there
        host.shared_bytes if host else 0,
        others.value or 0,
        available_memory(),
        None if kills is None or kills_before is None else kills - kills_before,
    )


def oom_kills() -> int | None:
    """How many processes the kernel has killed since it booted, as memory ran out; None off Linux."""
    lines = (or_none(Path("/proc/vmstat").read_text) or "").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
