"""Every rule for the scratch of a CPU kernel, held against PyTorch's profiler, with random arguments.

A tracer of operators sees their results; what a kernel takes and gives back inside is predicted by a rule
(`lightning_memguard/core/kernels`). Here functions of torch run with random shapes, strides, dilations, groups, dtypes,
reductions, layouts and numbers of threads, forward and backward, under the profiler. A dispatch mode marks each
operator that the recorder would see: the most that was alive inside it, and what stays after it, are compared with its
results and its rule. Operators without a rule are expected to take nothing.

    python benchmarks/cpu_scratch.py                                  # every family, 40 cases each, then a summary
    python benchmarks/cpu_scratch.py --only conv2d linear --cases 500
    python benchmarks/cpu_scratch.py --only conv2d --seed 17 --blocks # that case again, with each block inside
    python benchmarks/cpu_scratch.py --dtype bfloat16 --threads 1
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/cpu_scratch.py     # as on an older processor
"""

import argparse
import gc
import math
import random
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memguard.core.capture.kernel_scratch import this_cpu
from lightning_memguard.core.kernels import table
from lightning_memguard.core.kernels.arguments import Call
from lightning_memguard.core.simulation import mkldnn_lstm
from lightning_memguard.core.simulation.fake import by_name
from lightning_memguard.core.trace.scratch import ByteRange, Scratch
from lightning_memguard.core.trace.trace import moments_of
from shared.truth import operator_of, walk

MARKER = "dispatched::"
DTYPES = ("float32", "float32", "float32", "bfloat16", "float16", "float64")
Step = Callable[[], Any]


@dataclass(frozen=True)
class Result:
    """One operator of one case: bytes alive at its peak and after it, beyond what was there, predicted and measured."""

    operator: str
    family: str
    seed: int
    arguments: str
    has_rule: bool
    results: int
    predicted: tuple[int, int]  # the least and the most that the rule says
    predicted_kept: int
    measured: int
    measured_kept: int
    blocks: tuple[str, ...]

    @property
    def error(self) -> int:
        low, high = self.predicted
        return min(0, self.measured - low) + max(0, self.measured - high)

    @property
    def is_off(self) -> bool:
        return abs(self.error) > 64 or abs(self.measured_kept - self.predicted_kept) > 64


# Predict -------------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Marks each operator in the profile, and asks its rule."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family, self.seed = family, 0
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {storage_key(t) for t in tensors_in((args, kwargs))}
        number = len(self.calls)
        self.calls.append({})
        with record_function(f"{MARKER}{number}"):
            result = func(*args, **kwargs)
        results = list(tensors_in(result))
        fresh = {storage_key(t): t.untyped_storage().nbytes() for t in results if storage_key(t) not in known}
        name = str(func)
        target = this_cpu(torch.get_num_threads())
        rule = table.rule(name.split(".")[1], target) if name.startswith("aten.") else None
        call = Call(by_name(func, args, kwargs), results, target)
        scratch = rule(call) if rule else Scratch()
        low, high = (peak_of(scratch, results, fresh, place) for place in (0, 2))
        inside = mkldnn_lstm.scratch_bytes(func, args, kwargs)
        if inside:
            low = high = sum(fresh.values()) + inside
        self.calls[number] = {
            "operator": name,
            "family": self.family,
            "seed": self.seed,
            "arguments": describe(call, target.threads),
            "has_rule": bool(rule or inside),
            "results": sum(fresh.values()),
            "predicted": (low, high),
            "predicted_kept": sum(fresh.values()),
        }
        return result


def peak_of(scratch: Scratch, results: Sequence[Tensor], fresh: dict[int, int], case: int) -> int:
    """The most alive inside an operator, as the recorder writes its events; real storages know what is kept."""
    alive, left = 0, dict(fresh)
    peaks = [moment_bytes(moment, case) for moment in moments_of(scratch, -1)]
    for place, tensor in enumerate(results):
        alive += left.pop(storage_key(tensor), 0)
        peaks += [alive, *(alive + moment_bytes(moment, case) for moment in moments_of(scratch, place))]
    return max([0, alive, *peaks, *(alive + moment_bytes(moment, case) for moment in moments_of(scratch, None))])


def moment_bytes(moment: Any, case: int) -> int:
    blocks = (moment,) if isinstance(moment, int | ByteRange) else moment
    return sum(block[case] if isinstance(block, ByteRange) else block for block in blocks)


def tensors_in(tree: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def describe(call: Any, threads: int) -> str:
    def short(value: Any) -> Any:
        if isinstance(value, Tensor):
            size = "x".join(map(str, value.shape)) or "scalar"
            layout = "" if value.is_contiguous() else f" strides {'x'.join(map(str, value.stride()))}"
            return f"{str(value.dtype).removeprefix('torch.')} {size}{layout}"
        return [short(item) for item in value] if isinstance(value, (list, tuple)) else value

    given = (f"{name}={short(value)}" for name, value in call.arguments.items() if value is not None)
    return f"{', '.join(given)}; {threads} thread{'s' * (threads > 1)}".replace("'", "")


# Measure -------------------------------------------------------------------------------------------------------------


def run(family: str, seeds: Iterable[int], options: argparse.Namespace) -> list[Result]:
    """Run cases of a family under one profile."""
    watch = Watch(family)
    before = torch.get_num_threads()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    profiler.start()
    for seed in seeds:
        draw = Draw(family, seed, options)
        torch.manual_seed(seed)
        torch.set_num_threads(draw.threads)
        watch.seed = seed
        try:
            step = FAMILIES[family](draw)
            with watch:
                step()
            del step
        except (RuntimeError, NotImplementedError, ValueError, IndexError) as error:
            if options.verbose:
                print(f"{family} {seed}: {str(error).splitlines()[0]}")
        gc.collect()
    profiler.stop()
    torch.set_num_threads(before)
    inside: list[list[tuple[int, int, int, str]]] = [[] for _ in watch.calls]
    for node, ancestors in walk(profiler.profiler.kineto_results.experimental_event_tree()):
        marks = [name for name in ancestors if name.startswith(MARKER)]
        if marks and node.tag == _EventType.Allocation:
            block, asker = node.extra_fields, operator_of(ancestors).removeprefix("aten::")
            inside[int(marks[-1].removeprefix(MARKER))].append((node.start_time_ns, block.ptr, block.alloc_size, asker))
    pairs = zip(watch.calls, inside, strict=True)
    return [Result(**call, **replay(sorted(blocks))) for call, blocks in pairs if call]


def replay(blocks: Sequence[tuple[int, int, int, str]]) -> dict[str, Any]:
    live: dict[int, int] = {}
    peak = 0
    for _, address, size, _ in blocks:
        if size > 0:
            live[address] = size
        else:
            live.pop(address, None)
        peak = max(peak, sum(live.values()))
    texts = tuple(f"{size:_} {asker}" if size > 0 else f"{size:_}" for _, _, size, asker in blocks)
    return {"measured": peak, "measured_kept": sum(live.values()), "blocks": texts}


# Draw ----------------------------------------------------------------------------------------------------------------


class Draw:
    """Random arguments of one case: the same ones for the same family and seed."""

    def __init__(self, family: str, seed: int, options: argparse.Namespace) -> None:
        self.random = random.Random(f"{family} {seed}")
        self.threads = self.random.choice((1, 2))
        self.dtype = getattr(torch, self.random.choice(DTYPES))
        if options.threads:
            self.threads = options.threads
        if options.dtype:
            self.dtype = getattr(torch, options.dtype)
        if options.layout:
            self.layout_given = options.layout

    layout_given = ""

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def size(self, low: int = 1, high: int = 40) -> int:
        """A size; now and then a round one."""
        return self.random.choice((self.random.randint(low, high), min(high, 2 ** self.random.randint(0, 6)) or low))

    def chance(self, probability: float = 0.5) -> bool:
        return self.random.random() < probability

    def tensor(self, *shape: int, grad: bool = True, layout: str | None = None, dtype: Any = None) -> Tensor:
        """A tensor: contiguous mostly, or channels last, or with two dimensions swapped, or every other element."""
        kinds = ("contiguous", "contiguous", "contiguous", "channels_last", "transposed", "sliced")
        layout = layout or self.layout_given or self.one_of(*kinds)
        dtype = dtype or self.dtype
        if layout == "channels_last" and len(shape) in (4, 5):
            order = (0, *range(2, len(shape)), 1)
            x = torch.randn([shape[d] for d in order]).to(dtype).permute(0, len(shape) - 1, *range(1, len(shape) - 1))
        elif layout == "transposed" and len(shape) > 1:
            x = torch.randn((*shape[:-2], shape[-1], shape[-2])).to(dtype).transpose(-1, -2)
        elif layout == "sliced" and shape:
            x = torch.randn((*shape[:-1], 2 * shape[-1])).to(dtype)[..., ::2]
        else:
            x = torch.randn(shape).to(dtype)
        return x.requires_grad_() if grad else x

    def shape(self, dims: int, most: int = 100_000) -> tuple[int, ...]:
        while True:
            shape = tuple(self.size(1, 300 if dims < 3 else 40) for _ in range(dims))
            if math.prod(shape) <= most:
                return shape

    def any_tensor(self, low: int = 1, high: int = 4, **keywords: Any) -> Tensor:
        return self.tensor(*self.shape(self.random.randint(low, high)), **keywords)

    def integers(self, most: int, *shape: int) -> Tensor:
        return torch.randint(max(1, most), shape)


def trained(compute: Callable[..., Any], *tensors: Any) -> Step:
    """Forward and backward of a function, with a gradient for each result that is not a view of one number."""

    def step() -> None:
        out = [o for o in tree_leaves(compute(*tensors)) if isinstance(o, Tensor) and o.requires_grad]
        if out:
            grads = [torch.randn_like(o) for o in out]
            torch.autograd.backward(out, grads)

    return step


FAMILIES: dict[str, Callable[[Draw], Step]] = {}


def family(name: str) -> Callable[[Callable[[Draw], Any]], Callable[[Draw], Any]]:
    """Registers what makes a step: the step itself, or calls of which one is drawn and trained: functions, or their
    text, divided by semicolons, and the names in it."""

    def register(make: Callable[[Draw], Any]) -> Callable[[Draw], Any]:
        def step(draw: Draw) -> Step:
            made = make(draw)
            if isinstance(made, tuple):
                calls, names = made
                code = compile(draw.one_of(*calls.split(";")).strip(), "call", "eval")
                return trained(lambda: eval(code, {**globals(), **names}))
            return trained(draw.one_of(*made)) if isinstance(made, list) else made

        FAMILIES[name] = step
        return make

    return register


def convolution(dims: int, transposed: bool) -> Callable[[Draw], Step]:
    def make(draw: Draw) -> Step:
        groups = draw.one_of(1, 1, 1, 2, 4, 8)
        into, out = (draw.size(1, 24) * groups for _ in range(2))
        if draw.chance(0.15):  # depthwise
            groups, out = into, into * draw.one_of(1, 1, 2)
        elif groups == 1 and draw.chance(0.3):
            into = 3
        batch, most = draw.size(1, 8 if dims == 3 else 32), (60, 12, 5)[dims - 1]
        kernel = [draw.one_of(1, 2, 3, 3, 5, 7)] * dims if draw.chance(0.8) else [draw.size(1, 7) for _ in range(dims)]
        image = [draw.size(1, most * 2) for _ in range(dims)] if draw.chance(0.3) else [draw.size(1, most * 2)] * dims
        image = [max(least, size) for least, size in zip(kernel, image, strict=True)]
        while math.prod(image) * batch * into * out * math.prod(kernel) // groups > 5_000_000 and batch > 1:
            batch //= 2
        move = {"stride": draw.one_of(1, 1, 1, 2, 2, 3), "padding": draw.one_of(0, 1, 2, kernel[0] // 2)}
        move |= {"dilation": draw.one_of(1, 1, 1, 2, 3), "groups": groups}
        if transposed:
            move["output_padding"] = draw.one_of(0, 0, min(1, move["stride"] - 1))
        shape = (into, out // groups, *kernel) if transposed else (out, into // groups, *kernel)
        x = draw.tensor(batch, into, *image, grad=draw.chance(0.9))
        weight = draw.tensor(*shape, layout=draw.one_of("contiguous", "contiguous", "contiguous", "channels_last"))
        bias = draw.tensor(out, layout="contiguous") if draw.chance(0.7) else None
        return trained(lambda: getattr(F, f"conv{'_transpose' * transposed}{dims}d")(x, weight, bias, **move))

    return make


for _dims in (1, 2, 3):
    FAMILIES[f"conv{_dims}d"] = convolution(_dims, False)
    FAMILIES[f"conv_transpose{_dims}d"] = convolution(_dims, True)


@family("linear")
def _linear(draw: Draw) -> Step:
    into, out = draw.one_of(draw.size(1, 60), draw.size(1, 600)), draw.size(1, 300)
    x = draw.tensor(*draw.shape(draw.one_of(1, 1, 2), 400), into)
    weight = draw.tensor(out, into, layout="contiguous")
    bias = draw.tensor(out, layout="contiguous") if draw.chance(0.7) else None
    return trained(lambda: F.linear(x, weight, bias))


@family("matmul")
def _matmul(draw: Draw) -> Step:
    m, k, n = (draw.one_of(draw.size(1, 60), draw.size(1, 300)) for _ in range(3))
    batch = draw.one_of((), (), (draw.size(1, 16),))
    a, b, vector = draw.tensor(*batch, m, k), draw.tensor(*batch, k, n), draw.tensor(k)
    c = draw.tensor(*draw.one_of((n,), (*batch, m, n)))
    scales = {"beta": draw.one_of(1, 0.5), "alpha": draw.one_of(1, 0.5)}
    if draw.chance(0.3):
        return trained(lambda: (a @ vector, vector @ vector))
    if draw.chance(0.6):
        return trained(lambda: a @ b)
    return trained(lambda: torch.baddbmm(c.expand(*batch, m, n), a, b, **scales) if batch else c.addmm(a, b, **scales))


@family("attention")
def _attention(draw: Draw) -> Step:
    batch, heads, rows, keys = draw.size(1, 4), draw.size(1, 4), draw.size(1, 900), draw.size(1, 900)
    width, swap = draw.one_of(8, 16, 32, 64, 80), draw.chance()

    def one(length: int) -> Tensor:
        x = draw.tensor(batch, length, heads, width, layout="contiguous")
        return x.transpose(1, 2) if swap else draw.tensor(batch, heads, length, width, layout="contiguous")

    causal = draw.chance(0.3)
    mask = None if causal or draw.chance() else draw.tensor(rows, keys, grad=False, layout="contiguous")
    if mask is not None and draw.chance():
        mask = mask > 0
    q, k, v, dropout = one(rows), one(keys), one(keys), draw.one_of(0.0, 0.0, 0.1)
    return trained(lambda: F.scaled_dot_product_attention(q, k, v, mask, dropout, causal))


@family("norms")
def _norms(draw: Draw) -> Step:
    kind = draw.one_of("Batch", "Batch", "Layer", "Layer", "Group", "Instance", "RMS")
    dims = draw.one_of(2, 3, 4, 4, 5) if kind in ("Batch", "Layer", "RMS") else draw.one_of(3, 4, 5)
    shape, affine, groups = list(draw.shape(dims)), draw.chance(0.8), draw.one_of(1, 2, 4)
    shape[0] = max(2, shape[0])
    if kind == "Layer":
        inner = shape[-draw.one_of(1, 1, min(2, dims - 1)) :]
        module: nn.Module = nn.LayerNorm(inner, elementwise_affine=affine)
    elif kind == "RMS":
        module = nn.RMSNorm(shape[-1:])
    elif kind == "Group":
        shape[1] = groups * draw.size(1, 10)
        module = nn.GroupNorm(groups, shape[1], affine=affine)
    else:
        module = getattr(nn, f"{kind}Norm{max(1, dims - 2)}d")(shape[1], affine=affine)
    if draw.dtype is not torch.float32 and draw.chance(0.7):
        module = module.to(draw.dtype)
    module.train(draw.chance(0.8))
    return trained(module, draw.tensor(*shape))


@family("losses")
def _losses(draw: Draw) -> Step:
    reduction = {"reduction": draw.one_of("mean", "sum", "none")}
    shape = draw.shape(draw.one_of(1, 2, 3))
    x, y = draw.tensor(*shape), draw.tensor(*shape, grad=draw.chance(0.2), layout="contiguous")
    target, logs = torch.rand(shape).to(draw.dtype), draw.chance()
    weight = draw.one_of(None, None, torch.rand(shape).to(draw.dtype))
    positive = draw.one_of(None, None, torch.rand(shape[-1:]).to(draw.dtype))
    signs, one = target.round() * 2 - 1, F.normalize(draw.tensor(shape[0], 20), dim=-1)
    logits, given = F.binary_cross_entropy_with_logits, {**reduction}
    of_two = "".join(f"F.{name}(x, y, **given);" for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
    return (
        f"""{of_two} F.soft_margin_loss(x, signs, **given); F.hinge_embedding_loss(x, signs, **given);
        F.poisson_nll_loss(x, target, **given); F.multilabel_soft_margin_loss(x, target, **given);
        F.binary_cross_entropy(x.sigmoid(), target, weight, **given); logits(x, target, **given);
        logits(x, target, weight, pos_weight=positive, **given); F.kl_div(x, target, log_target=logs, **given);
        F.margin_ranking_loss(x, y, signs, **given); F.gaussian_nll_loss(x, y, target, **given); F.logsigmoid(x);
        F.triplet_margin_loss(x, y, target, **given); F.cosine_similarity(x, y, dim=-1); F.pairwise_distance(x, y);
        one @ one.T""",
        locals(),
    )


@family("classification")
def _classification(draw: Draw) -> Step:
    batch, classes = draw.size(1, 64), draw.size(2, 300)
    image = draw.one_of((), (), (draw.size(1, 10),), (draw.size(1, 10), draw.size(1, 10)))
    x, target = draw.tensor(batch, classes, *image), draw.integers(classes, batch, *image)
    reduction, smoothing = draw.one_of("mean", "sum", "none"), draw.one_of(0.0, 0.0, 0.1)
    weight = draw.one_of(None, None, torch.rand(classes).to(draw.dtype))
    if draw.chance(0.15) and not image:
        return trained(lambda: F.multi_margin_loss(x, target, weight=weight, reduction=reduction))
    if draw.chance(0.15):
        return trained(lambda: F.cross_entropy(x, x.detach().softmax(1), weight, reduction=reduction))
    return trained(lambda: F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing))


@family("ctc")
def _ctc(draw: Draw) -> Step:
    steps, batch, classes, zero = draw.size(10, 60), draw.size(1, 16), draw.size(3, 60), draw.chance()
    x, target = draw.tensor(steps, batch, classes), torch.randint(1, classes, (batch, 5))
    lengths, full = torch.randint(1, 5, (batch,)), torch.full((batch,), steps)
    return trained(lambda: F.ctc_loss(x.log_softmax(-1), target, full, lengths, zero_infinity=zero))


@family("softmax")
def _softmax(draw: Draw) -> list[Callable[[], Any]]:
    x = draw.any_tensor()
    dim = draw.random.randrange(x.dim())
    often = [F.softmax, F.log_softmax, torch.logsumexp] * 2
    rarely = [torch.cumsum, torch.cumprod, torch.logcumsumexp, F.glu, F.softmin, F.normalize]
    return [partial(compute, x, dim=dim) for compute in (*often, *rarely)]


@family("reductions")
def _reductions(draw: Draw) -> Step:
    x = draw.any_tensor()
    dim = draw.one_of(None, draw.random.randrange(x.dim()), draw.random.randrange(x.dim()))
    keywords = {} if dim is None else {"dim": dim}
    names = "sum mean var std amax amin prod nansum var_mean max min argmax any all count_nonzero median aminmax"
    compute, order = getattr(torch, draw.one_of(*names.split())), draw.one_of(1, 2, 3, math.inf, 0)
    if draw.chance(0.2):
        return trained(lambda: torch.linalg.vector_norm(x, order, **keywords))
    return trained(lambda: compute(x, **keywords))


@family("pointwise")
def _pointwise(draw: Draw) -> list[Callable[[], Any]]:
    x = draw.any_tensor()
    names = "silu relu elu selu celu mish softplus hardswish leaky_relu dropout tanh sigmoid hardtanh relu6 softsign"
    others = {"gelu": {"approximate": draw.one_of("none", "tanh")}, "rrelu": {"training": True}}
    others |= {"threshold": {"threshold": 0.1, "value": 0.0}, "logsigmoid": {}, "alpha_dropout": {}}
    every = {**{name: {} for name in names.split()}, **others}
    return [partial(getattr(F, name), x, **keywords) for name, keywords in every.items()]


@family("arithmetic")
def _arithmetic(draw: Draw) -> list[Callable[[], Any]]:
    shape = draw.shape(draw.one_of(1, 2, 3, 4))
    x, y = draw.tensor(*shape), draw.tensor(*(s if draw.chance(0.8) else 1 for s in shape))
    other = y.detach().to(draw.one_of(torch.float32, torch.bfloat16, torch.float64, draw.dtype))
    named = "".join(
        f"torch.{name}(x, other);" for name in ["add", "mul", "div", "sub", "maximum", "pow", "atan2", "hypot", "fmod"]
    )
    return (
        f"{named} torch.lerp(x, y, 0.3); torch.addcmul(x, x, y); torch.where(y > 0, x, y); x.clamp(-0.5, 0.5)",
        locals(),
    )


@family("embedding")
def _embedding(draw: Draw) -> Step:
    rows, width = draw.size(2, 300), draw.size(1, 64)
    weight, index = draw.tensor(rows, width, layout="contiguous"), draw.integers(rows, draw.size(), draw.size())
    mode, padding, scale = draw.one_of("sum", "mean", "max"), draw.one_of(None, 0), draw.chance(0.2)
    if draw.chance(0.3):
        return trained(lambda: F.embedding_bag(index, weight, mode=mode))
    return trained(lambda: F.embedding(index, weight, padding_idx=padding, scale_grad_by_freq=scale))


@family("pooling")
def _pooling(draw: Draw) -> list[Callable[[], Any]]:
    dims = draw.one_of(1, 2, 2, 3)
    x = draw.tensor(draw.size(1, 8), draw.size(1, 20), *[draw.size(6, (200, 30, 12)[dims - 1])] * dims)
    kernel, stride, size = draw.one_of(2, 3), draw.one_of(1, 2), draw.one_of(1, 2, 3)
    return [
        *(partial(getattr(F, f"{kind}_pool{dims}d"), x, kernel, stride) for kind in ("max", "avg")),
        *(partial(getattr(F, f"adaptive_{kind}_pool{dims}d"), x, size) for kind in ("max", "avg")),
        lambda: F.lp_pool1d(x.flatten(2), 2, kernel),
    ]


@family("resizing")
def _resizing(draw: Draw) -> Step:
    dims = draw.one_of(1, 2, 2, 2, 3)
    x = draw.tensor(draw.size(1, 4), draw.size(1, 20), *[draw.size(2, (100, 40, 10)[dims - 1]) for _ in range(dims)])
    mode = draw.one_of("nearest", ("linear", "bilinear", "trilinear")[dims - 1], "nearest-exact", "area")
    mode = "bicubic" if dims == 2 and draw.chance(0.2) else mode
    factor, antialias = draw.one_of(0.5, 2, 3, 1.5), dims == 2 and mode in ("bilinear", "bicubic") and draw.chance(0.2)
    return trained(lambda: F.interpolate(x, scale_factor=factor, mode=mode, antialias=antialias))


@family("images")
def _images(draw: Draw) -> Step:
    side, batch, channels = draw.size(6, 30), draw.size(1, 4), 4 * draw.size(1, 6)
    x = draw.tensor(batch, channels, side, side)
    grid = draw.tensor(batch, 8, 8, 2, layout="contiguous")
    pad = draw.one_of("constant", "reflect", "replicate", "circular")
    sampling = draw.one_of("bilinear", "nearest", "bicubic")
    return (
        """F.pad(x, (1, 2, 1, 0), mode=pad); F.unfold(x, 3); F.fold(F.unfold(x, 3), (side, side), 3);
        F.grid_sample(x, grid, mode=sampling, align_corners=False); F.pixel_shuffle(x, 2); F.channel_shuffle(x, 2);
        F.local_response_norm(x, 3); F.dropout2d(x, 0.3, True); x.roll((1, 2), (2, 3)); x.flip(3);
        F.affine_grid(grid[:, :2, :3, 0], [batch, channels, side, side], align_corners=False)""",
        locals(),
    )


@family("indexing")
def _indexing(draw: Draw) -> Step:
    rows, columns = draw.size(2, 200), draw.size(1, 100)
    x, source = draw.tensor(rows, columns), draw.tensor(rows, columns)
    some = draw.integers(rows, draw.size(1, 100))
    like = draw.integers(rows, rows, columns)
    mask = torch.rand(rows, columns) > 0.5
    return (
        """x[some]; x[mask]; x[some, some % columns]; x.index_select(0, some); x.gather(0, like); x.take(like);
        x.tril(); x.scatter_add(0, like, source); x.scatter(0, like, source);
        x.index_add(0, some, source[some]);
        x.index_copy(0, torch.randperm(rows), source); x.index_put((some,), source[some], accumulate=draw.chance());
        x.masked_fill(mask, 0.0); x.masked_scatter(mask, source); torch.take_along_dim(x, like, 0);
        x.scatter_reduce(0, like, source, draw.one_of("sum", "mean", "amax", "prod")); x.repeat_interleave(3, dim=0);
        F.one_hot(some, rows).float() * x[some].sum(1, keepdim=True)""",
        locals(),
    )


@family("sorting")
def _sorting(draw: Draw) -> Step:
    x = draw.any_tensor(1, 3)
    dim, flat = draw.random.randrange(x.dim()), x.detach().flatten()
    stable, most = draw.chance(), max(1, x.shape[dim] // 2)
    return (
        """x.sort(dim=dim, stable=stable); x.topk(most, dim); x.argsort(dim); x.kthvalue(most, dim); x.median(dim);
        x.mode(dim); torch.unique(flat); torch.searchsorted(flat.sort().values, flat); x.cummax(dim);
        torch.bincount((flat.abs() * 10).long()); torch.histc(flat, 10); x.quantile(0.3, dim);
        torch.multinomial(flat.abs() + 0.1, 1); torch.randperm(x.numel())""",
        locals(),
    )


@family("copies")
def _copies(draw: Draw) -> Step:
    x = draw.any_tensor(2, 4)
    other = getattr(torch, draw.one_of("float32", "bfloat16", "float16", "float64"))
    target = torch.empty(x.shape, dtype=draw.one_of(draw.dtype, other))
    order = list(range(x.dim()))
    draw.random.shuffle(order)
    return (
        """x.contiguous(); x.clone(); x.to(other); target.copy_(x.detach()); x.permute(order).contiguous();
        x.permute(order).reshape(-1) * 1; torch.cat([x, x], draw.random.randrange(x.dim())); torch.stack([x, x]);
        x.repeat(2, *(1 for _ in x.shape)); x.expand(3, *x.shape).contiguous();
        torch.complex(x.float(), x.float()).real""",
        locals(),
    )


@family("distances")
def _distances(draw: Draw) -> Step:
    p = draw.one_of(1.0, 2.0, 2.0, math.inf)
    a, b = draw.tensor(draw.size(1, 60), 8), draw.tensor(draw.size(1, 60), 8)
    return trained(draw.one_of(lambda: torch.cdist(a, b, p), lambda: F.pdist(a, p), lambda: torch.outer(a[0], b[0])))


@family("linear algebra")
def _linear_algebra(draw: Draw) -> Step:
    n, batch = draw.size(1, 60), draw.one_of((), (draw.size(1, 5),))
    x, y = draw.tensor(*batch, n, n), draw.tensor(*batch, n, draw.size(1, 20))
    spd = lambda: x @ x.mT + n * torch.eye(n, dtype=x.dtype)  # noqa: E731
    linalg = torch.linalg
    return (
        """linalg.cholesky(spd()); linalg.solve(spd(), y); linalg.inv(spd()); linalg.det(spd()); linalg.qr(x);
        linalg.slogdet(spd()).logabsdet; linalg.eigh(spd()); linalg.svd(x, full_matrices=False); linalg.matrix_exp(x);
        linalg.lstsq(x, y).solution; torch.cholesky_solve(y, linalg.cholesky(spd()));
        linalg.solve_triangular(spd().tril(), y, upper=False); torch.einsum("...ij,...jk->...ik", x, y)""",
        locals(),
    )


@family("fourier")
def _fourier(draw: Draw) -> Step:
    x = draw.any_tensor(1, 3)
    window = torch.hann_window(16)
    long = draw.tensor(draw.size(1, 4), draw.size(100, 900), dtype=torch.float32)
    return (
        """torch.fft.rfft(x); torch.fft.irfft(torch.fft.rfft(x)); torch.fft.fft(x); torch.fft.rfft2(x);
        torch.stft(long, 16, window=window, return_complex=True).abs()""",
        locals(),
    )


@family("recurrent")
def _recurrent(draw: Draw) -> Step:
    kind = draw.one_of(nn.LSTM, nn.GRU, nn.RNN)
    into, hidden, layers = draw.size(1, 40), draw.size(1, 60), draw.one_of(1, 1, 2)
    module = kind(into, hidden, layers, bidirectional=draw.chance(0.3), batch_first=draw.chance()).to(draw.dtype)
    x = draw.tensor(draw.size(1, 12), draw.size(1, 12), into, layout="contiguous")
    return trained(lambda: module(x)[0])


@family("lists of tensors")
def _lists(draw: Draw) -> Step:
    some = [draw.any_tensor(1, 3, grad=False) for _ in range(draw.size(1, 6))]
    parameters = [nn.Parameter(tensor.clone()) for tensor in some]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optim = torch.optim
    kind = draw.one_of(optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.Adamax)
    options = draw.one_of({}, {"foreach": True}, {"foreach": False})
    if kind in (optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad) and draw.chance(0.3):
        options = {"fused": True}
    optimizer = kind(parameters, lr=0.1, **options)
    return draw.one_of(
        optimizer.step,
        lambda: (optimizer.step(), optimizer.step()),
        lambda: nn.utils.clip_grad_norm_(parameters, 0.1),
        lambda: torch._foreach_norm(some),
        lambda: torch._foreach_add(some, some),
    )


@family("Muon")
def _muon(draw: Draw) -> Step:
    parameters = [nn.Parameter(torch.randn(draw.size(2, 300), draw.size(2, 300))) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.Muon(parameters).step


# Report --------------------------------------------------------------------------------------------------------------


def print_summary(results: Sequence[Result]) -> None:
    by_operator: defaultdict[tuple[bool, str], list[Result]] = defaultdict(list)
    for result in results:
        by_operator[result.has_rule, result.operator].append(result)
    print(f"{'operator':<58} {'rule':<4} {'calls':>6} {'off':>5} {'off by %, median':>16} {'worst':>9}   bytes")
    rows = [(sum(r.is_off for r in group), key, group) for key, group in by_operator.items()]
    for off, (has_rule, name), group in sorted(rows, key=lambda row: (-row[0], row[1])):
        if not (off or has_rule):
            continue
        worst = max(group, key=lambda r: abs(r.error))
        shares = sorted(100 * r.error / max(1, r.measured) for r in group if r.is_off)
        median = f"{shares[len(shares) // 2]:+.1f}" if shares else ""
        share = f"{100 * worst.error / max(1, worst.measured):+.1f}"
        known = "yes" if has_rule else ""
        print(f"{name:<58} {known:<4} {len(group):>6} {off:>5} {median:>16} {share:>9}   {worst.error:+,}")
    off = sum(r.is_off for r in results)
    print(f"\n{len(results)} calls of {len({r.operator for r in results})} operators; {off} off by more than 64 B")


def print_cases(results: Iterable[Result], most: int, blocks: bool) -> None:
    for result in sorted(results, key=lambda r: (r.operator, -abs(r.error)))[:most]:
        low, high = result.predicted
        predicted = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        print(
            f"{result.operator} [{result.family} --seed {result.seed}]: predicted {predicted}, measured "
            f"{result.measured:,} ({result.error:+,}); results {result.results:,}, kept {result.measured_kept:,}\n"
            f"    {result.arguments}"
        )
        if blocks:
            print(f"    {', '.join(result.blocks)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--cases", type=int, default=40, help="of each family")
    parser.add_argument("--seed", type=int, help="this case alone; otherwise the first of them")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--layout", choices=["contiguous", "channels_last", "transposed", "sliced"])
    parser.add_argument("--operator", help="list these operators alone")
    parser.add_argument("--list", type=int, default=30, metavar="N", help="how many cases that are off are listed")
    parser.add_argument("--blocks", action="store_true", help="list each block inside, in order")
    parser.add_argument("--verbose", action="store_true", help="also say which cases torch refuses")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    seeds = range(options.cases) if options.seed is None else [options.seed]
    results = [result for name in options.only for result in run(name, seeds, options)]
    if options.operator:
        results = [result for result in results if options.operator in result.operator]
    print_summary(results)
    print()
    print_cases([r for r in results if r.is_off or options.seed is not None], options.list, options.blocks)


if __name__ == "__main__":
    main()
