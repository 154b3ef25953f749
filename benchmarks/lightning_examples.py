"""Lightning's two examples of tensor parallelism with FSDP2, as written, predicted and measured. Needs no GPU.

They are `examples/fabric/tensor_parallel` and `examples/pytorch/tensor_parallel` of Lightning-AI/pytorch-lightning,
which is cloned first. Small, they train on gloo ranks of this machine under PyTorch's profiler, rank 0 of which is
compared, without what gloo allocates (`sharded.py`). As they are, 2 x 2 ranks, they are compared with their README:
36.73 GB, printed by ``torch.cuda.max_memory_reserved`` when that was written (c8059d7bfd); the 17.95 GB of Fabric's are
of a first version, whose optimizer had not been given the sharded parameters.

    python benchmarks/lightning_examples.py ../pytorch-lightning/examples
    python benchmarks/lightning_examples.py ../pytorch-lightning/examples --full
"""

import argparse
import contextlib
import importlib
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Subset

from sharded import _allocations
from shared.truth import QUIET, quieten

MIB = 1 << 20
PUBLISHED_MIB = 36.73e9 / MIB
SMALL = {"dim": 256, "n_layers": 4, "n_heads": 8, "vocab_size": 1000}
SAMPLES, LENGTH, STEPS = 8, 128, 3


def example(folder: str, kind: str, small: bool) -> Any:
    """The example's own ``train.py``, with a smaller model if asked for."""
    sys.path.insert(0, str(Path(folder) / kind / "tensor_parallel"))
    train = importlib.import_module("train")
    make = train.ModelArgs
    train.ModelArgs = (lambda **_: make(**SMALL)) if small else make
    return train


def predicted(folder: str, kind: str, sizes: tuple[int, int], small: bool) -> tuple[int, int]:
    """Bytes allocated and reserved."""
    from lightning_memguard import estimate

    train = example(folder, kind, small)
    batch = torch.zeros(SAMPLES, LENGTH + 1, dtype=torch.long)
    ranks = {"devices": sizes[0] * sizes[1], "device": "cpu" if small else "A100-SXM4-80GB"}
    own = {"data_parallel_size": sizes[0], "tensor_parallel_size": sizes[1]}
    with torch.device("meta"):
        model = train.Llama3() if kind == "pytorch" else train.Transformer(train.ModelArgs(vocab_size=32000))
    if kind == "pytorch":
        found = estimate(model, batch, strategy=train.ModelParallelStrategy(**own), **ranks)
    else:
        output = torch.empty(0)

        def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            nonlocal output  # which the example's loop holds until the next one is there
            inputs, labels = batch[:, :-1], batch[:, 1:]
            output = model(inputs)
            return F.cross_entropy(output.reshape(-1, output.size(-1)), labels.reshape(-1))

        strategy = train.ModelParallelStrategy(parallelize_fn=train.parallelize, **own)
        context = train.loss_parallel if sizes[1] > 1 else contextlib.nullcontext
        found = estimate(model, batch, step=step, context=context, optimizer=adamw, strategy=strategy, **ranks)
    return found.peak_allocated_bytes, found.peak_reserved_bytes


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, foreach=True)


def _rank(rank: int, port: int, folder: str, kind: str, sizes: tuple[int, int], results: Any) -> None:
    quieten()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    os.environ.update(where)
    torch.set_num_threads(1)
    train = example(folder, kind, small=True)
    name = "Trainer" if kind == "pytorch" else "Fabric"
    runner, strategy, lightning = getattr(train.L, name), train.ModelParallelStrategy, train.L
    data = train.RandomTokenDataset(vocab_size=SMALL["vocab_size"], seq_length=LENGTH)
    data = Subset(data, range(STEPS * SAMPLES * sizes[0]))

    def on_cpu(**settings: Any) -> Any:
        quiet = QUIET if kind == "pytorch" else {}
        return runner(**{**settings, "accelerator": "cpu", "devices": sizes[0] * sizes[1], **quiet})

    def on_gloo(**settings: Any) -> Any:
        own = {"data_parallel_size": sizes[0], "tensor_parallel_size": sizes[1], "process_group_backend": "gloo"}
        return strategy(**{**settings, **own})

    setattr(lightning, name, on_cpu)
    train.ModelParallelStrategy, train.RandomTokenDataset = on_gloo, lambda **_: data
    if kind == "fabric":
        runner.save = lambda *_, **__: None
    with tempfile.TemporaryDirectory() as here, contextlib.chdir(here):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train.train()
        if rank == 0:
            results.put((peak_of(profiler, without="c10d::"), peak_of(profiler, without="none")))
        torch.distributed.barrier()


def peak_of(profiler: Any, without: str) -> int:
    """The most bytes alive; a block that gloo's thread frees, unseen, ends where another begins at its address."""
    live: dict[int, int] = {}
    total = peak = 0
    for _, nbytes, address, path in sorted(_allocations(profiler), key=lambda event: event[0]):
        total -= live.pop(address, 0)
        if nbytes > 0 and not any(name.startswith(without) for name in path):
            live[address] = nbytes
            total += nbytes
            peak = max(peak, total)
    return peak


def measured(folder: str, kind: str, sizes: tuple[int, int]) -> tuple[int, int]:
    """The peak of rank 0 on gloo: without what gloo takes, and with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    work = (port, folder, kind, sizes, results)
    processes = [spawn.Process(target=_rank, args=(rank, *work)) for rank in range(sizes[0] * sizes[1])]
    for process in processes:
        process.start()
    found = results.get(timeout=300)
    for process in processes:
        process.join(60)
    return found


def _predict(work: tuple[Any, ...]) -> tuple[int, int, float]:
    quieten()
    torch.set_num_threads(1)
    started = time.process_time()
    found = predicted(*work)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return *found, time.process_time() - started + usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", help="the folder of that name in a clone of Lightning's repository")
    parser.add_argument("--full", action="store_true", help="as they are, compared with what was published")
    parser.add_argument("--sizes", nargs="+", default=["2x1", "1x2"], metavar="DATAxTENSOR")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    for kind in ("pytorch", "fabric"):
        for text in ["2x2"] if options.full else options.sizes:
            data, tensor = map(int, text.split("x"))
            work = options.examples, kind, (data, tensor)
            with spawn.Pool(1) as child:
                allocated, reserved, seconds = child.apply(_predict, ((*work, not options.full),))
            print(f"{kind} {text}: predicted {allocated:,} allocated, {seconds:.1f} s of processor time", flush=True)
            if options.full:
                off = reserved / MIB / PUBLISHED_MIB - 1
                print(f"  reserved {reserved / MIB:,.0f} MiB, published {PUBLISHED_MIB:,.0f} ({off:+.2%})", flush=True)
                continue
            alone, together = zip(*(measured(*work) for _ in range(options.repeats)), strict=True)
            off = allocated - min(alone)
            print(
                f"  measured without c10d {min(alone):,} to {max(alone):,} ({off:+,}, {off / min(alone):+.3%}), "
                f"with it at most {max(together):,}",
                flush=True,
            )


if __name__ == "__main__":
    main()
