"""What the operators of a step compute and move, added up by hand."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_memguard.core.batch.batches import batches_from_one
from lightning_memguard.core.capture import recorder as recorders
from lightning_memguard.core.capture.predict import predict
from lightning_memguard.core.capture.program import LoopProgram
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.capture.work import work_of
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.trace.work import CONVOLUTION, Work

pytestmark = pytest.mark.exact


def works_of(run, *tensors):
    """The work of a few operators, forward and, for tensors that require gradients, backward."""
    recorder = Recorder("cpu")
    recorder.mark("forward")
    with watching(recorder, nn.Module()):
        torch.ones(3).neg()  # of the first batch, which is not noted
        recorder.mark("forward", step=1)
        out = run(*tensors)
        if out.requires_grad:
            out.backward(torch.ones_like(out))
    return recorder.trace(1, "real").work


def test_work_is_noted_in_the_second_batch_alone(monkeypatch):
    """The first makes states, and looking at an operator takes time."""
    noted = list[object]()
    monkeypatch.setattr(recorders, "work_of", lambda func, *_, **__: noted.append(func))
    works_of(torch.neg, torch.ones(2))
    assert noted == [torch.ops.aten.neg.default]


def products_of(run, *tensors):
    return [work.flops for work in works_of(run, *tensors) if work.kind]


def weight(*shape):
    return torch.ones(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "tensors", "expected"),
    [
        pytest.param(
            torch.mm, [torch.ones(2, 3), torch.ones(3, 5)], [("float32", 2 * 2 * 3 * 5, 4 * (6 + 15 + 10))],
            id="a product reads its operands and writes its result",
        ),
        pytest.param(
            lambda x: x.t().reshape(6, 1)[1:].expand(5, 7), [torch.ones(1, 6)], [], id="a view moves nothing"
        ),
        pytest.param(torch.neg, [torch.ones(1).expand(100)], [("", 0, 4 + 400)], id="an expanded tensor is read once"),
        pytest.param(
            F.embedding, [torch.zeros(2, dtype=torch.long), torch.ones(1000, 8)], [("", 0, 2 * 2 * 8 * 4)],
            id="an embedding reads the rows that it returns",
        ),
    ],
)  # fmt: skip
def test_an_operator_moves_what_it_reads_and_writes(run, tensors, expected):
    assert works_of(run, *tensors) == tuple(Work(*each) for each in expected)


@pytest.mark.parametrize(("precision", "kind"), [("highest", "float32"), ("high", "tf32")])
def test_a_gpu_multiplies_in_the_format_that_was_set(precision, kind):
    torch.set_float32_matmul_precision(precision)
    try:
        with FakeTensorMode():
            x = torch.empty(2, 2, device="cuda")
            work = work_of(torch.ops.aten.mm.default, (x, x), {}, x, tf32=False)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert work == Work(kind, 16, 48)


def convolution(groups, transposed, forward):
    """As much for each gradient as forward."""
    shape = (4, 8 // groups, 3, 3) if transposed else (8, 4 // groups, 3, 3)
    run = functools.partial(F.conv_transpose2d if transposed else F.conv2d, groups=groups)
    flops = [forward // groups, 2 * forward // groups]
    name = f"a {'transposed ' * transposed}convolution of {groups} groups"
    return pytest.param(run, [weight(2, 4, 6, 6), weight(*shape)], flops, id=name)


OF_16_PLACES, OF_36_PLACES = (2 * 2 * places * 4 * 8 * 9 for places in (16, 36))
ONCE, PRODUCT = 2 * 4 * 5 * 3 * 9, 2 * 2 * 16 * 16 * 8


@pytest.mark.parametrize(
    ("run", "tensors", "flops"),
    [
        *(convolution(groups, False, OF_16_PLACES) for groups in (1, 2, 4)),
        *(convolution(groups, True, OF_36_PLACES) for groups in (1, 2)),
        pytest.param(
            F.conv2d, [torch.ones(1, 3, 4, 4), weight(5, 3, 3, 3)], [ONCE, ONCE],
            id="the first layer has no gradient of its input",
        ),
        pytest.param(
            F.scaled_dot_product_attention, [weight(1, 2, 16, 8) for _ in range(3)], [2 * PRODUCT, 5 * PRODUCT],
            id="attention costs five products backward for two forward",
        ),
    ],
)  # fmt: skip
def test_products_cost_their_flops_forward_and_backward(run, tensors, flops):
    assert products_of(run, *tensors) == flops


@pytest.mark.parametrize(("groups", "kind"), [(1, "bfloat16"), (8, "bfloat16"), (16, "float32"), (64, "float32")])
def test_thin_groups_have_no_use_for_tensor_cores(groups, kind):
    images, weight = torch.ones(2, 64, 8, 8).bfloat16(), torch.ones(64, 64 // groups, 3, 3).bfloat16()
    work = works_of(lambda x, w: F.conv2d(x, w, groups=groups), images, weight)
    assert [each.kind for each in work if each.kind] == [kind + CONVOLUTION]


def test_a_batch_norm_reads_its_input_twice_for_its_statistics():
    norm, images = nn.BatchNorm2d(4).requires_grad_(requires_grad=False), torch.ones(8, 4, 16, 16)
    both = [max(work.nbytes for work in works_of(norm.train(mode), images)) for mode in (True, False)]
    assert both[0] - both[1] == pytest.approx(images.numel() * 4, rel=0.01)


def test_a_step_is_its_batches_and_one_update():
    program = LoopProgram(
        nn.Linear(8, 4, bias=False),
        batches_from_one(torch.ones(6, 8)),
        lambda model, x: model(x).sum(),
        torch.optim.Adam,
        torch.device("cpu"),
        accumulate_grad_batches=2,
    )
    found = predict(program, 6, AllocatorSettings(kind="exact")).footprint_at(6).timing
    flops = [work.flops for work in found.work if work.kind]
    assert flops == [2 * 6 * 8 * 4] * 2  # forward, and the gradient of the weight: the input needs none
    assert found.batches_per_step == 2
    assert sum(work.nbytes for work in found.work if work.updates) > 4 * 32 * 3 * 2  # both moments and the weight
