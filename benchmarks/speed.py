"""How long MemGuard takes to decide, versus a real training step and torch's own tracer.

For a ResNet-50-shaped and a GPT-2-small-shaped module, in one process and one run, as ratios, because machines are
noisy:

- decide: from `setup` to the decision: sample, three captures at small sizes, the choice, and a fourth capture that
  confirms it
- one size: one capture alone, two optimizer steps through Lightning's loops, and its replay
- MemTracker: `torch.distributed._tools.mem_tracker.MemTracker` around one fake step of the same module
- real step: one training step at batch size 1 on this CPU, after one to warm up
- 30 sizes: footprints at 30 more batch sizes, as in the search for a size

    python benchmarks/speed.py
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.data import DataLoader

from lightning_memguard import MemGuard
from lightning_memguard.core.capture.predict import capture
from lightning_memguard.core.replay.footprint import footprint
from lightning_memguard.training.run.tune import Tuning, tune
from shared.truth import QUIET, quieten
from shared.zoo import Case, case_named

ROUNDS = 3


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def trainer_of(case: Case, module: pl.LightningModule, batch_size: int) -> pl.Trainer:
    """A Trainer in its state when `fit` calls the callbacks' `setup`."""
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        **QUIET,
    )
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, DataLoader(case.dataset(100_000), batch_size=batch_size))
    return trainer


def tracked_step(case: Case, batch_size: int) -> None:
    """One fake training step under torch's own tracker."""
    with FakeTensorMode():
        module = case.build(case.optimizers[0])
        optimizer = module.configure_optimizers()
        sample = [torch.empty(batch_size, *part.shape, dtype=part.dtype) for part in shapes(case)]
        tracker = MemTracker()
        tracker.track_external(module, optimizer)
        with tracker:
            step(module, optimizer, sample)


def shapes(case: Case) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return case.dataset(1)[0]


def step(module: pl.LightningModule, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss: Any = module.training_step(batch, 0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def real_step(case: Case) -> float:
    module = case.build(case.optimizers[0])
    optimizer: Any = module.configure_optimizers()
    batch = [part.unsqueeze(0) for part in shapes(case)]
    step(module, optimizer, batch)
    return seconds(lambda: step(module, optimizer, batch))


def measure(case: Case) -> None:
    module = case.build(case.optimizers[0])
    guard = MemGuard()
    decided: list[float] = []
    one_size: list[float] = []
    tracked: list[float] = []
    replayed: list[float] = []
    for _ in range(ROUNDS + 1):
        trainer = trainer_of(case, module, 4)
        result: list[Tuning] = []
        decided.append(
            seconds(lambda trainer=trainer, result=result: result.append(tune(trainer, module, guard._settings)))
        )
        profile = result[0].profile
        assert profile is not None
        prediction = profile.prediction
        one_size.append(seconds(lambda p=prediction: footprint(capture(p.program, 4, p.method), p.settings)))
        chosen = result[0].decision.batch_size
        replayed.append(seconds(lambda p=prediction, n=chosen: [p.footprint_at(10 * n + i) for i in range(30)]))
        tracked.append(seconds(lambda: tracked_step(case, 4)))
    first = decided[0], tracked[0]
    decide, one, tracker, sizes = (statistics.median(times[1:]) for times in (decided, one_size, tracked, replayed))
    real = statistics.median(real_step(case) for _ in range(ROUNDS))
    print(f"{case.name}: chose batch size {chosen}; median of {ROUNDS}, then ratios")
    print(f"  decide      {decide:7.2f} s   {decide / real:6.1f} real steps   {decide / tracker:5.2f} MemTracker steps")
    print(f"  one size    {one:7.2f} s   {one / real:6.1f} real steps   {one / tracker:5.2f} MemTracker steps")
    print(f"  MemTracker  {tracker:7.2f} s   {tracker / real:6.1f} real steps")
    print(f"  real step   {real:7.2f} s   at batch size 1")
    print(f"  30 sizes    {sizes:7.2f} s   {sizes / decide:.1%} of decide")
    print(f"  first time  {first[0]:7.2f} s   imports included; MemTracker after it {first[1]:.2f} s\n", flush=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    quieten()
    # at batch size 1 gradients soon vanish, and denormal numbers would slow the real step
    torch.set_flush_denormal(True)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    for name in ("resnet50", "gpt2_small"):
        measure(case_named(name))


if __name__ == "__main__":
    main()
