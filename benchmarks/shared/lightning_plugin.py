"""A plugin of pytest for Lightning's own tests: it adds a MemGuard to each Trainer, and writes down how each run ended.

`lightning_suite.py` loads it. Each line of the file named by ``--runs`` is one JSON object: a test that starts, a run of
a Trainer that is over (with a digest of whatever a user could see of it), or the outcome of a test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import json
import os
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import WarningCache

from lightning_memguard import MemGuard

DEEPEST = 6
UNSTABLE = re.compile(r"^(_parameters|_buffers|_modules|callbacks)$|_hooks|_time(_|$)")
HEADINGS = ("fit", "validate", "test", "predict")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--guard", choices=("none", "check", "tune"), default="none")
    parser.addoption("--runs", type=Path, required=True)
    parser.addoption("--test-seconds", type=float, default=60.0)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures, which Lightning's tests use where installed")
    config.pluginmanager.register(Observer(config))


class Observer:
    """Follows pytest from test to test, and each Trainer from run to run."""

    def __init__(self, config: pytest.Config) -> None:
        self.mode, self.seconds = config.getoption("--guard"), config.getoption("--test-seconds")
        self.file = config.getoption("--runs").open("a")
        self.pid = os.getpid()
        self.item: pytest.Item | None = None
        self.runs = 0
        self.warnings: dict[str, int] = {}
        Trainer.__init__ = self.with_guard(Trainer.__init__)  # type: ignore[method-assign]
        for name in HEADINGS:
            setattr(Trainer, name, self.observed(name, getattr(Trainer, name)))

    def write(self, **entry: Any) -> None:
        assert self.item is not None
        self.file.write(json.dumps({"test": self.item.nodeid, **entry}) + "\n")
        self.file.flush()

    # -- pytest's hooks

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.item, self.runs, self.warnings = item, 0, {}
        self.write(kind="start")
        # A test depends on none before it: the same random numbers, and Lightning's one-time warnings are to come.
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        for cache in warning_caches():
            cache.clear()
        faulthandler.dump_traceback_later(self.seconds, exit=True)  # also ends a test that no exception would
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.write(kind="warnings", state=self.warnings)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        text = re.sub(r"0x[0-9a-f]+", "0x", str(warning_message.message))
        if "MemGuard" not in text:
            self.warnings[f"{warning_message.category.__name__}: {text[:200]}"] = 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            error = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr or "")
            self.write(kind="outcome", outcome=report.outcome, seconds=round(report.duration, 3), error=error[:2000])

    # -- Trainers

    def with_guard(self, init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def wrapper(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            init(trainer, *args, **(kwargs if is_shadow(trainer) else self.guarded(kwargs)))

        return wrapper

    def guarded(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A Trainer's arguments, with a MemGuard after the test's own callbacks."""
        if self.mode == "none":
            return kwargs
        own = kwargs.get("callbacks") or []
        own = own if isinstance(own, (list, tuple)) else [own]
        if any(isinstance(callback, MemGuard) for callback in own):
            return kwargs
        return {**kwargs, "callbacks": [*own, MemGuard(mode=self.mode)]}

    def observed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            if is_shadow(trainer) or os.getpid() != self.pid or self.item is None:
                return method(trainer, *args, **kwargs)
            error = ""
            try:
                return method(trainer, *args, **kwargs)
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"[:300]
                raise
            finally:
                state = state_of(trainer, getattr(self.item, "funcargs", {}).get("tmp_path"))
                self.write(kind="run", run=self.runs, name=name, raised=error, state=state, guard=verdict(trainer))
                self.runs += 1

        return wrapper


def is_shadow(trainer: Trainer) -> bool:
    """Whether MemGuard made it, to capture a step."""
    return type(trainer).__module__.startswith("lightning_memguard")


@functools.cache
def warning_caches() -> list[WarningCache]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("lightning.pytorch")]
    owners = [*modules, *(value for module in modules for value in vars(module).values() if isinstance(value, type))]
    found = {id(value): value for owner in owners for value in vars(owner).values() if isinstance(value, WarningCache)}
    return list(found.values())


def verdict(trainer: Trainer) -> dict[str, Any] | None:
    """What MemGuard decided in the run; None without one, or where the run ended before its setup."""
    guard = next((callback for callback in trainer.callbacks if isinstance(callback, MemGuard)), None)
    decision = guard.decision if guard else None
    if decision is None:
        return None
    names = ("outcome", "reason", "limited_by", "batch_size", "requested_batch_size", "accumulate_grad_batches")
    notes = decision.footprint.notes if decision.footprint else ()
    method = decision.footprint.method if decision.footprint else ""
    return {**{name: getattr(decision, name) for name in names}, "method": method, "notes": list(notes)}


# -- digests


def state_of(trainer: Trainer, folder: Path | None) -> dict[str, dict[str, str]]:
    """What a user could see when a run is over: by kind, the digest of each value by its name."""
    random_state = torch.get_rng_state(), np.random.get_state()[1:], random.getstate()
    module = trainer.lightning_module
    modules = dict(module.named_modules()) if isinstance(module, torch.nn.Module) else {}
    callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, MemGuard)]
    metrics = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
    kinds: dict[str, Any] = {
        "random": dict(zip(("torch", "numpy", "python"), map(repr_hash, random_state), strict=True)),
        "weights": {name: owner._parameters | owner._buffers for name, owner in modules.items()},
        "gradients": {name: [each.grad for each in owner._parameters.values() if each is not None] for name, owner in modules.items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers if isinstance(optimizer, torch.optim.Optimizer)],
        "schedulers": [vars(config.scheduler) for config in trainer.lr_scheduler_configs],
        "metrics": metrics,
        "module": {name: attributes(owner) for name, owner in modules.items()},
        "datamodule": attributes(trainer.datamodule),
        "trainer": attributes(trainer),
        "loops": {name: getattr(trainer, f"{name}_loop").state_dict() for name in ("fit", "validate", "test", "predict")},
        "callbacks": {f"{index} {type(each).__name__}": attributes(each) for index, each in enumerate(callbacks)},
        "process": process_state(),
        "files": files_in({*([folder] if folder else []), Path(trainer.default_root_dir)}),
    }  # fmt: skip
    return {kind: dict(flat(value)) for kind, value in kinds.items()}


def attributes(owner: object) -> dict[str, Any]:
    """Its attributes, without what is listed elsewhere, times, and hooks, whose keys count up in the process."""
    own = getattr(owner, "__dict__", {})
    return {name: value for name, value in own.items() if not UNSTABLE.search(name)}


def process_state() -> dict[str, Any]:
    """What a run could leave behind in the process."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "intra-op threads": torch.get_num_threads(),
        "Python threads": threading.active_count(),
        "environment": sorted(os.environ),
        "folder": str(Path.cwd()),
        "warning filters": len(warnings.filters),
        "defaults": str(torch.get_default_device()),
    }


def files_in(folders: set[Path]) -> dict[str, Any]:
    """The files that runs wrote, without MemGuard's; of a checkpoint, what is in it."""
    found: dict[str, Any] = {}
    for folder in folders:
        for path in folder.rglob("*") if folder.is_dir() and folder != Path.cwd() else []:
            name = re.sub(r"tfevents.*", "tfevents", str(path))
            if "memguard" in name or not path.is_file():
                continue
            found[name] = None
            if path.suffix == ".ckpt":
                with contextlib.suppress(Exception):  # not a checkpoint of Lightning
                    loaded = torch.load(path, map_location="cpu", weights_only=False)
                    found[name] = {key: value for key, value in loaded.items() if key != "lightning_memguard"}
    return found


def flat(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """The values in a structure by their path, each as text or as a hash; of other objects, only the type."""
    if isinstance(value, Mapping) and depth < DEEPEST:
        for key, each in list(value.items()):
            if "memguard" not in str(key):
                yield from flat(each, f"{name}.{plain_key(key)}", depth + 1)
        if not value:
            yield name, "{}"
    elif isinstance(value, (list, tuple)) and depth < DEEPEST and len(value) <= 100:
        yield f"{name}.len", str(len(value))
        for index, each in enumerate(value):
            yield from flat(each, f"{name}.{index}", depth + 1)
    else:
        yield name, digest(value)


def plain_key(key: object) -> str:
    return str(key) if isinstance(key, (str, int)) else type(key).__name__


def digest(value: Any) -> str:
    if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
        try:
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        except Exception as error:  # noqa: BLE001 - sparse, quantized, uninitialized: its kind says enough
            return f"{value.layout} {type(error).__name__}"
        return f"{str(value.dtype)[6:]}{list(value.shape)} {hashlib.sha1(raw).hexdigest()[:12]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape} {hashlib.sha1(value.tobytes()).hexdigest()[:12]}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Path, torch.dtype, torch.device)):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:100]} {repr_hash(text)}"
    if isinstance(value, (list, tuple, AbstractSet)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__qualname__


def repr_hash(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return hashlib.sha1(value.numpy().tobytes()).hexdigest()[:12]
    if isinstance(value, tuple):
        value = tuple(each.tobytes() if isinstance(each, np.ndarray) else each for each in value)
    return hashlib.sha1(repr(value).encode()).hexdigest()[:12]
