"""Calls of convolutions, RNNs, attention and products by their settings, as a recording of single calls has them.

Each function returns a call like those of `shared/operator_calls.py`. `applied` sets the flags of PyTorch that a call
was recorded under.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.operator_calls import Call

Settings = dict[str, Any]
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@contextlib.contextmanager
def applied(settings: Settings | str) -> Iterator[None]:
    """PyTorch's global settings of a call, around its making, its forward and its backward; a name alone has none."""
    given = settings if isinstance(settings, dict) else {"cudnn_sdp": False}
    tf32, before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.matmul.allow_tf32 = bool(given.get("matmul_tf32", False))
    torch.backends.cuda.enable_cudnn_sdp(given.get("cudnn_sdp", True))
    try:
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=given.get("benchmark", False), allow_tf32=given.get("tf32", True)
        ):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cuda.enable_cudnn_sdp(before)


def of_settings(part: str, settings: Settings) -> Call:
    """The call of a part of a recording."""
    of_part = {"rnns": rnn, "attention": attention, "products": product}
    return partial(of_part.get(part, convolution), settings)


def zeros(*shape: int, dtype: torch.dtype = torch.float32, trains: bool = False, channels_last: bool = False) -> Tensor:
    with torch.no_grad():
        x = torch.zeros(shape, device="cuda", dtype=dtype)
        if channels_last:
            x = x.contiguous(memory_format=LAST[len(shape)])
    return x.requires_grad_(trains)


def _dtype(c: Settings) -> torch.dtype:
    found = getattr(torch, c["dtype"])
    assert isinstance(found, torch.dtype)
    return found


def convolution(c: Settings) -> Callable[[], object]:
    count, dtype = len(c["size"]), _dtype(c)
    kind = getattr(nn, f"Conv{'Transpose' * c['transposed']}{count}d")
    more = {"output_padding": c["output_padding"]} if c["transposed"] else {}
    names = ("kernel", "stride", "padding", "dilation", "output_padding")
    c = {**c, **{name: tuple(c[name]) for name in names}}
    layer = kind(
        *(c["in"], c["out"], c["kernel"], c["stride"], c["padding"]),
        **{
            "dilation": c["dilation"],
            "groups": c["groups"],
            "bias": c["bias"],
            "device": "cuda",
            "dtype": dtype,
            **more,
        },
    )
    if c["channels_last"]:
        layer = layer.to(memory_format=LAST[count + 2])
    shape = c["batch"], c["in"], *c["size"]
    return partial(layer, zeros(*shape, dtype=dtype, trains=c["input_grad"], channels_last=c["channels_last"]))


# -- RNNs


def rnn(c: Settings) -> Callable[[], object]:
    dtype = _dtype(c)
    more = {"proj_size": c["projected"]} if c["projected"] else {"nonlinearity": "relu"} if c["relu"] else {}
    layer = getattr(nn, c["mode"])(
        *(c["input"], c["hidden"], c["layers"]),
        bias=c["bias"],
        batch_first=c["batch_first"],
        dropout=c["dropout"],
        bidirectional=c["both"],
        **{"device": "cuda", "dtype": dtype, **more},
    ).train(c["train"])
    x, state = _sequences(c, dtype), _states(c, dtype) if c["state"] else None
    if c["dropout"] and c["train"]:  # dropout's state is PyTorch's from then on, not a call's
        with torch.no_grad():
            layer(x, state)

    def run() -> object:
        with torch.set_grad_enabled(c["grad"]):
            y = layer(x, state)[0]
        return (y[0] if c["grad"] else y.data) if c["packed"] else y

    return run


def _sequences(c: Settings, dtype: torch.dtype) -> Any:
    trains, times, batch = c["input_grad"] and c["grad"], c["times"], c["batch"]
    if not c["packed"]:
        shape = (batch, times) if c["batch_first"] else (times, batch)
        return zeros(*shape, c["input"], dtype=dtype, trains=trains)
    lengths = [max(1, times - (times * row) // (2 * batch)) for row in range(batch)]
    sizes = [sum(length > time for length in lengths) for time in range(times)]
    return nn.utils.rnn.PackedSequence(zeros(sum(sizes), c["input"], dtype=dtype, trains=trains), torch.tensor(sizes))


def _states(c: Settings, dtype: torch.dtype) -> Any:
    rows = c["layers"] * (2 if c["both"] else 1)
    state = zeros(rows, c["batch"], c["projected"] or c["hidden"], dtype=dtype)
    return (state, zeros(rows, c["batch"], c["hidden"], dtype=dtype)) if c["mode"] == "LSTM" else state


# -- attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attention(c: Settings) -> Callable[[], object]:
    return {"sdpa": _sdpa, "mha": _multi_head, "layer": _encoder_layer}[c["call"]](c)


def _sdpa(c: Settings) -> Callable[[], object]:
    batch, heads, groups, queries, keys, size = c["shape"]
    dtype = _dtype(c)

    def given(count: int, length: int) -> Tensor:
        shape = (batch, length, count, size) if c["rows_first"] else (batch, count, length, size)
        x = zeros(*shape, dtype=dtype)
        return (x.transpose(1, 2) if c["rows_first"] else x).detach().requires_grad_(c["grad"])

    query, key, value = given(heads, queries), given(groups, keys), given(groups, keys)
    masks: dict[str | None, Callable[[], Tensor | None]] = {
        None: lambda: None,
        "bool": lambda: torch.ones(batch, 1, queries, keys, device="cuda", dtype=torch.bool),
        "bool of keys": lambda: torch.ones(batch, 1, 1, keys, device="cuda", dtype=torch.bool),
        "bias": lambda: zeros(1, heads, queries, keys, dtype=dtype),
        "bias that learns": lambda: zeros(batch, heads, queries, keys, dtype=dtype, trains=True),
    }
    bias, backend = masks[c["mask"]](), BACKENDS.get(c["backend"])

    def run() -> Tensor:
        with sdpa_kernel([backend]) if backend else contextlib.nullcontext(), torch.set_grad_enabled(c["grad"]):
            return F.scaled_dot_product_attention(
                query, key, value, bias, dropout_p=c["dropout"], is_causal=c["causal"], enable_gqa=groups != heads
            )

    return run


def _encoder_layer(c: Settings) -> Callable[[], object]:
    x = zeros(c["batch"], c["length"], c["width"], dtype=_dtype(c), trains=c["train"])
    layer = nn.TransformerEncoderLayer(
        *(c["width"], c["heads"], 4 * c["width"], c["dropout"], c["activation"]),
        batch_first=True,
        norm_first=c["norm_first"],
        device="cuda",
        dtype=_dtype(c),
    ).train(c["train"])
    return _cast(c, lambda: layer(x))


def _multi_head(c: Settings) -> Callable[[], object]:
    batch, length, dtype = c["batch"], c["length"], _dtype(c)
    x = zeros(batch, length, c["width"], dtype=dtype, trains=c["train"])
    layer = nn.MultiheadAttention(
        c["width"], c["heads"], c["dropout"], batch_first=True, device="cuda", dtype=dtype
    ).train(c["train"])
    more: dict[str, Any] = {}
    if c["padded"] == "causal":
        future = torch.ones(length, length, device="cuda", dtype=torch.bool).triu(1)
        more = {"attn_mask": future, "is_causal": True}
    elif c["padded"]:
        more = {"key_padding_mask": torch.zeros(batch, length, device="cuda", dtype=torch.bool)}
    return _cast(c, lambda: layer(x, x, x, need_weights=c["weights"], **more)[0])


def _cast(c: Settings, call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.autocast("cuda", torch.bfloat16, enabled=c["autocast"]), torch.set_grad_enabled(c["train"]):
            return call()

    return run


# -- products


def product(c: Settings) -> Callable[[], object]:
    way = c["call"]
    for start, kind in (("scaled", _scaled), ("linear", _linear), ("int8", _int8), ("grouped", _grouped)):
        if way.startswith(start):
            return kind(c)
    return _batched(c) if "bmm" in way else _plain(c)


def _learned(c: Settings, *shape: int) -> Tensor:
    return zeros(*shape, dtype=_dtype(c), trains=True)


def _turned(c: Settings, *shape: int) -> Tensor:
    return zeros(*shape, dtype=_dtype(c)).mT.detach().requires_grad_()


def _batched(c: Settings) -> Callable[[], object]:
    n, i, k, j = c["shape"]
    if c["call"] == "baddbmm":
        return partial(torch.baddbmm, _learned(c, n, i, j), _learned(c, n, i, k), _learned(c, n, k, j))
    if c["call"] == "bmm turned":
        return partial(torch.bmm, _turned(c, n, k, i), _turned(c, n, j, k))
    return partial(torch.bmm, _learned(c, n, i, k), _learned(c, n, k, j))


def _plain(c: Settings) -> Callable[[], object]:
    m, k, n = c["shape"]
    if c["call"] == "addmm":
        return partial(torch.addmm, _learned(c, n), _learned(c, m, k), _learned(c, k, n))
    if c["call"] == "mm turned":
        return partial(torch.mm, _turned(c, k, m), _turned(c, n, k))
    return partial(torch.mm, _learned(c, m, k), _learned(c, k, n))


def _linear(c: Settings) -> Callable[[], object]:
    (m, k, n), way = c["shape"], c["call"]
    x = zeros(m, k, dtype=_dtype(c), trains=way != "linear frozen")
    weight, bias = _learned(c, n, k), None if way == "linear plain" else _learned(c, n)

    def run() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=way == "linear cast"):
            return F.linear(x, weight, bias)

    return run


def _scaled(c: Settings) -> Callable[[], object]:
    (m, k, n), way = c["shape"], c["call"]
    a = zeros(m, k, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    b = zeros(n, k, dtype=torch.bfloat16).to(torch.float8_e4m3fn).t()
    rows = way == "scaled rows"
    left, right = (torch.ones(shape if rows else (), device="cuda") for shape in ((m, 1), (1, n)))
    bias = zeros(n, dtype=_dtype(c)) if way == "scaled bias" else None
    return lambda: torch._scaled_mm(
        *(a, b), scale_a=left, scale_b=right, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=way == "scaled fast"
    )


def _int8(c: Settings) -> Callable[[], object]:
    m, k, n = c["shape"]
    a, b = (torch.zeros(rows, k, device="cuda", dtype=torch.int8) for rows in (m, n))
    return lambda: torch._int_mm(a, b.t())


def _grouped(c: Settings) -> Callable[[], object]:
    m, k, n = c["shape"]
    a, b = _learned(c, m, k), _turned(c, 4, n, k)
    ends = (torch.arange(1, 5, device="cuda") * (m // 4)).int()
    return lambda: torch._grouped_mm(a, b, offs=ends)
