"""Remedies that would make a step fit: each is really run, says what it costs, and is left out if it cannot run."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import DoesNotFitError, MemGuard
from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.curve import Curve, Terms
from lightning_memguard.core.capture.predict import Prediction, predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.decision.advice import Advice, in_order, text
from lightning_memguard.core.decision.decision import Budget, Request, decide
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation import compiled
from lightning_memguard.core.trace.growth import grow
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.core.trace.work import Work
from lightning_memguard.training.adapter.program import LightningProgram
from lightning_memguard.training.planning import advise as advise_module
from lightning_memguard.training.planning import remedies as remedies_module
from lightning_memguard.training.planning.advise import AdviceReport, try_remedies
from lightning_memguard.training.planning.remedies import BlockCost, EightBitAdam, Remedy, cheapest
from lightning_memguard.training.planning.search import largest_that_runs, with_retries
from lightning_memguard.training.planning.subject import trainer_for
from lightning_memguard.training.run import choose as choose_module
from lightning_memguard.units import KIB, MIB
from tests import tape
from tests.training.conftest import Wide
from tests.training.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("all_here")

SIZE = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Stacked(pl.LightningModule):
    """Blocks and a head; what the tests change is an argument."""

    refusal: Exception | None = None  # of weights in half precision, where the step is written out

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        width: int = 64,
        checkpointed: bool = False,
        manual: bool = False,
    ) -> None:
        super().__init__()
        self.optimizer, self.checkpointed = optimizer, checkpointed
        self.automatic_optimization = not manual
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).transpose(1, 2), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def batch(size: int = SIZE, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, 32, width), torch.zeros(size, 32, dtype=torch.long)


def program_of(module: Any, device: str = "cpu", precision: str = "32-true", **fields: Any) -> LightningProgram:
    fields = {"batches": batches_from_one(batch()), **fields}
    gpu = gpus.find(device) if device != "cpu" else None
    where = torch.device("cuda" if gpu else "cpu")
    trainer = trainer_for(module, precision, gpu)
    return LightningProgram(trainer, module, device=where, batches_per_epoch=lambda _: 1, gpu=gpu, **fields)


def known(program: Any, size: int = SIZE) -> Prediction:
    return predict(program, size, AllocatorSettings.for_device(program.device.type, {}), scalable=False)


def tried(
    step: Any, share: float = 0.6, *, size: int = SIZE, only: str | Sequence[str] = ("",), **options: Any
) -> AdviceReport:
    """Remedies with one of these words in their names (default: all), for a share of what the step takes.

    The step is a program, or its prediction.
    """
    words = (only,) if isinstance(only, str) else only
    prediction = step if isinstance(step, Prediction) else known(step, size)
    need = prediction.footprint_at(size).most_device_bytes
    families = [
        each for each in remedies_module.families_for(prediction, size) if any(word in each[0].name for word in words)
    ]
    with mock.patch.object(advise_module, "families_for", return_value=families):
        return try_remedies(prediction, size, Budget(need, int(need * share), 0, "given"), **options)


def considered(program: Any, size: int = SIZE) -> list[tuple[Remedy, ...]]:
    """What would be tried for a step of three blocks, whose trace says what they keep."""
    return remedies_module.families_for(Prediction(program, tape.read("blocks")), size)


def offered(program: Any, size: int = SIZE) -> set[str]:
    """The names of all that would be tried."""
    return {remedy.name for family in considered(program, size) for remedy in family}


def by_name(found: AdviceReport) -> dict[str, Advice]:
    return {" + ".join(each.remedies): each for each in found.advice}


# -- a step that is written out: what it takes follows from what a remedy has changed


def written(program: Any, batch_size: int, *_: object, **__: object) -> Trace:
    """In place of a capture: the step of `Stacked` that its program, with all that was changed, describes."""
    module = copy.deepcopy(program.module)
    for change in program.changes:
        change(module)
    if (refusal := module.refusal) and program.precision_in_use.endswith("16-true"):
        raise refusal
    optimizers, _ = module.configure_optimizers()
    item = 2 if program.precision_in_use.endswith("16-true") else 4
    weights = sum(parameter.numel() for parameter in module.parameters())
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    sizes = [("", "parameters", weights), ("", "gradients", trained)]
    if program.trains:
        sizes += [("", "optimizer_state", int(moments(optimizers[0]) * trained))]
        sizes += [] if program.around else activations(module, batch_size)
    half = 2 if program.precision_in_use.endswith("16-mixed") else 1
    events = [
        Event("alloc", block, size * item // (half if part == "activations" else 1), part, module=path)
        for block, (path, part, size) in enumerate(sizes)
    ]
    scratch = Event("alloc", len(events), item * weights * moments(optimizers[0]) // 4, phase="optimizer")
    again = any(isinstance(each.forward, functools.partial) for each in module.modules())
    product = "bfloat16" if "bf16" in program.precision_in_use else "float32"
    flops = batch_size * 32 * weights * (8 if again else 6)
    work = Work(product, flops, sum(event.nbytes for event in events)), Work("", 0, 3 * item * weights, updates=True)
    return Trace(batch_size, program.device.type, "fake", (*events, scratch), work=work)


def moments(optimizer: torch.optim.Optimizer) -> int:
    """How many numbers an optimizer keeps for each weight, about."""
    return {"Adam": 2, "Adafactor": 1, "EightBitAdam": 1}.get(type(optimizer).__name__, 0)


def activations(module: Any, batch_size: int) -> Iterator[tuple[str, str, int]]:
    """What each block keeps for its backward pass: nine times its input, or that alone if a checkpoint is around it."""
    rows = batch_size * 32
    for path, block in module.named_modules():
        if isinstance(block, Block):
            above = [module.get_submodule(path.rpartition(".")[0]), block]
            is_checkpointed = any(isinstance(each.forward, functools.partial) for each in above)
            width = block.layers[0].in_features
            yield path, "activations", rows * width * (1 if is_checkpointed or module.checkpointed else 9)


def write_out(replace: Callable[[str, Any], object]) -> None:
    """Have nothing captured; ``replace`` is given the path of each function, and the other."""
    replace("lightning_memguard.core.capture.capture.capture_here", written)
    path = "lightning_memguard.training.adapter.program.LightningProgram.inspect"
    replace(path, lambda program, examine: examine(program.module, "self"))


@pytest.fixture(autouse=True)
def _written(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is captured but in a test marked `captures`: what is advised follows from traces, whosever they are."""
    if not request.node.get_closest_marker("captures"):
        write_out(monkeypatch.setattr)


@pytest.fixture(scope="module")
def stacked(all_here: None) -> AdviceReport:
    with pytest.MonkeyPatch.context() as patches:
        write_out(patches.setattr)
        return tried(program_of(Stacked()))


def test_all_advice_saves_something_and_what_fits_comes_first(stacked: AdviceReport) -> None:
    assert min(each.saved_bytes for each in stacked.advice) > 0
    assert stacked.advice == in_order(reversed(stacked.advice))
    fits = [each.fits for each in stacked.advice]
    assert fits == sorted(fits, reverse=True)


@pytest.mark.parametrize(("device", "mixed", "eight_bit"), [("cpu", 4, False), ("NVIDIA A100-SXM4-80GB", 2, True)])
def test_remedies_are_tried_from_what_changes_the_training_least(device: str, mixed: int, eight_bit: bool) -> None:
    order = ["fused optimizer", "per-parameter optimizer", "activation checkpointing of blocks", "accumulation over"]
    order.insert(mixed, "bf16-mixed")
    order.insert(0, "activations on ")
    order += ["8-bit optimizer states"] * eight_bit + ["Adafactor", "bf16-true", "SGD", "freezing all but head"]
    names = [family[0].name for family in considered(program_of(frozen(), device))]
    assert all(name.startswith(expected) for name, expected in zip(names, order, strict=True)), names


def frozen(*args: Any, **options: Any) -> Stacked:
    """A net that has learned something before, which one frozen parameter shows."""
    module = Stacked(*args, **options)
    module.blocks[0].layers[0].bias.requires_grad_(False)
    return module


class Loaded(Stacked):
    def __init__(self, pretrained: bool) -> None:
        super().__init__()
        self.save_hyperparameters()


def from_hub(name_or_path: str) -> Stacked:
    module = Stacked()
    module.blocks[0].config = SimpleNamespace(name_or_path=name_or_path)
    return module


@pytest.mark.parametrize(
    ("module", "learned"),
    [
        *[(Stacked(), False), (Loaded(False), False), (from_hub(""), False)],
        *[(frozen(), True), (Loaded(True), True), (from_hub("bert-base-uncased"), True)],
    ],
)
def test_freezing_is_for_nets_that_have_learned_already(module: Stacked, learned: bool) -> None:
    assert ("freezing all but head" in offered(program_of(module))) == learned


def test_each_remedy_is_named_with_what_to_write_and_its_cost(stacked: AdviceReport) -> None:
    found = by_name(stacked)
    assert {"bf16-mixed", "bf16-true", "activation checkpointing of blocks", "SGD", "Adafactor"} <= set(found)
    assert found["bf16-true"].how == ('Trainer(precision="bf16-true")',)
    assert found["activation checkpointing of blocks"].how[0].startswith("for block in self.blocks: block.forward = ")
    assert all(len(each.remedies) == len(each.how) == len(each.costs) and all(each.costs) for each in stacked.advice)


@pytest.mark.captures
def test_a_remedy_takes_what_a_module_written_that_way_takes_and_the_users_is_left_as_it_was() -> None:
    """Predictions agree with those of modules whose owner has followed the advice."""
    module = frozen()
    before = dict(vars(module)), dict(vars(module.blocks[0]))
    followed = {
        "activation checkpointing of blocks": program_of(frozen(checkpointed=True)),
        "SGD": program_of(frozen(torch.optim.SGD)),
        "bf16-true": program_of(frozen(), precision="bf16-true"),
        "bf16-mixed": program_of(frozen(), precision="bf16-mixed"),
    }
    found = by_name(tried(program_of(module), only=(*followed, "freezing"), combinations=False))
    assert {*followed, "freezing all but head"} <= found.keys()
    for name, program in followed.items():
        expected = known(program).footprint_at(SIZE).peak_allocated_bytes
        # a checkpoint called from outside a block keeps the random state at another moment
        assert found[name].footprint.peak_allocated_bytes == pytest.approx(expected, rel=0.001), name
    assert (dict(vars(module)), dict(vars(module.blocks[0]))) == before
    assert sum(not parameter.requires_grad for parameter in module.parameters()) == 1


def test_pairs_save_more_than_either_and_are_never_two_of_a_kind(stacked: AdviceReport) -> None:
    found = by_name(stacked)
    pairs = [each for each in stacked.advice if len(each.remedies) == 2]
    assert 0 < len(pairs) <= 6
    for pair in pairs:
        singles = [found[name].saved_bytes for name in pair.remedies if name in found]
        assert pair.saved_bytes > max(singles)
        assert not {"bf16-mixed", "bf16-true"} >= set(pair.remedies)
        assert not {"SGD", "Adafactor"} >= set(pair.remedies)


@pytest.mark.captures
def test_side_by_side_remedies_give_what_they_give_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"share": 0.4, "only": ("SGD", "bf16-mixed")}
    one_by_one = tried(program_of(Stacked()), **options)
    monkeypatch.setattr("lightning_memguard.core.isolation.pool.can_fork", lambda: True)
    for module in ("capture", "leftovers"):
        monkeypatch.setattr(f"lightning_memguard.core.capture.{module}.in_child", in_child)
    together = tried(program_of(Stacked()), **options)
    assert together == one_by_one
    assert any(len(each.remedies) == 2 for each in together.advice)


def test_no_pairs_where_none_are_wanted() -> None:
    program = program_of(Stacked())
    families = [(remedy,) for remedy in (*remedies_module.precisions(program), remedies_module._SGD)]
    with mock.patch.object(advise_module, "families_for", return_value=families):
        found = try_remedies(known(program), SIZE, Budget(1, 1, 0, "given"), combinations=False).advice
    assert {len(each.remedies) for each in found} == {1}
    assert not any(each.fits for each in found)


def test_what_fits_is_held_against_the_budget(stacked: AdviceReport) -> None:
    need = known(program_of(Stacked())).footprint_at(SIZE).most_device_bytes
    for each in stacked.advice:
        assert each.footprint.most_device_bytes == need - each.saved_bytes
        assert each.fits == (each.footprint.most_device_bytes <= int(0.6 * need))
    assert {each.fits for each in stacked.advice} == {True, False}


@pytest.mark.parametrize(("share", "size"), [(0.8, 8), (0.3, 2), (0.01, 8)])
def test_accumulation_takes_the_largest_share_that_fits_else_half(share: float, size: int) -> None:
    found = tried(program_of(Stacked(torch.optim.SGD)), share, only="accumulation")
    assert [each.footprint.batch_size for each in found.advice] == [size]
    assert found.advice[0].how == (f"batch_size={size}, Trainer(accumulate_grad_batches={SIZE // size})",)


def test_accumulation_is_not_offered_where_it_is_not_ours_to_set() -> None:
    def accumulates(names: set[str]) -> bool:
        return any("accumulation" in name for name in names)

    assert accumulates(offered(program_of(Stacked())))
    assert not accumulates(offered(program_of(Stacked()), size=1))
    assert not accumulates(offered(program_of(Stacked(manual=True))))


def test_a_module_that_steps_by_hand_is_given_other_optimizers() -> None:
    assert [each.remedies for each in tried(program_of(Stacked(manual=True)), only="SGD").advice] == [("SGD",)]


def test_what_is_so_already_is_not_advised() -> None:
    there = program_of(Stacked(torch.optim.SGD, checkpointed=True), precision="bf16-true")
    assert not any("bf16" in name for name in offered(there))
    assert tried(there, only="SGD").left_out == (("SGD", "it is SGD without momentum already"),)
    assert tried(there, only="checkpointing").advice == ()


def test_a_remedy_that_cannot_run_is_left_out_with_the_reason() -> None:
    class Particular(Stacked):
        refusal = ValueError("float32 or nothing")

    lines: list[str] = []
    found = tried(program_of(Particular()), only="bf16-true", progress=lines.append)
    assert found.left_out == (("bf16-true", "ValueError: float32 or nothing"),)
    assert found.advice == ()
    assert lines == ["bf16-true", "bf16-true: left out, ValueError: float32 or nothing"]


@pytest.mark.captures
def test_a_remedy_with_which_less_is_known_is_left_out_in_plain_words() -> None:
    class Particular(Stacked):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.head.weight.dtype != torch.float32:
                raise ValueError("float32 or nothing")
            self.large = bool(self.head.weight.sum() > 1e9)
            return super().training_step(batch, batch_idx)

    prediction = known(program_of(Particular()))
    assert prediction.curve.method == "real"
    assert tried(prediction, only="bf16-true").left_out == (("bf16-true", "with it, the step does not run on a copy"),)


def test_nothing_is_begun_when_time_is_up() -> None:
    found = tried(program_of(Stacked()), most_seconds=-1.0)
    assert found.advice == ()
    assert found.not_tried >= 8


@pytest.mark.captures
def test_blocks_that_are_made_late_are_found() -> None:
    class Late(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = None

        def configure_model(self) -> None:
            if self.blocks is None:
                self.blocks = nn.ModuleList(Block(64) for _ in range(4))

    assert "activation checkpointing of blocks" in offered(program_of(Late()))


@pytest.mark.captures
def test_blocks_of_several_stages_are_taken_together_and_their_parts_are_not() -> None:
    class Staged(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(Block(64), Block(64)) for _ in range(2))

    of_stages, of_blocks = "activation checkpointing of blocks", "activation checkpointing of the 4 Block modules"
    prediction = known(program_of(Staged()))
    families = remedies_module.families_for(prediction, SIZE)
    assert {each.name for family in families for each in family if "checkpointing" in each.name} == {
        of_stages,
        of_blocks,
    }
    assert set(by_name(tried(prediction, only="checkpointing"))) == {of_blocks}  # the one that saves more


@pytest.mark.captures
def test_as_few_blocks_are_checkpointed_as_make_it_fit_and_that_costs_less_time() -> None:
    prediction = known(program_of(Stacked()))
    need = prediction.footprint_at(SIZE).most_device_bytes

    def advised(share: float) -> Advice:
        every = remedies_module.families_for(prediction, SIZE, int(share * need))
        families = [family for family in every if family[0].kind == "checkpointing"]
        with mock.patch.object(advise_module, "families_for", return_value=families):
            return try_remedies(prediction, SIZE, Budget(need, int(need * share), 0, "given")).advice[0]

    every, some = advised(1.5), advised(0.85)
    assert every.remedies == ("activation checkpointing of blocks",)  # as it fits already
    assert some.remedies in [(f"activation checkpointing of {count} of 3 blocks",) for count in (1, 2)]
    assert some.fits
    assert "in self.blocks[:" in some.how[0]
    assert "activation_memory_budget" not in some.how[0]  # of a compiled step, it is a remedy of its own
    assert every.time_ratio
    assert some.time_ratio
    assert 1 < some.time_ratio < every.time_ratio
    assert f"{some.time_ratio - 1:+.0%} time a sample." in text(some)


def test_the_blocks_that_save_most_for_least_are_found_by_every_subset() -> None:
    sizes = ((8, 5), (4, 9), (16, 9), (2, 1), (8, 6), (4, 2))
    costs = [BlockCost(str(at), *each) for at, each in enumerate(sizes)]
    subsets = [s for count in range(7) for s in itertools.combinations(costs, count)]
    for need in (1, 7, 15, 29, 41):
        enough = [s for s in subsets if sum(each.nbytes for each in s) >= need]
        found = cheapest(costs, need)
        assert sum(each.nbytes for each in found) >= need
        assert sum(each.flops for each in found) == min(sum(each.flops for each in s) for s in enough)
    assert cheapest(costs, 43) == ()
    assert [each.path for each in cheapest([BlockCost(name, 8, 8) for name in "abc"], 16)] == ["a", "b"]


@pytest.mark.captures
def test_a_model_with_a_switch_for_checkpointing_is_switched() -> None:
    class Switched(nn.Module):
        supports_gradient_checkpointing = True

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(64) for _ in range(4))
            self.is_gradient_checkpointing = False

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
            self.is_gradient_checkpointing = gradient_checkpointing_kwargs == {"use_reentrant": False}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.is_gradient_checkpointing else block(x)
            return x

    class Wrapped(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Switched()])

    (found,) = tried(program_of(Wrapped()), only="checkpointing").advice
    assert found.remedies == ("activation checkpointing of blocks.0",)
    options = "gradient_checkpointing_kwargs={'use_reentrant': False}"
    assert found.how == (f"self.blocks[0].gradient_checkpointing_enable({options})",)


@pytest.mark.captures
def test_on_a_gpu_8_bit_states_take_what_bitsandbytes_keeps() -> None:
    states = EightBitAdam([weight := nn.Parameter(torch.zeros(5000)), small := nn.Parameter(torch.zeros(4095))])
    weight.grad, small.grad = torch.zeros(5000), torch.zeros(4095)
    states.step()
    kept = [tensor.untyped_storage().nbytes() for tensor in states.state[weight].values()]
    assert sorted(kept) == [20 * 4, 20 * 4, 1024, 1024, 5000, 5000]
    assert [tensor.dtype for tensor in states.state[small].values()] == [torch.float32] * 2

    program = program_of(Stacked(width=256), "NVIDIA A100-SXM4-80GB", batches=batches_from_one(batch(width=256)))
    found = by_name(tried(program, only=("8-bit", "SGD", "per-parameter")))
    assert found["8-bit optimizer states"].costs[0].startswith("moments are rounded to 8 bits")
    assert found["8-bit optimizer states"].saved_bytes < found["SGD"].saved_bytes
    assert "per-parameter optimizer" in found  # the default there takes lists of temporaries


def test_a_gpu_that_cannot_compute_in_bf16_is_given_float16() -> None:
    names = offered(program_of(Stacked(), "Tesla T4"))
    assert {"16-mixed", "16-true"} <= names
    assert not any("bf16" in name for name in names)
    (found,) = tried(program_of(Stacked(), "Tesla T4"), only="16-true").advice
    assert found.how == ('Trainer(precision="16-true")',)


@pytest.mark.captures
def test_ddp_is_offered_gradients_as_bucket_views() -> None:
    strategy = pl.strategies.DDPStrategy(parallel_devices=[torch.device("cpu")] * 2)
    (found,) = tried(program_of(Stacked(), strategy=strategy), only="bucket").advice
    assert found.how == ("DDPStrategy(gradient_as_bucket_view=True)",)
    assert strategy._ddp_kwargs == {}


@pytest.mark.captures
def test_a_plain_loop_is_advised_too() -> None:
    def step(model: Any, given: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(given[0]).transpose(1, 2), given[1])

    model = nn.Sequential(*(Block(64) for _ in range(2)), nn.Linear(64, 4))
    model[0].layers[0].bias.requires_grad_(False)
    program = LoopProgram(model, batches_from_one(batch()), step, torch.optim.Adam, torch.device("cpu"))
    found = by_name(tried(program, 0.5, only=("accumulation", "checkpointing", "freezing", "SGD", "bf16-true")))
    assert {"bf16-true", "SGD", "freezing all but 2"} <= set(found)
    (halved,) = (each.footprint for name, each in found.items() if name.startswith("accumulation") and "+" not in name)
    assert halved.parts["gradients"] == halved.parts["parameters"] - 256 * 4  # those of the batches before
    head = next(each for name, each in found.items() if "accumulation" in name and "freezing" in name)
    assert head.footprint.parts["gradients"] <= (64 * 4 + 4) * 4
    assert found["freezing all but 2"].how == ("model.requires_grad_(False); model[2].requires_grad_(True)",)
    assert (
        found["activation checkpointing of the 2 Block modules of model"].how[0].startswith("for block in (model[0],")
    )
    assert found["freezing all but 2"].footprint.parts["gradients"] <= (64 * 4 + 4) * 4
    assert sum(not parameter.requires_grad for parameter in model.parameters()) == 1


@pytest.mark.captures
def test_a_compiled_step_is_advised_to_save_less_which_is_predicted_as_compiled() -> None:
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    model = torch.compile(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))))
    of_one = batches_from_one(torch.zeros(512, 64))
    program = LoopProgram(model, of_one, step, torch.optim.Adam, torch.device("cpu"))
    prediction, least = known(program, 512).proven_at(512), compiled.share_saved()
    need = prediction.footprint_at(512).most_device_bytes
    only = mock.patch.object(advise_module, "families_for", return_value=[])
    with only, mock.patch.object(remedies_module, "_BUDGETS", (0.5,)):
        (found,) = try_remedies(prediction, 512, Budget(need, need - 1, 0, "given")).advice
    assert found.footprint.method == "compiled"
    assert found.fits
    assert found.how[0].startswith("torch._functorch.config.activation_memory_budget = 0.5")
    assert compiled.share_saved() == least


def test_an_evaluation_is_advised_another_precision_alone() -> None:
    class Evaluated(Stacked):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(batch[0])

    found = tried(program_of(Evaluated(), stage="validate"))
    assert {"bf16-true"} <= set(by_name(found)) <= {"bf16-mixed", "bf16-true"}
    assert {name for name, _ in found.left_out} <= {"bf16-mixed"}


# -- inside the error


def refusal_of(budget: int) -> DoesNotFitError:
    data = TensorDataset(torch.randn(64, 128), torch.randint(0, 10, (64,)))
    with pytest.raises(DoesNotFitError) as error:
        quiet_trainer(MemGuard(budget=budget, margin=0.0)).fit(Wide(), train_dataloaders=DataLoader(data, 4))
    return error.value


@pytest.fixture(scope="module")
def refused(all_here: None) -> DoesNotFitError:
    return refusal_of(3000 * KIB)


@pytest.mark.captures
def test_the_error_says_what_would_make_it_fit(refused: DoesNotFitError) -> None:
    assert refused.advice
    text = str(refused)
    assert text.startswith("Batch size 1 needs ")
    assert "\nWhat would make it fit (each predicted by running the step on a copy):\n  - " in text
    assert any(each.fits and each.remedies == ("SGD",) for each in refused.advice)
    assert "You can raise `budget`." in text
    assert "smaller model" not in text  # the rule of thumb is for where there is no better advice


@pytest.mark.captures
def test_the_figures_of_a_refusal_and_of_its_remedies_add_up(refused: DoesNotFitError) -> None:
    """What a remedy needs and what it saves is what the error says that the step needs."""
    assert refused.advice
    for each in refused.advice:
        assert each.footprint.most_device_bytes + each.saved_bytes == refused.needed_bytes


def test_advising_that_fails_does_not_hide_the_error(tuned: Any, taped: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(advise_module, "try_remedies", fail)
    with pytest.raises(DoesNotFitError) as refused:
        tuned(quiet_trainer(), Wide(), TensorDataset(torch.randn(64, 128), torch.zeros(64)), budget=20 * KIB)
    error = refused.value
    assert error.advice == ()
    assert "The largest part is " in str(error)
    assert "What would make it fit" not in str(error)


def fragmenting(size: int = 8) -> Trace:
    """Blocks that are freed in segments too small for what follows."""
    events = [Event("alloc", block, 30 * MIB) for block in range(4)]
    events += [event._replace(action="free") for event in events]
    return Trace(size, "cuda", "fake", (*events, Event("alloc", 9, 100 * MIB)))


def test_a_setting_of_the_allocator_is_a_remedy_that_costs_nothing() -> None:
    def advised(settings: AllocatorSettings, budget: int) -> list[Advice]:
        known = Curve(Terms(settings), "fake", captured={8: (fragmenting(),)}, scalable=False)
        usable = Budget(budget, budget, 0, "given")
        return advise_module._settings_that_save(known, 8, usable)

    (advice,) = advised(AllocatorSettings(), 140 * MIB)
    assert advice.remedies == ("expandable_segments:True",)
    assert advice.how == ("set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment",)
    assert advice.saved_bytes == 100 * MIB  # of 4 x 30 + 100 MiB, what is free is used
    assert advice.fits
    assert not advised(AllocatorSettings(), 100 * MIB)[0].fits
    assert advised(AllocatorSettings(expandable_segments=True), 140 * MIB) == []
    assert advised(AllocatorSettings(kind="exact"), 140 * MIB) == []


def test_a_refusal_names_the_setting_of_the_allocator_that_fits() -> None:
    """Four samples need 160 MiB as it is, 120 in segments that grow, and the budget is between the two."""
    known = Prediction(mock.Mock(), Curve(Terms(AllocatorSettings()), "fake", grow([growing(4), growing(8)])))
    request, budget = Request(4, free_to_choose=False), Budget(140 * MIB, 140 * MIB, 0, "given", "a GPU")
    decision = with_retries(decide(known.footprint_at, budget, request), known)
    assert decision.setting == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert decision.reason.startswith(f"batch size 4 does NOT fit, but would with {decision.setting} in the environ")
    with pytest.raises(DoesNotFitError, match=f"set {decision.setting} in the environment, with which it fits"):
        largest_that_runs(known, budget, replace(request, free_to_choose=True, min_batch_size=4))
    small = replace(budget, free_bytes=100 * MIB)
    assert with_retries(decide(known.footprint_at, small, request), known).setting == ""


def growing(size: int) -> Trace:
    """Blocks of 30 MiB and one of 10 MiB a sample, which none of their segments can hold."""
    events = [Event("alloc", block, 30 * MIB) for block in range(4)]
    events += [event._replace(action="free") for event in events]
    return Trace(size, "cuda", "fake", (*events, Event("alloc", 9, size * 10 * MIB)))


def test_a_setting_of_the_allocator_is_named_with_the_batch_sizes_that_fit() -> None:
    growth = grow([growing(4), growing(8)])
    known = Curve(Terms(AllocatorSettings()), "fake", growth)
    request, budget = Request(4, max_batch_size=64), Budget(300 * MIB, 300 * MIB, 0, "given")
    (advice,) = advise_module._settings_that_save(known, 8, budget, request)
    assert advice.batch_sizes == (30, 18)
    assert "Batch size 30 instead of 18. " in text(advice)
    least = replace(request, min_batch_size=8)
    (advice,) = advise_module._settings_that_save(known, 8, replace(budget, free_bytes=125 * MIB), least)
    assert advice.batch_sizes == (12, 0), "eight samples do not fit next to four segments"
    assert "Batch size 12 instead of none. " in text(advice)
    (advice,) = advise_module._settings_that_save(known, 8, budget, replace(request, max_batch_size=16))
    assert advice.batch_sizes == (16, 16), "what bounds the size is not memory"
    assert "instead of" not in text(advice)


def test_a_setting_that_saves_much_is_noted_where_the_size_is_chosen() -> None:
    known = Curve(Terms(AllocatorSettings()), "fake", captured={8: (fragmenting(),)}, scalable=False)
    (note,) = choose_module._with_setting_note(known.footprint_at(8), known).notes
    words = "the same step needs at most 120.0 MiB instead of 220.0 MiB"
    assert note == f"with PYTORCH_ALLOC_CONF=expandable_segments:True in the environment, {words}"
    grown = Trace(8, "cuda", "fake", (Event("alloc", 0, 100 * MIB),))
    known = Curve(Terms(AllocatorSettings()), "fake", captured={8: (grown,)}, scalable=False)
    assert choose_module._with_setting_note(known.footprint_at(8), known).notes == ()
