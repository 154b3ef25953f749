"""Record the corpus on the GPU at hand: what every training takes, as the device and PyTorch's allocator say it.

Each training of `corpus.py` runs for four steps with the real Trainer, alone on the GPU, in a process of its own. The
next ones load their libraries meanwhile and wait. What comes out is one JSON file, written anew after each training:
run again, it goes on where it stopped. Nothing of lightning_memguard takes part; this is the truth that predictions
are held against (`accuracy.py`).

    python benchmarks/record.py --out benchmarks/recordings/h200.json.gz       # at most 9 minutes
    python benchmarks/record.py --only gpt --minutes 2
    python benchmarks/record.py --accelerator cpu --only mlp --batch-size 8    # proves the way, measures nothing
"""

import argparse
import gzip
import json
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STEPS = 4
SAMPLING_SECONDS = 0.002


# The parent: one training at a time, the next ones waiting -----------------------------------------------------------


def record(names: Sequence[str], out: Path, options: argparse.Namespace) -> None:
    """Record what is not recorded yet, until all is or the time is up."""
    deadline = time.monotonic() + 60 * options.minutes
    recording = read(out)
    left = [name for name in names if name not in recording["cases"]]
    print(f"{len(names) - len(left)} recorded already, {len(left)} to go", flush=True)
    waiting: list[tuple[str, subprocess.Popen[str]]] = []
    try:
        while left or waiting:
            while left and len(waiting) <= options.ahead:
                name = left.pop(0)
                waiting.append((name, start(name, options)))
            name, child = waiting.pop(0)
            seconds = deadline - time.monotonic()
            if seconds < options.reserve:
                waiting.insert(0, (name, child))
                print(f"time is up with {len(left) + len(waiting)} to go: run again to go on", flush=True)
                break
            case = finish(child, min(seconds, options.case_minutes * 60))
            recording["machine"] = case.pop("machine", None) or recording["machine"]
            recording["cases"][name] = case
            write(out, recording)
            print(f"{name:<32}{words(case)}", flush=True)
    finally:
        for _, child in waiting:
            child.kill()
            child.wait()


def start(name: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that loads its libraries and builds its module, then waits for a word."""
    command = [sys.executable, __file__, "--child", name, "--accelerator", options.accelerator]
    if options.batch_size:
        command += ["--batch-size", str(options.batch_size)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Let it train; a training that fails or takes too long is recorded as such."""
    try:
        out, err = child.communicate("go\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"failed": f"took more than {seconds:g} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        return {"failed": (err.strip().splitlines() or ["no reason given"])[-1][:400]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def words(case: dict[str, Any]) -> str:
    """One line for the terminal."""
    if "failed" in case:
        return f"FAILED: {case['failed']}"
    if case["max_reserved"] is None:
        return f"{case['seconds']:.1f} s; there is no GPU to measure"
    mib = {key: case[key] / 2**20 for key in ("max_allocated", "max_reserved", "nvml_peak") if case[key] is not None}
    return "  ".join(f"{key} {value:,.0f} MiB" for key, value in mib.items()) + f"  {case['seconds']:.1f} s"


def read(path: Path) -> dict[str, Any]:
    """A recording so far; empty where there is none."""
    if not path.exists():
        return {"format": 1, "machine": None, "cases": {}}
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def write(path: Path, recording: dict[str, Any]) -> None:
    """All of it, or what was there before: the file is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(recording, separators=(",", ":")).encode()
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    beside.replace(path)


# The child: one training ---------------------------------------------------------------------------------------------


def train(name: str, accelerator: str, batch_size: int | None) -> dict[str, Any]:
    """Build, wait for the word, train, measure."""
    import pytorch_lightning as pl
    import torch
    from corpus import corpus
    from torch.utils.data import DataLoader
    from truth import quieten

    quieten()
    warnings.simplefilter("ignore")
    training = next(case for case in corpus() if case.name == name)
    size = batch_size or training.batch_size
    torch.manual_seed(0)
    module = training.module()
    accumulate = training.trainer_kwargs.get("accumulate_grad_batches", 1)
    loader = DataLoader(training.dataset(size * STEPS * accumulate), batch_size=size)
    torch.backends.cuda.matmul.allow_tf32 = training.tf32
    sys.stdin.readline()

    gpu = Gpu() if accelerator == "cuda" else None
    started = time.perf_counter()
    if gpu:
        gpu.open_context(training.cap_gib, history=training.history)
    steps = Steps.callback(pl, torch if gpu else None)
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=1,
        max_steps=STEPS,
        precision=training.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[steps],
        **training.trainer_kwargs,
    )
    with gpu.sampled() if gpu else nothing():
        trainer.fit(module, train_dataloaders=loader)
    found: dict[str, Any] = {
        "batch_size": size,
        "seconds": round(time.perf_counter() - started, 2),
        "max_allocated": None,
        "max_reserved": None,
        "nvml_peak": None,
        "steps": steps.peaks,
        "machine": machine(torch, pl, gpu),
    }
    return {**found, **gpu.measured(history=training.history)} if gpu else found


@contextmanager
def nothing() -> Iterator[None]:
    """In place of what only a GPU has."""
    yield


class Steps:
    """Peaks after each optimizer step."""

    @staticmethod
    def callback(pl: Any, torch: Any) -> Any:
        class Peaks(pl.Callback):
            def __init__(self) -> None:
                self.peaks: list[list[int]] = []

            def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
                if torch:
                    self.peaks.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])

        return Peaks()


class Gpu:
    """The device's and the allocator's own counters."""

    def __init__(self) -> None:
        import pynvml
        import torch

        self.torch, self.nvml = torch, pynvml
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        before = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]  # torch may open the context
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        place = uuids.index(uuid) if uuid in uuids else 0
        self.handle, self.before = handles[place], before[place]
        self.peak = self.context = 0
        self.stop = threading.Event()

    def used(self) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)

    def open_context(self, cap_gib: float | None, *, history: bool) -> None:
        cuda = self.torch.cuda
        one = self.torch.zeros(1, device="cuda")
        cuda.synchronize()
        self.context = self.used() - self.before - cuda.memory_reserved()
        del one
        cuda.empty_cache()
        if cap_gib:
            cuda.set_per_process_memory_fraction(cap_gib * 2**30 / cuda.get_device_properties(0).total_memory)
        cuda.reset_peak_memory_stats()
        if history:
            cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=1_000_000)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Ask NVML at every turn for what is in use."""

        def watch() -> None:
            while not self.stop.is_set():
                self.peak = max(self.peak, self.used())
                self.stop.wait(SAMPLING_SECONDS)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.torch.cuda.synchronize()
            self.stop.set()
            thread.join()

    def measured(self, *, history: bool) -> dict[str, Any]:
        cuda = self.torch.cuda
        stats = cuda.memory_stats()
        kept = (
            "num_alloc_retries",
            "num_ooms",
            "segment.all.peak",
            "allocation.all.allocated",
            "inactive_split_bytes.all.peak",
            "requested_bytes.all.peak",
        )
        return {
            "max_allocated": cuda.max_memory_allocated(),
            "max_reserved": cuda.max_memory_reserved(),
            "nvml_before": self.before,
            "nvml_peak": self.peak,
            "context": self.context,
            "stats": {key: stats[key] for key in kept if key in stats},
            "history": events(cuda.memory._snapshot()) if history else None,
        }


def events(snapshot: dict[str, Any]) -> list[list[Any]]:
    """The allocator's events as ``[action, address, bytes, stream]``, addresses and streams numbered as they come."""
    addresses: dict[int, int] = {}
    streams: dict[int, int] = {}
    return [
        [
            entry["action"],
            addresses.setdefault(entry.get("addr", -1), len(addresses)),
            entry["size"],
            streams.setdefault(entry.get("stream", 0), len(streams)),
        ]
        for entry in snapshot["device_traces"][0]
    ]


def machine(torch: Any, pl: Any, gpu: Gpu | None) -> dict[str, Any]:
    """Versions, flags and the GPU."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "lightning": pl.__version__,
        "environ": {key: value for key, value in os.environ.items() if "ALLOC_CONF" in key or "CUBLAS" in key},
        "gpu": None,
    }
    if gpu:
        facts = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": facts.name,
            "total_memory": facts.total_memory,
            "nvml_total": int(gpu.nvml.nvmlDeviceGetMemoryInfo(gpu.handle).total),
            "compute_capability": [facts.major, facts.minor],
            "multiprocessors": facts.multi_processor_count,
            "driver": str(gpu.nvml.nvmlSystemGetDriverVersion()),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "recordings" / "gpu.json.gz")
    parser.add_argument("--only", default="", help="trainings whose name contains this")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop cleanly after this long")
    parser.add_argument("--case-minutes", type=float, default=2.0, help="give up on a training after this long")
    parser.add_argument("--reserve", type=float, default=20.0, help="start none with fewer seconds left")
    parser.add_argument("--ahead", type=int, default=3, help="processes that load their libraries meanwhile")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch-size", type=int, help="in place of the corpus's own")
    parser.add_argument("--list", action="store_true", help="print the trainings and stop")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(options.child, options.accelerator, options.batch_size)), flush=True)
        return
    from corpus import corpus
    from corpus import main as list_all

    if options.list:
        list_all()
        return
    record([case.name for case in corpus() if options.only in case.name], options.out, options)


if __name__ == "__main__":
    main()
