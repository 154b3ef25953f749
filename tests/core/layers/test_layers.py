"""The table by layer: compared with real tensors, torch's own counter, and sums by hand."""

import copy
import itertools
import random
from dataclasses import FrozenInstanceError, replace

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_memguard.core import gpus
from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import capture
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.layers.layers import Layer, LayerTable, Weight, layer_table, run_model
from lightning_memguard.core.simulation.fake_cuda import can_simulate_cuda
from lightning_memguard.errors import MemGuardError

# -- a network of four branches, worked out by hand


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one = nn.Conv2d(channels, 12, 1)
        self.three_in, self.three = nn.Conv2d(channels, 10, 1), nn.Conv2d(10, 18, 3, padding=1)
        self.five_in, self.five = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, 14, 5, padding=2)
        self.pool, self.pooled = nn.AvgPool2d(3, stride=1, padding=1), nn.Conv2d(channels, 8, 1)

    def forward(self, x):
        branches = [self.one(x), self.three(self.three_in(x)), self.five(self.five_in(x)), self.pooled(self.pool(x))]
        return torch.cat(branches, dim=1)


class FourBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry, self.pool1, self.block1 = nn.Conv2d(1, 6, 5), nn.MaxPool2d(2), Block(6)
        self.middle, self.pool2, self.block2 = nn.Conv2d(52, 12, 5), nn.MaxPool2d(2), Block(12)
        self.head = nn.Linear(832, 10)

    def forward(self, x):
        x = self.block1(self.pool1(self.entry(x)))
        return self.head(self.block2(self.pool2(self.middle(x))).flatten(1))


# path: (output shape, parameters, multiply-adds), worked out by hand from the layers' sizes
BY_HAND = {
    "entry": ((6, 24, 24), (1 * 25 + 1) * 6, 25 * 6 * 24 * 24),
    "pool1": ((6, 12, 12), 0, 0),
    "block1.one": ((12, 12, 12), (6 + 1) * 12, 6 * 12 * 144),
    "block1.three_in": ((10, 12, 12), (6 + 1) * 10, 6 * 10 * 144),
    "block1.three": ((18, 12, 12), (10 * 9 + 1) * 18, 90 * 18 * 144),
    "block1.five_in": ((8, 12, 12), (6 + 1) * 8, 6 * 8 * 144),
    "block1.five": ((14, 12, 12), (8 * 25 + 1) * 14, 200 * 14 * 144),
    "block1.pool": ((6, 12, 12), 0, 0),
    "block1.pooled": ((8, 12, 12), (6 + 1) * 8, 6 * 8 * 144),
    "middle": ((12, 8, 8), (52 * 25 + 1) * 12, 52 * 25 * 12 * 64),
    "pool2": ((12, 4, 4), 0, 0),
    "block2.one": ((12, 4, 4), (12 + 1) * 12, 12 * 12 * 16),
    "block2.three_in": ((10, 4, 4), (12 + 1) * 10, 12 * 10 * 16),
    "block2.three": ((18, 4, 4), (10 * 9 + 1) * 18, 90 * 18 * 16),
    "block2.five_in": ((8, 4, 4), (12 + 1) * 8, 12 * 8 * 16),
    "block2.five": ((14, 4, 4), (8 * 25 + 1) * 14, 200 * 14 * 16),
    "block2.pool": ((12, 4, 4), 0, 0),
    "block2.pooled": ((8, 4, 4), (12 + 1) * 8, 12 * 8 * 16),
    "head": ((10,), (832 + 1) * 10, 832 * 10),
}


@pytest.fixture(scope="module")
def four_branches() -> LayerTable:
    return layer_table(FourBranches(), torch.zeros(1, 1, 28, 28))


def test_four_branches_have_33762_parameters_by_three_routes(four_branches):
    by_torch = sum(parameter.numel() for parameter in FourBranches().parameters())
    by_hand = sum(parameters for _, parameters, _ in BY_HAND.values())
    assert four_branches.parameters == by_torch == by_hand == 33_762
    assert four_branches.trainable_parameters == 33_762
    assert four_branches.parameter_bytes == 135_048
    assert round(four_branches.parameter_bytes / 2**20, 2) == 0.13


def test_four_branches_layer_by_layer(four_branches):
    leaves = [layer for layer in four_branches if layer.is_leaf]
    found = {layer.name: (layer.output_shape[1:], layer.parameters, layer.multiply_adds) for layer in leaves}
    assert found == BY_HAND
    assert [layer.name for layer in four_branches if not layer.is_leaf] == ["", "block1", "block2"]
    assert four_branches.multiply_adds == 1_840_448
    assert four_branches.flops == 2 * 1_840_448
    assert four_branches["block1"].parameters == 0
    assert four_branches.within("block1").parameters == 4_718
    assert four_branches.within("block1").multiply_adds == 669_312
    assert four_branches["block1.five"].depth == 2


# -- what autograd keeps: the same step with real tensors


class Tokens(nn.Module):
    """Embedding, attention with dropout, GRU, a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.rnn(self.encoder(self.embed(tokens)))[0])


def really_kept(model, batch):
    """Bytes of the storages that autograd holds after a real forward pass."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.detach()), lambda _: None):
        model(batch)
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), batch)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(nbytes for address, nbytes in storages.items() if address not in known)


NETWORKS = {
    "four branches": (FourBranches(), (3, 1, 28, 28)),
    "conv1d": (
        nn.Sequential(
            nn.Conv1d(4, 6, 5, stride=2, groups=2), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(48, 7)
        ),
        (3, 4, 20),
    ),
    "conv2d": (
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3, groups=4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
        ),
        (3, 3, 16, 16),
    ),
    "conv3d": (
        nn.Sequential(nn.Conv3d(2, 4, 3), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(108, 3, bias=False)),
        (3, 2, 8, 8, 8),
    ),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(3, 5, 3, stride=2), nn.Tanh()), (3, 3, 8, 8)),
    "in place": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), (3, 4)),
    "tokens": (Tokens(), (3, 7)),
    "evaluation": (Tokens().eval(), (3, 7)),
}


@pytest.mark.parametrize(("model", "shape"), NETWORKS.values(), ids=NETWORKS)
def test_activations_are_what_autograd_really_keeps_and_flops_are_torchs(model, shape):
    """On the CPU torch's own counter calls its fused attention 0: that of attention is summed by hand below."""
    batch = torch.zeros(shape, dtype=torch.long if isinstance(model, Tokens) else None)
    table = layer_table(model, batch)
    assert table.activation_bytes == really_kept(model, batch) > 0
    with FlopCounterMode(display=False) as counter:
        model(batch)
    assert isinstance(model, Tokens) or table.flops == counter.get_total_flops() > 0


def test_the_trace_of_the_step_holds_the_same_activations_at_any_batch_size():
    model, batch = FourBranches(), torch.zeros(2, 1, 28, 28)

    def step(model, x):
        return model(x).square().sum()

    program = LoopProgram(model, batches_from_one(batch), step, None, torch.device("cpu"))
    made = [event for event in capture(program, 8, "fake") if event.action == "alloc" and event.phase == "forward"]
    traced = sum(event.nbytes for event in made if event.part == "activations" and event.step == 0)
    small, large = (layer_table(model, batch, batch_size=size, step=step) for size in (None, 8))
    assert traced == large.activation_bytes + 4  # the loss itself
    assert (small.batch_size, large.batch_size) == (2, 8)
    assert large.activation_bytes == 4 * small.activation_bytes
    assert large.flops == 4 * small.flops
    assert large["head"].output_bytes == 4 * small["head"].output_bytes == 8 * 10 * 4
    assert large.parameters == small.parameters


# -- modules of all kinds, each with its own batch, in one model


class Discards(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.for_nothing, self.target = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.for_nothing(x.exp()).exp()
        with torch.no_grad():
            target = self.target(x).exp()
        return self.used(x).exp() * target


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x.exp(), use_reentrant=False)


class Attends(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.need_weights = need_weights
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class FewerKeys(nn.Module):
    def forward(self, q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.again = self.body
        self.unused = nn.Linear(2, 3)

    def forward(self, x):
        return self.again(self.body(x)) + self.body(x)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel, self.weight = nn.Parameter(torch.zeros(4, 2, 3)), nn.Parameter(torch.zeros(5, 4 * 8))

    def forward(self, x):
        return F.linear(F.relu(F.conv1d(x, self.kernel)).flatten(1), self.weight)


class VectorTimesMatrix(nn.Linear):
    def forward(self, x):
        return super().forward(x[0]) @ torch.ones(3)


def tanhs():
    return nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()


ATTENDS = [*itertools.product((True, False), repeat=3)]
KINDS = {
    "rectified": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Sigmoid()), torch.zeros(3, 4)),
    "discards": (Discards(), torch.zeros(3, 4)),
    "checkpointed": (Checkpointed(*tanhs()), torch.zeros(3, 8, requires_grad=True)),
    "not_checkpointed": (nn.Sequential(*tanhs()), torch.zeros(3, 8, requires_grad=True)),
    "frozen": (nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 2)), torch.zeros(3, 4)),
    **{
        f"attends_{training}_{frozen}_{need_weights}": (
            Attends(need_weights).train(training).requires_grad_(not frozen),
            torch.zeros(3, 7, 16),
        )
        for training, frozen, need_weights in ATTENDS
    },
    "fewer_keys": (FewerKeys(), torch.zeros(3, 4, 5, 8, requires_grad=True), torch.zeros(3, 2, 5, 8)),
    **{
        kind.__name__: (kind(12, 8, num_layers=2, bidirectional=True, batch_first=True), torch.zeros(3, 5, 12))
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    },
    "vector": (VectorTimesMatrix(5, 3), torch.zeros(3, 5)),
    "shares": (Shares(), torch.zeros(3, 6)),
    "tokens": (Tokens(), torch.zeros(3, 7, dtype=torch.long)),
    "functional": (Functional(), torch.zeros(3, 2, 10)),
}


@pytest.fixture(scope="module")
def kinds():
    """The table of each kind by its name, with its own paths: of one table of all."""

    def step(model, batches):
        return [model[name](*batch) for name, batch in batches.items()]

    model = nn.ModuleDict({name: module for name, (module, *_) in KINDS.items()})
    whole = layer_table(model, {name: tuple(batch) for name, (_, *batch) in KINDS.items()}, step=step)

    def of(name):
        def own(path):
            return path.removeprefix(name).removeprefix(".")

        rows = whole.within(name)
        return replace(rows, layers=tuple(replace(r, name=own(r.name), shared_with=own(r.shared_with)) for r in rows))

    return of


def test_a_storage_counts_where_it_is_kept_first(kinds):
    """The rectifier keeps its result, so the layer after it has nothing to add; the batch exists anyway."""
    assert [layer.activation_bytes for layer in kinds("rectified")] == [0, 0, 3 * 8 * 4, 0, 3 * 2 * 4]


def test_what_is_dropped_before_the_backward_pass_is_not_kept(kinds):
    table = kinds("discards")
    assert table["for_nothing"].activation_bytes == 0
    assert table["target"].activation_bytes == 0
    assert table.activation_bytes == 2 * 3 * 4 * 4  # the exponential and the target


def test_a_checkpoint_keeps_its_input_alone(kinds):
    assert kinds("checkpointed").activation_bytes == 3 * 8 * 4
    assert kinds("not_checkpointed").activation_bytes == 2 * 3 * 8 * 4


def test_a_frozen_backbone_keeps_nothing(kinds):
    table = kinds("frozen")
    assert [layer.activation_bytes for layer in table] == [0, 0, 0, 3 * 8 * 4]
    assert (table.parameters, table.trainable_parameters) == (58, 18)
    assert sum(weight.nbytes for weight in table.weights if weight.trainable) == 18 * 4


@pytest.mark.skipif(not can_simulate_cuda(), reason="this torch cannot simulate CUDA")
def test_a_gpu_keeps_other_tensors_than_the_cpu():
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.Dropout()), torch.zeros(3, 4)
    on_gpu = layer_table(model, batch, gpu=gpus.find("NVIDIA H200"))
    assert layer_table(model, batch)["1"].activation_bytes == 3 * 8 * 4
    assert on_gpu["1"].activation_bytes == 3 * 8
    tokens = torch.zeros(3, 7, dtype=torch.long)
    both = [layer_table(Tokens().eval(), tokens, gpu=gpu) for gpu in (None, gpus.find("NVIDIA H200"))]
    assert both[0].flops == both[1].flops


# -- what is computed


@pytest.mark.parametrize("how", ATTENDS)
def test_attention_counts_by_whatever_path_it_runs(kinds, how):
    """Training or not, frozen or not, asked for weights or not."""
    training, frozen, need_weights = how
    batch, length, width = 3, 7, 16
    projections = 4 * 2 * batch * length * width * width
    scores_and_values = 2 * 2 * batch * length * length * width
    table = kinds(f"attends_{training}_{frozen}_{need_weights}")
    assert table["attention"].flops == table.flops == projections + scores_and_values
    assert table["attention"].parameters + table["attention.out_proj"].parameters == 4 * 16 * 17


def test_scaled_dot_product_attention_with_fewer_keys(kinds):
    assert kinds("fewer_keys").flops == 2 * 2 * 3 * 4 * 5 * 5 * 8


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers(kinds, kind, gates):
    table = kinds(kind)
    weights = 2 * gates * 8 * (12 + 8) + 2 * gates * 8 * (16 + 8)
    assert table.flops == 2 * 3 * 5 * weights
    assert table[""].output_shape == (3, 5, 16)
    assert table.parameters == weights + 4 * 2 * gates * 8


def test_a_vector_times_a_matrix_counts(kinds):
    assert kinds("vector").multiply_adds == 5 * 3 + 3


# -- which module counts what


def test_a_shared_module_counts_once_and_is_shown_as_shared(kinds):
    table = kinds("shares")
    names = ["", "body", "body.0", "body.1", "again", "again.0", "again.1", "unused"]
    assert [layer.name for layer in table] == names
    assert [layer.shared_with for layer in table] == ["", "", "", "", "body", "body.0", "body.1", ""]
    assert [layer.calls for layer in table] == [1, 3, 3, 3, 0, 0, 0, 0]
    assert table["body.0"].flops == table.flops == 3 * 2 * 3 * 6 * 6
    assert table["again.0"].parameters == table["body.0"].parameters == 42
    assert table["again.0"].output_shape == (3, 6)
    assert table["unused"].output_shape is None
    assert table.parameters == 42 + 9 == sum(p.numel() for p in Shares().parameters())


def test_a_tied_parameter_counts_once(kinds):
    table = kinds("tokens")
    assert table["head"].parameters == table["embed"].parameters == 800
    assert [weight.name for weight in table["head"].weights] == ["tokens.embed.weight"]
    assert table.parameters == sum(p.numel() for p in Tokens().parameters())
    assert table.within("head").parameters == 800


def test_modules_in_functional_style_count_for_the_module_that_runs(kinds):
    (row,) = kinds("functional")
    assert row.multiply_adds == 3 * (4 * 8 * 2 * 3 + 5 * 4 * 8)
    assert row.activation_bytes == 3 * 4 * 8 * 4
    assert row.parameters == 24 + 160


# -- models and batches as they come


def on_meta(model):
    with torch.device("meta"):
        return model()


LAZY = nn.Sequential(nn.LazyConv3d(4, 3), nn.LazyBatchNorm3d(), nn.Flatten(), nn.LazyLinear(5), nn.Linear(5, 2))
KNOWN = nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4), nn.Flatten(), nn.Linear(256, 5), nn.Linear(5, 2))
VOLUMES, WORDS = torch.zeros(2, 1, 6, 6, 6), torch.zeros(3, 7, dtype=torch.long)


def test_a_table_is_the_same_of_lazy_modules_on_the_meta_device_and_where_gradients_are_off():
    known = layer_table(KNOWN, VOLUMES)
    assert layer_table(LAZY, VOLUMES) == known
    assert nn.parameter.is_lazy(LAZY[0].weight)
    assert isinstance(LAZY[0], nn.LazyConv3d)
    with torch.no_grad():
        assert layer_table(KNOWN, VOLUMES) == known
    assert layer_table(on_meta(Tokens), WORDS.to("meta")) == layer_table(Tokens(), WORDS)
    wide = on_meta(lambda: nn.Linear(1 << 20, 1 << 20))  # 4 TiB
    assert layer_table(wide, torch.zeros(1, 1 << 20)).parameter_bytes == 4 * ((1 << 40) + (1 << 20))


def test_half_precision_takes_half_the_bytes():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    whole = layer_table(model, torch.zeros(3, 4))
    half = layer_table(copy.deepcopy(model).bfloat16(), torch.zeros(3, 4, dtype=torch.bfloat16))
    assert 2 * half.parameter_bytes == whole.parameter_bytes
    assert 2 * half.activation_bytes == whole.activation_bytes
    assert half.flops == whole.flops


def test_nothing_of_the_users_model_is_touched():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(72, 3))
    model[2].eval()
    seen = []
    model.register_forward_hook(lambda *_: seen.append("a hook of the user's ran on the copy, not on the model"))
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    hooks = [(list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.modules()]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    pythons = random.getstate()
    table = layer_table(model, torch.zeros(4, 1, 8, 8), step=lambda m, x: m(x * random.random() + torch.rand(1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == pythons
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not nn.modules.module._global_forward_hooks
    assert torch.backends.mha.get_fastpath_enabled()
    assert table["2"].activation_bytes == 0  # a dropout in evaluation mode keeps nothing


# -- LightningModules, batches and steps


class Trains(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss


class OnlyForward(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x):
        return self.net(x)


def test_a_lightning_module_runs_its_training_step():
    batch = (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))
    table = layer_table(Trains(), batch)
    assert table["net"].multiply_adds == 3 * 4 * 2
    assert table[""].activation_bytes == 3 * 2 * 4 + 4  # the loss keeps its softmax and what it divides by
    attached = Trains()
    attached._trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", barebones=True)
    trainer = attached._trainer
    assert layer_table(attached, batch) == table
    assert attached._trainer is trainer
    seen = []
    layer_table(attached, batch, step=lambda m, _: seen.append(m._trainer))
    assert seen == [None]


def test_a_lightning_module_without_a_training_step_runs_its_forward():
    assert run_model(OnlyForward(), torch.zeros(3, 4)).shape == (3, 2)


def test_batches_are_passed_as_they_suggest():
    class Pair(nn.Module):
        def forward(self, x, y):
            return x @ y

    class Whole(nn.Module):
        def forward(self, pair):
            return pair[0] @ pair[1]

    x, y = torch.rand(4, 2, 3), torch.rand(4, 3, 5)
    for batch in [(x, y), [x, y], {"x": x, "y": y}]:
        assert torch.equal(run_model(Pair(), batch), x @ y)
    assert torch.equal(run_model(Whole(), (x, y)), x @ y)


def test_a_step_decides_how_to_call_the_model_and_a_note_states_what_was_assumed():
    model, x = nn.Linear(4, 2), torch.zeros(3, 4)
    for step, note in {
        lambda m, b: F.cross_entropy(m(b["image"]), b["label"]): "",
        lambda m, b: m(b["image"]).sum().backward(): "own backward pass",
        lambda m, b: m(b["image"][b["image"].sum(1) > 0]).sum(): "largest result",
    }.items():
        table = layer_table(model, {"image": x, "label": torch.zeros(3, dtype=torch.long)}, step=step)
        assert table.multiply_adds == 3 * 4 * 2  # the forward pass alone
        assert [note in each for each in table.notes] == [True] * bool(note)


# -- what is refused


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: layer_table("model", torch.zeros(3, 4)), "model is a str"),
        (lambda: layer_table(nn.Linear(4, 2), torch.zeros(3, 4), batch_size=0), "batch_size=0"),
        (lambda: layer_table(nn.Linear(4, 2), torch.zeros(3, 4), step=3), "step= is a int"),
        (lambda: layer_table(nn.Linear(4, 2), "batch"), "no tensor to size it by"),
        (lambda: layer_table(nn.Linear(4, 2), torch.zeros(3, 5)), "layers of Linear"),
        (lambda: layer_table(Branches(), torch.zeros(3, 4)), r"layers of Branches.*step=\(model, batch\)"),
    ],
)
def test_what_makes_no_sense_is_refused(ask, words):
    with pytest.raises(MemGuardError, match=words):
        ask()


# -- the records by themselves


def test_totals_of_a_table_written_by_hand():
    weight, tied = Weight("a.weight", 10, 40, trainable=True), Weight("b.bias", 3, 6, trainable=False)
    rows = (
        Layer("", "Model", (2,), 8, 1, is_leaf=False),
        Layer("a", "Linear", (2, 5), 40, 1, (weight,), 100, 7),
        Layer("b", "Linear", (2, 1), 8, 2, (weight, tied), 20, 30),
        Layer("b2", "Linear", (2, 1), weights=(weight, tied), shared_with="b"),
    )
    table = LayerTable(2, rows)
    assert (table.parameters, table.trainable_parameters, table.parameter_bytes) == (13, 10, 46)
    assert (table.activation_bytes, table.flops, table.multiply_adds) == (120, 37, 3 + 15)
    assert [row.name for row in table.within("b")] == ["b"]
    assert len(table) == 4
    with pytest.raises(KeyError):
        table["c"]
    with pytest.raises(FrozenInstanceError):
        table.batch_size = 3
