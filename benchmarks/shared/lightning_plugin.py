"""A plugin of pytest for Lightning's own tests: it adds a MemGuard to each Trainer, and writes down how each run ended.

`lightning_suite.py` loads it. Each line of ``--runs`` is a JSON object: a test that starts, a run of a Trainer that is
over, with digests of what a user can see of it, or how a test ended.
"""

import contextlib
import faulthandler
import functools
import hashlib
import json
import os
import random
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import WarningCache
from torch.optim import Optimizer

from lightning_memguard import MemGuard
from lightning_memguard.training.data.loaders import LoaderInfo, rewrite_loaders
from lightning_memguard.training.facts.lightning_port import set_batch_size
from lightning_memguard.training.facts.run_facts import ROLES, Stage, read_run_facts

RUNS = ("fit", "validate", "test", "predict")
DEEPEST = 6
LISTED_ELSEWHERE = ("_parameters", "_buffers", "_modules", "callbacks")
UNSTABLE = re.compile(r"_hooks|_time(_|$)|^time_elapsed$")  # the keys of hooks count up in the process
UNNAMED = re.compile(  # names drawn at random, and MemGuard's metrics where a warning lists all
    rf"0x[0-9a-f]+|(?<={re.escape(tempfile.gettempdir())}/tmp)\w{{8}}|(?<=tfevents).*"
    r"|(, )?'memguard/[\w/]+'(?=\])|'memguard/[\w/]+', "
)
OURS = re.compile(r"MemGuard|^Batch size \d+ (is unchanged|fits)")  # warnings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--guard", choices=("none", "check", "tune", "sized"), default="none")
    parser.addoption("--sizes", type=Path, help="for sized: what each run of each test was tuned to, in JSON")
    parser.addoption("--runs", type=Path, default=Path(os.devnull))
    parser.addoption("--test-seconds", type=float, default=60.0)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures, which need not be installed")
    config.pluginmanager.register(Observer(config))
    seed()  # test modules make data when they are imported


def seed() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the state that tests share
    torch.manual_seed(0)


class Observer:
    """Follows pytest from test to test, and each Trainer from run to run."""

    def __init__(self, config: pytest.Config) -> None:
        self.mode, self.seconds = config.getoption("--guard"), config.getoption("--test-seconds")
        self.file = config.getoption("--runs").open("a")
        sizes = config.getoption("--sizes")
        self.sizes: dict[str, list[dict[str, Any] | None]] = json.loads(sizes.read_text()) if sizes else {}
        self.pid = os.getpid()
        self.item: Any = None
        self.threads: list[threading.Thread] = []
        self.runs = -1
        Sized.observer = self
        Trainer.__init__ = self.with_guard(Trainer.__init__)
        for name in RUNS:
            setattr(Trainer, name, self.observed(name, getattr(Trainer, name)))

    def write(self, kind: str, **entry: Any) -> None:
        self.file.write(json.dumps({"test": self.item.nodeid, "kind": kind, **entry}) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A test depends on none before it: the same random numbers, all of Lightning's one-time warnings to come."""
        self.item, self.warnings = item, {}
        self.runs = -1
        self.threads = threading.enumerate()  # those that an earlier test left behind end at any time
        self.write("start")
        seed()
        for cache in warning_caches():
            cache.clear()
        faulthandler.dump_traceback_later(self.seconds, exit=True)  # ends also what no exception would
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.write("warnings", state=self.warnings)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        text = UNNAMED.sub("", str(warning_message.message))
        if not OURS.search(text):
            self.warnings[f"{warning_message.category.__name__}: {text[:200]}"] = "given"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            error = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr or "")
            self.write("outcome", outcome=report.outcome, seconds=report.duration, error=error[:2000])

    def with_guard(self, init: Any) -> Any:
        """A Trainer's constructor that puts a MemGuard, or what stands in for it, after the test's own callbacks."""

        @functools.wraps(init)
        def wrapper(trainer: Trainer, *args: Any, callbacks: Any = None, **kwargs: Any) -> None:
            if self.mode != "none" and not is_shadow(trainer):
                own = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
                guard = Sized() if self.mode == "sized" else MemGuard(mode=self.mode, min_steps_per_epoch=None)
                trainer.memguard, callbacks = guard, [*own, guard]  # finders put other callbacks in their place
            init(trainer, *args, callbacks=callbacks, **kwargs)

        return wrapper

    def observed(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def wrapper(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            if is_shadow(trainer) or os.getpid() != self.pid or self.item is None:
                return method(trainer, *args, **kwargs)
            raised, self.runs = "", self.runs + 1
            try:
                return method(trainer, *args, **kwargs)
            except BaseException as error:
                raised = UNNAMED.sub("", f"{type(error).__name__}: {error}")[:300]
                raise
            finally:
                state = state_of(trainer, self.item.funcargs.get("tmp_path"), self.threads)
                self.write("run", name=name, raised=raised, state=state, guard=verdict(trainer))

        return wrapper


class Sized(Callback):
    """Gives a run the batch sizes that it was tuned to, and is nothing else: what a tuned run is compared with."""

    observer: "Observer"  # of the class: a Trainer may be pickled before it runs

    def __init__(self) -> None:
        self.undo: list[Callable[[], None]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: Stage) -> None:
        runs = self.observer.sizes.get(self.observer.item.nodeid, [])
        tuned = dict(enumerate(runs)).get(self.observer.runs)
        if tuned is None or tuned["outcome"] != "tuned":
            return
        facts, size = read_run_facts(trainer, stage), tuned["batch_size"]
        for role, samples in {ROLES[stage]: size, "val": tuned["validation_batch_size"]}.items():
            if samples:
                unread = LoaderInfo(None, "", (), "the loader", role)
                self.undo.append(rewrite_loaders(trainer, facts, unread, partial(int, samples)))
        self.undo.append(set_batch_size(pl_module, trainer.datamodule, size))

    def teardown(self, *_: Any, **__: Any) -> None:
        while self.undo:
            self.undo.pop()()

    on_exception = teardown


def is_shadow(trainer: Trainer) -> bool:
    """Whether MemGuard made it, to capture a step."""
    return type(trainer).__module__.startswith("lightning_memguard")


@functools.cache
def warning_caches() -> list[WarningCache]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("lightning.pytorch")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    values = (value for owner in (*modules, *classes) for value in vars(owner).values())
    return [value for value in values if isinstance(value, WarningCache)]


def verdict(trainer: Trainer) -> dict[str, Any] | None:
    """The decision of MemGuard; None without one, or if the run ended before its setup."""
    guard = getattr(trainer, "memguard", None)
    decision = guard.decision if isinstance(guard, MemGuard) else None
    if decision is None:
        return None
    names = ("outcome", "reason", "limited_by", "batch_size", "validation_batch_size", "accumulate_grad_batches")
    found = {name: getattr(decision, name) for name in names}
    return {**found, "method": decision.footprint.method if decision.footprint else "none"}


# -- digests


def state_of(trainer: Trainer, folder: Path | None, before: list[threading.Thread]) -> dict[str, dict[str, str]]:
    """Everything that a user can see when a run is over: by kind, each value, or its hash, by its name."""
    module = trainer.lightning_module
    modules = dict(module.named_modules()) if isinstance(module, torch.nn.Module) else {}
    callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, MemGuard | Sized)]
    optimizers = [each for each in trainer.optimizers if isinstance(each, Optimizer)]
    numpy_state = np.random.get_state()[1:]  # noqa: NPY002
    kinds = {
        "random": {"torch": torch.get_rng_state(), "numpy": numpy_state, "python": hash_of(repr(random.getstate()))},
        "weights": {name: owner._parameters | owner._buffers for name, owner in modules.items()},
        "gradients": [each.grad for each in module.parameters()] if modules else None,
        "optimizers": [each.state_dict() for each in optimizers],
        "schedulers": [vars(config.scheduler) for config in trainer.lr_scheduler_configs],
        "metrics": [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics],
        "module": {name: attributes(owner) for name, owner in modules.items()},
        "datamodule": attributes(trainer.datamodule),
        "trainer": attributes(trainer),
        "loops": {name: getattr(trainer, f"{name}_loop").state_dict() for name in RUNS},
        "callbacks": {f"{index} {type(each).__name__}": attributes(each) for index, each in enumerate(callbacks)},
        "process": process_state(before),
        "files": files_in({folder, Path(trainer.default_root_dir)} - {None, Path.cwd()}),
    }  # fmt: skip
    stable = partial(UNNAMED.sub, "")
    return {kind: {stable(name): stable(text) for name, text in flat(value)} for kind, value in kinds.items()}


def attributes(owner: object) -> dict[str, Any]:
    own = getattr(owner, "__dict__", {})
    return {name: each for name, each in own.items() if name not in LISTED_ELSEWHERE}


def process_state(threads_before: list[threading.Thread]) -> dict[str, Any]:
    """State that a run could leave behind in the process."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
    # tqdm's monitor comes and goes, those of a DataLoader's queues end a moment after it, and that of a launcher looks
    # whether its processes have ended once in five seconds: after a run that is shorter, it is still there.
    new = [each for each in threading.enumerate() if each not in threads_before]
    names = sorted(type(each).__name__ for each in new if not each.name.startswith("QueueFeeder"))
    threads = torch.get_num_threads(), [name for name in names if name not in ("TMonitor", "_ChildProcessObserver")]
    state = {"modes": modes, "threads": threads, "environment": sorted(os.environ), "folder": str(Path.cwd())}
    return {**state, "dtype": torch.get_default_dtype(), "warning filters": len(warnings.filters)}


def files_in(folders: set[Any]) -> dict[str, Any]:
    """The files that runs wrote, without MemGuard's; of a checkpoint, what is in it."""
    found: dict[str, Any] = {}
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        found[str(path)] = "there"
        if path.suffix == ".ckpt":
            with contextlib.suppress(Exception):  # not one of Lightning's
                found[str(path)] = torch.load(path, map_location="cpu", weights_only=False)
    return found


def flat(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """The values in a structure by their path; MemGuard's own are left out."""
    if isinstance(value, Mapping) and depth < DEEPEST:
        for key, each in list(value.items()):
            if "memguard" not in str(key) and not UNSTABLE.search(str(key)):
                known = isinstance(key, str) or (isinstance(key, int) and key < 1_000_000)  # not an `id`
                yield from flat(each, f"{name}.{key if known else type(key).__name__}", depth + 1)
    elif isinstance(value, (list, tuple)) and depth < DEEPEST and len(value) <= 100:
        yield f"{name}.len", str(len(value))
        for index, each in enumerate(value):
            yield from flat(each, f"{name}.{index}", depth + 1)
    else:
        yield name, digest(value)


def digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        try:  # a fake tensor, or a sparse one: its kind says enough
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"{value.dtype}{list(value.shape)} {hash_of(raw)}"
        except Exception as error:  # noqa: BLE001
            return f"{type(value).__name__} {value.layout} {type(error).__name__}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape} {hash_of(value.tobytes())}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Path, torch.dtype, torch.device)):
        return repr(value) if len(repr(value)) <= 200 else hash_of(repr(value))
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, (list, tuple, AbstractSet)) else kind


def hash_of(raw: str | bytes) -> str:
    return hashlib.sha1(raw.encode() if isinstance(raw, str) else raw).hexdigest()[:12]
