"""Record the corpus on this machine's GPU: what every training takes, by the device's and PyTorch's own counters.

Each training of `shared/corpus.py` runs for four steps with the real Trainer, alone on the GPU, in a separate
process. Meanwhile the next processes load their libraries and wait. The
result is one JSON file, rewritten after each training: a second run continues where the first stopped. Figures of
another GPU, another torch or another corpus are recorded again. Nothing here imports lightning_memguard; predictions
are compared with these figures (`accuracy.py`).

    python benchmarks/record.py --out benchmarks/recordings/h200.json.gz       # at most 9 minutes
    python benchmarks/record.py --only gpt llama --minutes 2
    python benchmarks/record.py --accelerator cpu --only mlp --batch-size 8    # a dry run, measures nothing
"""

import argparse
import gzip
import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

STEPS = 4
SAMPLING_SECONDS = 0.002


# The parent: one training at a time, the next ones waiting -----------------------------------------------------------


def record(names: Sequence[str], out: Path, options: argparse.Namespace) -> None:
    """Record what is missing, until everything is recorded or the time is up."""
    deadline = time.monotonic() + 60 * options.minutes
    recording = read(out)
    under = conditions(options)
    left = [name for name in names if not is_recorded(recording, name, under, again=options.again)]
    print(f"{len(names) - len(left)} recorded already, {len(left)} to go", flush=True)
    waiting: list[tuple[str, subprocess.Popen[str]]] = []
    try:
        while left or waiting:
            while left and len(waiting) <= options.ahead:
                name = left.pop(0)
                waiting.append((name, start(name, options)))
            name, child = waiting.pop(0)
            seconds = deadline - time.monotonic()
            enough = seconds >= options.reserve
            case = finish(child, min(seconds, 60 * options.case_minutes)) if enough else None
            if case is None or ("failed" in case and time.monotonic() >= deadline):  # it may have lacked only time
                waiting.insert(0, (name, child))
                print(f"time is up with {len(left) + len(waiting)} to go: run again to continue", flush=True)
                break
            keep(recording, name, {**case, "conditions": under})
            write(out, recording)
            print(f"{name:<32}{words(case)}", flush=True)
    finally:
        for _, child in waiting:
            child.kill()
            child.wait()


def conditions(options: argparse.Namespace) -> str:
    """The GPU, torch and corpus that a figure belongs to; read without a CUDA context, which would take memory."""
    import torch

    here = Path(__file__).parent / "shared"
    digest = hashlib.sha256(b"".join((here / name).read_bytes() for name in ("corpus.py", "zoo.py"))).hexdigest()
    device = gpu_name() if options.accelerator == "cuda" else "CPU"
    size = f", batch size {options.batch_size}" if options.batch_size else ""
    return f"{device}, torch {torch.__version__}, corpus {digest[:12]}{size}"


def gpu_name() -> str:
    """NVML's name of the first GPU visible to CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if visible.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
        return text(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        raise SystemExit(f"No NVIDIA GPU to record on ({error}). Use --accelerator cpu without one.") from None


def text(value: str | bytes) -> str:
    """Text of NVML; older bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def is_recorded(recording: dict[str, Any], name: str, under: str, *, again: bool) -> bool:
    """Whether there is a figure for these conditions, or a failure that should not be tried again."""
    case = recording["cases"].get(name)
    return bool(case) and case.get("conditions") == under and not (again and "failed" in case)


def keep(recording: dict[str, Any], name: str, case: dict[str, Any]) -> None:
    recording["machine"] = case.pop("machine", None) or recording["machine"]
    recording["cases"][name] = case


def start(name: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that loads its libraries and builds its module, then waits."""
    command = [sys.executable, __file__, "--child", name, "--accelerator", options.accelerator]
    if options.batch_size:
        command += ["--batch-size", str(options.batch_size)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(child: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Let it train; a training that fails or takes too long is recorded as such."""
    try:
        out, err = child.communicate(f"go {seconds:.0f}\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"failed": f"took more than {seconds:g} s"}
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        return {"failed": (err.strip().splitlines() or [f"ended with {child.returncode}"])[-1][:400]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def words(case: dict[str, Any]) -> str:
    if "failed" in case:
        return f"FAILED: {case['failed']}"
    if case["max_reserved"] is None:
        return f"{case['seconds']:.1f} s; no GPU to measure"
    mib = {key: case[key] / 2**20 for key in ("max_allocated", "max_reserved", "nvml_peak") if case[key] is not None}
    return "  ".join(f"{key} {value:,.0f} MiB" for key, value in mib.items()) + f"  {case['seconds']:.1f} s"


def read(path: Path) -> dict[str, Any]:
    """The recording so far; empty if there is none."""
    if not path.exists():
        return {"format": 1, "machine": None, "cases": {}}
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def write(path: Path, recording: dict[str, Any]) -> None:
    """Replace the file as a whole: it is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps(recording, separators=(",", ":")).encode()
    part = path.with_name(path.name + ".part")
    part.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    part.replace(path)


# The child: one training ---------------------------------------------------------------------------------------------


def train(name: str, accelerator: str, batch_size: int | None) -> dict[str, Any]:
    """Build, wait for the parent, train, measure."""
    import torch
    from torch.utils.data import DataLoader

    from shared.corpus import corpus, pl
    from shared.truth import QUIET, quieten

    quieten()
    warnings.simplefilter("ignore")
    training = next(case for case in corpus() if case.name == name)
    size = batch_size or training.batch_size
    torch.manual_seed(0)
    module = training.module()
    accumulate = training.trainer_kwargs.get("accumulate_grad_batches", 1)
    loader = DataLoader(training.dataset(size * STEPS * accumulate), batch_size=size)
    torch.backends.cuda.matmul.allow_tf32 = training.tf32
    wait_for_go(torch)

    gpu = Gpu() if accelerator == "cuda" else None
    started = time.perf_counter()
    if gpu and training.cap_gib and training.cap_gib * 2**30 > gpu.free():
        return {"failed": f"skipped: it needs {training.cap_gib:g} GiB, and {gpu.free() / 2**30:.1f} GiB are free"}
    if gpu:
        gpu.open_context(training.cap_gib, history=training.history)
    steps = peaks_after_steps(pl, gpu)
    given = {**QUIET, **training.trainer_kwargs, "precision": training.precision, "callbacks": [steps]}
    trainer = pl.Trainer(accelerator=accelerator, devices=1, max_steps=STEPS, **given)
    found: dict[str, Any] = {"batch_size": size, "training": training.settings(), "steps": steps.peaks}
    found |= dict.fromkeys(("max_allocated", "max_reserved", "nvml_peak"))
    failed: dict[str, Any] = {}
    with gpu.sampled() if gpu else nullcontext():
        try:
            trainer.fit(module, train_dataloaders=loader)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what was measured so far is a result too
            failed = failure(error)
    found["step_seconds"] = [round(end - start, 5) for start, end in pairwise(steps.ends)]
    found |= {"seconds": round(time.perf_counter() - started, 2), "machine": machine(torch, pl, gpu)}
    if gpu:
        found |= gpu.measured()
    if not failed:
        return found
    return {**failed, "until_then": found, "machine": found.pop("machine")}


def wait_for_go(torch: Any) -> float:
    """Until the parent says so, the GPU belongs to another training. If the parent is gone, exit.

    Returns:
        Seconds after which the parent gives up.
    """
    assert not torch.cuda.is_initialized(), "a context was opened too early"
    word, _, seconds = sys.stdin.readline().partition(" ")
    if word != "go":
        raise SystemExit("the parent process is gone")
    return float(seconds)


def failure(error: BaseException) -> dict[str, Any]:
    """The error in one line, and whether it was an out-of-memory error."""
    lines = str(error).strip().splitlines() or [""]
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return {"failed": f"{type(error).__name__}: {lines[0]}"[:400], "out_of_memory": out_of_memory}


def peaks_after_steps(pl: Any, gpu: "Gpu | None") -> Any:
    """A callback: peaks after each batch, and the last state before Lightning moves the module off the GPU."""

    class Peaks(pl.Callback):
        def __init__(self) -> None:
            self.peaks: list[list[int]] = []
            self.ends: list[float] = []

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            if gpu:
                cuda = gpu.torch.cuda
                cuda.synchronize()
                self.ends.append(time.perf_counter())
                self.peaks.append([cuda.max_memory_allocated(), cuda.max_memory_reserved()])

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            if gpu:
                gpu.look()

        on_exception = on_train_end

    return Peaks()


class Gpu:
    """The device's and the allocator's own counters."""

    def __init__(self) -> None:
        import pynvml
        import torch

        self.torch, self.nvml = torch, pynvml
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        before = [self.settled(handle) for handle in handles]  # torch is about to open the context
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        uuids = [text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        place = uuids.index(uuid) if uuid in uuids else 0
        self.handle, self.before = handles[place], before[place]
        self.peak = self.context = 0
        self.cap: int | None = None
        self.history = False
        self.seen: dict[str, Any] = {}
        self.stop = threading.Event()

    def settled(self, handle: Any) -> int:
        """Memory in use once the previous training is gone: two equal readings in a row."""
        used = -1
        for _ in range(40):
            now = int(self.nvml.nvmlDeviceGetMemoryInfo(handle).used)
            if now == used:
                break
            used = now
            time.sleep(0.05)
        return used

    def used(self) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used)

    def free(self) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handle).free)

    def open_context(self, cap_gib: float | None, *, history: bool) -> None:
        cuda = self.torch.cuda
        one = self.torch.zeros(1, device="cuda")
        cuda.synchronize()
        self.context = self.used() - self.before - cuda.memory_reserved()
        del one
        cuda.empty_cache()
        if cap_gib:
            total = cuda.get_device_properties(0).total_memory
            fraction = cap_gib * 2**30 / total
            cuda.set_per_process_memory_fraction(fraction)
            self.cap = int(fraction * total)  # as the allocator computes it
        cuda.reset_peak_memory_stats()
        self.history = history
        if history:
            cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=1_000_000)

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample the memory in use from NVML."""

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

    def look(self) -> None:
        """Memory that is held now, and the events so far; only the first call counts."""
        if self.seen:
            return
        cuda = self.torch.cuda
        self.seen = {
            "outside_at_end": self.used() - self.before - cuda.memory_reserved(),
            "allocated_at_end": cuda.memory_allocated(),
            "reserved_at_end": cuda.memory_reserved(),
            "history": None,
        }
        if self.history:
            snapshot = cuda.memory._snapshot()
            self.seen |= {"history": events(snapshot), "addresses": addresses(snapshot), "segments": segments(snapshot)}

    def measured(self) -> dict[str, Any]:
        self.look()
        cuda, backends = self.torch.cuda, self.torch.backends
        stats = cuda.memory_stats()
        kept = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "allocation.all.allocated")
        pools = ("segment.all", "segment.large_pool", "segment.small_pool", "allocation.all", "active_bytes.all")
        pools += ("inactive_split.all", "inactive_split_bytes.all", "requested_bytes.all")
        kept += tuple(f"{pool}.peak" for pool in pools)
        flags = {f"cudnn_{name}": getattr(backends.cudnn, name) for name in ("benchmark", "deterministic")}
        flags |= {"matmul_tf32": backends.cuda.matmul.allow_tf32, "cudnn_tf32": backends.cudnn.allow_tf32}
        peaks = {"max_allocated": cuda.max_memory_allocated(), "max_reserved": cuda.max_memory_reserved()}
        nvml = {"nvml_before": self.before, "nvml_peak": self.peak, "context": self.context, "cap": self.cap}
        return {
            **peaks,
            **nvml,
            "stats": {key: stats[key] for key in kept if key in stats},
            "flags": flags,
            **self.seen,
        }


def events(snapshot: dict[str, Any]) -> list[list[Any]]:
    """The allocator's events as ``[action, address, bytes, stream]``, both numbered as they appear."""
    addresses: dict[int, int] = {}
    streams: dict[int, int] = {}
    found = []
    for entry in snapshot["device_traces"][0]:
        address = addresses.setdefault(entry.get("addr", -1), len(addresses))
        stream = streams.setdefault(entry.get("stream", 0), len(streams))
        found.append([entry["action"], address, entry["size"], stream])
    return found


def addresses(snapshot: dict[str, Any]) -> list[int]:
    """Each numbered address of `events`, relative to the lowest: equal blocks are taken by address."""
    seen = dict.fromkeys(entry.get("addr", -1) for entry in snapshot["device_traces"][0])
    lowest = min((address for address in seen if address > 0), default=0)
    return [max(address - lowest, -1) for address in seen]


def segments(snapshot: dict[str, Any]) -> list[list[Any]]:
    """Segments held at the end, by address: ``[bytes, pool, stream, [[block's bytes, bytes asked for, state], ...]]``.

    Streams are numbered in order of appearance.
    """
    held = sorted(snapshot["segments"], key=lambda segment: segment["address"])
    streams: dict[int, int] = {}
    found = []
    for segment in held:
        stream = streams.setdefault(segment["stream"], len(streams))
        blocks = [[block["size"], block.get("requested_size"), block["state"]] for block in segment["blocks"]]
        found.append([segment["total_size"], segment["segment_type"], stream, blocks])
    return found


def machine(torch: Any, pl: Any, gpu: Gpu | None) -> dict[str, Any]:
    """Versions, flags and the GPU."""
    libraries = ("nvidia-cublas", "nvidia-cudnn", "nvidia-cuda-runtime", "nvidia-ml-py", "triton")
    installed = {str(each.metadata["Name"]).lower(): each.version for each in metadata.distributions()}
    settings = ("ALLOC_CONF", "CUBLAS", "CUDNN", "CUDA_MODULE_LOADING", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32")
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "lightning": pl.__version__,
        "libraries": {name: version for name, version in sorted(installed.items()) if name.startswith(libraries)},
        "environ": {key: value for key, value in os.environ.items() if any(part in key for part in settings)},
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
            "driver": text(gpu.nvml.nvmlSystemGetDriverVersion()),
            "nvml_name": text(gpu.nvml.nvmlDeviceGetName(gpu.handle)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recordings = Path(__file__).parent / "recordings"
    number = partial(parser.add_argument, type=float)
    parser.add_argument("--out", type=Path, default=recordings / "gpu.json.gz", metavar="FILE")
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="cases with one of these in their name")
    number("--minutes", default=9.0, help="stop cleanly after this long (default: %(default)g)")
    number("--case-minutes", default=2.0, help="give up on a training after this long (default: %(default)g)")
    number("--reserve", default=20.0, help="start no training with fewer seconds left (default: %(default)g)")
    ahead = ("--jobs-ahead", "--ahead")
    parser.add_argument(*ahead, dest="ahead", type=int, default=3, help="processes that load ahead (default: 3)")
    parser.add_argument("--again", action="store_true", help="retry what failed")
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch-size", type=int, help="instead of the corpus's own")
    parser.add_argument("--list", action="store_true", help="print the trainings and stop")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(train(options.child, options.accelerator, options.batch_size)), flush=True)
        return
    from shared.corpus import corpus

    if options.list:
        for case in corpus():
            print(f"{case.name:<32}{case.family:<13}{case.batch_size:>6}  {case.optimizer:<15}{case.precision}")
        return
    names = [case.name for case in corpus()]
    record([name for name in names if any(part in name for part in options.only)], options.out, options)


if __name__ == "__main__":
    main()
