"""Predictions for torchtitan's published trainings, from `examples/fsdp.py`, and for a thousand GPUs.

Truth: ``benchmarks/llama3_h100_202412_torchtitan.md`` of pytorch/torchtitan @b5bcd76c6: max reserved over ranks, on
H100 with 96 GB; here H200, which has the same kernels and does not run short either. The 70B row was measured with
torch.compile and float8, which are not predicted: it is compared with the same training without them.

    python benchmarks/torchtitan.py                 # all rows
    python benchmarks/torchtitan.py 8B ranks
"""

import importlib.util
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.strategies import ModelParallelStrategy

from lightning_memguard import estimate

MIB = 1 << 20
# size, checkpointing, batch, data x tensor parallel, devices and nodes, published MiB
ROWS: dict[str, tuple[str, str, int, tuple[int, int], tuple[int, int], int]] = {
    "8B": ("8B", "selective", 2, (8, 1), (8, 1), 84_378),
    "70B": ("70B", "full", 16, (32, 8), (8, 32), 73_626),
    "ranks": ("70B", "full", 1, (128, 8), (8, 128), 0),
}


def example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "fsdp.py"
    specification = importlib.util.spec_from_file_location("fsdp_example", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["fsdp_example"] = module
    specification.loader.exec_module(module)
    return module


def main(names: list[str]) -> None:
    llama = example().Llama
    for name in names or ROWS:
        size, checkpointing, batch, (data, tensor), (devices, nodes), published = ROWS[name]
        with torch.device("meta"):
            model = llama(size, checkpointing=checkpointing)
        tokens = torch.empty(batch, 8192, dtype=torch.int64, device="meta")
        started, strategy = time.monotonic(), ModelParallelStrategy(data, tensor)
        found = estimate(model, tokens, strategy=strategy, devices=devices, num_nodes=nodes, device="H200")
        seconds = time.monotonic() - started
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        reserved = found.peak_reserved_bytes / MIB
        versus = f", published {published:,} ({reserved / published - 1:+.1%})" if published else ""
        print(
            f"{size}, {data} x {tensor} ranks: reserved {reserved:,.0f} MiB{versus}; {seconds:.0f} s, of which "
            f"{usage.ru_utime + usage.ru_stime:.0f} s of processor time so far; {usage.ru_maxrss >> 10} MiB",
            flush=True,
        )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
