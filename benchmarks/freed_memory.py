"""The cost of returning freed memory at once in a CPU training, as MemGuard makes glibc do if memory is tight.

Real training steps in one process, alternating glibc's own rule and MemGuard's; the median of the ratios.

    python benchmarks/freed_memory.py
"""

import argparse
import ctypes
import statistics
import time
import warnings

import torch
from torch.utils.data import default_collate

from lightning_memguard.core.device.malloc import return_freed_memory
from shared.zoo import case_named

ROUNDS = 6
SIZES = {"resnet": 32, "unet": 32, "mlp": 1024}


def seconds_of(name: str) -> tuple[float, float, float]:
    """Seconds of two steps with glibc's rule, with MemGuard's, and the median ratio of neighbors."""
    case = case_named(name)
    module = case.build("sgd")
    optimizer = module.configure_optimizers()
    dataset = case.dataset(SIZES[name])
    batch = default_collate([dataset[i] for i in range(SIZES[name])])

    def two_steps() -> float:
        started = time.perf_counter()
        for _ in range(2):
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            optimizer.step()
        return time.perf_counter() - started

    undo = return_freed_memory(torch.device("cpu"))
    undo()  # from here on the threshold is where glibc's own rule lets it rise to
    kept, returned = [], []
    for _ in range(ROUNDS):
        two_steps()
        kept.append(two_steps())
        undo = return_freed_memory(torch.device("cpu"))
        two_steps()
        returned.append(two_steps())
        undo()
    ratio = statistics.median(b / a for a, b in zip(kept, returned, strict=True))
    return statistics.median(kept), statistics.median(returned), ratio


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.filterwarnings("ignore")
    torch.set_flush_denormal(True)
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        raise SystemExit("This C library has no mallopt: there is nothing to compare.")
    for name in SIZES:
        kept, returned, ratio = seconds_of(name)
        print(f"{name:8} two steps: kept {kept:.3f} s, returned {returned:.3f} s, ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
