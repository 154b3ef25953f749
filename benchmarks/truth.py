"""The memory a real training on the CPU takes, byte for byte, as PyTorch's own profiler sees it (`shared/truth.py`).

python benchmarks/truth.py mlp --optimizer adam --batch-size 64             # what is alive at the peak, as text
python benchmarks/truth.py mlp --optimizer sgd adam --batch-size 64 256 --json
python benchmarks/truth.py mlp --by-hand                                    # compared with a sum added by hand
"""

import argparse
import json
from dataclasses import asdict

import torch

from shared.truth import Truth, measure_here
from shared.zoo import case_named


def mlp_by_hand(optimizer: str, batch_size: int) -> int:
    """The peak of the zoo's MLP (512 -> 1024 -> 1024 -> 1024 -> 10), added up by hand.

    With SGD it is at the last ReLU: parameters, the last step's gradients, momentum, the batch, the outputs of
    three ReLUs and the input of the third. With Adam and a small batch it is in the update of a 1024 x 1024
    weight: parameters, gradients, two moments, a step count each, the batch, and the two temporaries of the
    denominator, while the name `denominator` still holds that of the bias before. Five scalars take 20 bytes more.
    """
    sizes = [512 * 1024, 1024, 1024 * 1024, 1024, 1024 * 1024, 1024, 1024 * 10, 10]
    parameter_bytes = 4 * sum(sizes)
    batch_bytes = batch_size * (512 * 4 + 8)
    if optimizer == "sgd":
        return 3 * parameter_bytes + batch_bytes + 4 * batch_size * 1024 * 4
    if optimizer == "adam":
        return 4 * parameter_bytes + 4 * len(sizes) + batch_bytes + 2 * 1024 * 1024 * 4 + 1024 * 4 + 20
    raise ValueError(f"No sum by hand for {optimizer}.")


def check_by_hand() -> None:
    for optimizer, batch_size in (("sgd", 64), ("sgd", 256), ("sgd", 1024), ("adam", 8), ("adam", 16), ("adam", 64)):
        measured = measure_here(case_named("mlp"), optimizer, batch_size).peak_bytes
        by_hand = mlp_by_hand(optimizer, batch_size)
        print(
            f"mlp, {optimizer:4}, {batch_size:>4}: measured {measured:,}, by hand {by_hand:,}: {measured - by_hand:+,}"
        )


def as_text(truth: Truth) -> str:
    lines = [
        (
            f"{truth.case}, {truth.optimizer}, batch size {truth.batch_size}, {truth.threads} threads: "
            f"peak {truth.peak_bytes:,} bytes ({truth.peak_bytes / 2**20:.2f} MiB)"
        ),
        (
            f"in {truth.phase}, at {truth.operator}; {truth.event_count} events, {truth.miscounted} miscounted, "
            f"{truth.wall_seconds:.2f} s"
        ),
    ]
    lines += [f"  {group.bytes:>14,} bytes  {group.count:>5} x {group.operator}" for group in truth.held]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--optimizer", nargs="+", help="default: the case's first")
    parser.add_argument("--batch-size", nargs="+", type=int, help="default: the case's middle size")
    parser.add_argument("--steps", type=int, default=3, help="periods of the case; the second is the first with states")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads: some kernels' scratch depends on it")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--by-hand", action="store_true", help="compare the MLP's peak with a sum added by hand")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.by_hand:
        check_by_hand()
        return
    case = case_named(arguments.case)
    for optimizer in arguments.optimizer or case.optimizers[:1]:
        for batch_size in arguments.batch_size or case.batch_sizes[1:2]:
            truth = measure_here(case, optimizer, batch_size, arguments.steps)
            print(json.dumps(asdict(truth)) if arguments.json else as_text(truth), flush=True)


if __name__ == "__main__":
    main()
