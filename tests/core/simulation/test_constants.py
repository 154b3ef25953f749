"""Tensors that a step makes from constants have values, and the step may branch on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.simulation import constants
from lightning_memguard.core.simulation.constants import KnownFakeMode, known_value
from lightning_memguard.core.simulation.fake import fake_copy
from lightning_memguard.core.simulation.faking import faking

CPU = torch.device("cpu")


@pytest.fixture
def mode() -> Iterator[KnownFakeMode]:
    mode = KnownFakeMode(allow_non_fake_inputs=True)
    with faking(mode):
        yield mode


def causal() -> torch.Tensor:
    mask = torch.triu(torch.ones(5, 5), diagonal=1)
    return mask.masked_fill(mask == 1, float("-inf"))


def filled_in_place() -> torch.Tensor:
    return torch.empty(5, 5).fill_(float("-inf")).triu_(1)


def waves() -> torch.Tensor:
    table = torch.zeros(6, 4)
    table[:, 0::2] = torch.sin(torch.arange(6.0).unsqueeze(1))
    table[1:3].mul_(2)
    return table.t()


def counted() -> torch.Tensor:
    steps = torch.tensor(3)
    steps += 1
    return steps


def overwritten() -> torch.Tensor:
    into = torch.empty(3)
    into.copy_(torch.linspace(0, 1, 3))
    return into


def of_a_list() -> torch.Tensor:
    parts = [torch.zeros(2), torch.ones(2)]
    torch._foreach_add_(parts, 1.5)
    return torch.cat(parts)


def picked() -> torch.Tensor:
    numbers = torch.arange(10)
    return numbers[numbers % 3 == 0]


MADE = [causal, filled_in_place, waves, counted, overwritten, of_a_list, picked]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_what_is_made_of_constants_has_the_value_that_it_really_has(mode, make: Callable[[], torch.Tensor]):
    fake = make()
    with torch.utils._python_dispatch._disable_current_modes():
        real = make()
        assert isinstance(fake, FakeTensor)
        assert torch.equal(known_value(fake), real)
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def written_at_random(x: torch.Tensor) -> None:
    x.uniform_()


def written_with_unknowns(x: torch.Tensor) -> None:
    x[0].add_(torch.empty(()))


def normalized(x: torch.Tensor) -> None:
    nn.functional.batch_norm(torch.empty(2, 3), x, torch.ones(3), training=True)


def stepped_fused(x: torch.Tensor) -> None:
    torch._foreach_lerp_([x], [torch.empty(3)], 0.1)


@pytest.mark.parametrize("write", [written_at_random, written_with_unknowns, normalized, stepped_fused])
def test_what_is_overwritten_by_something_unknown_is_unknown(mode, write: Callable[[torch.Tensor], None]):
    x = torch.zeros(3)
    assert known_value(x) is not None
    write(x)
    assert known_value(x) is None
    with pytest.raises(DataDependentOutputException):
        bool((x == 0).all())


def test_a_tensor_that_is_asked_for_its_shape_alone_is_not_kept(mode):
    like = torch.empty(4).as_strided((2, 2), (2, 1))
    gone, zeros = weakref.ref(like), like.new_zeros(3)
    del like
    assert gone() is None
    assert known_value(zeros).tolist() == [0, 0, 0]


def test_random_numbers_are_known_if_they_have_a_seed_whatever_else_is_drawn(mode):
    mode.seed = 1
    state = torch.default_generator.get_state()
    drawn = [known_value(torch.rand(size)[:2]) for size in (2, 1000)]
    mode.seed, mode._draws = 1, 0
    again = known_value(torch.rand(2))
    torch.rand(5)
    assert torch.equal(drawn[0], again)
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(state, torch.default_generator.get_state())
    assert known_value(torch.empty(3).normal_()) is not None
    assert known_value(torch.randperm(4, device="cpu")).sum() == 6
    assert known_value(torch.ones(3, 3)[:, 0].uniform_()) is None  # a part of known memory


def test_with_luck_the_least_or_the_most_of_many_draws_is_drawn(mode):
    mode.seed = 0
    for luck, least, most in (("least", 0.0, 0.1), ("most", 0.9, 1.0)):
        mode.luck = luck
        assert least <= torch.rand(()).item() <= most
        assert torch.full((3,), 0.5).bernoulli().tolist() == [round(most)] * 3


def test_what_is_random_or_empty_or_large_is_unknown(mode):
    assert known_value(torch.rand(3)) is None
    assert known_value(torch.empty(3)) is None
    assert known_value(torch.zeros(constants.MOST_ELEMENTS + 1)) is None
    assert known_value(torch.zeros(3) + torch.empty(3)) is None


@pytest.mark.parametrize(
    "make", [torch.zeros_like, lambda like: like.new_ones(2), lambda like: torch.full_like(like, 3)]
)
def test_a_constant_holds_nothing_that_it_was_made_like(mode, make: Callable[[torch.Tensor], torch.Tensor]):
    like = torch.randn(5, 5)
    storage = weakref.ref(like.untyped_storage())
    made = make(like)
    del like
    assert storage() is None
    assert known_value(made) is not None


def test_a_tensor_that_was_set_to_zero_can_be_freed(mode):
    tensor = torch.randn(5, 5)
    storage = weakref.ref(tensor.untyped_storage())
    assert mode.note_write(torch.ops.aten.zero_.default, [tensor], {})
    del tensor
    assert storage() is None


def test_numbers_written_into_a_constant_are_known_before_and_after_it_is_read(mode):
    aten, held = torch.ops.aten, torch.zeros(3)
    assert all(mode.note_write(func, [held, 2.0], {}) for func in (aten.add_.Tensor, aten.mul_.Tensor))
    assert mode._held_bytes == 0
    assert known_value(held).tolist() == [4, 4, 4]
    assert mode.note_write(aten.add_.Tensor, [held, 1], {})
    assert known_value(held).tolist() == [5, 5, 5]
    assert not mode.note_write(aten.add_.Tensor, [held[:1], 1], {})
    assert not mode.note_write(aten.add_.Tensor, [torch.zeros(3, dtype=torch.long), 0.5], {})


def test_all_values_together_stay_small(mode, monkeypatch):
    """Zeros take no memory until they are asked for; 30 of 4 KiB each are then too many for 100 KiB."""
    monkeypatch.setattr(constants, "MOST_BYTES", 100 * 1024)
    kept = [torch.zeros(1024) + 1 for _ in range(30)]
    assert 20 <= sum(known_value(each) is not None for each in kept) < 26
    assert mode._held_bytes <= 100 * 1024
    kept.clear()
    assert mode._held_bytes == 0


def test_a_branch_and_a_size_that_constants_decide_are_known(mode):
    mask = torch.tensor([True, False, True])
    assert bool((causal() == filled_in_place()).all())
    assert torch.equal(causal(), filled_in_place())
    assert [int(each) for each in torch.arange(3)] == [0, 1, 2]
    assert torch.empty(3, 4)[mask].shape == (2, 4)
    assert torch.arange(3).repeat_interleave(torch.tensor([2, 0, 3])).shape == (5,)


class Queue(nn.Module):
    """As MoCo keeps one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("keys", torch.zeros(4, 32))
        self.started = nn.Parameter(torch.tensor(False), requires_grad=False)
        self.seen: list[tuple[int, bool]] = []

    def push(self, keys: torch.Tensor) -> None:
        start = int(self.pointer)
        self.seen.append((start, bool(self.started)))
        self.keys[:, start : start + len(keys)] = keys.t()
        self.pointer[0] = (start + len(keys)) % 32
        self.started.fill_(True)


def test_small_tensors_of_the_module_are_known_and_the_users_own_stay_as_they_are(mode):
    with torch.utils._python_dispatch._disable_current_modes():
        queue = Queue()
    queue_copy = fake_copy(queue, mode, CPU)
    for _ in range(3):
        queue_copy.push(torch.empty(8, 4))
    assert queue_copy.seen == [(0, False), (8, True), (16, True)]
    with torch.utils._python_dispatch._disable_current_modes():
        assert (queue.pointer.item(), queue.started.item()) == (0, False)
        assert known_value(queue_copy.keys) is None


def test_parameters_that_are_trained_are_unknown(mode):
    with torch.utils._python_dispatch._disable_current_modes():
        layer = nn.Linear(16, 16)
    assert known_value(fake_copy(layer, mode, CPU).weight) is None
    assert known_value(fake_copy(layer.requires_grad_(False), mode, CPU).weight).shape == (16, 16)


class Decoder(nn.Module):
    """A mask makes `nn.Transformer*` ask whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, x, tgt_mask=mask)


@pytest.mark.usefixtures("here")
def test_a_transformer_with_a_mask_is_predicted_on_meta_weights():
    with torch.device("meta"):
        model = Decoder()
    program = LoopProgram(
        model,
        batches_from_one(torch.zeros(2, 6, 16)),
        lambda model, x: model(x).sum(),
        torch.optim.Adam,
        CPU,
    )
    assert predict(program, 2, AllocatorSettings()).curve.method == "fake"
