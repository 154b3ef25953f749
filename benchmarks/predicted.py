"""What lightning_memguard predicts for the cases of the zoo, through a Trainer as a user would ask.

python benchmarks/predicted.py mlp --optimizer adam --batch-size 64            # the prediction, as JSON
python benchmarks/predicted.py mlp --optimizer adam --batch-size 64 --budget 1000000000   # the size it chooses
"""

import argparse
import json
from dataclasses import asdict

import torch

from shared.predicted import predict_here
from shared.zoo import case_named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--optimizer", nargs="+", help="default: the case's first")
    parser.add_argument("--batch-size", nargs="+", type=int, help="default: the case's middle size")
    parser.add_argument("--threads", type=int, help="torch.set_num_threads: some kernels' scratch depends on it")
    parser.add_argument("--budget", type=int, help="bytes; with it, MemGuard chooses the batch size")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    case = case_named(arguments.case)
    for optimizer in arguments.optimizer or case.optimizers[:1]:
        for batch_size in arguments.batch_size or case.batch_sizes[1:2]:
            print(json.dumps(asdict(predict_here(case, optimizer, batch_size, arguments.budget))), flush=True)


if __name__ == "__main__":
    main()
