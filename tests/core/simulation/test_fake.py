"""A module's fake copy: everything of the module but its memory, and nothing done to it reaches the module."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import inspect
import math
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard.core.simulation.constants import KnownFakeMode
from lightning_memguard.core.simulation.fake import fake_copy, isolated_rng, real_copy
from lightning_memguard.core.simulation.faking import (
    UnknownFloat,
    ValueNeededError,
    call,
    faking,
    known_result,
    laid_out,
)
from lightning_memguard.core.simulation.value_sizes import assumption, public_name, result_of

CPU = torch.device("cpu")
aten = torch.ops.aten


class Tied(nn.Module):
    """An encoder and a decoder with one weight, and all that people hang on a module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, dtype=torch.float64)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.encoder.bias.requires_grad_(False)
        self.encoder.weight.sharded = True
        self.register_buffer("mean", torch.full((3,), 7.0))
        self.plain = torch.ones(5)
        self.history = [[1.0]]
        self.steps = 3


def copy_of(module: nn.Module, device: torch.device = CPU, instead: dict[int, object] | None = None) -> nn.Module:
    return fake_copy(module, FakeTensorMode(allow_non_fake_inputs=True), device, instead)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    mode = KnownFakeMode(allow_non_fake_inputs=True)
    with faking(mode):
        yield mode


# The copy


def test_a_copy_has_every_tensor_of_the_module_without_its_memory():
    module = Tied()
    module_copy = copy_of(module)
    mine, theirs = module.state_dict(keep_vars=True), module_copy.state_dict(keep_vars=True)
    assert list(mine) == list(theirs)
    for name in mine:
        assert isinstance(theirs[name], FakeTensor)
        assert isinstance(theirs[name], nn.Parameter) == isinstance(mine[name], nn.Parameter)
        assert (theirs[name].shape, theirs[name].dtype) == (mine[name].shape, mine[name].dtype)
        assert theirs[name].stride() == mine[name].stride()
        assert theirs[name].requires_grad == mine[name].requires_grad
        assert storage(theirs[name]) != storage(mine[name])


def test_tensors_that_are_neither_parameters_nor_buffers_are_fake_too():
    module = Tied()
    module.product = module.encoder.weight * 2  # torch itself refuses to deep-copy this one
    module_copy = copy_of(module)
    assert isinstance(module_copy.plain, FakeTensor)
    assert isinstance(module_copy.product, FakeTensor)


def test_tied_parameters_stay_tied():
    module_copy = copy_of(Tied())
    assert module_copy.decoder.weight is module_copy.encoder.weight


def test_a_buffer_that_two_modules_hold_stays_one():
    module = Tied()
    module.encoder.register_buffer("mean", module.mean)
    module_copy = copy_of(module)
    assert module_copy.encoder.mean is module_copy.mean


def test_tensors_that_share_a_storage_still_share_one():
    module = nn.Module()
    module.register_buffer("table", torch.zeros(8))
    module.register_buffer("first_half", module.table[:4])
    module_copy = copy_of(module)
    assert storage(module_copy.first_half) == storage(module_copy.table)


def test_a_part_of_a_storage_is_moved_without_the_rest():
    """As a parameter of a checkpoint that was read into one storage."""
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.zeros(1024)[:4].view(2, 2))
    copies = [copy_of(module, device) for device in (CPU, torch.device("meta"))]
    assert [each.weight.untyped_storage().nbytes() for each in copies] == [4096, 16]


def test_lists_and_counters_of_the_copy_are_its_own():
    module = Tied()
    module_copy = copy_of(module)
    module_copy.history[0].append(2.0)
    module_copy.history.append([3.0])
    module_copy.steps += 1
    assert (module.history, module.steps) == ([[1.0]], 3)


def test_the_module_is_left_as_it_was():
    module = Tied()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}
    module_copy = copy_of(module)
    module_copy.encoder.weight.requires_grad_(False)
    module_copy.encoder.weight.sharded = False
    for name, tensor in module.state_dict(keep_vars=True).items():
        identity, values = before[name]
        assert id(tensor) == identity
        assert torch.equal(tensor, values)
    assert module.encoder.weight.requires_grad
    assert module.encoder.weight.sharded


def test_attributes_of_parameters_are_kept():
    """Optimizers and strategies read them: which to decay, which to shard."""
    assert copy_of(Tied()).encoder.weight.sharded is True


def test_a_list_on_a_parameter_is_the_copys_own():
    module = Tied()
    module.encoder.weight.groups = ["encoder"]
    copy_of(module).encoder.weight.groups.append("copy")
    assert module.encoder.weight.groups == ["encoder"]


def test_datasets_loaders_and_arrays_are_shared_and_not_copied():
    module = nn.Linear(2, 2)
    module.dataset = TensorDataset(torch.zeros(3))
    module.loaders = {"train": DataLoader(module.dataset)}
    module.tables = [np.zeros(3)]
    module_copy = copy_of(module)
    assert module_copy.dataset is module.dataset
    assert module_copy.loaders["train"] is module.loaders["train"]
    assert module_copy.tables[0] is module.tables[0]
    assert module_copy.tables is not module.tables


@pytest.mark.parametrize("make_copy", [copy_of, real_copy])
def test_what_cannot_be_copied_is_shared_and_all_else_is_still_copied(make_copy):
    module = Tied()
    module.lock = threading.Lock()
    module.numbers = (n for n in (1, 2, 3))
    module_copy = make_copy(module)
    assert module_copy.lock is module.lock
    assert module_copy.numbers is module.numbers
    assert module_copy.history is not module.history
    assert storage(module_copy.encoder.weight) != storage(module.encoder.weight)


@pytest.mark.parametrize("make_copy", [copy_of, real_copy])
def test_what_a_child_cannot_copy_is_shared_and_the_child_is_still_copied(make_copy):
    """Else the copy's weights are the user's, and a step on the copy trains them."""
    module = Tied()
    module.encoder.lock = threading.Lock()
    module_copy = make_copy(module)
    assert module_copy.encoder.lock is module.encoder.lock
    assert module_copy.encoder is not module.encoder
    assert storage(module_copy.encoder.weight) != storage(module.encoder.weight)


class _Unsaved(nn.Linear):
    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "log"}


@pytest.mark.parametrize("make_copy", [copy_of, real_copy])
def test_what_a_getstate_leaves_out_is_shared(make_copy):
    module = _Unsaved(2, 2)
    module.log = ["a file"]
    module_copy = make_copy(nn.Sequential(module))
    assert module_copy[0].log is module.log
    assert module_copy[0].weight is not module.weight


@pytest.mark.parametrize("make_copy", [copy_of, real_copy])
def test_a_class_whose_new_has_arguments_is_copied(make_copy):
    """The EMA of ema-pytorch: a deep copy calls ``__new__`` without them."""

    class Average(nn.Module):
        def __new__(cls, model):
            return super().__new__(cls)

        def __init__(self, model):
            super().__init__()
            self.online, self.steps = model, [0]

    module = nn.ModuleDict({"model": Tied()})
    module["average"] = Average(module["model"])
    module_copy = make_copy(module)
    assert type(module_copy["average"]) is Average
    assert module_copy["average"].online is module_copy["model"]
    assert module_copy["average"].steps is not module["average"].steps
    assert storage(module_copy["model"].encoder.weight) != storage(module["model"].encoder.weight)


@pytest.mark.parametrize("make_copy", [copy_of, real_copy])
def test_tensors_that_share_a_storage_have_copies_that_do(make_copy):
    """A TensorDictParams in torchrl holds the parameters of a module that has them as well; each is copied apart."""
    module = nn.Linear(4, 2)
    module.views = [module.weight.data, module.weight.detach()[1:]]
    module.flat = torch.arange(8.0)
    module.part = module.flat[2:5]
    module_copy = make_copy(module)
    assert {storage(view) for view in module_copy.views} == {storage(module_copy.weight)}
    assert module_copy.views[1].storage_offset() == 4
    assert storage(module_copy.part) == storage(module_copy.flat) != storage(module.flat)
    assert module_copy.part.untyped_storage().nbytes() == 32
    assert [each.requires_grad for each in (module_copy.weight, *module_copy.views)] == [True, False, False]


@pytest.mark.parametrize("make_copy", [copy_of, real_copy])
def test_a_function_over_a_module_around_the_copied_one_is_over_the_copy(make_copy):
    """As a marginal likelihood, which holds the network whose loss it is."""
    module = nn.ModuleDict({"network": nn.Linear(4, 2)})
    likelihood = nn.Sequential(module["network"], nn.Linear(2, 1))
    module.loss = lambda: likelihood
    around = make_copy(module)
    assert around.loss()[0] is around["network"] is not module["network"]
    assert around.loss()[1] is not likelihood[1]
    assert module.loss() is likelihood


class Hooked(nn.Module):
    """Its hooks keep what they are given in the module's own lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen, self.given = nn.Linear(2, 2), [], []
        seen = self.seen
        self.layer.register_forward_pre_hook(lambda *_: self.seen.append("pre"))
        self.layer.register_forward_hook(lambda *_: seen.append("forward"))
        self.layer.register_forward_hook(functools.partial(self.note, self.given))
        self.layer.register_full_backward_hook(lambda *_, owner=self: owner.seen.append("backward"))
        self.layer.weight.register_hook(lambda gradient: self.seen.append("gradient"))
        self.layer.bias.register_post_accumulate_grad_hook(lambda _: self.seen.append("accumulated"))

    @staticmethod
    def note(given: list[object], *_: object) -> None:
        given.append(1)


@pytest.mark.parametrize("make_copy", [real_copy, lambda module: real_copy(module).double()])
def test_hooks_of_a_copy_are_given_the_copy(make_copy):
    module = Hooked()
    module_copy = make_copy(module)
    module_copy.layer(next(module_copy.parameters())).sum().backward()
    assert (module.seen, module.given) == ([], [])
    assert sorted(module_copy.seen) == ["accumulated", "backward", "forward", "gradient", "pre"]
    assert module_copy.given == [1]


def test_hooks_of_a_fake_copy_are_given_the_copy(mode):
    module = Hooked()
    module_copy = fake_copy(module, mode, torch.device("cpu")).double()
    module_copy.layer(next(module_copy.parameters())).sum().backward()
    assert module.seen == []
    assert sorted(module_copy.seen) == ["accumulated", "backward", "forward", "gradient", "pre"]


@pytest.mark.parametrize("make_copy", [copy_of, real_copy])
def test_a_tensor_that_was_computed_is_copied_without_its_graph(make_copy):
    """The weight of ``weight_norm``, which each forward pass replaces: the one of the copy has to be free then."""
    module = nn.Linear(4, 2)
    module.scaled = 2 * module.weight
    module_copy = make_copy(module)
    assert storage(module_copy.scaled) not in (storage(module.scaled), storage(module_copy.weight))
    assert module_copy.scaled.is_leaf
    assert module_copy.scaled.requires_grad


@pytest.mark.parametrize("make_copy", [copy_of, real_copy])
def test_a_scripted_module_has_parameters_that_an_optimizer_takes(make_copy: Callable[[nn.Module], nn.Module]) -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    scripted[0].bias.requires_grad_(False)
    copied = make_copy(nn.ModuleList([scripted]))
    for mine, theirs in zip(scripted.parameters(), copied.parameters(), strict=True):
        assert theirs.is_leaf
        assert theirs.requires_grad == mine.requires_grad
        assert storage(theirs) != storage(mine)
    tensors = [*copied.parameters(), *copied.buffers()]
    assert all(isinstance(tensor, FakeTensor) == (make_copy is copy_of) for tensor in tensors)


def test_an_object_can_be_replaced_on_the_way():
    """How a LightningModule's copy comes without its Trainer."""
    module = Tied()
    module.owner = threading.Thread()
    assert copy_of(module, instead={id(module.owner): None}).owner is None


def test_parameters_and_buffers_go_to_the_device_and_other_tensors_stay():
    module_copy = copy_of(Tied(), torch.device("cuda"))
    assert {t.device.type for t in (*module_copy.parameters(), *module_copy.buffers())} == {"cuda"}
    assert module_copy.plain.device.type == "cpu"


def test_the_copy_of_a_module_without_memory_is_on_the_device_too(mode):
    with torch.utils._python_dispatch._disable_current_modes():
        module = nn.Linear(4, 4, device="meta")
    assert {parameter.device.type for parameter in fake_copy(module, mode, CPU).parameters()} == {"cpu"}


def test_a_real_copy_has_the_values_and_none_of_the_memory():
    module = Tied()
    module_copy = real_copy(module)
    assert torch.equal(module_copy.encoder.weight, module.encoder.weight)
    assert module_copy.decoder.weight is module_copy.encoder.weight
    assert storage(module_copy.encoder.weight) != storage(module.encoder.weight)


# Running under fake tensors


def test_a_copy_can_be_moved_to_another_dtype_and_stays_tied(mode):
    module_copy = fake_copy(Tied(), mode, CPU)
    counted = [
        tensor.untyped_storage() for tensor in module_copy.parameters()
    ]  # what a recorder holds weak references to
    module_copy.to(torch.bfloat16)
    assert {tensor.dtype for tensor in (*module_copy.parameters(), *module_copy.buffers())} == {torch.bfloat16}
    assert isinstance(module_copy.encoder.weight, nn.Parameter)
    assert module_copy.decoder.weight is module_copy.encoder.weight
    assert [p.requires_grad for p in module_copy.parameters()] == [True, False]
    assert len(counted) == 2


def test_a_move_that_changes_nothing_keeps_the_very_parameters(mode):
    """An optimizer made before it still holds those that train."""
    module_copy = fake_copy(nn.Linear(2, 2), mode, CPU)
    before = list(module_copy.parameters())
    module_copy.to("cpu").float()
    assert all(mine is theirs for mine, theirs in zip(before, module_copy.parameters(), strict=True))


def test_a_move_to_channels_last_keeps_the_very_parameters_in_the_new_order(mode):
    module_copy = fake_copy(nn.Conv2d(4, 8, 3), mode, CPU)
    weight = module_copy.weight
    module_copy.to(memory_format=torch.channels_last)
    assert module_copy.weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.requires_grad


def test_real_modules_move_as_ever_meanwhile(mode):
    with torch.utils._python_dispatch._disable_current_modes():
        module = nn.Linear(2, 2)
        weight = module.weight
        module.to(torch.bfloat16)
    assert module.weight is weight, "torch changes real parameters in place"
    assert module.weight.dtype == torch.bfloat16


def test_torchs_own_way_to_move_modules_comes_back_even_after_an_error():
    before, meanwhile = nn.Module._apply, []

    def fail_inside() -> None:
        with faking(FakeTensorMode()):
            meanwhile.append(nn.Module._apply)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert meanwhile[0] is not before
    assert nn.Module._apply is before


def test_a_compiled_module_runs_eagerly(mode):
    """Compiling for fake tensors would take long, and show operators that the eager step does not run."""
    compiled = []
    module = torch.compile(fake_copy(nn.Linear(3, 2), mode, CPU), backend=lambda graph, _: compiled.append(graph))
    assert tuple(module(torch.empty(5, 3)).shape) == (5, 2)
    assert compiled == []


def test_random_generators_are_given_back_as_they_were_even_after_an_error():
    def draws() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])

    def fail_inside() -> None:
        with isolated_rng():
            draws()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert draws() == expected


# Reading unknown values


def test_a_fake_tensor_can_be_deep_copied(mode):
    """As callbacks that keep an average of the weights do; torch's own way would make a real storage."""
    original = torch.empty(3, requires_grad=True)
    memo: dict[int, object] = {}
    module_copy = call(torch.Tensor.__deepcopy__, (original, memo), {})
    assert isinstance(module_copy, FakeTensor)
    assert (module_copy.shape, module_copy.requires_grad) == (original.shape, True)
    assert storage(module_copy) != storage(original)
    assert call(torch.Tensor.__deepcopy__, (original, memo), {}) is module_copy


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_module_can_be_deep_copied_inside_the_mode(mode):
    module = fake_copy(Tied(), mode, CPU)
    clone = copy.deepcopy(module)
    assert clone.decoder.weight is clone.encoder.weight
    assert isinstance(clone.encoder.weight, FakeTensor)
    assert storage(clone.encoder.weight) != storage(module.encoder.weight)


def test_an_unknown_float_can_be_logged_printed_and_scaled(mode):
    loss = call(torch.Tensor.item, (torch.empty(()),), {})
    assert isinstance(loss, UnknownFloat)
    assert isinstance(loss, float)
    assert f"{loss:.2f} {loss}" == "1.00 1.0"
    assert {loss: "kept"}
    assert f"{100 * loss / 4}" == "25.0"


@pytest.mark.parametrize(
    "compare",
    [
        lambda x: x < 0.1,
        lambda x: x <= 0.1,
        lambda x: x > 0.1,
        lambda x: x >= 0.1,
        lambda x: x == 0.1,
        lambda x: x != 0.1,
        lambda x: min(x, 0.1),
        lambda x: "yes" if x else "no",
    ],
)
def test_an_unknown_float_refuses_to_decide_which_way_a_step_takes(compare):
    with pytest.raises(ValueNeededError) as error:
        compare(UnknownFloat(1.0))
    assert str(error.value) == ("The step compares the value of a tensor (`.item()`), which only a real run can give.")


@pytest.mark.parametrize(
    "count", [int, round, math.floor, math.ceil, math.trunc, "{:d}".format, lambda x: [0, 1][int(x)]]
)
def test_an_unknown_float_is_no_count(count):
    """It may be a random choice of an image's size, or a length."""
    with pytest.raises((ValueNeededError, ValueError)):
        count(UnknownFloat(1.0))


def test_an_unknown_float_is_rounded_to_be_shown():
    assert isinstance(round(UnknownFloat(1.0), 3), UnknownFloat)


def test_an_unknown_float_stays_unknown_when_scaled():
    with pytest.raises(ValueNeededError):
        _ = 100 * UnknownFloat(1.0) > 50


def test_a_check_may_choose_the_words_of_what_it_raises(mode):
    """As torchmetrics does where it checks labels; a branch that does something else still needs the value."""

    def checked(x, allowed=None):
        if call(torch.Tensor.__bool__, (x,), {}):
            raise ValueError(f"expected {[0, 1] if allowed is None else [allowed]}")
        return x

    def changed(x, allowed=None):
        if call(torch.Tensor.__bool__, (x,), {}):
            x = 1 if allowed is None else x
        return x

    def normalize_logits_if_needed(x):
        return "as it is" if call(torch.Tensor.__bool__, (x,), {}) else "normalized"

    unknown = torch.empty((), dtype=torch.bool)
    assert checked(unknown) is unknown
    assert normalize_logits_if_needed(unknown) == "normalized"
    with pytest.raises(DataDependentOutputException):
        changed(unknown)


def test_a_value_that_is_known_is_given(mode):
    assert call(torch.Tensor.item, (torch.tensor(2.5),), {}) == 2.5


def test_float_of_a_tensor_is_a_plain_float(mode):
    """Python insists on it, so a comparison of that one goes unseen."""
    assert type(call(torch.Tensor.__float__, (torch.empty(()),), {})) is float


def test_a_mask_whose_value_is_known_is_no_fake_tensor_to_a_library(mode):
    """As transformers asks, before it decides by the values of a mask."""
    known, unknown = torch.ones(3, dtype=torch.bool), torch.empty(3, dtype=torch.bool)
    assert not isinstance(known, torch._subclasses.FakeTensor)
    assert known.all()
    for tensor in (unknown, torch.ones(3), nn.Parameter(torch.empty(3))):
        assert isinstance(tensor, torch._subclasses.FakeTensor)
    assert not isinstance(3, torch._subclasses.FakeTensor)
    assert issubclass(type(known), torch._subclasses.FakeTensor)
    assert torch._subclasses.FakeTensor == type(known), "torch looks for it in lists of types"  # noqa: E721


def test_canary_libraries_find_fake_tensors_where_they_are_hidden():
    before = torch._subclasses.FakeTensor
    assert before is FakeTensor, "see `_Unknown`"
    with faking(KnownFakeMode()):
        assert torch._subclasses.FakeTensor is not before
    assert torch._subclasses.FakeTensor is before
    if importlib.util.find_spec("transformers"):
        asks = inspect.getsource(importlib.import_module("transformers.utils.import_utils").is_fake_tensor)
        assert 'getattr(torch, "_subclasses").FakeTensor' in asks


@pytest.mark.parametrize(("std", "draws"), [(0.02, 1), (1.0, 2), (2.0, 3)])
def test_a_truncated_normal_is_drawn_again_as_often_as_numbers_are_left(mode, std, draws):
    """The bounds are -2 and 2: of 12 numbers, no draw, one and two draws are expected to leave one outside."""
    counted = _CountedDraws()
    with counted:
        nn.init.trunc_normal_(torch.empty(3, 4), std=std)
    assert counted.draws == (draws if torch.__version__ >= "2.13" else 1)
    with pytest.raises(DataDependentOutputException):
        bool(torch.empty(1).normal_() > 0)


class _CountedDraws(TorchDispatchMode):
    draws = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.draws += func in (aten.normal_.default, aten.uniform_.default)
        return func(*args, **kwargs or {})


def test_an_unknown_int_is_not_invented(mode):
    """A number of tokens decides shapes: a made-up one would be a guess."""
    with pytest.raises(DataDependentOutputException):
        call(torch.Tensor.item, (torch.empty((), dtype=torch.long),), {})


# Operators whose result depends on values

X = torch.arange(1.0, 13).reshape(3, 4)
ALL = torch.ones(3, 4, dtype=torch.bool)
ROWS = torch.ones(3, dtype=torch.bool)
COLUMNS = torch.ones(4, dtype=torch.bool)
WORST: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "nonzero": (aten.nonzero.default, (X,)),
    "masked_select": (aten.masked_select.default, (X, ALL)),
    "masked_select, broadcast": (aten.masked_select.default, (X, COLUMNS)),
    "x[mask]": (aten.index.Tensor, (X, [ALL])),
    "x[rows]": (aten.index.Tensor, (X, [ROWS])),
    "x[:, columns]": (aten.index.Tensor, (X, [None, COLUMNS])),
    "unique": (aten._unique2.default, (X.long(), True, True, True)),
}


@pytest.mark.parametrize("name", WORST)
def test_the_worst_case_is_what_a_mask_that_keeps_everything_gives(name):
    operator, args = WORST[name]
    real = operator(*args)
    mode = FakeTensorMode()
    with mode:
        fake_args = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        worst = result_of(operator, fake_args, {})
    facts = [(t.shape, t.dtype) for t in (real if isinstance(real, tuple) else [real])]
    assert [(t.shape, t.dtype) for t in (worst if isinstance(worst, tuple) else [worst])] == facts


def test_a_mask_among_other_indices_keeps_everything_too():
    """x[mask, 0] of 3 rows: three numbers."""
    mode = FakeTensorMode()
    with mode:
        mask, zero = torch.empty(3, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
        assert tuple(result_of(aten.index.Tensor, (torch.empty(3, 4), [mask, zero]), {}).shape) == (3,)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 6, 5).transpose(1, 2),
        torch.randn(4, 6, 5, 8).transpose(2, 3),
        torch.randn(6, 4, 5, 8).transpose(0, 1),
        torch.randn(4, 6, 5, 8).to(memory_format=torch.channels_last),
        torch.randn(4, 6, 5, 8),
    ],
    ids=["patches", "turned", "samples_second", "channels_last", "in_order"],
)
def test_a_batch_norm_is_laid_out_as_its_kernel_does(x):
    forward, backward = aten.native_batch_norm.default, aten.native_batch_norm_backward.default

    def strides(run, x):
        out, *sums = run(forward, (x, None, None, None, None, True, 0.1, 1e-5))
        grad, *_ = run(backward, (out, x, None, None, None, *sums, True, 1e-5, [True, False, False]))
        return out.stride(), grad.stride()

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = strides(lambda func, args: laid_out(func, args, {}), mode.from_tensor(x))
    assert found == strides(lambda func, args: func(*args), x)


def test_an_operator_without_a_known_bound_is_refused_by_name():
    with pytest.raises(ValueNeededError) as error:
        result_of(aten.unique_dim.default, (torch.zeros(3, 4), 0), {})
    assert str(error.value) == "torch.unique needs the values of its input, which only a real run can give."


def test_a_count_of_classes_has_as_many_bins_as_its_caller_names_and_else_no_bound():
    with FakeTensorMode():
        labels = torch.empty(100, dtype=torch.long)
        counts = result_of(aten.bincount.default, (labels, None, 10), {})
        assert (tuple(counts.shape), counts.dtype) == ((10,), torch.long)
        with pytest.raises(ValueNeededError, match=r"^torch\.bincount without `minlength` has as many bins as"):
            result_of(aten.bincount.default, (labels,), {})


def test_a_note_states_what_was_assumed():
    assert assumption(aten.nonzero.default) == "torch.nonzero was assumed to return its largest result"
    assert assumption(aten.bincount.default) == "torch.bincount was assumed to return as many bins as its minlength"
    assert assumption(aten._unique2.default).startswith("torch.unique was")
    assert public_name(aten.linalg_lstsq.default) == "torch.linalg.lstsq"
    assert public_name(torch.ops.prims.div.default) == "prims.div"


# Operators whose result is known without running them


def test_what_writes_into_a_fake_tensor_gives_it_back(mode):
    x = torch.empty(3)
    assert known_result(aten.add_.Tensor, (x, x), {}) is x
    assert known_result(aten.addcdiv_.default, (x, x, x), {}) is x


def test_what_makes_a_tensor_or_writes_a_real_or_known_one_has_to_run(mode):
    x, known = torch.empty(3), torch.tensor(2.5)
    with torch.utils._python_dispatch._disable_current_modes():
        real = torch.empty(3)
    assert known_result(aten.add.Tensor, (x, x), {}) is None
    assert known_result(aten.add_.Tensor, (real, real), {}) is None
    assert known_result(aten.add_.Tensor, (known, known), {}) is None
    assert known_result(aten.zero_.default, (known,), {}) is known


_AFTER_DTENSOR = """
import torch.distributed.tensor
aten = torch.ops.aten
before = {packet: {name: getattr(getattr(aten, packet), name) for name in getattr(aten, packet).overloads()}
          for packet in ("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "sqrt_", "zero_", "fill_",
                         "_fused_sgd_", "_fused_adagrad_")}
import lightning_memguard, lightning_memguard.core.capture.predict, lightning_memguard.core.layers.layers
for packet, overloads in before.items():
    for name, overload in overloads.items():
        assert getattr(getattr(aten, packet), name) is overload, (packet, name)
"""


@pytest.mark.long
def test_importing_us_after_dtensor_leaves_torchs_operators_the_same_objects() -> None:
    """DTensor's rules are kept by operator: with another ``mul_.Tensor`` in its place, FSDP2 finds no rule for it."""
    done = subprocess.run([sys.executable, "-c", _AFTER_DTENSOR], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- tensor subclasses


class Wrapping(torch.Tensor):
    """As torchvision's tv_tensors: a few operators return it, all others plain tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **kwargs or {})
        if func is torch.Tensor.clone:
            return output.as_subclass(cls)
        return output.as_subclass(torch.Tensor) if isinstance(output, cls) else output


class Kept(torch.Tensor):
    """Of which torch makes the results of all operators."""


class Noted(torch.Tensor):
    """As MONAI's MetaTensor: what is noted on a tensor goes on to the results."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs)
        if isinstance(output, cls) and args and isinstance(args[0], cls):
            vars(output).update({name: value for name, value in vars(args[0]).items() if name == "noted"})
        return output


class MadeOf(torch.Tensor):
    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_subclass(cls, tensor)


def noted(x):
    made = x.as_subclass(Noted)
    made.noted = 3
    return made


MAKERS = {
    "wrapping": (lambda x: x.as_subclass(Wrapping), torch.Tensor),
    "kept": (lambda x: x.as_subclass(Kept), Kept),
    "noted": (noted, Noted),
    "made": (MadeOf, MadeOf),
}


@pytest.mark.parametrize(("make", "result"), MAKERS.values(), ids=MAKERS)
def test_a_tensor_subclass_is_as_on_real_tensors_and_stays_fake(make, result) -> None:
    def step(x):
        made = make(x)
        product = made @ made.mT
        return made, made.clone(), product, getattr(product, "noted", None), made.as_subclass(torch.Tensor)

    weight = torch.rand(2, 3, requires_grad=True)
    real = step(weight * 1)
    mode = FakeTensorMode()
    with faking(mode):
        fake = step(mode.from_tensor(weight) * 1)
        assert all(isinstance(each, FakeTensor) for each in fake if isinstance(each, torch.Tensor))
        assert type(fake[-1]) is FakeTensor
        assert isinstance(fake[2], result)
        assert fake[3] == real[3]
        for mine, theirs in zip(fake[:3], real[:3], strict=True):
            assert type(mine).__name__ == type(theirs).__name__.replace("Tensor", "FakeTensor")
            assert mine.as_subclass(torch.Tensor).shape == theirs.shape
            assert mine.requires_grad is theirs.requires_grad


def test_as_subclass_of_real_tensors_is_torchs_own() -> None:
    own = torch.Tensor.as_subclass
    with faking(FakeTensorMode()):
        pass
    assert torch.Tensor.as_subclass is own
    assert type(torch.zeros(2).as_subclass(Kept)) is Kept
