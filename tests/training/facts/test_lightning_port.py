"""What each function of Lightning's port has to return: if a release moves a name, one of these fails."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import lightning_fabric
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import _replace_dunder_methods
from pytorch_lightning import callbacks, strategies
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from lightning_memguard.core.foreign import gaps
from lightning_memguard.training.facts import lightning_port as port
from tests.training.quiet import quiet_trainer

pytestmark = pytest.mark.contract

DATA = TensorDataset(torch.arange(12.0).reshape(6, 2))


class Module(pl.LightningModule):
    """A module that notes what it sees."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, 1)
        self.seen: list[Any] = []

    def train_dataloader(self):
        return DataLoader(DATA, self.hparams.batch_size)

    def training_step(self, batch, batch_idx):
        self.seen.append((batch_idx, port.accumulates(self.trainer)))
        loss = self.layer(batch[0]).sum()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch[0]).sum())

    def on_train_epoch_end(self):
        self.seen.append((port.logging_step(self.trainer), "training_step.loss" in port.logged_values(self.trainer)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(module: Module, *others: pl.Callback, **settings: Any) -> pl.Trainer:
    trainer = quiet_trainer(*others, max_epochs=1, **settings)
    trainer.fit(module)
    return trainer


# -- a Trainer's settings


@pytest.mark.parametrize("asked", [True, False])
def test_settings_are_those_that_were_passed(asked):
    trainer = quiet_trainer(detect_anomaly=asked, use_distributed_sampler=asked)
    assert (port.detects_anomaly(trainer), port.divides_samples(trainer)) == (asked, asked)


def test_a_loop_has_a_source_of_loaders_that_can_be_replaced():
    module = Module()
    trainer = quiet_trainer(max_epochs=1)
    source = port.data_source(trainer.fit_loop)
    give_back = port.intercept_loaders(trainer.fit_loop, lambda own: DataLoader(DATA, 3 * own().batch_size))
    trainer.fit(module)
    assert (source.instance, source.name, len(module.seen)) == (module, "train_dataloader", 2)
    give_back()
    assert source.dataloader().batch_size == 2


SINCE_2_6 = pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="since Lightning 2.6")


@pytest.mark.parametrize("interval", [0.5, 4, pytest.param({"minutes": 1}, marks=SINCE_2_6)])
def test_an_interval_of_validation_is_read_unless_it_is_a_time(interval):
    found = port.check_interval(quiet_trainer(val_check_interval=interval))
    assert found == (None if isinstance(interval, dict) else interval)


def test_a_stage_is_text_with_a_value():
    stage = port.stage_named("fit", pl)
    assert (stage, stage.value) == ("fit", "fit")


def test_the_log_dir_is_read_without_asking_another_rank(tmp_path, monkeypatch):
    trainer = quiet_trainer(default_root_dir=str(tmp_path))
    monkeypatch.setattr(trainer.strategy, "broadcast", None)
    assert port.log_dir_of(trainer) == str(tmp_path)


# -- a Trainer's loops


def test_a_fit_counts_logs_and_accumulates():
    """Metrics of an epoch are written at its last step, and what ``self.log`` got is found until then."""
    module = Module()
    trainer = fitted(module, accumulate_grad_batches=2)
    assert module.seen == [(0, True), (1, False), (2, False), (1, True)]
    assert port.logged_values(trainer) is trainer.fit_loop.epoch_loop._results
    assert hasattr(port.logged_values(trainer), "batch")


def test_a_checkpoint_counts_its_epochs(tmp_path):
    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(Module())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert port.epochs_saved(torch.load(tmp_path / "last.ckpt", weights_only=False)) == 2
    assert port.epochs_saved({}) == 0


def test_a_hook_is_called_as_the_loops_do():
    module = Module()
    trainer = fitted(module)
    module.on_fit_end = lambda: module._current_fx_name  # type: ignore[method-assign, assignment]
    assert port.call_module_hook(trainer, module, "on_fit_end") == "on_fit_end"


def test_a_fit_turns_nothing_into_numbers():
    trainer = quiet_trainer(max_epochs=1, log_every_n_steps=1)
    port.leave_numbers(trainer)
    assert not trainer._logger_connector.should_update_logs
    trainer.fit(Module())


def test_an_evaluation_turns_nothing_into_numbers():
    trainer = quiet_trainer()
    port.leave_numbers_of_epochs(trainer)
    assert trainer.validate(Module(), DataLoader(DATA, 2), verbose=False) == [{}]


def test_a_fit_passes_another_index():
    module, trainer = Module(), quiet_trainer(max_epochs=1)
    port.count_batches_as(trainer, lambda index: index + 7)
    trainer.fit(module)
    assert [index for index, _ in module.seen[:3]] == [7, 8, 9]


def test_a_fit_asks_no_rank():
    trainer = quiet_trainer()
    loop = trainer.fit_loop.epoch_loop
    is_asked = hasattr(loop, "_broadcast_sigterm_tensor")
    assert is_asked == (tuple(map(int, pl.__version__.split(".")[:2])) >= (2, 6))
    port.ask_no_rank(trainer)
    assert loop._broadcast_sigterm_tensor() is None


def test_a_trainer_can_get_another_strategy():
    trainer, strategy = quiet_trainer(), strategies.SingleDeviceStrategy("cpu")
    port.use_strategy(trainer, strategy)
    assert trainer.strategy is strategy


def test_batches_are_moved_by_the_hooks_of_a_datamodule():
    class Data(pl.LightningDataModule):
        def on_after_batch_transfer(self, batch, _):
            moved.append(batch)
            return batch

    class Starts(callbacks.Callback):
        def on_fit_start(self, trainer, _):
            trainer.datamodule = Data()
            port.use_hooks_of(trainer, trainer.datamodule)

    moved: list[object] = []
    fitted(Module(), Starts())
    assert len(moved) == 3


def test_each_name_of_a_trainer_is_there():
    assert gaps("lightning", "logging", trainer=quiet_trainer()) == ""


# -- loaders


class OwnLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def dunders():
    """Attributes that each class has under these names, own or inherited, and those that Lightning keeps to undo."""
    names = [f"__{old}{name}__" for old in ("", "old__") for name in ("init", "setattr", "delattr")]
    return [(cls, name, getattr(cls, name, None)) for cls in (DataLoader, BatchSampler, OwnLoader) for name in names]


def test_lightning_does_not_undo_its_patches_one_inside_the_other():
    """If this fails, Lightning has mended it, and `preserve_loader_classes` may go."""
    with port.preserve_loader_classes():
        before = dunders()
        with _replace_dunder_methods(DataLoader), _replace_dunder_methods(DataLoader):
            pass
        assert dunders() != before


def test_a_capture_inside_a_loader_call_leaves_the_outer_patches_to_end_as_usual():
    before = dunders()
    with _replace_dunder_methods(DataLoader), _replace_dunder_methods(BatchSampler):
        outer = dunders()
        with port.preserve_loader_classes(), _replace_dunder_methods(DataLoader), _replace_dunder_methods(BatchSampler):
            assert dunders() != outer
        assert dunders() == outer
    assert dunders() == before


def test_an_error_in_a_loader_hook_leaves_no_patch():
    before = dunders()
    with pytest.raises(KeyError), port.preserve_loader_classes(), _replace_dunder_methods(DataLoader):
        raise KeyError
    assert dunders() == before


def test_arguments_of_a_loader_are_recorded_and_can_be_changed():
    assert port.recorded_arguments(DataLoader(DATA)) is None
    with port.recording_loaders(Module()):
        named, placed = OwnLoader(DATA, batch_size=2), OwnLoader(DATA, 2)
    for loader, name in ((named, "batch_size"), (placed, "args")):
        assert name in (port.recorded_arguments(loader) or ()) or vars(loader)["__pl_saved_args"]
    port.change_recorded_argument(named, "batch_size", 3)
    remade = pl.trainer.connectors.data_connector._update_dataloader(named, named.sampler)
    assert remade.batch_size == 3


def test_loaders_are_combined_as_a_loop_does_and_arranged_as_they_were():
    loaders = {"a": DataLoader(DATA), "b": [DataLoader(DATA, 2)]}
    combined = port.combine(loaders, "min_size", pl)
    assert (combined.flattened, port.mode_of(combined)) == ([loaders["a"], loaders["b"][0]], "min_size")
    assert port.arrange(combined, [1, 2]) == {"a": 1, "b": [2]}
    other = port.combine(combined, "sequential", pl)
    assert (other is combined, port.mode_of(other)) == (False, "min_size")


# -- modules


def test_hyperparameters_are_found_twice_and_copied():
    module = Module()
    both = port.hyperparameters_of(module)
    assert [each["batch_size"] for each in both] == [2, 2]
    assert {port.HYPERPARAMETERS, port.HYPERPARAMETERS_LOGGED} <= {*vars(module)}
    port.copy_hyperparameters(module)
    assert not any(mine is theirs for mine, theirs in zip(both, port.hyperparameters_of(module), strict=True))
    assert port.hyperparameters_of(pl.LightningModule()) == []


def test_a_batch_size_is_set_wherever_it_is_kept_and_set_back():
    module = Module()
    module.batch_size = 2  # type: ignore[assignment]
    back = port.set_batch_size(module, None, 5)
    assert port.batch_sizes_of(module) == [5, 5, 5]
    back()
    assert port.batch_sizes_of(module) == [2, 2, 2]


def test_a_module_without_a_mesh_has_none():
    module = Module()
    assert port.mesh_of(module) is None
    assert "_device_mesh" in vars(module)


def test_the_optimizers_of_a_command_line_are_a_bound_partial():
    """As ``LightningCLI._add_configure_optimizers_method_to_model`` binds them."""
    module = Module()
    assert port.optimizers_of_cli(module) is None
    made = functools.partial(lambda _, optimizer: optimizer, optimizer=None)
    module.configure_optimizers = types.MethodType(functools.update_wrapper(made, Module.configure_optimizers), module)
    assert port.optimizers_of_cli(module) is made


# -- callbacks and loggers


def test_averages_are_updated_as_the_callbacks_do():
    swa = callbacks.StochasticWeightAveraging(0.1, device=torch.device("cpu"))
    assert port.average_device(swa) == torch.device("cpu")
    average, module = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    average.weight.data.fill_(1)
    module.weight.data.fill_(3)
    with torch.no_grad():
        port.average_between_epochs(swa, average, module, torch.tensor(1))
    assert average.weight.item() == 2


@SINCE_2_6
def test_an_averaged_model_has_the_settings_of_its_callback():
    averaging = callbacks.WeightAveraging(use_buffers=False, avg_fn=max)
    averaged = port.averaged_model(averaging, nn.Module())
    assert (port.average_device(averaging), averaged.use_buffers, averaged.avg_fn) == ("cpu", False, max) or (
        port.average_device(averaging) is None and averaged.avg_fn is max
    )


def test_other_parameters_are_pruned():
    layer = nn.Linear(4, 1, bias=False)
    pruning = callbacks.ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
    port.prune_others(pruning, [(layer, "weight")])
    assert port.pruned_parameters(pruning) == [(layer, "weight")]
    port.prune(pruning, 0)
    assert int((layer.weight == 0).sum()) == 2


def test_the_rates_that_are_tried_are_counted():
    assert port.rates_of(callbacks.LearningRateFinder(num_training_steps=7)) == 7


def test_an_experiment_is_found_and_not_made(tmp_path):
    logger = pl.loggers.CSVLogger(tmp_path)
    assert port.experiment_of(logger) is None
    assert port.experiment_of(logger) is None or not list(tmp_path.iterdir())
    made = logger.experiment
    assert port.experiment_of(logger) is made


# -- strategies


def test_what_a_setup_sets_in_a_strategy_is_known():
    strategy = fitted(Module()).strategy
    strategy.optimizers = [torch.optim.SGD([torch.ones(1)], lr=0.1)]
    known = port.optimizers_of(strategy)
    assert known["_optimizers"] == strategy.optimizers
    before = port.as_before_setup(strategy)
    assert {*known} <= {*before}
    vars(strategy).update(before)
    assert (strategy.optimizers, strategy.model, strategy.lightning_module) == ([], None, None)


def test_dimensions_of_a_mesh_are_counted():
    mesh = strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=4)
    assert (port.tensor_ranks(mesh), port.mesh_dimensions(mesh)) == (4, 1)
    assert port.tensor_ranks(strategies.ModelParallelStrategy()) == "auto"


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_form_of_a_checkpoint_is_read(kind):
    mesh = strategies.ModelParallelStrategy(save_distributed_checkpoint=kind == "sharded")
    both = strategies.FSDPStrategy(state_dict_type=kind), mesh  # type: ignore[arg-type]
    assert [port.saves_shards(each) for each in both] == [kind == "sharded"] * 2


def test_arguments_of_ddp_are_read_and_added():
    strategy = strategies.DDPStrategy(find_unused_parameters=True, ddp_comm_hook=max)
    other = port.with_ddp_arguments(strategy, static_graph=True)
    assert (dict(port.ddp_arguments(strategy)), port.ddp_hook(strategy)) == ({"find_unused_parameters": True}, max)
    assert dict(port.ddp_arguments(other)) == {"find_unused_parameters": True, "static_graph": True}
    fabrics = lightning_fabric.strategies.DDPStrategy(static_graph=True)
    assert (dict(port.ddp_arguments(fabrics)), port.ddp_hook(fabrics)) == ({"static_graph": True}, None)


@pytest.mark.parametrize("asked", [True, False])
def test_a_synchronized_batch_norm_is_known(asked):
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", sync_batchnorm=asked, logger=False)
    assert port.syncs_batch_norm(trainer.strategy) == asked


def test_fsdp_tells_what_it_has_wrapped():
    assert hasattr(strategies.FSDPStrategy, "_setup_model")
    model, seen = nn.Linear(1, 1), []
    base = type("Base", (), {"_setup_model": lambda _, model: model})
    own: Any = type("Own", (port.TellsWrapped, base), {})()
    own.start = seen.append
    assert (own._setup_model(model), seen) == (model, [model])


def test_deepspeed_tells_its_optimizer_and_completes_its_configuration_again():
    assert hasattr(strategies.DeepSpeedStrategy, "_init_optimizers")
    base = type("Base", (), {"_init_optimizers": lambda _: ("optimizer", "scheduler"), "_config_initialized": True})
    own: Any = type("Own", (port.TellsOptimizer, base), {"optimizer_made": lambda self, made: seen.append(made)})()
    seen: list[object] = []
    assert (own._init_optimizers(), seen) == (("optimizer", "scheduler"), ["optimizer"])
    assert (port.completes_again(own), port.completes_again(own)) == (True, False)


# -- Fabric


def test_fabric_wraps_a_module_whose_loss_can_be_followed_back():
    layer, strategy = nn.Linear(2, 1), lightning_fabric.strategies.SingleDeviceStrategy("cpu")
    wrapped = port.fabric_module("lightning_fabric", layer, strategy, layer)
    assert port.inside_fabric_module(wrapped) is layer
    wrapped(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None


def test_arguments_of_fsdp_can_be_changed_in_fabric():
    strategy = lightning_fabric.strategies.FSDPStrategy(limit_all_gathers=False)
    port.change_fsdp_arguments(strategy, lambda given: {**given, "more": 1})
    assert {"limit_all_gathers": False, "more": 1}.items() <= strategy._fsdp_kwargs.items()


def test_each_function_has_a_test():
    text = Path(__file__).read_text()
    named = [each.__name__ for each in vars(port).values() if getattr(each, "__module__", "") == port.__name__]
    assert [name for name in named if not name.startswith("_") and f"port.{name}" not in text] == []
