"""Memory that DistributedDataParallel adds to a step, against a real training of two gloo processes.

The truth is taken in two children: PyTorch's profiler lists each block that rank 0's CPU
allocator hands out. Nothing of ours runs there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as lp
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import Batches
from lightning_memguard.core.capture.predict import capture
from lightning_memguard.core.capture.program import tensors
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.core.trace.work import COMMUNICATION
from lightning_memguard.training.adapter import program as program_module
from lightning_memguard.training.adapter import shadow
from lightning_memguard.training.strategies import ddp
from tests.forks import on_ranks
from tests.training.quiet import quiet_trainer

BATCH_SIZE = 8
WIDTH = 256
H200 = gpus.find("NVIDIA H200")


class Net(pl.LightningModule):
    """Layers enough for several buckets of 0.25 MiB, and what else a case asks for."""

    def __init__(self, extra: str = "", lightly: bool = False) -> None:
        super().__init__()
        widths = [64, *[WIDTH] * 4, 10]
        layers = [nn.Linear(*pair) for pair in itertools.pairwise(widths)]
        self.net = nn.Sequential(*[each for layer in layers for each in (layer, nn.ReLU())][:-1])
        self.extra, self.lightly = extra, lightly
        self.automatic_optimization = extra != "manual"
        if extra == "buffers":
            self.register_buffer("table", torch.zeros(300_000))
            self.register_buffer("counts", torch.zeros(50_000, dtype=torch.float32))
        if extra == "unused":
            self.spare = nn.Linear(WIDTH, WIDTH)
        if extra == "mixed":
            self.gain = nn.Parameter(torch.ones(100_000, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        if self.extra == "outputs":
            return {"loss": loss, "out": out.repeat(1, 500)}
        if hasattr(self, "gain"):
            loss = loss + self.gain.sum().float()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(parameters, lr=0.01) if self.lightly else torch.optim.Adam(parameters)


# What DDP is given, what the module has besides its layers, and how many micro-batches make a step.
CASES: dict[str, tuple[dict[str, Any], str, int]] = {
    "default": ({"bucket_cap_mb": 0.25}, "", 1),
    "default cap": ({}, "", 1),
    "view": ({"bucket_cap_mb": 0.25, "gradient_as_bucket_view": True}, "", 1),
    "static": ({"bucket_cap_mb": 0.25, "static_graph": True}, "", 1),
    "static view": ({"bucket_cap_mb": 0.25, "static_graph": True, "gradient_as_bucket_view": True}, "", 1),
    "find unused": ({"bucket_cap_mb": 0.25, "find_unused_parameters": True}, "unused", 1),
    "outputs": ({"bucket_cap_mb": 0.25, "find_unused_parameters": True}, "outputs", 1),
    "accumulate": ({"bucket_cap_mb": 0.25}, "", 2),
    "accumulate view": ({"bucket_cap_mb": 0.25, "gradient_as_bucket_view": True}, "", 2),
    "buffers": ({"bucket_cap_mb": 0.25}, "buffers", 2),
    "buffers stay": ({"bucket_cap_mb": 0.25, "broadcast_buffers": False}, "buffers", 1),
    "mixed": ({"bucket_cap_mb": 0.25}, "mixed", 1),
    "manual": ({"bucket_cap_mb": 0.25, "gradient_as_bucket_view": True}, "manual", 1),
}
STEPS = 3
HEAVILY = ("default", "view", "static view", "find unused", "accumulate view")  # those with Adam too
RUNS = [(name, lightly) for name in CASES for lightly in (True, False) if lightly or name in HEAVILY]

# -- the truth, in two processes of their own


class Marks(pl.Callback):
    """Marks each batch in the profile, and keeps what the reducer says of its buckets."""

    said: dict[str, str]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        with record_function(f"truth::{batch_idx}"):
            pass

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.said = dict(trainer.strategy.model._get_ddp_logging_data())


def train(name: str, lightly: bool, rank: int) -> dict[str, Any]:
    """Train one case on this rank; rank 0 says by how much the batches peaked."""
    options, extra, accumulate = CASES[name]
    batches = (STEPS + 1) * accumulate
    dataset = TensorDataset(
        torch.randn(2 * batches * BATCH_SIZE, 64), torch.randint(0, 10, (2 * batches * BATCH_SIZE,))
    )
    marks = Marks()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler if rank == 0 else contextlib.nullcontext():
        strategy = pl.strategies.DDPStrategy(process_group_backend="gloo", **options)
        trainer = quiet_trainer(marks, devices=2, strategy=strategy, accumulate_grad_batches=accumulate)
        trainer.fit(Net(extra, lightly), DataLoader(dataset, batch_size=BATCH_SIZE))
    if rank:
        return {}
    said = {name: str(value) for name, value in marks.said.items() if "bucket" in name}
    return {"peaks": peaks_of(profiler), "said": said}


def peaks_of(profiler: Any) -> dict[str, int]:
    """The most bytes alive during each batch; ``"before"`` until the first one starts."""
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    live: dict[int, int] = {}
    sent: set[int] = set()
    total, batch, peaks = 0, "before", {}
    for node, path in sorted(walk(roots, ()), key=lambda pair: pair[0].start_time_ns):
        if node.name.startswith("truth::"):
            batch = node.name.removeprefix("truth::")
        if node.tag != _EventType.Allocation or node.extra_fields.device.type != "cpu":
            continue
        address, nbytes = node.extra_fields.ptr, node.extra_fields.alloc_size
        flattens = "aten::flatten_dense_tensors" in path
        if nbytes > 0:
            # What was broadcast is let go by gloo's thread at times, where the profiler does not look.
            gone = [*(() if flattens else sent), address]
            sent -= set(gone)
            total += nbytes - sum(live.pop(block, 0) for block in gone)
            live[address] = nbytes
            sent |= {address} if flattens else set()
        else:
            total -= live.pop(address, 0)
            sent.discard(address)
        peaks[batch] = max(total, peaks.get(batch, 0))
    return peaks


def walk(nodes: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    for node in nodes:
        yield node, path
        yield from walk(node.children, (*path, node.name))


def train_all(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    told = {f"{name}, {lightly}": train(name, lightly, rank) for name, lightly in RUNS}
    if rank == 0:
        (folder / "truth.json").write_text(json.dumps(told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Memory of rank 0 in a real training, by case and optimizer."""
    return trained(tmp_path_factory.mktemp("ddp"))


@pytest.fixture(scope="module")
def lowest(truth: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, float], float]:
    """The peak of one batch; where it is off, the lowest of up to three trainings.

    On a busy machine gloo's own thread lets go of a tensor late, so a peak can only be too high by chance.
    """
    runs = [truth]

    def of(name: str, batch: str, expected: float) -> float:
        while min(run[name]["peaks"][batch] for run in runs) > expected * 1.001 and len(runs) < 3:
            runs.append(trained(tmp_path_factory.mktemp("ddp")))
        return float(min(run[name]["peaks"][batch] for run in runs))

    return of


def trained(folder: Path) -> dict[str, Any]:
    """Train all cases on two processes, and read what rank 0 wrote."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    on_ranks(2, train_all, folder)
    told: dict[str, Any] = json.loads((folder / "truth.json").read_text())
    return told


# -- the prediction


@pytest.fixture(scope="module")
def predict(all_here: None) -> Iterator[Any]:
    """The trace of a case: program.py's own run, with DDP attached where Lightning would wrap the module.

    Each is captured once.
    """
    known: dict[str, Trace] = {}

    def predicted(
        options: dict[str, Any] | None, extra: str = "", accumulate: int = 1, *, lightly: bool = True, **where: Any
    ) -> Trace:
        key = repr((options, extra, accumulate, lightly, {"method": "fake", **where}))
        known[key] = known.get(key) or traced(options, extra, accumulate, lightly, **where)
        return known[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shadow, "STEPS", STEPS)
        yield predicted


def traced(options: dict[str, Any] | None, extra: str, accumulate: int, lightly: bool, **where: Any) -> Trace:
    strategy = strategy_of(pl, options or {})

    @contextlib.contextmanager
    def watched(recorder: Recorder, module: nn.Module) -> Iterator[None]:
        with watching(recorder, module):
            if options is not None:
                ddp.attach(strategy, module, recorder)
            yield

    trainer = pl.Trainer(accelerator="cpu", devices=1, accumulate_grad_batches=accumulate, logger=False)
    sample = [[torch.randn(n, 64), torch.randint(0, 10, (n,))] for n in (2, 4)]
    program = program_module.LightningProgram(
        trainer,
        Net(extra, lightly),
        Batches(*sample, 2, 4),
        where.get("device", torch.device("cpu")),
        batches_per_epoch=lambda _: 100,
        gpu=where.get("gpu"),
    )
    with mock.patch.object(program_module, "watching", watched):
        return capture(program, BATCH_SIZE, where.get("method", "fake"))


def strategy_of(package: Any, options: dict[str, Any], **more: Any) -> Any:
    return package.strategies.DDPStrategy(parallel_devices=[torch.device("cpu")] * 2, **options, **more)


def peaks_by_batch(events: Any) -> dict[int, int]:
    """The most bytes alive during each batch."""
    total, peaks = 0, {}
    for event in events:
        total += event.nbytes if event.action == "alloc" else -event.nbytes
        if event.phase != "setup":
            peaks[event.step] = max(total, peaks.get(event.step, 0))
    return peaks


def steady_peak(trace: Trace) -> int:
    """The peak of the last batch."""
    peaks = peaks_by_batch(trace)
    return peaks[max(peaks)]


def bucket_bytes(trace: Trace) -> list[int]:
    """The buckets, in the order in which they were made: alone they are made by ``empty``, of more than a map."""
    made = [event for event in trace if event.action == "alloc" and event.operator == "aten.empty.memory_format"]
    return [event.nbytes for event in made if event.part == "communication" and event.nbytes > 100]


LARGEST_LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)  # a gradient is there next to its bucket until it has been copied
GRADIENT_BYTES = 4 * sum(p.numel() for p in Net().parameters())

# -- what a reader learns


@pytest.mark.parametrize("method", ["fake", pytest.param("real", marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "lightly"), RUNS)
def test_every_batch_peaks_where_the_profiler_saw_it_peak(
    name: str, lightly: bool, method: str, lowest: Any, predict: Any
) -> None:
    options, extra, accumulate = CASES[name]
    predicted = peaks_by_batch(predict(options, extra, accumulate, lightly=lightly, method=method))
    assert len(predicted) == STEPS * accumulate
    for batch, peak in predicted.items():
        measured = lowest(f"{name}, {lightly}", str(batch), peak)
        assert peak == pytest.approx(measured, rel=1e-3), f"batch {batch}"


@pytest.mark.parametrize("name", CASES)
def test_buckets_are_those_of_the_reducer(name: str, truth: Any, predict: Any) -> None:
    options, extra, accumulate = CASES[name]
    said = truth[f"{name}, True"]["said"]
    known = [said["bucket_sizes"], *([said["rebuilt_bucket_sizes"]] if int(said["has_rebuilt_buckets"]) else [])]
    assert bucket_bytes(predict(options, extra, accumulate)) == [int(n) for text in known for n in text.split(",")]


def test_gradients_fill_buckets_in_the_order_in_which_they_are_ready(truth: Any) -> None:
    said = truth["default, True"]["said"]["rebuilt_per_bucket_param_indices"]
    buckets = [[int(index) for index in bucket.split()] for bucket in said.split(",")]
    parameters = list(Net().parameters())
    ready = [index for bucket in buckets for index in bucket]
    arguments = ddp.Arguments.of(strategy_of(pl, CASES["default"][0]))
    assert ddp.later_buckets(arguments, parameters, [False] * len(parameters), ready) == buckets
    assert len(buckets) > 2
    assert ready == [*reversed(range(len(parameters)))]


def test_ddp_takes_the_gradients_a_second_time_and_views_give_that_back(predict: Any) -> None:
    alone = steady_peak(predict(None))
    assert steady_peak(predict(CASES["default"][0])) - alone == GRADIENT_BYTES
    assert steady_peak(predict(CASES["view"][0])) == pytest.approx(alone + LARGEST_LAYER_BYTES, rel=1e-3)


def test_views_save_nothing_while_gradients_are_accumulated(predict: Any) -> None:
    last = steady_peak(predict(CASES["default"][0], accumulate=2))
    assert steady_peak(predict(CASES["view"][0], accumulate=2)) > 0.9 * last


def test_views_hold_the_gradients_twice_while_buckets_are_rebuilt(predict: Any) -> None:
    alone, peaks = peaks_by_batch(predict(None)), peaks_by_batch(predict(CASES["view"][0]))
    assert peaks[1] > peaks[2]
    assert peaks[1] > alone[1] + GRADIENT_BYTES / 2


@pytest.mark.parametrize("name", ["default", "view", "static view", "find unused", "accumulate", "buffers", "manual"])
def test_a_pretended_gpu_takes_what_the_cpu_does(name: str, predict: Any) -> None:
    """There the backward pass is walked in Python, and must run the same hooks."""
    options, extra, accumulate = CASES[name]
    on_gpu = predict(options, extra, accumulate, device=torch.device("cuda"), gpu=H200)
    without_scratch = [event for event in on_gpu if event.part != "workspaces"]
    on_cpu = peaks_by_batch(predict(options, extra, accumulate))
    assert peaks_by_batch(without_scratch) == pytest.approx(on_cpu, rel=1e-3)


def test_a_hook_that_compresses_sends_half_of_each_bucket(predict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**CASES["default"][0], "ddp_comm_hook": default_hooks.bf16_compress_hook}
    trace = predict(options, device=torch.device("cuda"), gpu=H200)
    copies = [event for event in sent(trace) if event.operator == "aten.empty.memory_format" and event.step == 2]
    assert sum(event.nbytes for event in copies) * 2 == GRADIENT_BYTES
    assert trace.notes == ()


def test_a_hook_that_is_not_known_is_said_to_be_missing(predict: Any) -> None:
    def shout(state: Any, bucket: Any) -> Any: ...

    options = {"ddp_comm_hook": shout}
    assert any("shout" in note for note in predict(options, device=torch.device("cuda"), gpu=H200).notes)
    assert predict(options).notes == ()  # Lightning registers hooks on CUDA only


def attached(make: Callable[[], Any], *, is_fit: bool = True, **options: Any) -> tuple[Trace, Any]:
    """What DDP allocates as it wraps a module on fake tensors, and the module's copy."""
    recorder = Recorder("cpu")
    with tensors(fake=True):
        module_copy = make()
        with watching(recorder, module_copy):
            ddp.attach(strategy_of(pl, options), module_copy, recorder, is_fit=is_fit)
    return recorder.trace(1, "fake"), module_copy


def sent(trace: Trace) -> list[Event]:
    return [event for event in trace if event.part == "communication" and event.action == "alloc"]


def test_two_broadcasts_are_on_their_way_at_once_when_the_wrapper_is_built() -> None:
    class Large(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024 * 40, bias=False) for _ in range(6))  # 160 MiB each
            self.layers.requires_grad_(False)
            self.head = nn.Linear(4, 4)

    total, most = 0, 0
    for event in attached(Large)[0]:
        if event.part == "communication":
            total += event.nbytes if event.action == "alloc" else -event.nbytes
            most = max(most, total)
    assert most == 2 * 320 * 2**20


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_two_maps_tell_which_parameters_were_used(option: str, predict: Any) -> None:
    maps = [event for event in sent(predict({option: True})) if event.nbytes == 4 * len([*Net().parameters()])]
    assert len(maps) == 2  # one on the host, one on the device, which is the host here
    on_gpu = sent(predict({option: True}, device=torch.device("cuda"), gpu=H200))
    assert len([event for event in on_gpu if event.nbytes == maps[0].nbytes]) == 1


def test_a_validation_alone_broadcasts_the_module_and_wraps_nothing() -> None:
    trace, module_copy = attached(Net, is_fit=False)
    assert [event.nbytes for event in sent(trace)] == [GRADIENT_BYTES]
    assert "training_step" not in vars(module_copy)


def test_what_stays_of_views_is_called_communication(predict: Any) -> None:
    """The buckets are there when no parameter has a gradient, as while a fit validates."""
    alive = {event.block: event for event in predict(CASES["view"][0])}
    standing = [event for event in alive.values() if event.action == "alloc"]
    assert sum(event.nbytes for event in standing if event.part == "communication") == GRADIENT_BYTES
    assert not [event for event in standing if event.part == "gradients"]


@pytest.mark.parametrize(("gpu", "streams"), [(H200, {1}), (None, {0})])
def test_on_a_gpu_the_wrapper_is_built_on_a_stream_of_its_own(gpu: Any, streams: set[int]) -> None:
    """Lightning does so; what it frees there, the training's own stream does not take again."""

    class Streams(Recorder):
        now = 0

        @contextlib.contextmanager
        def on_stream(self, stream: int) -> Iterator[None]:
            self.now = stream
            yield
            self.now = 0

        def label(self, tensors: Any, part: str) -> None:
            super().label(tensors, part)
            if part == "communication":
                seen.add(self.now)

    seen: set[int] = set()
    recorder = Streams("cuda" if gpu else "cpu", kernel_target=gpu.kernel_target if gpu else None)
    with tensors(fake=True, gpu=gpu):
        module_copy = Net()
        module_copy = module_copy.to("cuda") if gpu else module_copy
        with watching(recorder, module_copy):
            ddp.attach(strategy_of(pl, {}), module_copy, recorder)
    assert seen == streams


def test_synchronized_batch_norms_gather_their_statistics() -> None:
    """For 32 channels: 65 floats (mean, deviation, count) joined, and those of two ranks; back at once."""
    strategy = strategy_of(pl, {})
    strategy._layer_sync = pl.plugins.TorchSyncBatchNorm()
    recorder = Recorder("cpu")
    with tensors(fake=True):
        module_copy = pl.LightningModule()
        module_copy.norm = nn.BatchNorm1d(32)
        with watching(recorder, module_copy):
            ddp.attach(strategy, module_copy, recorder)
            before = recorder.alive_bytes
            module_copy.norm(torch.empty(8, 32)).sum()
            assert recorder.alive_bytes == before
    events = recorder.trace(1, "fake").events
    exchanged = [e for e in events if e.action == "alloc" and e.part == "communication" and "new_empty" in e.operator]
    assert [event.nbytes for event in exchanged][-2:] == [4 * 65, 4 * 65 * 2]


def test_sparse_gradients_have_no_bucket() -> None:
    class Sparse(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 16, sparse=True)
            self.head = nn.Linear(16, 8)

    assert bucket_bytes(attached(Sparse, find_unused_parameters=True)[0]) == [4 * (16 * 8 + 8)]


@pytest.mark.parametrize("package", [pl, lp], ids=["pytorch_lightning", "lightning"])
def test_only_strategies_that_wrap_in_ddp_are_attached(package: Any) -> None:
    class Own(package.strategies.DDPStrategy):  # type: ignore[misc]
        pass

    class XLAStrategy(package.strategies.DDPStrategy):  # type: ignore[misc]
        pass

    assert ddp.wraps_in_ddp(strategy_of(package, {}))
    assert ddp.wraps_in_ddp(Own())
    assert not ddp.wraps_in_ddp(XLAStrategy())
    assert not ddp.wraps_in_ddp(package.strategies.FSDPStrategy())
    assert not ddp.wraps_in_ddp(package.strategies.SingleDeviceStrategy())
    assert ddp.steps_until_steady(package.strategies.SingleDeviceStrategy()) == 2
    assert ddp.steps_until_steady(strategy_of(package, {"static_graph": True})) == 3


@pytest.mark.parametrize("name", ["default", "accumulate", "manual"])
def test_gradients_are_sent_once_a_step(name: str, predict: Any) -> None:
    sent = [work for work in predict(*CASES[name]).work if work.kind == COMMUNICATION]
    assert sum(work.nbytes for work in sent) == 2 * GRADIENT_BYTES
    assert all(work.updates for work in sent)
