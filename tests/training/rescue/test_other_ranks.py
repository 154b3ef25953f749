"""Canaries: the private names that doing a step again leans on, so that a rename is noticed here first."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard.training.rescue.other_ranks import _calls


class Look(pl.Callback):
    """Looks at what there is while a batch is trained on."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        kwargs = OrderedDict(batch=batch, batch_idx=batch_idx)
        closure = loop._make_closure(kwargs, trainer.optimizers[0], batch_idx)
        assert {"_step_fn", "_backward_fn", "_zero_grad_fn", "_result"} <= vars(closure).keys()
        assert inspect.signature(type(closure).closure).parameters.keys() >= {"self", "args", "kwargs"}
        closure.closure = closure.closure  # may be replaced
        assert closure._zero_grad_fn.__code__
        assert closure._backward_fn.__code__
        result = loop.output_result_cls(torch.ones(()), extra={"x": 1})
        assert {"closure_loss", "loss", "extra"} <= vars(result).keys()
        assert trainer._results is trainer.fit_loop.epoch_loop._results
        assert {"batch", "batch_size"} <= vars(trainer._results).keys()
        assert [*inspect.signature(trainer._results.log).parameters][:3] == ["fx", "name", "value"]
        assert callable(trainer._results.reset)
        assert {"_first_loop_iter", "_current_fx"} <= vars(trainer._logger_connector).keys()
        assert "_current_fx_name" in vars(module)


class Logs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch[0]).sum()
        self.log("loss", loss)
        return loss

    validation_step = test_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_canary_lightnings_closure_and_logged_values(trainer: Any) -> None:
    trainer(Look()).fit(Logs(), DataLoader(TensorDataset(torch.ones(2, 2))))
    call = pl.trainer.call
    for hook in (call._call_callback_hooks, call._call_lightning_module_hook):
        assert [*inspect.signature(hook).parameters][:2] == ["trainer", "hook_name"]


def test_canary_steps_of_evaluation_are_called_on_the_strategy(trainer: Any) -> None:
    strategy = trainer().strategy
    assert callable(strategy.validation_step)
    assert callable(strategy.test_step)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_canary_collective_calls_are_numbered() -> None:
    """By this number a rank knows whether a failed attempt has talked to the others."""
    before = _calls()
    dist.all_reduce(torch.ones(1))
    assert _calls() == before + 1
    wrapper = DistributedDataParallel(torch.nn.Linear(2, 1))
    assert {"require_backward_grad_sync", "require_forward_param_sync"} <= vars(wrapper).keys()
    before = _calls()
    with wrapper.no_sync():
        wrapper(torch.ones(1, 2)).sum().backward()
    assert _calls() == before
    wrapper(torch.ones(1, 2)).sum().backward()
    assert _calls() > before
