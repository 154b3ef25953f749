"""What a process that trains on the CPU takes besides its tensors: the recordings behind `process_bytes`.

Each in a process forked from one that has computed nothing: resident memory that is no file's (RssAnon), in MiB.

- products: what MKL keeps after a linear layer's products, forward, gradient of its input, gradient of its weight
- objects: from the setup of a fit to its second step, without a logger; the model and its batches are a few KiB

    python benchmarks/cpu_process.py                # 1 and 2 threads
    python benchmarks/cpu_process.py --threads 1 4 8
"""

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_memguard import MemGuard
from lightning_memguard.core.device.malloc import return_freed_memory
from lightning_memguard.core.device.process import OBJECTS_BYTES, process_bytes
from shared.truth import QUIET, quieten
from shared.zoo import Supervised, vectors

_MIB = 1 << 20
_ROWS = (64, 512, 2048)
_LAYERS = (  # inputs, outputs
    (128, 128),
    (256, 256),
    (128, 512),
    (512, 128),
    (512, 512),
    (512, 2048),
    (2048, 512),
    (1024, 1024),
    (384, 4096),
    (384, 16384),
)
_MOST_FLOPS = 6e9


def anonymous() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def in_a_process(work: Callable[[], float]) -> float:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, str(work()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return float(found)


def products(threads: int, rows: int, inputs: int, outputs: int) -> float:
    """What stays once the three products of a linear layer were computed."""
    torch.set_num_threads(threads)
    x, weight, y = torch.ones(rows, inputs), torch.ones(outputs, inputs), torch.ones(rows, outputs)
    dx, dweight = torch.ones_like(x), torch.ones_like(weight)
    before = anonymous()
    torch.mm(x, weight.t(), out=y)
    torch.mm(y, weight, out=dx)
    torch.mm(y.t(), x, out=dweight)
    return anonymous() - before


class Objects(pl.Callback):
    """Reads what the process holds when its second step is over."""

    def __init__(self) -> None:
        self.before = anonymous()

    def on_train_batch_end(self, *_: object) -> None:
        self.taken = anonymous() - self.before


def objects(threads: int) -> float:
    quieten()
    torch.set_num_threads(threads)
    return_freed_memory(torch.device("cpu"))
    module = Supervised(torch.nn.Linear(16, 10), "adam", torch.nn.functional.cross_entropy)
    trainer = pl.Trainer(accelerator="cpu", max_steps=2, **QUIET)
    watch = Objects()
    trainer.callbacks += [watch, MemGuard(max_batch_size=8)]
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 1)
        trainer.fit(module, DataLoader(vectors(16)(64), batch_size=8))
    return watch.taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    for threads in arguments.threads:
        taken = [in_a_process(lambda: objects(threads)) for _ in range(3)]  # noqa: B023 - it is called here
        print(f"{threads} threads: objects {statistics.median(taken):.2f} (of {min(taken):.2f} to {max(taken):.2f})")
        print(f"{'inputs':>8} {'outputs':>8} {'at most':>8}   kept at {', '.join(map(str, _ROWS))} rows")
        for inputs, outputs in _LAYERS:
            most = process_bytes([torch.empty(outputs, inputs, device="meta")], threads)[2] / _MIB
            most -= OBJECTS_BYTES / _MIB
            kept = [
                in_a_process(lambda: products(threads, rows, inputs, outputs))  # noqa: B023
                for rows in _ROWS
                if rows * inputs * outputs < _MOST_FLOPS
            ]
            words = " ".join(f"{each:6.2f}" for each in kept)
            print(f"{inputs:>8} {outputs:>8} {most:>8.2f}   {words}{'  ABOVE' if max(kept) > most else ''}", flush=True)


if __name__ == "__main__":
    main()
