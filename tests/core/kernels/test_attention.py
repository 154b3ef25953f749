"""Scratch of attention on a CUDA GPU: each rule against a case worked by hand from PyTorch's source."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from lightning_memguard.core.kernels import attention, table
from lightning_memguard.core.kernels.arguments import Call
from lightning_memguard.core.range import Range
from lightning_memguard.core.simulation.faking import by_name
from lightning_memguard.core.trace.scratch import NONE, CpuTarget, CudaTarget, Scratch
from tests.profiled import blocks_of

V100, A100, RTX4090, H100, RTX5090 = (
    CudaTarget((7, 0), 80),
    CudaTarget((8, 0), 108),
    CudaTarget((8, 9), 128),
    CudaTarget((9, 0), 132),
    CudaTarget((12, 0), 170),
)
BF16, SINGLE = torch.bfloat16, torch.float32


def tensors(
    *shape: int, dtype: torch.dtype = BF16, device: str = "meta", grad: bool = True, groups: int = 1
) -> list[torch.Tensor]:
    """Query, key and value, as a linear layer and `view(...).transpose(1, 2)` make them."""
    batch, heads, rows, width = shape

    def one(heads: int) -> torch.Tensor:
        x = torch.empty(batch, rows, heads, width, dtype=dtype, device=device, requires_grad=grad)
        return x.transpose(1, 2)

    return [one(heads), one(heads // groups), one(heads // groups)]


def scratch(name: str, *args: Any, kernel_target: Any, results: tuple[Any, ...] = ()) -> Scratch:
    operator = getattr(torch.ops.aten, f"_{name}").default
    rule = table.rule(f"_{name}", kernel_target)
    assert rule is not None
    return rule(Call(by_name(operator, args, {}), results or args[:1], kernel_target))


def flash_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel_target: CudaTarget, out=None
) -> Scratch:
    out = query if out is None else out
    return scratch(
        "scaled_dot_product_flash_attention_backward", query, query, key, value, out, kernel_target=kernel_target
    )


def efficient_backward(inputs: list[torch.Tensor], kernel_target: CudaTarget, dropout_p: float = 0.0) -> Scratch:
    rest = (None, None, None, None, None, dropout_p, [True, True, True, False])
    return scratch(
        "scaled_dot_product_efficient_attention_backward", inputs[0], *inputs, *rest, kernel_target=kernel_target
    )


FLASH = "scaled_dot_product_flash_attention"
EFFICIENT = "scaled_dot_product_efficient_attention"


def test_flash_splits_the_keys_where_queries_are_too_few_for_the_gpu() -> None:
    inputs = tensors(1, 4, 128, 64)
    # 8 blocks of queries on 216 slots; the keys of 1024 make 4 blocks of 256, and each split is a wave of its own part:
    # 8/216, 16/216, (three make the same as two), 32/216. Only four reach 85% of the best.
    key = tensors(1, 4, 1024, 64)[1]
    splits = 4
    assert scratch(FLASH, inputs[0], key, key, kernel_target=A100) == Scratch(
        after=((splits * 4 * 128 * 4, splits * 4 * 128 * 64 * 4),)
    )


def test_flash_does_not_split_when_the_gpu_is_full_or_with_dropout() -> None:
    full = tensors(8, 16, 128, 64)  # 256 blocks of queries
    assert scratch(FLASH, *full, kernel_target=A100) == NONE
    few = tensors(1, 4, 1024, 64)
    assert scratch(FLASH, *few, 0.1, kernel_target=A100).after == ((16,),)  # the generator's state
    assert scratch(FLASH, *few, kernel_target=A100) != NONE


@pytest.mark.parametrize(("width", "rounded"), [(64, 64), (72, 96), (128, 128), (136, 192), (256, 256)])
def test_flash_backward_sums_the_querys_gradient_in_float32(width, rounded) -> None:
    sums = 2 * 4 * 256 * 4  # 200 rows, rounded up to 256
    inputs = tensors(2, 4, 200, width)
    assert flash_backward(*inputs, A100) == Scratch(after=((sums, sums * rounded),))


def test_flash_backward_copies_what_is_in_another_order() -> None:
    inputs = tensors(2, 4, 128, 64)
    out = torch.empty(2, 4, 128, 64, dtype=BF16, device="meta")
    sums = 2 * 4 * 128 * 4
    assert flash_backward(*inputs, A100, out) == Scratch(after=((2 * 4 * 128 * 64 * 2, sums, sums * 64),))


def test_flash_backward_gives_every_head_a_gradient_of_a_shared_key() -> None:
    inputs = tensors(2, 8, 128, 64, groups=4)
    sums, expanded = 2 * 8 * 128 * 4, 2 * 8 * 128 * 64 * 2
    assert flash_backward(*inputs, A100) == Scratch(after=((sums, sums * 64, expanded, expanded),))


def test_flash_backward_takes_a_copy_a_wave_to_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    sums = 2 * 4 * 128 * 4
    assert flash_backward(*tensors(2, 4, 128, 64), A100) == Scratch(after=((sums, 14 * sums * 64),))  # 108 / 8, up


def test_efficient_keeps_wide_heads_in_float32_next_to_the_result() -> None:
    assert scratch(EFFICIENT, *tensors(2, 4, 16, 128), None, True, kernel_target=A100) == NONE
    assert scratch(EFFICIENT, *tensors(2, 4, 16, 256, dtype=SINGLE), None, True, kernel_target=A100) == NONE
    wide = tensors(2, 4, 16, 256)
    assert scratch(EFFICIENT, *wide, None, True, kernel_target=A100) == Scratch(after=((2 * 4 * 16 * 256 * 4,),))


def test_efficient_backward_takes_tiles_of_the_querys_gradient() -> None:
    # two tiles of 64 rows by one of 64 columns, 16 bytes before each
    workspace = 2 * 4 * 2 * (16 + 64 * 64 * 4)
    assert efficient_backward(tensors(2, 4, 100, 64), A100) == Scratch(after=((2 * 4 * 100 * 4, workspace),))
    # one tile of 128 by 128
    workspace = 2 * 4 * (16 + 128 * 128 * 4)
    assert efficient_backward(tensors(2, 4, 100, 128), A100) == Scratch(after=((2 * 4 * 100 * 4, workspace),))


def test_efficient_backward_has_narrow_tiles_for_some_gpus() -> None:
    """As PyTorch 2.11 allocated them, its kernels left out (`benchmarks/operators.py`)."""
    square, narrow = 2 * 4 * (16 + 128 * 128 * 4), 2 * 4 * 2 * (16 + 128 * 64 * 4)
    sums = 2 * 4 * 100 * 4
    heads = tensors(2, 4, 100, 96)
    assert efficient_backward(tensors(2, 4, 100, 128), RTX5090) == Scratch(after=((sums, square),))
    assert efficient_backward(heads, RTX4090) == Scratch(after=((sums, narrow),))
    assert efficient_backward(heads, RTX4090, dropout_p=0.1) == Scratch(after=((sums, square),))
    assert efficient_backward(heads, CudaTarget((7, 5), 40)) == Scratch(after=((sums, narrow),))


def test_efficient_backward_makes_gradients_for_every_head_that_shares_a_key() -> None:
    query, (key, value) = tensors(2, 8, 256, 64)[0], tensors(2, 2, 256, 64)[:2]
    expanded = 2 * 8 * 256 * 64 * 2
    taken = efficient_backward([query, key, value], H100).after
    assert taken == ((expanded, expanded, 2 * 8 * 256 * 4, 1_049_600),)  # as PyTorch 2.14 allocated them


def test_efficient_backward_in_float32_makes_the_row_sums_first() -> None:
    product, sums = 2 * 4 * 100 * 64 * 4, 2 * 4 * 100 * 4
    workspace = 2 * 4 * 2 * (16 + 64 * 64 * 4)
    for kernel_target in (A100, RTX4090, V100):
        assert efficient_backward(tensors(2, 4, 100, 64, dtype=SINGLE), kernel_target) == Scratch(
            after=((product, sums, sums), (sums, workspace))
        )
    assert efficient_backward(tensors(2, 4, 100, 64, dtype=SINGLE), CudaTarget((6, 1), 20)) == Scratch(
        after=((product, sums, sums), (sums,))
    )


@pytest.mark.parametrize(
    ("pairs", "columns", "splits"), [(8, 1024, 16), (100, 1024, 2), (256, 1024, 1), (256, 100, 1), (16, 64, 1)]
)
def test_keys_are_split_less_the_more_heads_there_are(pairs, columns, splits) -> None:
    assert attention._efficient_splits(pairs, columns, 64, (8, 0)) == splits
    assert attention._efficient_splits(pairs, columns, 64, (6, 1)) == 1


def test_cudnn_says_nothing_of_its_workspace_so_it_is_a_span() -> None:
    inputs = tensors(2, 4, 128, 64)
    forward = scratch("scaled_dot_product_cudnn_attention", *inputs, None, True, kernel_target=H100)
    assert forward == Scratch(after=((Range(0, 0, 2 * 4 * 128 * 64 * 4),),))
    backward = scratch("scaled_dot_product_cudnn_attention_backward", inputs[0], *inputs, kernel_target=H100)
    sums, one = 2 * 4 * 128 * 4, 2 * 4 * 128 * 64 * 4
    assert backward == Scratch(after=((Range(sums, sums + one, sums + 3 * one),),))


# -- plain operators


def test_the_softmax_of_plain_products_looks_for_rows_that_are_masked_out() -> None:
    x = torch.empty(2, 4, 16, 32, device="meta")
    masks = (2 * 4 * 16 * 32, 2 * 4 * 16)
    assert scratch("safe_softmax", x, -1, kernel_target=V100).after == ((*masks, 4),)


@pytest.mark.parametrize("shape", [(4, 8, 128, 128), (2, 4, 16, 32), (6, 10)])
@pytest.mark.parametrize("dtype", [SINGLE, BF16, torch.float64])
@pytest.mark.parametrize("is_turned", [False, True])
def test_the_softmax_takes_on_the_cpu_what_the_profiler_says(shape, dtype, is_turned) -> None:
    x = torch.randn(shape).to(dtype)
    x = x.mT.contiguous().mT if is_turned else x
    sizes = [nbytes for _, nbytes in blocks_of(lambda: torch.ops.aten._safe_softmax(x, -1))]
    peaks = list(accumulate(sizes))
    moments = scratch("safe_softmax", x, -1, kernel_target=CpuTarget(threads=1)).after
    assert sizes[0] == x.nbytes, "the result"
    assert max(peaks) - x.nbytes == max(map(sum, moments))
    if shape == (4, 8, 128, 128) and dtype == SINGLE and not is_turned:
        assert max(peaks) - x.nbytes == 528_388
