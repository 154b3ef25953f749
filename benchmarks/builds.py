"""Predict the zoo for CUDA with this build of torch, or compare the predictions of two builds.

A CPU-only build must predict for CUDA exactly what a CUDA build does, case by case. Neither needs a GPU. Both take
cuDNN's workspaces from the package's table here, as a CPU-only build does: a CUDA build would ask its own cuDNN. And
both take what operators allocate inside as one version of torch does (`RULES_OF`): versions differ in it.

    python benchmarks/builds.py --write cpu.json        # in the environment with the CPU-only build
    python benchmarks/builds.py --compare cpu.json      # in the environment with the CUDA build
    python benchmarks/builds.py --compiled ...          # the models of compiled.py, compiled, in place of the zoo

Compiled steps are those of the compiler that is installed: compare builds of one version.
"""

import argparse
import json
import sys
from pathlib import Path
from unittest import mock

import torch
from torch.utils.data import DataLoader

import compiled
from lightning_memguard import estimate
from lightning_memguard.core import gpus
from lightning_memguard.core import torch_port as port
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.kernels import cudnn
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.settings import AllocatorSettings
from shared.predicted import program_of
from shared.truth import quieten
from shared.zoo import CASES, Case

GPU = "NVIDIA H200"
PRECISIONS = ("32-true", "bf16-mixed")
RULES_OF = (2, 13)
LIMIT = 1.0  # percent


def footprint_of(case: Case, precision: str) -> Footprint:
    """One case at its middle batch size, stepped by a Trainer with this precision on the GPU."""
    gpu = gpus.find(GPU)
    torch.manual_seed(0)
    module, size = case.build(case.optimizers[0]), case.batch_sizes[1]
    batch = next(iter(DataLoader(case.dataset(size), batch_size=size)))
    program = program_of(module, batch, "cuda", precision, gpu, **case.trainer_kwargs)
    return predict(program, size, AllocatorSettings.for_device("cuda", {}), scalable=False).footprint_at(size)


def predict_all() -> dict[str, tuple[str, int, int]]:
    """Method, allocated and reserved peak of every case and precision."""
    peaks = {}
    for case in CASES:
        for precision in PRECISIONS:
            peak = footprint_of(case, precision)
            peaks[f"{case.name} {precision}"] = (peak.method, peak.peak_allocated_bytes, peak.peak_reserved_bytes)
    return peaks


def predict_compiled() -> dict[str, tuple[str, int, int]]:
    """Likewise of the models that torch.compile compiles."""
    peaks = {}
    for case in compiled.CASES:
        step = {"step": compiled.loss_of, "optimizer": torch.optim.AdamW, "precision": case.precision}
        peak = estimate(case.model(), case.batch(case.sizes[1]), device=GPU, **step)
        peaks[case.name] = (peak.method, peak.peak_allocated_bytes, peak.peak_reserved_bytes)
    return peaks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write this build's predictions here")
    parser.add_argument("--compare", type=Path, help="compare this build's predictions with those")
    parser.add_argument("--compiled", action="store_true", help="compiled models in place of the zoo")
    arguments = parser.parse_args()
    quieten()
    asked, rules = (
        mock.patch.object(cudnn, "workspaces", return_value=None),
        mock.patch.object(port, "VERSION", RULES_OF),
    )
    with asked, rules:
        mine = predict_compiled() if arguments.compiled else predict_all()
    if arguments.write:
        arguments.write.write_text(json.dumps({"torch": torch.__version__, "peaks": mine}), encoding="utf-8")
    if not arguments.compare:
        return 0
    other = json.loads(arguments.compare.read_text(encoding="utf-8"))
    print(f"torch {other['torch']} versus torch {torch.__version__}, for the {GPU}; bytes")
    print(f"{'case':<36}{'method':<12}{'allocated':>14}{'differs':>9}{'reserved':>14}{'differs':>9}")
    worst = 0.0
    for name, (method, allocated, reserved) in mine.items():
        theirs = other["peaks"][name]
        off = [100 * (their / my - 1) for their, my in zip(theirs[1:], (allocated, reserved), strict=True)]
        worst = max(worst, *map(abs, off))
        print(f"{name:<36}{method:<12}{allocated:>14,}{off[0]:>+8.3f}%{reserved:>14,}{off[1]:>+8.3f}%")
    print(f"{len(mine)} cases; they differ by {worst:.3f} % at most (limit {LIMIT} %)")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
