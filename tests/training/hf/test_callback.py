"""MemGuard in real fits of transformers' Trainer, and in a loop with Accelerate: the same training, and its memory."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memguard import MemGuardError
from lightning_memguard.training.hf.callback import MemGuardCallback
from tests.profiled import measured_peak

transformers = pytest.importorskip("transformers", reason="of the extra hf, which is not installed")
accelerate = pytest.importorskip("accelerate", reason="of the extra hf, which is not installed")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "use_cache": False,
}


def model_of() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def texts(count: int = 16, length: int = 64) -> list[dict[str, torch.Tensor]]:
    drawn = torch.randint(512, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": each, "labels": each} for each in drawn]


def trainer_of(folder: Path, callbacks: list[Any], model: Any = None, **settings: Any) -> Any:
    given: dict[str, Any] = {"output_dir": str(folder), "report_to": "none", "save_strategy": "no", "use_cpu": True}
    given |= {"num_train_epochs": 2, "per_device_train_batch_size": 4, "disable_tqdm": True, "seed": 1, **settings}
    arguments = transformers.TrainingArguments(**given)
    return transformers.Trainer(model or model_of(), arguments, train_dataset=texts(), callbacks=callbacks)


def state_after(trainer: Any) -> tuple[list[torch.Tensor], Any]:
    trainer.train()
    weights = [each.detach().clone() for each in trainer.model.parameters()]
    return weights, (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2, "bf16": True}, {"max_grad_norm": 0.0}])
def test_a_fit_is_equal_to_the_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    guard = MemGuardCallback()
    weights, numbers = state_after(trainer_of(tmp_path, [], **settings))
    guarded, guarded_numbers = state_after(trainer_of(tmp_path, [guard], **settings))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, guarded, strict=True))
    assert torch.equal(numbers[0], guarded_numbers[0])
    assert numbers[1:] == guarded_numbers[1:]
    assert guard.decision is not None
    assert guard.decision.footprint.method == "fake"
    assert (guard.decision.batch_size, len(guard.records)) == (4, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"optim": "adamw_torch"},
        {"optim": "adamw_torch_fused"},
        {"optim": "sgd"},
        {"gradient_accumulation_steps": 2},
        {"label_smoothing_factor": 0.1},
        {"optim": "adamw_bnb_8bit"},
    ],
    ids=str,
)
def test_the_prediction_is_what_the_profiler_counts(settings: dict[str, Any], tmp_path: Path) -> None:
    """Within 2 percent: the Trainer's own small tensors, and its dataset's batches."""
    if settings.get("optim") == "adamw_bnb_8bit":  # its embeddings keep states of 32 bits
        pytest.importorskip("bitsandbytes", reason="of the extra hf, which is not installed")
    guard = MemGuardCallback()
    trainer_of(tmp_path, [guard], **settings).train()
    trainer = trainer_of(tmp_path, [], **settings)
    held = sum(each.nbytes for each in trainer.model.state_dict().values())
    gc.collect()
    measured = held + measured_peak(trainer.train)
    found = guard.decision.footprint
    assert found.method == "fake"
    assert abs(found.peak_allocated_bytes / measured - 1) < 0.02


def test_an_epoch_is_in_the_trainers_own_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    guard = MemGuardCallback()
    trainer = trainer_of(tmp_path, [guard])
    trainer.train()
    logged = [each for each in trainer.state.log_history if "memguard/predicted_peak_gib" in each]
    assert [each["step"] for each in logged] == [4, 8]
    assert logged[0]["memguard/batch_size"] == 4.0
    printed = capsys.readouterr().out
    assert "MemGuard" in printed
    assert "predicted a peak of" in printed


def test_a_step_that_will_not_fit_is_said_and_moves_its_activations(tmp_path: Path) -> None:
    plain, _ = state_after(trainer_of(tmp_path, []))
    free = MemGuardCallback(offload="never")
    trainer_of(tmp_path, [free]).train()
    budget = int(free.decision.footprint.most_device_bytes * 0.9)
    guard = MemGuardCallback(budget=budget, margin=0.0)
    with pytest.warns(UserWarning, match="MemGuard"):
        weights, _ = state_after(trainer_of(tmp_path, [guard]))
    assert not guard.decision.fits
    assert [each.offloaded for each in guard.records] == [4, 4]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, plain, strict=True))


class OwnLoss(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Takes the labels away, so the model's output has no loss; reads the loss, if asked to."""

    reads = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * logits.square().mean()
        if self.reads and loss.item() > 100:
            loss = 2 * loss
        return loss


def own_trainer_of(folder: Path, callbacks: list[Any], reads: bool) -> Any:
    trainer = trainer_of(folder, callbacks)
    trainer.__class__ = OwnLoss
    trainer.reads = reads
    return trainer


def test_a_loss_of_the_trainers_own_is_predicted(tmp_path: Path) -> None:
    guard = MemGuardCallback()
    plain, _ = state_after(own_trainer_of(tmp_path, [], reads=False))
    trainer = own_trainer_of(tmp_path, [guard], reads=False)
    weights, _ = state_after(trainer)
    assert "compute_loss" not in vars(trainer)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, plain, strict=True))
    squares = 4 * 64 * 512 * 4  # of all logits
    standard = MemGuardCallback()
    trainer_of(tmp_path, [standard]).train()
    more = guard.decision.footprint.peak_allocated_bytes - standard.decision.footprint.peak_allocated_bytes
    assert guard.decision.footprint.method == "fake"
    assert more >= squares


def test_what_cannot_be_predicted_is_a_warning(tmp_path: Path) -> None:
    """A loss that reads a value is not followed, and the model's output has none."""
    guard = MemGuardCallback()
    with pytest.warns(UserWarning, match=r"has no loss: pass MemGuardCallback\(loss="):
        own_trainer_of(tmp_path, [guard], reads=True).train()
    assert guard.decision is None
    assert not guard.records


def test_the_users_own_error_is_raised(tmp_path: Path) -> None:
    class Broken(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            raise KeyError("the user's own")

    model = Broken(transformers.LlamaConfig(**SIZES))
    with pytest.warns(UserWarning, match="MemGuard does not predict"), pytest.raises(KeyError, match="the user's own"):
        trainer_of(tmp_path, [MemGuardCallback()], model=model).train()


def test_a_loop_with_accelerate_is_predicted_and_equal_to_the_bit() -> None:
    def trained(guard: MemGuardCallback | None) -> list[torch.Tensor]:
        model = model_of()
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(texts(8), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if guard:
            guard.attach(model, optimizer)
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                accelerator.backward(model(**batch).loss)
                optimizer.step()
            if guard:
                guard.epoch()
        if guard:
            guard.detach()
        return [each.detach().clone() for each in model.parameters()]

    guard = MemGuardCallback()
    plain = trained(None)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain, trained(guard), strict=True))
    assert guard.decision.footprint.method == "fake"
    assert (guard.decision.batch_size, len(guard.records)) == (2, 2)


def test_a_loss_elsewhere_can_be_given() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = MemGuardCallback(loss=lambda module, x: module(x).square().mean())
    guard.attach(model, optimizer)
    model(torch.ones(16, 8)).square().mean().backward()
    guard.detach()
    assert guard.decision.batch_size == 16
    with pytest.raises(MemGuardError, match="if_needed"):
        MemGuardCallback(offload="sometimes")
