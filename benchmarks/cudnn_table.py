"""Make the package's table of cuDNN's workspaces by asking the cuDNN of a CUDA build of torch. Needs no GPU.

    python benchmarks/cudnn_table.py            # writes lightning_memguard/core/kernels/cudnn_table.csv

For each kind of convolution it asks for the first choice over a set of shapes, and keeps the median of its share of
image, weight and result together, in percent, rounded to 5.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from lightning_memguard.core.kernels import cudnn
from lightning_memguard.core.kernels.cudnn import kind_of, tensors_bytes

TABLE = Path(cudnn.__file__).with_name("cudnn_table.csv")
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
OPERATIONS: tuple[cudnn.Operation, ...] = ("forward", "input", "weight")
BATCHES = (8, 32, 128)
# in, out, size of the image, size of the kernel, stride, groups
SHAPES = (
    *((3, 64, size, kernel, stride, 1) for size, kernel, stride in ((32, 3, 1), (86, 3, 1), (224, 3, 1), (224, 7, 2))),
    *((c, c, size, 3, 1, 1) for c, size in ((32, 112), (64, 56), (128, 28), (256, 14), (512, 7), (64, 32), (256, 32))),
    *((c, 2 * c, size, 3, 2, 1) for c, size in ((32, 112), (64, 56), (128, 28), (256, 14), (64, 32))),
    *((c, 4 * c, size, 1, 1, 1) for c, size in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *((4 * c, c, size, 1, 1, 1) for c, size in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *((c, 2 * c, size, 1, 2, 1) for c, size in ((64, 56), (256, 56), (512, 28), (1024, 14))),
    *((c, c, size, 3, 1, c // 16) for c, size in ((64, 56), (128, 28), (256, 14), (512, 7))),
)
NUMBERS = (("float32", True), ("float32", False), ("float16", True))


def questions(capability: tuple[int, int]) -> Iterator[cudnn.Question]:
    """Every question for one compute capability."""
    combined = itertools.product(OPERATIONS, SHAPES, BATCHES, NUMBERS, (False, True))
    for operation, (channels, out, size, kernel, stride, groups), batch, (kind, tf32), channels_last in combined:
        side = (size + 2 * (kernel // 2) - kernel) // stride + 1
        image, weight = (batch, channels, size, size), (out, channels // groups, kernel, kernel)
        tensors = operation, image, weight, (batch, out, side, side), kind, channels_last
        move = (kernel // 2,) * 2, (stride,) * 2, (1, 1)
        yield cudnn.Question(*tensors, *move, capability, tf32, deterministic=False)


def main() -> None:
    found: dict[tuple[str, ...], dict[tuple[int, int], int]] = defaultdict(dict)
    for capability in CAPABILITIES:
        shares: dict[tuple[str, ...], list[float]] = defaultdict(list)
        for question in questions(capability):
            sizes = cudnn.workspaces(question)
            if sizes is not None:
                shares[kind_of(question)].append(sizes[0] / tensors_bytes(question))
        for kind, values in shares.items():
            found[kind][capability] = 5 * round(20 * statistics.median(values))
        print(f"{capability[0]}.{capability[1]}: {sum(map(len, shares.values()))} answers", flush=True)
    lines = [
        f"# First choices of cuDNN {cudnn.version()}: medians of the share of all three tensors together, in percent.",
        "# Made by benchmarks/cudnn_table.py.",
        "operation,window,numbers,layout,percent,capabilities",
    ]
    for kind, by_capability in sorted(found.items()):
        same: dict[int, list[str]] = defaultdict(list)
        for capability, percent in by_capability.items():
            same[percent].append("{}.{}".format(*capability))
        lines += [",".join((*kind, str(percent), ";".join(names))) for percent, names in same.items()]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
