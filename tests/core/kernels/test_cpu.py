"""Kernels of the CPU, each alone: the most alive inside one operator, asked of its rule and seen by the profiler."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memguard.core.capture.kernel_scratch import this_cpu
from lightning_memguard.core.kernels import cpu_factorizations as lapack
from lightning_memguard.core.kernels import onednn, table
from lightning_memguard.core.kernels.arguments import Call
from lightning_memguard.core.range import Range
from lightning_memguard.core.simulation.faking import by_name
from lightning_memguard.core.trace.scratch import CpuTarget
from lightning_memguard.core.trace.trace import moments_of
from tests.profiled import blocks_of

pytestmark = pytest.mark.exact

aten = torch.ops.aten
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
ASKED = pytest.mark.skipif(onednn.library() is None, reason="oneDNN inside this build of PyTorch cannot be asked")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def assert_exact(operator: Any, *args: Any, **keywords: Any) -> None:
    """The rule says what the profiler sees: the most alive at once, but for a few numbers."""
    gc.collect()
    ran: list[Any] = []
    sizes = [nbytes for _, nbytes in blocks_of(lambda: ran.append(operator(*args, **keywords)))]
    alive, peak, out = sum(sizes), max(itertools.accumulate(sizes), default=0), ran[0]
    results = [each for each in (out if isinstance(out, (list, tuple)) else [out]) if each is not None]
    given = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
    target = this_cpu(torch.get_num_threads())
    rule = table.rule(operator._schema.name.partition("::")[2], target)
    assert rule is not None
    scratch = rule(Call(by_name(operator, args, keywords), results or [keywords["out"]], target))
    held, moments = 0, [0, *map(total, moments_of(scratch, -1))]
    for place, result in enumerate(results):
        held += 0 if result.untyped_storage()._cdata in given else result.numel() * result.element_size()
        held += scratch.kept if place == 0 else 0
        moments += [held, *(held + total(moment) for moment in moments_of(scratch, place))]
    predicted = max([*moments, *(held + total(moment) for moment in moments_of(scratch, None))])
    assert held == alive
    assert abs(predicted - peak) <= 16


def total(moment: Any) -> int:
    return sum(moment) if isinstance(moment, tuple) else moment


def tensor(*shape: int, dtype: torch.dtype = torch.float32, last: bool = False) -> torch.Tensor:
    x = torch.randn(shape).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


# -- convolutions

Case = Callable[[], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]
CONVOLUTIONS: dict[str, Case] = {
    "strided, on small images": lambda: (tensor(8, 64, 4, 4), tensor(96, 64, 3, 3), {"stride": 2, "padding": 1}),
    "strided, odd sides": lambda: (tensor(4, 24, 9, 7), tensor(40, 24, 3, 3), {"stride": 2, "padding": 1}),
    "strided, few inputs": lambda: (tensor(4, 3, 20, 20), tensor(16, 3, 7, 7), {"stride": 2, "padding": 3}),
    "a dilated sequence": lambda: (tensor(4, 24, 60), tensor(32, 24, 3), {"dilation": 4, "padding": 4}),
    "a sequence with channels innermost": lambda: (tensor(4, 60, 24).transpose(1, 2), tensor(32, 24, 3), {}),
    "groups": lambda: (tensor(4, 24, 9, 9), tensor(48, 6, 3, 3), {"groups": 4}),
    "depthwise, channels last": lambda: (tensor(4, 40, 9, 9, last=True), tensor(40, 1, 7, 7), {"groups": 40}),
    "channels last": lambda: (tensor(4, 24, 9, 9, last=True), tensor(40, 24, 3, 3), {"padding": 1}),
    "volumes": lambda: (tensor(2, 6, 5, 6, 7), tensor(9, 6, 3, 3, 3), {"stride": 2}),
    "transposed": lambda: (tensor(4, 24, 5, 6), tensor(24, 10, 4, 4), {"stride": 2, "padding": 1, "transposed": True}),
    "transposed, groups": lambda: (
        tensor(4, 24, 5, 6),
        tensor(24, 5, 3, 3),
        {"stride": 2, "output_padding": 1, "groups": 2, "transposed": True},
    ),
    "bfloat16": lambda: (tensor(4, 24, 9, 9, dtype=BF16), tensor(40, 24, 3, 3, dtype=BF16), {"padding": 1}),
    "float16": lambda: (tensor(4, 24, 9, 9, dtype=F16), tensor(40, 24, 3, 3, dtype=F16), {"stride": 2}),
}
UNFOLDED: dict[str, Case] = {
    "one image": lambda: (tensor(1, 8, 9, 9), tensor(12, 8, 3, 3), {"padding": 1}),
    "float64": lambda: (tensor(3, 8, 9, 9, dtype=F64), tensor(12, 8, 3, 3, dtype=F64), {"padding": 1}),
    "float64, dilated": lambda: (tensor(3, 8, 9, 9, dtype=F64), tensor(12, 8, 3, 3, dtype=F64), {"dilation": 2}),
    "float64, groups": lambda: (tensor(3, 8, 9, 9, dtype=F64), tensor(12, 2, 3, 3, dtype=F64), {"groups": 4}),
    "float64, transposed": lambda: (
        tensor(3, 8, 5, 5, dtype=F64),
        tensor(8, 6, 3, 3, dtype=F64),
        {"stride": 2, "transposed": True},
    ),
    "float64, volumes": lambda: (tensor(2, 4, 5, 5, 5, dtype=F64), tensor(6, 4, 2, 2, 2, dtype=F64), {}),
    "float64, volumes, each voxel": lambda: (tensor(2, 4, 5, 5, 5, dtype=F64), tensor(6, 4, 1, 1, 1, dtype=F64), {}),
}


def assert_convolution_exact(case: Case) -> None:
    x, weight, move = case()
    count = x.dim() - 2
    spread = {name: [move.get(name, default)] * count for name, default in DEFAULTS.items()}
    transposed, groups = move.get("transposed", False), move.get("groups", 1)
    rest = (*list(spread.values())[:3], transposed, spread["output_padding"], groups)
    out = weight.shape[1] * groups if transposed else weight.shape[0]
    bias = torch.zeros(out, dtype=x.dtype)
    assert_exact(aten.convolution.default, x, weight, bias, *rest)
    assert_exact(aten.convolution.default, x, weight, None, *rest)
    grad = torch.randn_like(aten.convolution(x, weight, bias, *rest))
    for mask in ([True, True, True], [False, True, False]):
        assert_exact(aten.convolution_backward.default, grad, x, weight, [out], *rest, mask)


DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}


@ASKED
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_what_a_convolution_takes_is_asked_of_onednn(case: str, threads: int) -> None:
    x = CONVOLUTIONS[case]()[0]
    host = this_cpu(threads)
    if (x.dtype is BF16 and not host.bf16) or (x.dtype is F16 and not host.fp16):
        pytest.skip(f"PyTorch does not give {x.dtype} to oneDNN on this processor")
    assert_convolution_exact(CONVOLUTIONS[case])


@pytest.mark.parametrize("case", UNFOLDED)
def test_other_convolutions_unfold_their_images(case: str) -> None:
    assert_convolution_exact(UNFOLDED[case])


@ASKED
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts a process's peak")
def test_looking_for_onednn_takes_little_memory_of_a_process_that_trains() -> None:
    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))

    _, path = onednn._mapped("libtorch_cpu")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    before = status("VmRSS")
    assert onednn._symbols(path, list(onednn._FUNCTIONS))
    assert status("VmHWM") - before < 32 << 10, "KiB; the library's table of names has 100 MiB"


@pytest.mark.skipif(
    bool({"ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"} & {*os.environ}), reason="the formulas are for a whole processor"
)
def test_formulas_stand_in_where_onednn_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "convolution", lambda *_: None)
    plain = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert_exact(aten.convolution.default, tensor(4, 16, 8, 8), tensor(20, 16, 3, 3), None, *plain)


# -- products in half precision

PRODUCTS: dict[str, tuple[Any, Callable[[torch.dtype], tuple[Any, ...]]]] = {
    "a linear layer": (aten.addmm.default, lambda t: (tensor(10).to(t), half(128, 512, t), half(10, 512, t).t())),
    "its weight's gradient": (aten.mm.default, lambda t: (half(128, 10, t).t(), half(128, 512, t))),
    "one column": (aten.mm.default, lambda t: (half(128, 512, t), half(512, 1, t))),
    "a strided operand": (aten.mm.default, lambda t: (half(128, 128, t)[:, ::2], half(64, 60, t))),
    "a small product": (aten.mm.default, lambda t: (half(8, 8, t), half(8, 8, t))),
    "a batch": (aten.bmm.default, lambda t: (half(4, 50 * 30, t).view(4, 50, 30), half(4, 30 * 70, t).view(4, 30, 70))),
    "a vector": (aten.mv.default, lambda t: (half(128, 512, t), half(1, 512, t)[0])),
    "two vectors": (aten.dot.default, lambda t: (half(1, 5000, t)[0], half(1, 5000, t)[0])),
}


def half(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns).to(dtype)


@ASKED
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_what_a_product_in_half_precision_takes_is_asked_of_onednn(
    product: str, dtype: torch.dtype, threads: int
) -> None:
    operator, arguments = PRODUCTS[product]
    assert_exact(operator, *arguments(dtype))


@ASKED
def test_a_scaled_product_holds_its_scale_too(threads: int) -> None:
    """Muon's orthogonalization: ``beta * self + alpha * mat1 @ mat2`` in bfloat16."""
    x = half(96, 96, BF16)
    assert_exact(aten.addmm.default, x, x, x, beta=-4.775, alpha=2.0315)


# -- attention in half precision

ATTENTION = {
    "short": (20, 20, 32),
    "packed for AMX": (100, 100, 32),
    "with tiles at the end": (300, 130, 16),
    "odd heads": (70, 66, 17),
}


@ASKED
@pytest.mark.parametrize("dtype", [torch.float32, F64, BF16, F16], ids=["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_takes_its_tiles_in_both_precisions(case: str, dtype: torch.dtype) -> None:
    length, keys, width = ATTENTION[case]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        query, key, value = (torch.randn(2, n, 4, width).to(dtype).transpose(1, 2) for n in (length, keys, keys))
        assert_exact(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value)
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        grad = torch.randn_like(out)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        assert_exact(backward, grad, query, key, value, out, sums, 0.0, False)
    finally:
        torch.set_num_threads(before)


@ASKED
def test_each_thread_may_add_to_the_gradients_at_once() -> None:
    x = torch.randn(2, 4, 100, 32).to(BF16)
    rule = table.rule("_scaled_dot_product_flash_attention_for_cpu_backward", CpuTarget(threads=2))
    assert rule is not None
    given = {"grad_out": x, "query": x, "key": x, "value": x}
    ((*_, product),) = rule(Call(given, [x, x, x], CpuTarget(threads=2))).after
    assert isinstance(product, Range)
    assert 0 < product.low < product.high == 2 * product.low


# -- losses, sums, operands of different types

X = (50, 40)
LAYOUTS = {
    "in order": torch.randn(4, 8, 16),
    "turned": torch.randn(4, 16, 8).transpose(1, 2),
    "with gaps": torch.randn(4, 8, 32)[..., ::2],
}
OTHERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    **{
        f"{name}, reduction {reduction}": lambda name=name, reduction=reduction: (  # type: ignore[misc]
            getattr(aten, name).default,
            *(torch.rand(X), torch.rand(X)),
            *([None] if name == "binary_cross_entropy" else []),
            *([None, None] if name == "binary_cross_entropy_with_logits" else []),
            reduction,
        )
        for name in ("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits")
        for reduction in (0, 1, 2)
    },
    "weighted positives": lambda: (
        aten.binary_cross_entropy_with_logits.default,
        *(torch.rand(X), torch.rand(X), None, torch.rand(40), 0),
    ),
    "soft margins": lambda: (aten.soft_margin_loss_backward.default, torch.rand(()), torch.rand(X), torch.rand(X), 1),
    "the mean of half precision": lambda: (aten.mean.dim, half(50, 40, BF16), [1]),
    "the mean of everything": lambda: (aten.mean.default, half(50, 40, F16)),
    "a sum of flags": lambda: (aten.sum.dim_IntList, torch.rand(X) > 0.5, [1]),
    "a weight and half a step": lambda: (aten.add_.Tensor, torch.rand(X), half(50, 40, BF16)),
    "half a weight and a step": lambda: (aten.add_.Tensor, half(50, 40, BF16), torch.rand(X)),
    "a product of two types": lambda: (aten.mul.Tensor, torch.rand(X), half(50, 40, BF16)),
    "layer norm of half precision": lambda: (
        aten.native_layer_norm_backward.default,
        *(half(50, 40, BF16), half(50, 40, BF16), [40], half(50, 1, BF16), half(50, 1, BF16)),
        *(torch.rand(40).to(BF16), torch.rand(40).to(BF16), [True, True, True]),
    ),
    **{
        f"gelu, {names}": lambda names=names: (aten.gelu_backward.default, *(LAYOUTS[name] for name in names))
        for names in itertools.product(("in order", "turned", "with gaps"), repeat=2)
    },
    **{
        f"a bag of embeddings, mode {mode}, {dtype}": lambda mode=mode, dtype=dtype: (  # type: ignore[misc]
            aten._embedding_bag.default,
            *(torch.rand(50, 40).to(dtype), torch.randint(50, (600,)), torch.arange(0, 600, 5), False, mode),
        )
        for mode in (0, 1, 2)
        for dtype in (torch.float32, F64)
    },
    "matrices with gaps": lambda: (aten.bmm.default, torch.rand(3, 16, 80)[..., ::2], torch.rand(3, 40, 90)[..., ::2]),
    **{
        f"batch norm, {name}": lambda last=last: (aten.native_batch_norm.default, *of_channels(last), True, 0.1, 1e-5)
        for name, last in (("contiguous", False), ("channels last", True))
    },
    **{
        f"its gradients, {name}": lambda last=last: (
            aten.native_batch_norm_backward.default,
            *(tensor(4, 24, 9, 9, last=last), *of_channels(last)[:2], *of_channels(last)[3:]),
            *(torch.rand(24), torch.rand(24), True, 1e-5, [True, True, True]),
        )
        for name, last in (("contiguous", False), ("channels last", True))
    },
    "softmax of a transposed matrix": lambda: (aten._softmax.default, torch.rand(40, 50).t(), 1, False),
    "the gradient of a softmax": lambda: (
        aten._softmax_backward_data.default,
        *(torch.rand(40, 50).t(), torch.rand(50, 40), 1, torch.float32),
    ),
    "the gradient of an embedding": lambda: (
        aten.embedding_dense_backward.default,
        *(torch.rand(8, 600).t(), torch.randint(50, (600,)), 50, -1, False),
    ),
    "the gradient of pooling": lambda: (
        aten._adaptive_avg_pool2d_backward.default,
        *(torch.rand(4, 24, 2, 3).transpose(2, 3), torch.rand(4, 24, 9, 9)),
    ),
    **{
        f"small images, {kind}": lambda kind=kind: (
            getattr(aten, f"upsample_{kind}2d").default,
            *(torch.rand(2, 3, 6, 6), [12, 12], *([False] if kind == "bilinear" else [])),
        )
        for kind in ("nearest", "bilinear")
    },
    "a transposed matrix, copied": lambda: (aten.copy_.default, torch.rand(90, 80), torch.rand(80, 90).t()),
    "sums so far of flags": lambda: (aten.cumsum.default, torch.rand(X) > 0.5, 1),
    **{
        f"unfolded images, {name}": lambda last=last: (  # type: ignore[misc]
            aten.im2col.default,
            *(tensor(2, 3, 8, 8, last=last), [3, 3], [1, 1], [0, 0], [1, 1]),
        )
        for name, last in (("contiguous", False), ("channels last", True))
    },
    "folded columns": lambda: (
        aten.col2im.default,
        *(torch.rand(2, 9, 360).transpose(1, 2), [12, 12], [6, 6], [1, 1], [0, 0], [3, 3]),
    ),
}


def of_channels(last: bool) -> tuple[torch.Tensor, ...]:
    """Images, and a weight, a bias and the statistics of their channels."""
    return (tensor(4, 24, 9, 9, last=last), *torch.rand(4, 24))


@pytest.mark.parametrize("case", OTHERS)
def test_what_other_kernels_take(case: str, threads: int) -> None:
    assert_exact(*OTHERS[case]())


# -- factorizations


def symmetric(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, shape[-1], dtype=dtype)
    return x @ x.mT + torch.eye(shape[-1], dtype=dtype)


FACTORIZATIONS: dict[str, Callable[[], tuple[Any, ...]]] = {
    **{
        f"singular values, {shape} {dtype}": lambda shape=shape, dtype=dtype: (
            aten._linalg_svd.default,
            torch.randn(shape, dtype=dtype),
        )
        for shape, dtype in (((96, 64), F64), ((64, 96), torch.float32), ((3, 40, 20), torch.float32))
    },
    "singular values of a transposed matrix": lambda: (aten._linalg_svd.default, torch.randn(90, 70).t()),
    "all singular vectors": lambda: (aten._linalg_svd.default, torch.randn(80, 50), True),
    **{
        f"QR, {shape} {mode}": lambda shape=shape, mode=mode: (aten.linalg_qr.default, torch.randn(shape), mode)
        for shape in ((64, 64), (300, 40), (40, 300), (31, 33))
        for mode in ("reduced", "complete", "r")
    },
    "QR of a batch": lambda: (aten.linalg_qr.default, torch.randn(3, 64, 32)),
    "QR in double precision": lambda: (aten.linalg_qr.default, torch.randn(64, 32, dtype=F64)),
    "eigenvectors": lambda: (aten._linalg_eigh.default, symmetric(100)),
    "eigenvectors of a batch": lambda: (aten._linalg_eigh.default, symmetric(3, 32, dtype=F64)),
    "an inverse": lambda: (aten.linalg_inv_ex.default, symmetric(80)),
}


@pytest.mark.skipif(
    lapack.workspace_bytes("geqrf", "s", (8, 8), 1) is None,
    reason="LAPACK inside this build cannot be asked",
)
@pytest.mark.parametrize("case", FACTORIZATIONS)
def test_what_a_factorization_takes(case: str, threads: int) -> None:
    assert_exact(*FACTORIZATIONS[case]())


def test_without_an_answer_of_lapack_a_workspace_is_as_in_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lapack, "_library", lambda: None)
    assert lapack.workspace_bytes.__wrapped__("geqrf", "s", (64, 64), 1) is None
    assert lapack.workspace_bytes.__wrapped__("orgqr", "d", (64, 64, 64), 1) is None


def test_asking_lapack_leaves_the_threads_as_they_were(threads: int) -> None:
    lapack.workspace_bytes.__wrapped__("geqrf", "s", (96, 96), 5)
    assert torch.get_num_threads() == threads


# -- asking


def test_a_library_without_these_functions_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str, **_: str) -> tuple[int, str]:
        raise LookupError(name)

    monkeypatch.setattr(onednn, "_mapped", nowhere)
    assert onednn.library.__wrapped__() is None


@ASKED
def test_asking_leaves_the_threads_as_they_were(threads: int) -> None:
    matrix = onednn.Matrix((64, 64), (64, 1), "f32", True)
    one, three = (onednn.matmul(matrix, matrix, matrix, 1.0, 0.0, count) for count in (1, 3))
    assert one is not None
    assert three is not None
    assert torch.get_num_threads() == threads


@ASKED
def test_the_functions_of_this_torch_are_those_that_were_checked() -> None:
    """A canary: PyTorch links oneDNN 3, whose C interface is the same in all releases."""
    assert "v3." in torch.__config__.show().split("MKL-DNN ")[1].split()[0]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16, F64])
def test_a_gradient_of_gelu_is_put_in_order_where_the_input_is(
    dtype: torch.dtype, approximate: str, threads: int
) -> None:
    x, turned = torch.randn(96, 64).to(dtype), torch.randn(64, 96).to(dtype).t()
    wide = torch.randn(96, 1).to(dtype).expand(96, 64)
    for grad, given in ((x, x), (turned, x), (wide, x), (x, turned), (turned, turned)):
        assert_exact(aten.gelu_backward.default, grad, given, approximate=approximate)


@pytest.mark.parametrize("dtype", [torch.float, BF16])
@pytest.mark.parametrize(("rows", "turned"), [(132, False), (131, False), (132, True), (131, True)])
def test_gradients_are_padded_to_the_ranks_and_cast_one_by_one(rows: int, turned: bool, dtype: torch.dtype) -> None:
    importlib.import_module("torch.distributed.fsdp")  # brings the operator
    weight = torch.zeros(512, rows, dtype=dtype).t() if turned else torch.zeros(rows, 512, dtype=dtype)
    out = torch.empty(2, 66 * 513)
    assert_exact(torch.ops.fsdp.chunk_cat.default, [weight, weight[:, 0].clone()], 0, 2, out=out)
