"""Find the batch size for a training loop of one's own under Lightning Fabric, with `estimate`.

`estimate` is asked before `fabric.setup`, with the module and the optimizer as they will be set up. For several
devices, pass the strategy that Fabric gets: `estimate(..., strategy="fsdp", devices=8)`.

    python examples/fabric.py                                        # trains on the CPU within 64 MiB
    python examples/fabric.py --device H100 --budget 70GiB           # plans for a GPU that is not there
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from lightning_memguard import estimate
from lightning_memguard.units import format_bytes, parse_bytes


def network() -> nn.Module:
    """Two convolutions and a linear layer."""
    convolutions = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def optimizer_of(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or a GPU by name (default: %(default)s)")
    parser.add_argument("--budget", default="64MiB", help="memory that a step may take (default: %(default)s)")
    options = parser.parse_args(arguments)
    model, budget = network(), parse_bytes(options.budget)
    example = torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)
    size, peak = 0, 0
    for larger in (2**power for power in range(1, 16)):
        footprint = estimate(
            model, example, batch_size=larger, step=loss_of, optimizer=optimizer_of, device=options.device
        )
        if footprint.most_device_bytes > budget:
            break
        size, peak = larger, footprint.peak_device_bytes
    if not size:
        raise SystemExit(f"Not even two images fit into {options.budget}.")
    print(f"Batch size {size}: a predicted peak of {format_bytes(peak)} on {options.device}, within {options.budget}.")
    if options.device != "cpu":
        return
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, optimizer_of(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        fabric.backward(loss_of(wrapped, (torch.rand(size, 3, 32, 32), torch.randint(10, (size,)))))
        optimizer.step()
    print(f"Trained 3 steps at batch size {size}.")


if __name__ == "__main__":
    main()
