"""Attention on a pretended CUDA GPU: the choice by PyTorch's own rules, and what autograd keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.simulation import fake_cuda, sdpa
from lightning_memguard.core.trace.scratch import CudaTarget
from lightning_memguard.errors import CannotTraceError
from tests.core.kernels.test_attention import tensors

V100, T4, A100, RTX3090, RTX4090, H100, B200, RTX5090 = (
    CudaTarget((7, 0), 80),
    CudaTarget((7, 5), 40),
    CudaTarget((8, 0), 108),
    CudaTarget((8, 6), 82),
    CudaTarget((8, 9), 128),
    CudaTarget((9, 0), 132),
    CudaTarget((10, 0), 148),
    CudaTarget((12, 0), 170),
)
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
OLD_CUDNN, NEW_CUDNN = 91_002, 91_900
CAUSAL = torch.empty(16, 16, dtype=torch.bool, device="meta")


def attend(*args: Any, kernel_target: CudaTarget, **options: Any) -> torch.Tensor:
    call = sdpa.Attention(*args, **options, capability=kernel_target.compute_capability, cudnn=NEW_CUDNN)
    return sdpa.attend(call)


# -- the choice


def choose(*args: Any, kernel_target: CudaTarget, **options: Any) -> str:
    return sdpa.choose(sdpa.Attention(*args, **options, capability=kernel_target.compute_capability))


@pytest.mark.parametrize(
    ("kernel_target", "dtype", "width", "options", "expected"),
    [
        (A100, BF16, 64, {}, "flash"),
        (A100, HALF, 100, {}, "flash"),  # padded to 104
        (A100, HALF, 256, {"dropout_p": 0.1}, "flash"),
        (A100, HALF, 264, {}, "efficient"),
        (A100, SINGLE, 64, {}, "efficient"),
        (A100, DOUBLE, 64, {}, "math"),
        (A100, SINGLE, 66, {}, "math"),  # not a multiple of four
        (A100, BF16, 64, {"attn_mask": CAUSAL}, "efficient"),
        (A100, BF16, 60, {"attn_mask": CAUSAL}, "math"),  # not a multiple of eight
        (A100, BF16, 64, {"is_causal": True}, "flash"),
        (V100, HALF, 64, {}, "efficient"),
        (V100, BF16, 64, {}, "math"),
        (V100, SINGLE, 65, {}, "efficient"),  # no tensor cores, no alignment
        (V100, HALF, 60, {}, "math"),
        (T4, SINGLE, 64, {"attn_mask": CAUSAL}, "efficient"),
        (CudaTarget((5, 0), 16), HALF, 63, {}, "efficient"),
        (CudaTarget((3, 7), 13), HALF, 64, {}, "math"),
        (CudaTarget((13, 0), 100), HALF, 64, {}, "math"),
        (RTX5090, BF16, 64, {}, "flash"),
        (RTX5090, BF16, 200, {}, "efficient"),
        (RTX5090, BF16, 256, {}, "flash"),
        (RTX5090, BF16, 256, {"dropout_p": 0.1}, "efficient"),
        (RTX3090, BF16, 192, {}, "flash"),
        (RTX3090, BF16, 224, {}, "efficient"),
        (RTX4090, BF16, 232, {}, "flash"),
        (RTX4090, BF16, 232, {"dropout_p": 0.5}, "efficient"),
    ],
)
def test_the_choice_follows_gpu_dtype_width_mask_and_dropout(kernel_target, dtype, width, options, expected) -> None:
    inputs = tensors(2, 4, 16, width, dtype=dtype)
    assert choose(*inputs, **options, kernel_target=kernel_target, cudnn=NEW_CUDNN) == expected


def test_wide_heads_are_forbidden_to_flash_only_while_training() -> None:
    inputs = tensors(2, 4, 16, 224)
    assert choose(*inputs, kernel_target=RTX4090) == "efficient"
    with torch.no_grad():
        assert choose(*inputs, kernel_target=RTX4090) == "flash"
    assert choose(*tensors(2, 4, 16, 224, grad=False), kernel_target=RTX4090) == "flash"


@pytest.mark.parametrize(
    ("torch_version", "kernel_target", "cudnn", "expected"),
    [
        ((2, 11), H100, OLD_CUDNN, "flash"),
        ((2, 11), H100, NEW_CUDNN, "cudnn"),
        ((2, 13), B200, NEW_CUDNN, "cudnn"),
        ((2, 13), CudaTarget((10, 3), 148), NEW_CUDNN, "cudnn"),
        ((2, 13), A100, NEW_CUDNN, "flash"),
        ((2, 13), RTX5090, NEW_CUDNN, "flash"),
    ],
)
def test_a_new_cudnn_comes_first_on_hopper_and_blackwell(
    monkeypatch: pytest.MonkeyPatch, torch_version, kernel_target, cudnn, expected
) -> None:
    monkeypatch.setattr(port, "VERSION", torch_version)
    assert choose(*tensors(2, 4, 16, 64), kernel_target=kernel_target, cudnn=cudnn) == expected


def test_the_users_environment_keeps_cudnn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "VERSION", (2, 13))
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(*tensors(2, 4, 16, 64), kernel_target=H100, cudnn=NEW_CUDNN) == "flash"


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((2, 4, 16, 256), {}, "cudnn"),
        ((2, 4, 16, 100), {}, "flash"),  # not a multiple of eight
        ((2, 4, 16, 64), {"attn_mask": CAUSAL}, "cudnn"),
        ((2, 4, 16, 64), {"attn_mask": CAUSAL[None]}, "efficient"),  # masks of three dimensions are refused
        ((2, 4, 16, 64), {"dropout_p": 0.5}, "cudnn"),
        ((2, 4, 16, 64), {"dropout_p": 0.1}, "flash"),  # not a multiple of 1/16
        ((2, 4, 1, 64), {}, "flash"),  # a key of length one
    ],
)
def test_cudnn_declines_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, shape, options, expected) -> None:
    monkeypatch.setattr(port, "VERSION", (2, 13))
    assert choose(*tensors(*shape), **options, kernel_target=H100, cudnn=NEW_CUDNN) == expected


def test_cudnn_declines_strict_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "VERSION", (2, 13))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert choose(*tensors(2, 4, 16, 64), kernel_target=H100, cudnn=NEW_CUDNN) == "flash"


def test_shared_keys_go_to_flash_and_with_a_mask_to_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "VERSION", (2, 13))
    inputs = tensors(2, 8, 16, 64, groups=4)
    assert choose(*inputs, enable_gqa=True, kernel_target=A100) == "flash"
    assert choose(*inputs, CAUSAL, enable_gqa=True, kernel_target=A100) == "math"
    monkeypatch.setattr(port, "VERSION", (2, 14))
    assert choose(*inputs, CAUSAL, enable_gqa=True, kernel_target=A100) == "efficient"
    assert choose(*inputs, kernel_target=A100) == "math"


def test_shapes_that_no_fused_kernel_takes() -> None:
    query, key, value = tensors(2, 4, 16, 64)
    assert choose(query[0], key[0], value[0], kernel_target=A100) == "math"
    assert choose(query, key[:, :, :0], value[:, :, :0], kernel_target=A100) == "math"
    assert choose(query.transpose(2, 3), key.transpose(2, 3), value.transpose(2, 3), kernel_target=A100) == "math"
    assert choose(query[:, :, :8], key, value, is_causal=True, kernel_target=A100) == "efficient"


def test_the_backends_the_user_allows_are_the_ones_that_count() -> None:
    inputs = tensors(2, 4, 16, 64)
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(*inputs, kernel_target=A100) == "math"
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose(*inputs, kernel_target=A100, cudnn=NEW_CUDNN) == "cudnn"
    everything = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    with sdpa_kernel(everything, set_priority=True):  # what torch itself sets where the GPU is a Hopper
        assert choose(*inputs, kernel_target=A100, cudnn=NEW_CUDNN) == "flash"
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(CannotTraceError, match=r"compute capability 7\.0"):
        choose(*inputs, kernel_target=V100)


# -- the call


class Results(TorchDispatchMode):
    """Notes each operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


@pytest.fixture(name="fake_cuda")
def fake_cuda_tensors() -> Iterator[FakeTensorMode]:
    """Fake tensors that may say ``cuda``, on any build."""
    fake_cuda._guard_cuda()
    with FakeTensorMode() as mode:
        yield mode


@pytest.fixture
def recent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of one version of torch, whichever runs the tests."""
    monkeypatch.setattr(port, "VERSION", (2, 13))


def kept(out: torch.Tensor) -> dict[str, tuple[str, int]]:
    """Tensors that autograd keeps apart from query, key and value: by name, its device and the bytes of its storage."""
    node = out.grad_fn
    while not node.name().startswith("ScaledDotProduct"):
        node = node.next_functions[0][0]
    values = {name.removeprefix("_saved_"): getattr(node, name) for name in dir(node) if name.startswith("_saved_")}
    return {
        name: (tensor.device.type, tensor.untyped_storage().nbytes())
        for name, tensor in values.items()
        if isinstance(tensor, torch.Tensor) and name not in ("query", "key", "value")
    }


@pytest.mark.usefixtures("fake_cuda", "recent")
class TestAttend:
    def test_flash_keeps_the_padded_result_and_one_number_a_row(self) -> None:
        query, key, value = tensors(2, 4, 16, 60, device="cuda")
        out = attend(query, key, value, dropout_p=0.1, is_causal=True, kernel_target=A100)
        assert out.shape == (2, 4, 16, 60)
        assert kept(out) == {
            "output": ("cuda", 2 * 4 * 16 * 64 * 2),
            "logsumexp": ("cuda", 2 * 4 * 16 * 4),
            "rng_state": ("cuda", 16),
            "unused": ("cuda", 8),
        }

    def test_flash_leaves_shared_keys_as_few_as_they_are(self) -> None:
        inputs = tensors(2, 8, 16, 64, device="cuda", groups=4)
        with Results() as seen:
            out = attend(*inputs, enable_gqa=True, kernel_target=A100)
        assert [name for name in seen.names if name.startswith("_")] == ["_scaled_dot_product_flash_attention.default"]
        grads = out.grad_fn(torch.empty_like(out))
        assert [grad.shape[1] for grad in grads[:3]] == [8, 2, 2]

    def test_efficient_rounds_the_rows(self) -> None:
        inputs = tensors(2, 4, 20, 64, dtype=SINGLE, device="cuda")
        out = attend(*inputs, dropout_p=0.1, kernel_target=A100)
        rounded = {"output": ("cuda", 2 * 4 * 20 * 64 * 4), "log_sumexp": ("cuda", 2 * 4 * 32 * 4)}
        assert kept(out).items() >= rounded.items()
        grads = out.grad_fn(torch.empty_like(out))
        assert [grad.untyped_storage().nbytes() for grad in grads[:3]] == [2 * 4 * 20 * 64 * 4] * 3

    def test_efficient_keeps_no_sums_without_gradients(self) -> None:
        inputs = tensors(2, 4, 20, 64, dtype=SINGLE, device="cuda", grad=False)
        assert attend(*inputs, kernel_target=A100).grad_fn is None

    @pytest.mark.parametrize(("length", "row_bytes"), [(16, 16 * 2), (20, 24 * 2)])
    def test_efficient_makes_a_boolean_mask_additive_and_pads_its_rows(self, length, row_bytes) -> None:
        inputs = tensors(2, 4, length, 64, device="cuda")
        mask = torch.empty(2, 1, length, length, dtype=torch.bool, device="cuda")
        out = attend(*inputs, mask, kernel_target=A100)
        assert kept(out)["attn_bias"] == ("cuda", 2 * length * row_bytes)

    def test_cudnn_keeps_a_column_of_sums_and_its_seed_on_the_gpu(self) -> None:
        out = attend(*tensors(2, 4, 16, 64, device="cuda"), dropout_p=0.5, kernel_target=H100)
        assert kept(out) == {
            "output": ("cuda", 2 * 4 * 16 * 64 * 2),
            "logsumexp": ("cuda", 2 * 4 * 16 * 4),
            "philox_seed": ("cuda", 8),
            "philox_offset": ("cuda", 8),
        }

    def test_cudnn_takes_a_boolean_mask(self) -> None:
        mask = torch.empty(16, 16, dtype=torch.bool, device="cuda")
        out = attend(*tensors(2, 4, 16, 64, device="cuda"), mask, kernel_target=H100)
        assert kept(out)["attn_bias"] == ("cuda", 16 * 16 * 2)

    def test_plain_products_are_torchs_own(self) -> None:
        inputs = tensors(2, 8, 16, 64, dtype=HALF, device="cuda", groups=2)
        mask = torch.empty(16, 16, dtype=torch.bool, device="cuda")
        with Results() as ours:
            attend(*inputs, mask, 0.1, enable_gqa=True, kernel_target=V100)
        with Results() as theirs, sdpa_kernel(SDPBackend.MATH):
            bias = torch.ops.aten.where.ScalarSelf(mask, 0.0, torch.scalar_tensor(0.0, dtype=HALF, device="cuda"))
            torch.ops.aten._scaled_dot_product_attention_math(*inputs, bias, 0.1, enable_gqa=True)
        assert ours.names == theirs.names
        assert "native_dropout.default" in ours.names

    def test_autocast_lowers_the_inputs_once(self) -> None:
        inputs = tensors(2, 4, 16, 64, dtype=SINGLE, device="cuda")
        mask = torch.empty(16, 16, device="cuda")
        before = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            out = attend(*inputs, mask, kernel_target=A100)
            assert torch.is_autocast_enabled("cuda")
        finally:
            torch.set_autocast_enabled("cuda", before)
        assert out.dtype == torch.get_autocast_dtype("cuda")
        assert kept(out)["attn_bias"] == ("cuda", 16 * 16 * 2)


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.skipif(torch.version.cuda is None, reason="a CPU-only build has no choice for cuda to compare with")
def test_a_boolean_mask_becomes_additive_in_the_operators_that_torch_takes() -> None:
    query, key, value = tensors(2, 4, 16, 64, dtype=SINGLE, device="cuda")
    mask = torch.empty(16, 16, dtype=torch.bool, device="cuda")
    with Results() as ours:
        attend(query, key, value, mask, kernel_target=CudaTarget((3, 7), 13))
    with Results() as theirs, sdpa_kernel(SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    asides = ("prim.", "_fused_sdp_choice")  # questions, which allocate nothing
    assert [name for name in ours.names if not name.startswith(asides)] == [
        name for name in theirs.names if not name.startswith(asides)
    ]


def test_sizes_may_be_symbols_of_torch_compile() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta"), static_shapes=False)
    assert isinstance(x.shape[0], torch.SymInt)
    assert sdpa.choose(sdpa.Attention(x, x, x, is_causal=True, capability=(8, 0))) == "flash"
