"""Steps that come later in a run: Lightning's counters are moved forward as the module's own are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.long import long_but


def module_of(base: Any, is_due: Callable[[Any, int], bool]) -> Any:
    """A module whose step takes its loss on a batch four times as large if it is due."""

    class Later(base):  # type: ignore[misc]
        weighs_more = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if is_due(self, batch_idx):
                return self.loss([torch.cat([each] * 4) for each in batch])
            return self.loss(batch)

        def on_train_epoch_start(self) -> None:
            self.weighs_more = self.current_epoch == 2

    return Later()


DUE: dict[str, tuple[Callable[[Any, int], bool], dict[str, Any]]] = {
    "every 16 steps": (lambda module, _: module.global_step % 16 == 15, {"max_epochs": 4}),
    "every 5 accumulated steps": (
        lambda module, _: module.global_step and module.global_step % 5 == 0,
        {"max_epochs": 3, "accumulate_grad_batches": 2},
    ),
    "the last batch": (lambda _, batch_idx: batch_idx == 3, {}),
    "every third batch": (lambda _, batch_idx: batch_idx % 3 == 2, {}),
    "from epoch 2": (lambda module, _: module.current_epoch >= 2, {"max_epochs": 4}),
    "an epoch's hook": (lambda module, _: module.weighs_more, {"max_epochs": 4}),
    "by the Trainer": (lambda module, _: module.trainer.global_step > 9, {"max_epochs": 4}),
}


@pytest.mark.parametrize("name", long_but(("every 5 accumulated steps", "the last batch", "an epoch's hook"), DUE))
def test_a_step_that_comes_later_is_as_measured(name: str, wide: Any, wide_data: Any, as_measured: Any) -> None:
    is_due, settings = DUE[name]
    decision = as_measured(
        lambda trainer: trainer.fit(module_of(wide, is_due), DataLoader(wide_data, batch_size=64)), **settings
    )
    assert any("test_later_steps.py:" in note for note in decision.footprint.notes)


@pytest.mark.parametrize("settings", [{"max_steps": 8}, {"max_epochs": 2}], ids=str)
def test_a_step_that_the_run_never_comes_to_is_not_counted(
    settings: dict[str, int], wide: Any, wide_data: Any, as_measured: Any
) -> None:
    def is_due(module: Any, _: int) -> bool:
        return module.global_step >= 1000 or module.current_epoch >= 5

    decision = as_measured(
        lambda trainer: trainer.fit(module_of(wide, is_due), DataLoader(wide_data, batch_size=64)), **settings
    )
    assert not decision.footprint.notes
