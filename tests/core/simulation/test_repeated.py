"""An operator called again the same way gives what torch's own fake tensors give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_memguard.core.simulation import repeated
from lightning_memguard.core.simulation.repeated import RepeatingFakeMode


class Repeating(RepeatingFakeMode):
    """As the modes that captures run in use it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, types, args, kwargs or {})


def facts(tree: object) -> list[object]:
    """Facts about fake tensors, and which of them share memory."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    first = {tensor.untyped_storage()._cdata: place for place, tensor in reversed([*enumerate(tensors)])}
    return [
        (
            *(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.layout, t.requires_grad, type(t)),
            (
                t.untyped_storage().nbytes(),
                first[t.untyped_storage()._cdata],
                t._is_view(),
                t.is_leaf,
                t.is_inference(),
            ),
        )
        for t in tensors
    ]


def images(x: torch.Tensor) -> Any:
    net = nn.Conv2d(3, 4, 3)
    return net(x), net(x.to(memory_format=torch.channels_last)), nn.functional.max_pool2d(x, 2, return_indices=True)


def views(x: torch.Tensor) -> Any:
    return x, x[1:, ::2], x.split(1), x.transpose(0, 1).reshape(-1), x.expand(2, *x.shape), x.detach(), x.unbind()


def writes(x: torch.Tensor) -> Any:
    y = x.detach().clone()
    return y, y.add_(1), torch._foreach_mul([y, y], 2.0), y.view(-1)[3:].zero_()


def kinds(x: torch.Tensor) -> Any:
    return x + 1, x > 0, x.double(), x.to(torch.complex64).conj(), x.sum(0), x.sum((0, 1), keepdim=True), x * True


def gradients(x: torch.Tensor) -> Any:
    loss = nn.functional.layer_norm(x, x.shape[-1:]).exp().sum()
    return torch.autograd.grad(loss, x)


def normalized(x: torch.Tensor) -> Any:
    return torch.ops.aten.native_batch_norm(x, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)


def inferred(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return kinds(x), views(x), views(x + 1), writes(x)


@pytest.mark.parametrize(
    "step", [images, views, writes, kinds, gradients, normalized, inferred], ids=lambda step: step.__name__
)
def test_a_repetition_gives_what_torchs_own_fake_tensors_give(
    step: Callable[[torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(repeated, "_templates", templates := {})  # earlier tests may have met the step's operators

    def run(mode: FakeTensorMode) -> list[object]:
        with mode:
            return facts(step(torch.empty(2, 3, 8, 8, requires_grad=True)))

    expected = run(FakeTensorMode())
    assert run(Repeating()) == expected
    known = len(templates)
    assert known > 0
    assert run(Repeating()) == expected
    assert len(templates) == known


def test_a_repeated_operator_does_not_run_torchs_own_dispatch(monkeypatch):
    with Repeating():
        x = torch.empty(3, 4)
        first = x.mul(2)
        monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", None)
        again = x.mul(2)
    assert isinstance(again, FakeTensor)
    assert facts(again) == facts(first)
    assert again.untyped_storage()._cdata != first.untyped_storage()._cdata


def test_numbers_of_another_kind_make_another_result():
    with Repeating():
        x = torch.empty(3, dtype=torch.long)
        assert [x.mul(value).dtype for value in (2, 2.0, True)] == [torch.long, torch.float32, torch.long]


def test_what_depends_on_values_is_left_to_torch():
    with Repeating():
        mask = torch.empty(3, dtype=torch.bool)
        for _ in range(2):
            with pytest.raises(torch._subclasses.fake_tensor.DynamicOutputShapeException):
                mask.nonzero()


def test_fake_tensors_of_two_modes_do_not_mix():
    """The templates are shared, the tensors are not."""
    for _ in range(2):
        mode = Repeating()
        with mode:
            assert (torch.empty(5) + 1).fake_mode is mode
