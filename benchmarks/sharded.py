"""One rank of N, predicted and measured on the CPU: FSDP2, HSDP, tensor parallelism and FSDP1, to the byte.

The prediction is made in one process that has no process group. The truth is PyTorch's profiler around a real training
of rank 0, in fresh processes: under torch's fake process group, whose collectives take no memory of their own, the same
on every repetition; or on real gloo ranks of this machine (`--gloo`), several times. What gloo's threads allocate
inside a collective is counted apart (under ``c10d::``). What they free, the profiler does not see, since it watches
rank 0's own thread: the peak varies from one repetition to the next, and the least is the truth.

    python benchmarks/sharded.py                              # all cases at 2, 4 and 8 ranks
    python benchmarks/sharded.py --only plain tensor --ranks 2
    python benchmarks/sharded.py --gloo --ranks 2 4 --repeats 5
    python benchmarks/sharded.py --many 2 64 1024              # seconds and memory of a prediction, by number of ranks
"""

import argparse
import functools
import gc
import itertools
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

STEPS = 3
WIDTH, LENGTH, WORDS = 128, 32, 500
DEVICE = "cpu"


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_up(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


class MLP(nn.Module):
    """Layers whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"up": (WIDTH + 3, 4 * WIDTH), "down": (4 * WIDTH, WIDTH + 3)}
        layers = ({name: nn.Linear(*size) for name, size in sizes.items()} for _ in range(4))
        self.blocks = nn.ModuleList(nn.ModuleDict(each) for each in layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        return x.square().mean()


def batch_for(model: str, samples: int) -> Tensor:
    return torch.zeros(samples, LENGTH, dtype=torch.long) if model == "gpt" else torch.zeros(samples, WIDTH + 3)


# What is done to a model on one of several ranks


def mesh_of(ranks: int, *, replicas: int = 1, names: tuple[str, str] = ("replicate", "shard")) -> DeviceMesh:
    return _mesh_of(dist.group.WORLD, ranks, replicas, names)


@functools.cache  # what a mesh takes itself is not the training's: the second time, it is there
def _mesh_of(_: object, ranks: int, replicas: int, names: tuple[str, str]) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(DEVICE, (ranks,))
    return init_device_mesh(DEVICE, (replicas, ranks // replicas), mesh_dim_names=names)


def sharded(ranks: int, *, blocks: bool = True, replicas: int = 1, half: bool = False, **options: Any) -> Callable:
    def parallelize(model: Any) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = mesh_of(ranks, replicas=replicas)
        if half:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks if blocks else ():
            for each in block.values() if isinstance(block, nn.ModuleDict) else (block,):
                fully_shard(each, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return parallelize


def tensor_parallel(ranks: int) -> Callable:
    def parallelize(model: Any) -> nn.Module:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = mesh_of(ranks)
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    return parallelize


def both(ranks: int) -> Callable:
    def parallelize(model: Any) -> nn.Module:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = mesh_of(ranks, replicas=ranks // 2, names=("data", "tensor"))
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if not isinstance(block, nn.ModuleDict):
                fully_shard(block, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    return parallelize


def fsdp1(ranks: int, kind: str = "FULL_SHARD", **options: Any) -> Callable:
    def parallelize(model: Any) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        if kind.startswith("HYBRID"):
            options["device_mesh"] = mesh_of(ranks, replicas=2)
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block, nn.Linear}),
            device_id=torch.device(DEVICE),
            sharding_strategy=ShardingStrategy[kind],
            **{"use_orig_params": True, **options},
        )

    return parallelize


CASES: dict[str, Callable[[int], Callable]] = {
    "plain": sharded,
    "kept gathered": partial(sharded, reshard_after_forward=False),
    "root alone": partial(sharded, blocks=False),
    "bf16": partial(sharded, half=True),
    "hsdp": partial(sharded, replicas=2),
    "tensor": tensor_parallel,
    "fsdp x tensor": both,
    "fsdp1": fsdp1,
    "fsdp1 flat": partial(fsdp1, use_orig_params=False),
    "fsdp1 grad op": partial(fsdp1, kind="SHARD_GRAD_OP"),
    "fsdp1 no shard": partial(fsdp1, kind="NO_SHARD"),
    "fsdp1 hybrid": partial(fsdp1, kind="HYBRID_SHARD"),
}
MODELS = {"gpt": GPT, "mlp": MLP}
LEAST_RANKS = {"hsdp": 4, "fsdp1 hybrid": 4, "fsdp x tensor": 4}


def optimizer_for(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def run_model(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


# Predicted


def predicted(model: str, case: str, ranks: int, samples: int) -> tuple[int, dict[str, int], float]:
    """The peak, its parts, and the seconds it took: from captures at other batch sizes."""
    from lightning_memguard.core.batch.batches import batches_from_one
    from lightning_memguard.core.capture.predict import predict
    from lightning_memguard.core.capture.program import LoopProgram
    from lightning_memguard.core.replay.settings import AllocatorSettings

    started = time.perf_counter()
    batches = batches_from_one(batch_for(model, 4))
    given = MODELS[model](), batches, run_model, optimizer_for, torch.device("cpu")
    program = LoopProgram(*given, ranks=ranks, parallelize=CASES[case](ranks))
    found = predict(program, 4, AllocatorSettings(kind="exact")).footprint_at(samples)
    return found.peak_allocated_bytes, dict(found.parts), time.perf_counter() - started


# Measured


def measure(model: str, case: str, ranks: int, samples: int) -> tuple[int, int]:
    """The peak of this rank's training, by the profiler: without what the communication library takes, and with it."""
    parallelize = CASES[case](ranks)
    parallelize(MODELS[model]())
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        module = parallelize(MODELS[model]())
        optimizer = optimizer_for(module.parameters())
        started = time.time_ns()  # the allocations of the setup count where they are alive later
        for _ in range(STEPS):
            module.zero_grad()
            batch = batch_for(model, samples)
            loss = module(batch)
            loss.backward()
            optimizer.step()
    events = sorted(_allocations(profiler), key=lambda event: event[0])
    return _peak(events, started, without="c10d::"), _peak(events, started)


def _allocations(profiler: Any) -> Iterator[tuple[int, int, int, tuple[str, ...]]]:
    todo = [(event, ()) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while todo:
        event, path = todo.pop()
        todo += [(child, (*path, event.name)) for child in event.children]
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, path


def _peak(events: Sequence[tuple[int, int, int, tuple[str, ...]]], started: int, without: str = "") -> int:
    live = peak = 0
    left_out: set[int] = set()
    for at, nbytes, address, path in events:
        if without and nbytes > 0 and any(name.startswith(without) for name in path):
            left_out.add(address)
        elif address in left_out and nbytes < 0:
            left_out.discard(address)
        else:
            live += nbytes
            peak = max(peak, live) if at >= started else peak
    return peak


def under_fake_group(model: str, case: str, ranks: int, samples: int) -> int:
    """In a fresh process."""
    command = [sys.executable, __file__, "--measure", model, case, str(ranks), str(samples)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if answer.returncode:
        raise RuntimeError(answer.stderr[-2000:])
    return json.loads(answer.stdout.splitlines()[-1])[0]


def measure_as_first(model: str, case: str, ranks: int, samples: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    print(json.dumps(measure(model, case, ranks, samples)))


def _gloo_rank(rank: int, ranks: int, port: int, work: tuple[str, str, int, int], results: Any) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = measure(*work)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def on_gloo_ranks(model: str, case: str, ranks: int, samples: int) -> tuple[int, int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    work = (model, case, ranks, samples)
    processes = [spawn.Process(target=_gloo_rank, args=(rank, ranks, port, work, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = results.get(timeout=600)
    for process in processes:
        process.join(60)
    return found


# Compare


def situations(options: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    """Each model, case, number of ranks, and number of samples."""
    for model, case, count in itertools.product(options.models, options.only, options.ranks):
        if count >= LEAST_RANKS.get(case, 2):
            yield model, case, count, options.samples


def compare(options: argparse.Namespace) -> int:
    """Print the table; how many differ by more than bf16's 0.3 % or, in fp32, by a byte."""
    print(f"{'model':5} {'case':15} {'ranks':>5} {'predicted':>12} {'measured':>12} {'difference':>10}  seconds")
    wrong = 0
    for what in situations(options):
        model, case, count, _ = what
        ours, _, seconds = predicted(*what)
        truth = under_fake_group(*what)
        wrong += abs(ours - truth) > (0.003 * truth if case == "bf16" else 0)
        row = f"{model:5} {case:15} {count:>5} {ours:>12,} {truth:>12,} {ours - truth:>+10,}  {seconds:.1f}"
        print(row, flush=True)
    print(f"{wrong} differ")
    return wrong


def compare_with_gloo(options: argparse.Namespace) -> None:
    print(f"{'model':5} {'case':15} {'ranks':>5} {'predicted':>12}  measured without c10d (least, most)     with it")
    for what in situations(options):
        model, case, count, _ = what
        ours, _, _ = predicted(*what)
        alone, together = zip(*(on_gloo_ranks(*what) for _ in range(options.repeats)), strict=True)
        within = "within" if min(alone) <= ours <= max(alone) else f"{ours - min(alone):+,}"
        row = f"{model:5} {case:15} {count:>5} {ours:>12,}  {min(alone):>12,} {max(alone):>12,} {within:>10}"
        print(f"{row}   {max(together):>12,}", flush=True)


def count_many(cases: Sequence[str], ranks: Sequence[int]) -> None:
    print(f"{'case':15} {'ranks':>6} {'seconds':>8} {'MiB resident (most of a child)':>30} {'peak MiB':>9}")
    for case in cases:
        for count in ranks:
            peak, _, seconds = predicted("gpt", case, count, 8)
            resident = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
            print(f"{case:15} {count:>6} {seconds:>8.1f} {resident:>30} {peak / 2**20:>9.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], metavar="CASE")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--gloo", action="store_true", help="compare with real ranks of this machine")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--many", nargs="+", type=int, metavar="RANKS", help="seconds and memory of a prediction")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.measure:
        model, case, ranks, samples = arguments.measure
        measure_as_first(model, case, int(ranks), int(samples))
        return
    torch.set_num_threads(1)
    if arguments.many:
        count_many(arguments.only, arguments.many)
    elif arguments.gloo:
        compare_with_gloo(arguments)
    elif compare(arguments):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
