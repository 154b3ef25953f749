"""Calls of single operators on CUDA, each in several shapes and types, forward and backward.

A call is made by a function without arguments: it allocates the inputs, and returns a function that allocates nothing
else of its own.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

Call = Callable[[], Callable[[], object]]
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def given(*shape: int, dtype: torch.dtype = torch.float32, trains: bool = True) -> Tensor:
    """An input that a backward pass gives a gradient, if it can have one."""
    tensor = torch.rand(shape, device="cuda", dtype=dtype)
    return tensor.requires_grad_(trains)


def fixed(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return given(*shape, dtype=dtype, trains=False)


def whole(high: int, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
    return torch.randint(high, shape, device="cuda", dtype=dtype)


def mask(*shape: int) -> Tensor:
    return torch.zeros(shape, device="cuda", dtype=torch.bool)


def last_of(shape: tuple[int, ...], *, trains: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of this shape whose memory is in channels last order."""
    with torch.no_grad():
        tensor = torch.rand((shape[0], *shape[2:], shape[1]), device="cuda", dtype=dtype)
    return tensor.movedim(-1, 1).detach().requires_grad_(trains)


def turned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose last two dimensions are transposed in memory."""
    return fixed(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT.detach().requires_grad_()


def call(make: Callable[[], Iterable[Any]]) -> Call:
    """A call of the function that ``make`` returns first, with the arguments that follow it."""

    def prepared() -> Callable[[], object]:
        function, *arguments = make()
        return partial(function, *arguments)

    return prepared


Named = Iterator[tuple[str, Call]]


def of_functions(rows: dict[str, Callable[[torch.dtype], Iterable[Any]]], *types: str) -> Named:
    """A call for each type: of half precision and of single, or of those named."""
    for (name, make), kind in itertools.product(rows.items(), types or ("f32", "bf16")):
        yield f"{name} {kind}", call(partial(make, FLOATS[kind]))


# -- families


ROWS = ((4100, 64), (70_000, 96), (512, 2048))


def reductions() -> Named:
    for shape, dim in itertools.product(((4100, 64), (64, 40_000), (32, 128, 768), (3_000_001,)), (None, 0, -1)):
        yield from _reduced(shape, dim)
    yield "sum of a mask", call(lambda: (torch.sum, mask(4096, 640)))
    yield "sum of longs", call(lambda: (torch.sum, whole(9, 4096, 640)))
    yield "mean in float32", call(lambda: (partial(torch.mean, dtype=torch.float32), given(64, 4096, dtype=torch.half)))
    yield "sum of transposed", call(lambda: (partial(torch.sum, dim=0), turned(2048, 512)))


def _reduced(shape: tuple[int, ...], dim: int | None) -> Named:
    at: dict[str, Any] = {} if dim is None else {"dim": dim}
    rows = {
        "sum": lambda t: (partial(torch.sum, **at), given(*shape, dtype=t)),
        "mean": lambda t: (partial(torch.mean, **at), given(*shape, dtype=t)),
        "var": lambda t: (partial(torch.var, **at), given(*shape, dtype=t)),
        "amax": lambda t: (partial(torch.amax, **at), given(*shape, dtype=t)),
        "max": lambda t: (partial(torch.max, **at), given(*shape, dtype=t)),
        "argmax": lambda t: (partial(torch.argmax, **at), fixed(*shape, dtype=t)),
        "norm": lambda t: (partial(torch.linalg.vector_norm, **at), given(*shape, dtype=t)),
        "logsumexp": lambda t: (partial(torch.logsumexp, dim=dim or 0), given(*shape, dtype=t)),
        "any": lambda _: (partial(torch.any, **at), mask(*shape)),
        "all": lambda t: (partial(torch.all, **at), fixed(*shape, dtype=t)),
        "count_nonzero": lambda t: (partial(torch.count_nonzero, **at), fixed(*shape, dtype=t)),
        "aminmax": lambda t: (partial(torch.aminmax, **at), fixed(*shape, dtype=t)),
        "prod": lambda t: (partial(torch.prod, **at), given(*shape, dtype=t)),
        "median": lambda t: (partial(torch.median, **at), given(*shape, dtype=t)),
        "std_mean": lambda t: (partial(torch.std_mean, **at), given(*shape, dtype=t)),
        "nansum": lambda t: (partial(torch.nansum, **at), given(*shape, dtype=t)),
    }
    yield from ((f"{name} {shape} dim={dim}", each) for name, each in of_functions(rows))


def losses() -> Named:
    for reduction, shape in itertools.product(("none", "mean", "sum"), ((4100, 64), (33, 17_001))):
        yield from _losses(reduction, shape)
    pixels = lambda t: (F.cross_entropy, given(4, 19, 96, 96, dtype=t), whole(19, 4, 96, 96))  # noqa: E731
    yield from of_functions({"cross_entropy of pixels": pixels})
    ctc = lambda _: (  # noqa: E731
        lambda x, y, a, b: F.ctc_loss(x.log_softmax(-1), y, a, b),
        given(60, 8, 30),
        whole(29, 8, 12) + 1,
        whole(1, 8) + 60,
        whole(1, 8) + 12,
    )
    yield from of_functions({"ctc": ctc}, "f32")


def _losses(reduction: str, shape: tuple[int, int]) -> Named:
    plain = {
        "mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss,
        "bce": F.binary_cross_entropy, "bce_logits": F.binary_cross_entropy_with_logits,
        "soft_margin": F.soft_margin_loss, "kl_div": F.kl_div, "poisson": F.poisson_nll_loss,
    }  # fmt: skip
    rows: dict[str, Any] = {
        name: lambda t, loss=loss: (
            partial(loss, reduction=reduction), given(*shape, dtype=t), fixed(*shape, dtype=t)
        )
        for name, loss in plain.items()
    }  # fmt: skip
    rows |= {
        "cross_entropy": lambda t: (
            partial(F.cross_entropy, reduction=reduction), given(*shape, dtype=t), whole(shape[1], shape[0])
        ),
        "cross_entropy smooth": lambda t: (
            partial(F.cross_entropy, reduction=reduction, label_smoothing=0.1),
            given(*shape, dtype=t), whole(shape[1], shape[0]),
        ),
        "cross_entropy soft": lambda t: (
            partial(F.cross_entropy, reduction=reduction), given(*shape, dtype=t), fixed(*shape, dtype=t)
        ),
        "multi_margin": lambda t: (
            partial(F.multi_margin_loss, reduction=reduction), given(*shape, dtype=t), whole(shape[1], shape[0])
        ),
        "multilabel_soft_margin": lambda t: (
            partial(F.multilabel_soft_margin_loss, reduction=reduction),
            given(*shape, dtype=t), fixed(*shape, dtype=t),
        ),
        "gaussian_nll": lambda t: (
            lambda x, y, v: F.gaussian_nll_loss(x, y, v, reduction=reduction),
            given(*shape, dtype=t), fixed(*shape, dtype=t), given(*shape, dtype=t),
        ),
        "cosine_embedding": lambda t: (
            partial(F.cosine_embedding_loss, reduction=reduction),
            given(*shape, dtype=t), given(*shape, dtype=t), fixed(shape[0], dtype=t),
        ),
        "triplet": lambda t: (
            partial(F.triplet_margin_loss, reduction=reduction), *(given(*shape, dtype=t) for _ in range(3))
        ),
        "bce_logits weighted": lambda t: (
            lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, pos_weight=w, reduction=reduction),
            given(*shape, dtype=t), fixed(*shape, dtype=t), fixed(shape[1], dtype=t),
        ),
    }  # fmt: skip
    yield from ((f"{name} {reduction} {shape}", each) for name, each in of_functions(rows))


def norms() -> Named:
    for shape in ROWS:
        yield from _norms_of_rows(*shape)
    for shape, make in itertools.product(((8, 32, 24, 24), (2, 64, 8, 8, 8)), (given, last_of)):
        yield from _norms_of_images(shape, make)


def _norms_of_rows(*shape: int) -> Named:
    width = shape[-1]
    rows: dict[str, Any] = {
        "layer_norm": lambda t: (
            lambda x, w, b: F.layer_norm(x, (width,), w, b),
            given(*shape, dtype=t), given(width, dtype=t), given(width, dtype=t),
        ),
        "layer_norm plain": lambda t: (lambda x: F.layer_norm(x, (width,)), given(*shape, dtype=t)),
        "layer_norm turned": lambda t: (
            lambda x, w, b: F.layer_norm(x, (width,), w, b),
            turned(*shape, dtype=t), given(width, dtype=t), given(width, dtype=t),
        ),
        "rms_norm": lambda t: (
            lambda x, w: F.rms_norm(x, (width,), w), given(*shape, dtype=t), given(width, dtype=t)
        ),
        "softmax": lambda t: (lambda x: x.softmax(-1), given(*shape, dtype=t)),
        "softmax first": lambda t: (lambda x: x.softmax(0), given(*shape, dtype=t)),
        "log_softmax": lambda t: (lambda x: x.log_softmax(-1), given(*shape, dtype=t)),
        "softmax to float32": lambda t: (partial(F.softmax, dim=-1, dtype=torch.float32), given(*shape, dtype=t)),
        "log_softmax to float32": lambda t: (
            partial(F.log_softmax, dim=-1, dtype=torch.float32), given(*shape, dtype=t)
        ),
        "normalize": lambda t: (F.normalize, given(*shape, dtype=t)),
        "batch_norm rows": lambda t: (
            nn.BatchNorm1d(width, device="cuda", dtype=t), given(*shape, dtype=t),
        ),
        "gumbel": lambda t: (F.gumbel_softmax, given(*shape, dtype=t)),
    }  # fmt: skip
    yield from ((f"{name} {shape}", each) for name, each in of_functions(rows))


def _norms_of_images(shape: tuple[int, ...], make: Callable[..., Tensor]) -> Named:
    x = partial(make, *shape) if make is given else partial(make, shape)
    kind = f"{shape}" if make is given else f"{shape} channels last"
    count = len(shape) - 2
    channels = shape[1]
    norm = nn.BatchNorm2d if count == 2 else nn.BatchNorm3d
    rows = {
        "group_norm": lambda t: (nn.GroupNorm(8, channels, device="cuda", dtype=t), x(dtype=t)),
        "instance_norm": lambda t: (
            (nn.InstanceNorm2d if count == 2 else nn.InstanceNorm3d)(channels, device="cuda", dtype=t), x(dtype=t)
        ),
        "batch_norm native": lambda t: (without_cudnn(lambda: norm(channels, device="cuda", dtype=t)), x(dtype=t)),
        "batch_norm of eval": lambda t: (
            without_cudnn(lambda: norm(channels, device="cuda", dtype=t).eval()), x(dtype=t)
        ),
    }  # fmt: skip
    yield from ((f"{name} {kind}", each) for name, each in of_functions(rows))


def without_cudnn(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A layer without cuDNN, whose choice of kernels is another matter."""
    with torch.backends.cudnn.flags(enabled=False):
        layer = make()

    def run(*args: Any) -> Any:
        with torch.backends.cudnn.flags(enabled=False):
            return layer(*args)

    return run


def indexing() -> Named:
    for count in (500, 50_000):
        yield from _indexing(count)
    shape = (64, 3000)
    rows = {
        "masked_fill": lambda t: (lambda x, m: x.masked_fill(m, 0.0), given(*shape, dtype=t), mask(*shape)),
        "where": lambda t: (
            lambda x, y, m: torch.where(m, x, y), given(*shape, dtype=t), given(*shape, dtype=t), mask(*shape)
        ),
        "masked_select": lambda t: (lambda x, m: x[m], given(*shape, dtype=t), mask(*shape)),
        "masked_select of rows": lambda t: (lambda x, m: x[m], given(*shape, dtype=t), mask(64)),
        "masked_select by name": lambda t: (torch.masked_select, given(*shape, dtype=t), mask(*shape)),
        "masked_scatter": lambda t: (
            lambda x, m, y: x.masked_scatter(m, y), given(*shape, dtype=t), mask(*shape), given(*shape, dtype=t)
        ),
        "masked_put": lambda t: (masked_put, fixed(*shape, dtype=t), mask(*shape)),
        "nonzero": lambda t: (torch.nonzero, fixed(*shape, dtype=t)),
        "triu": lambda t: (torch.triu, given(*shape, dtype=t)),
        "roll": lambda t: (lambda x: x.roll(3, 1), given(*shape, dtype=t)),
        "flip": lambda t: (lambda x: x.flip(0), given(*shape, dtype=t)),
        "unfold": lambda t: (lambda x: x.unfold(1, 8, 4).contiguous(), given(*shape, dtype=t)),
    }  # fmt: skip
    yield from of_functions(rows)


def _indexing(count: int) -> Named:
    rows: dict[str, Any] = {
        "embedding": lambda t: (F.embedding, whole(5000, count), given(5000, 64, dtype=t)),
        "embedding by frequency": lambda t: (
            partial(F.embedding, scale_grad_by_freq=True), whole(5000, count), given(5000, 64, dtype=t)
        ),
        "embedding padded": lambda t: (
            partial(F.embedding, padding_idx=0), whole(5000, count), given(5000, 64, dtype=t)
        ),
        "bag": lambda t: (F.embedding_bag, whole(5000, count // 10, 10), given(5000, 64, dtype=t)),
        "bag sum": lambda t: (
            partial(F.embedding_bag, mode="sum"), whole(5000, count // 10, 10), given(5000, 64, dtype=t)
        ),
        "bag max": lambda t: (
            partial(F.embedding_bag, mode="max"), whole(5000, count // 10, 10), given(5000, 64, dtype=t)
        ),
        "index": lambda t: (lambda x, i: x[i], given(5000, 64, dtype=t), whole(5000, count)),
        "index pair": lambda t: (
            lambda x, i, j: x[i, j], given(500, 64, 8, dtype=t), whole(500, count), whole(64, count)
        ),
        "index second": lambda t: (lambda x, i: x[:, i], given(64, 5000, dtype=t), whole(5000, count)),
        "index apart": lambda t: (
            lambda x, i, j: x[i, :, j], given(500, 8, 64, dtype=t), whole(500, count), whole(64, count)
        ),
        "index_select": lambda t: (
            lambda x, i: x.index_select(0, i), given(5000, 64, dtype=t), whole(5000, count)
        ),
        "gather": lambda t: (lambda x, i: x.gather(0, i), given(5000, 64, dtype=t), whole(5000, count, 64)),
        "take_along_dim": lambda t: (
            lambda x, i: x.take_along_dim(i, 0), given(5000, 64, dtype=t), whole(5000, count, 64)
        ),
        "scatter": lambda t: (
            lambda x, i, y: x.scatter(0, i, y),
            given(5000, 64, dtype=t), whole(5000, count, 64), given(count, 64, dtype=t),
        ),
        "scatter_add": lambda t: (
            lambda x, i, y: x.scatter_add(0, i, y),
            given(5000, 64, dtype=t), whole(5000, count, 64), given(count, 64, dtype=t),
        ),
        "scatter_reduce": lambda t: (
            lambda x, i, y: x.scatter_reduce(0, i, y, "amax"),
            given(5000, 64, dtype=t), whole(5000, count, 64), given(count, 64, dtype=t),
        ),
        "index_add": lambda t: (
            lambda x, i, y: x.index_add(0, i, y),
            given(5000, 64, dtype=t), whole(5000, count), given(count, 64, dtype=t),
        ),
        "index_copy": lambda t: (
            lambda x, i, y: x.index_copy(0, i, y),
            given(5000, 64, dtype=t), whole(5000, count), given(count, 64, dtype=t),
        ),
        "index_put": lambda t: (
            lambda x, i, y: x.index_put((i,), y),
            given(5000, 64, dtype=t), whole(5000, count), given(count, 64, dtype=t),
        ),
        "index_put adding": lambda t: (
            lambda x, i, y: x.index_put((i,), y, accumulate=True),
            given(5000, 64, dtype=t), whole(5000, count), given(count, 64, dtype=t),
        ),
        "index_fill": lambda t: (lambda x, i: x.index_fill(0, i, 0.0), given(5000, 64, dtype=t), whole(5000, count)),
        "take": lambda t: (lambda x, i: x.take(i), given(5000, 64, dtype=t), whole(5000, count)),
        "one_hot": lambda _: (lambda i: F.one_hot(i, 64), whole(64, count)),
        "bincount": lambda _: (lambda i: torch.bincount(i, minlength=64), whole(64, count)),
        "repeat_interleave": lambda t: (lambda x: x.repeat_interleave(3, 0), given(count, 64, dtype=t)),
    }  # fmt: skip
    yield from ((f"{name} {count}", each) for name, each in of_functions(rows))


def masked_put(x: Tensor, where: Tensor) -> Tensor:
    x[where] = 0.0
    return x


def sorting() -> Named:
    for shape in ((64, 3000), (4, 50_000), (400, 9000), (100_000,)):
        yield from _sorting(*shape)
    for count in (1000, 100_000):
        yield from _counted(count)


def _sorting(*shape: int) -> Named:
    rows: dict[str, Any] = {
        "sort": lambda t: (torch.sort, given(*shape, dtype=t)),
        "argsort": lambda t: (torch.argsort, fixed(*shape, dtype=t)),
        "sort first": lambda t: (partial(torch.sort, dim=0), given(*shape, dtype=t)),
        "topk": lambda t: (lambda x: x.topk(50), given(*shape, dtype=t)),
        "kthvalue": lambda t: (lambda x: x.kthvalue(5), given(*shape, dtype=t)),
        "cumsum": lambda t: (lambda x: x.cumsum(-1), given(*shape, dtype=t)),
        "cumsum first": lambda t: (lambda x: x.cumsum(0), given(*shape, dtype=t)),
        "cumprod": lambda t: (lambda x: x.cumprod(-1), given(*shape, dtype=t)),
        "cummax": lambda t: (lambda x: x.cummax(-1), given(*shape, dtype=t)),
        "logcumsumexp": lambda t: (lambda x: x.logcumsumexp(-1), given(*shape, dtype=t)),
        "multinomial": lambda t: (lambda x: x.multinomial(1), fixed(*shape, dtype=t)),
        "multinomial some": lambda t: (lambda x: x.multinomial(20), fixed(*shape, dtype=t)),
        "multinomial again": lambda t: (lambda x: x.multinomial(20, replacement=True), fixed(*shape, dtype=t)),
        "searchsorted": lambda t: (torch.searchsorted, fixed(*shape, dtype=t), fixed(*shape, dtype=t)),
        "quantile": lambda t: (lambda x: x.float().quantile(0.5, -1), given(*shape, dtype=t)),
        "median last": lambda t: (lambda x: x.median(-1), given(*shape, dtype=t)),
        "mode": lambda t: (lambda x: x.mode(-1), given(*shape, dtype=t)),
        "histc": lambda t: (lambda x: x.float().histc(32, 0, 1), fixed(*shape, dtype=t)),
        "msort": lambda t: (torch.msort, given(*shape, dtype=t)),
    }
    yield from ((f"{name} {shape}", each) for name, each in of_functions(rows))


def _counted(count: int) -> Named:
    yield f"sort of longs {count}", call(lambda: (torch.sort, whole(1000, count)))
    yield f"unique {count}", call(lambda: (torch.unique, whole(1000, count)))
    inverse = partial(torch.unique, return_inverse=True, return_counts=True)
    yield f"unique with all {count}", call(lambda: (inverse, whole(1000, count)))
    yield f"unique_consecutive {count}", call(lambda: (torch.unique_consecutive, whole(1000, count)))
    yield f"unique of rows {count}", call(lambda: (partial(torch.unique, dim=0), whole(5, count // 10, 4)))
    yield f"nonzero of longs {count}", call(lambda: (torch.nonzero, whole(1000, count)))
    yield f"cumsum of a mask {count}", call(lambda: (lambda x: x.cumsum(0), mask(count)))
    yield f"randperm {count}", call(lambda: (lambda: torch.randperm(count, device="cuda"),))
    yield f"bucketize {count}", call(lambda: (torch.bucketize, fixed(count), fixed(64)))
    yield f"isin {count}", call(lambda: (torch.isin, whole(1000, count), whole(1000, 500)))


def images() -> Named:
    for make, name in ((given, ""), (last_of, " channels last")):
        yield from _images(make, name)
    line = {
        "max_pool1d": lambda t: (lambda a: F.max_pool1d(a, 2), given(8, 16, 500, dtype=t)),
        "avg_pool1d": lambda t: (lambda a: F.avg_pool1d(a, 2), given(8, 16, 500, dtype=t)),
        "nearest1d": lambda t: (lambda a: F.interpolate(a, scale_factor=2), given(8, 16, 500, dtype=t)),
        "nearest1d turned": lambda t: (lambda a: F.interpolate(a, scale_factor=2), turned(8, 16, 500, dtype=t)),
        "linear1d": lambda t: (lambda a: F.interpolate(a, scale_factor=2, mode="linear"), turned(8, 16, 500, dtype=t)),
        "pad reflect1d": lambda t: (lambda a: F.pad(a, (3, 4), mode="reflect"), turned(8, 16, 500, dtype=t)),
        "pad replicate1d": lambda t: (lambda a: F.pad(a, (3, 4), mode="replicate"), turned(8, 16, 500, dtype=t)),
    }
    yield from of_functions(line)


def _images(make: Callable[..., Tensor], name: str) -> Named:
    x = lambda t, *shape: make(*shape, dtype=t) if make is given else make(shape, dtype=t)  # noqa: E731
    two, three = (4, 16, 30, 34), (2, 8, 12, 14, 16)
    rows: dict[str, Any] = {
        "max_pool2d": lambda t: (lambda a: F.max_pool2d(a, 2), x(t, *two)),
        "max_pool2d indices": lambda t: (lambda a: F.max_pool2d(a, 3, 2, return_indices=True)[0], x(t, *two)),
        "avg_pool2d": lambda t: (lambda a: F.avg_pool2d(a, 2), x(t, *two)),
        "adaptive_avg_pool2d": lambda t: (lambda a: F.adaptive_avg_pool2d(a, 7), x(t, *two)),
        "adaptive_avg_pool2d to one": lambda t: (lambda a: F.adaptive_avg_pool2d(a, 1), x(t, *two)),
        "adaptive_max_pool2d": lambda t: (lambda a: F.adaptive_max_pool2d(a, 7), x(t, *two)),
        "fractional_max_pool2d": lambda t: (lambda a: F.fractional_max_pool2d(a, 2, 9), x(t, *two)),
        "lp_pool2d": lambda t: (lambda a: F.lp_pool2d(a, 2.0, 2), x(t, *two)),
        "max_unpool2d": lambda t: (unpooled, x(t, *two)),
        "max_pool3d": lambda t: (lambda a: F.max_pool3d(a, 2), x(t, *three)),
        "avg_pool3d": lambda t: (lambda a: F.avg_pool3d(a, 2), x(t, *three)),
        "adaptive_avg_pool3d": lambda t: (lambda a: F.adaptive_avg_pool3d(a, 3), x(t, *three)),
        "adaptive_max_pool3d": lambda t: (lambda a: F.adaptive_max_pool3d(a, 3), x(t, *three)),
        "nearest2d": lambda t: (lambda a: F.interpolate(a, scale_factor=2), x(t, *two)),
        "nearest-exact2d": lambda t: (lambda a: F.interpolate(a, scale_factor=2, mode="nearest-exact"), x(t, *two)),
        "bilinear": lambda t: (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), x(t, *two)),
        "bilinear antialias": lambda t: (
            lambda a: F.interpolate(a, size=(17, 17), mode="bilinear", antialias=True), x(t, *two)
        ),
        "bicubic": lambda t: (lambda a: F.interpolate(a, scale_factor=2, mode="bicubic"), x(t, *two)),
        "area": lambda t: (lambda a: F.interpolate(a, size=(9, 9), mode="area"), x(t, *two)),
        "nearest3d": lambda t: (lambda a: F.interpolate(a, scale_factor=2), x(t, *three)),
        "trilinear": lambda t: (lambda a: F.interpolate(a, scale_factor=2, mode="trilinear"), x(t, *three)),
        "grid_sample": lambda t: (F.grid_sample, x(t, *two), given(4, 20, 20, 2, dtype=t)),
        "grid_sample3d": lambda t: (F.grid_sample, x(t, *three), given(2, 5, 5, 5, 3, dtype=t)),
        "affine_grid": lambda t: (lambda a: F.affine_grid(a, [4, 3, 20, 20]), given(4, 2, 3, dtype=t)),
        "pad": lambda t: (lambda a: F.pad(a, (1, 2, 3, 4)), x(t, *two)),
        "pad reflect": lambda t: (lambda a: F.pad(a, (1, 2, 3, 4), mode="reflect"), x(t, *two)),
        "pad replicate": lambda t: (lambda a: F.pad(a, (1, 2, 3, 4), mode="replicate"), x(t, *two)),
        "pad circular": lambda t: (lambda a: F.pad(a, (1, 2, 3, 4), mode="circular"), x(t, *two)),
        "pad reflect3d": lambda t: (lambda a: F.pad(a, (1, 2, 1, 2, 1, 2), mode="reflect"), x(t, *three)),
        "pad replicate3d": lambda t: (lambda a: F.pad(a, (1, 2, 1, 2, 1, 2), mode="replicate"), x(t, *three)),
        "unfold2d": lambda t: (lambda a: F.unfold(a, 3), x(t, *two)),
        "fold2d": lambda t: (lambda a: F.fold(a, (30, 34), 2, stride=2), given(4, 64, 255, dtype=t)),
        "pixel_shuffle": lambda t: (lambda a: F.pixel_shuffle(a, 2), x(t, *two)),
        "pixel_unshuffle": lambda t: (lambda a: F.pixel_unshuffle(a, 2), x(t, *two)),
        "channel_shuffle": lambda t: (lambda a: F.channel_shuffle(a, 4), x(t, *two)),
        "local_response_norm": lambda t: (lambda a: F.local_response_norm(a, 3), x(t, *two)),
        "dropout": lambda t: (F.dropout, x(t, *two)),
        "dropout2d": lambda t: (F.dropout2d, x(t, *two)),
        "alpha_dropout": lambda t: (F.alpha_dropout, x(t, *two)),
        "prelu": lambda t: (F.prelu, x(t, *two), given(16, dtype=t)),
        "rrelu": lambda t: (lambda a: F.rrelu(a, training=True), x(t, *two)),
        "glu": lambda t: (lambda a: F.glu(a, 1), x(t, *two)),
    }  # fmt: skip
    yield from ((f"{label}{name}", each) for label, each in of_functions(rows))


def unpooled(x: Tensor) -> Tensor:
    values, places = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, places, 2)


def activations() -> Named:
    names = ("relu", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus", "hardswish", "hardtanh",
             "hardsigmoid", "logsigmoid", "softsign", "tanhshrink", "sigmoid", "tanh")  # fmt: skip
    yield from of_functions({name: lambda t, name=name: (getattr(F, name), given(64, 3000, dtype=t)) for name in names})
    maths = ("exp", "log", "sqrt", "rsqrt", "sin", "abs", "reciprocal", "square", "erf", "lgamma", "logit", "sign",
             "clone", "cos", "expm1", "log1p", "atan", "digamma", "sinc", "frac", "nan_to_num")  # fmt: skip
    yield from of_functions(
        {name: lambda t, name=name: (getattr(torch, name), given(64, 3000, dtype=t)) for name in maths}
    )
    pairs = ("add", "mul", "div", "sub", "maximum", "atan2", "fmod", "pow", "hypot", "copysign", "logaddexp")
    for name in pairs:
        yield from _pairs(name, getattr(torch, name))
    rows = {
        "clamp": lambda t: (lambda x: x.clamp(0.1, 0.9), given(64, 3000, dtype=t)),
        "lerp": lambda t: (torch.lerp, *(given(64, 3000, dtype=t) for _ in range(3))),
        "addcmul": lambda t: (torch.addcmul, *(given(64, 3000, dtype=t) for _ in range(3))),
        "addcdiv": lambda t: (torch.addcdiv, *(given(64, 3000, dtype=t) for _ in range(3))),
        "cat": lambda t: (lambda *xs: torch.cat(xs, 1), given(64, 300, dtype=t), given(64, 500, dtype=t)),
        "stack": lambda t: (lambda *xs: torch.stack(xs), given(64, 300, dtype=t), given(64, 300, dtype=t)),
        "chunk": lambda t: (lambda x: torch.mul(*x.chunk(2, 1)), given(64, 300, dtype=t)),
        "repeat": lambda t: (lambda x: x.repeat(3, 2), given(64, 300, dtype=t)),
        "cumulative mean": lambda t: (lambda x: x.cumsum(1) / 2, given(64, 300, dtype=t)),
        "cast": lambda t: (lambda x: x.float().half(), given(64, 300, dtype=t)),
        "pow": lambda t: (lambda x: x**2.5, given(64, 300, dtype=t)),
        "cross": lambda t: (partial(torch.cross, dim=-1), given(64, 3, dtype=t), given(64, 3, dtype=t)),
        "trace": lambda t: (torch.trace, given(64, 64, dtype=t)),
        "diag_embed": lambda t: (torch.diag_embed, given(64, 64, dtype=t)),
        "tril_indices": lambda _: (lambda: torch.tril_indices(300, 300, device="cuda"),),
        "renorm": lambda t: (lambda x: x.renorm(2, 0, 1.0), given(64, 300, dtype=t)),
        "weight_norm": lambda t: (torch._weight_norm, given(64, 300, dtype=t), given(64, 1, dtype=t)),
        "cosine_similarity": lambda t: (F.cosine_similarity, given(64, 300, dtype=t), given(64, 300, dtype=t)),
        "pairwise_distance": lambda t: (F.pairwise_distance, given(64, 300, dtype=t), given(64, 300, dtype=t)),
        "pdist": lambda t: (F.pdist, given(64, 300, dtype=t)),
        "bernoulli": lambda t: (torch.bernoulli, fixed(64, 300, dtype=t)),
        "normal": lambda t: (lambda x: torch.randn_like(x) * x, given(64, 300, dtype=t)),
        "poisson": lambda t: (torch.poisson, fixed(64, 300, dtype=t)),
        "exponential": lambda t: (lambda x: torch.empty_like(x).exponential_(), fixed(64, 300, dtype=t)),
        "allclose": lambda t: (torch.allclose, fixed(64, 300, dtype=t), fixed(64, 300, dtype=t)),
        "equal": lambda t: (torch.equal, fixed(64, 300, dtype=t), fixed(64, 300, dtype=t)),
        "isnan any": lambda t: (lambda x: x.isnan().any(), fixed(64, 3000, dtype=t)),
        "checkpoint": lambda t: (
            lambda x: checkpoint(lambda y: (y.sin().cos() * y).exp(), x, use_reentrant=False), given(64, 3000, dtype=t)
        ),
        "to host": lambda t: (lambda x: x.t().cpu(), fixed(64, 300, dtype=t)),
        "to host cast": lambda t: (lambda x: x.to("cpu", torch.float64), fixed(64, 300, dtype=t)),
    }  # fmt: skip
    yield from of_functions(rows)
    yield "complex product", call(lambda: (torch.mul, *(given(64, 300, dtype=torch.complex64) for _ in range(2))))
    yield "complex parts", call(lambda: (lambda x: x.real * x.imag, given(64, 300, dtype=torch.complex64)))
    yield "view as complex", call(lambda: (lambda x: torch.view_as_complex(x).abs(), given(64, 300, 2)))
    yield "polar", call(lambda: (torch.polar, given(64, 300), given(64, 300)))


def _pairs(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Named:
    rows = {
        name: lambda t: (function, given(64, 3000, dtype=t), given(64, 3000, dtype=t)),
        f"{name} broadcast": lambda t: (function, given(64, 3000, dtype=t), given(3000, dtype=t)),
        f"{name} of a column": lambda t: (function, given(64, 1, dtype=t), given(64, 3000, dtype=t)),
        f"{name} of types": lambda t: (function, given(64, 3000, dtype=t), given(64, 3000)),
    }
    yield from of_functions(rows)


def products() -> Named:
    rows: dict[str, Any] = {
        "mm": lambda t: (torch.mm, given(640, 320, dtype=t), given(320, 160, dtype=t)),
        "mm turned": lambda t: (torch.mm, turned(640, 320, dtype=t), turned(320, 160, dtype=t)),
        "mm of steps": lambda t: (
            lambda a, b: a[:, ::2] @ b[::2], given(640, 320, dtype=t), given(320, 160, dtype=t)
        ),
        "linear": lambda t: (F.linear, given(640, 320, dtype=t), given(160, 320, dtype=t), given(160, dtype=t)),
        "linear of 3": lambda t: (
            F.linear, given(8, 80, 320, dtype=t), given(160, 320, dtype=t), given(160, dtype=t)
        ),
        "linear of 3 turned": lambda t: (
            F.linear, turned(8, 80, 320, dtype=t), given(160, 320, dtype=t), given(160, dtype=t)
        ),
        "linear plain": lambda t: (F.linear, given(8, 80, 320, dtype=t), given(160, 320, dtype=t)),
        "addmm": lambda t: (
            torch.addmm, given(640, 160, dtype=t), given(640, 320, dtype=t), given(320, 160, dtype=t)
        ),
        "baddbmm": lambda t: (
            torch.baddbmm, given(8, 64, 16, dtype=t), given(8, 64, 32, dtype=t), given(8, 32, 16, dtype=t)
        ),
        "bmm": lambda t: (torch.bmm, given(8, 64, 32, dtype=t), given(8, 32, 16, dtype=t)),
        "bmm turned": lambda t: (torch.bmm, turned(8, 64, 32, dtype=t), turned(8, 32, 16, dtype=t)),
        "bmm of steps": lambda t: (
            lambda a, b: a[..., ::2] @ b[:, ::2], given(8, 64, 32, dtype=t), given(8, 32, 16, dtype=t)
        ),
        "addbmm": lambda t: (
            torch.addbmm, given(64, 16, dtype=t), given(8, 64, 32, dtype=t), given(8, 32, 16, dtype=t)
        ),
        "mv": lambda t: (torch.mv, given(640, 320, dtype=t), given(320, dtype=t)),
        "mv of steps": lambda t: (lambda a, b: a[:, ::2] @ b, given(640, 320, dtype=t), given(160, dtype=t)),
        "addmv": lambda t: (torch.addmv, given(640, dtype=t), given(640, 320, dtype=t), given(320, dtype=t)),
        "dot": lambda t: (torch.dot, given(640, dtype=t), given(640, dtype=t)),
        "outer": lambda t: (torch.outer, given(640, dtype=t), given(320, dtype=t)),
        "addr": lambda t: (torch.addr, given(640, 320, dtype=t), given(640, dtype=t), given(320, dtype=t)),
        "matmul broadcast": lambda t: (torch.matmul, given(8, 4, 64, 32, dtype=t), given(4, 32, 16, dtype=t)),
        "matmul of 4 by 2": lambda t: (torch.matmul, given(8, 4, 64, 32, dtype=t), given(32, 16, dtype=t)),
        "einsum heads": lambda t: (
            partial(torch.einsum, "bqhd,bkhd->bhqk"), given(4, 64, 8, 16, dtype=t), given(4, 48, 8, 16, dtype=t)
        ),
        "einsum of three": lambda t: (
            partial(torch.einsum, "ab,bc,cd->ad"),
            given(64, 32, dtype=t), given(32, 80, dtype=t), given(80, 16, dtype=t),
        ),
        "bilinear layer": lambda t: (
            F.bilinear, given(64, 32, dtype=t), given(64, 48, dtype=t), given(8, 32, 48, dtype=t), given(8, dtype=t)
        ),
        "tensordot": lambda t: (
            partial(torch.tensordot, dims=([1], [0])), given(8, 32, 48, dtype=t), given(32, 16, dtype=t)
        ),
        "chain_matmul": lambda t: (
            lambda *xs: torch.linalg.multi_dot(xs),
            given(64, 32, dtype=t), given(32, 80, dtype=t), given(80, 16, dtype=t),
        ),
        "kron": lambda t: (torch.kron, given(16, 16, dtype=t), given(8, 8, dtype=t)),
        "linear in autocast": lambda t: (autocast(F.linear), given(640, 320), given(160, 320), given(160)),
        "layer in autocast": lambda t: (
            autocast(nn.TransformerEncoderLayer(64, 4, 128, device="cuda", batch_first=True)), given(4, 100, 64)
        ),
        "lstm cell": lambda t: (nn.LSTMCell(64, 96, device="cuda", dtype=t), given(32, 64, dtype=t)),
        "gru cell": lambda t: (nn.GRUCell(64, 96, device="cuda", dtype=t), given(32, 64, dtype=t)),
        "lstm native": lambda t: (
            without_cudnn(lambda: nn.LSTM(64, 96, device="cuda", dtype=t)), given(7, 32, 64, dtype=t)
        ),
        "gru native": lambda t: (
            without_cudnn(lambda: nn.GRU(64, 96, device="cuda", dtype=t)), given(7, 32, 64, dtype=t)
        ),
        "rnn native": lambda t: (
            without_cudnn(lambda: nn.RNN(64, 96, device="cuda", dtype=t)), given(7, 32, 64, dtype=t)
        ),
        "mha": lambda t: (
            lambda m, x: m(x, x, x)[0],
            nn.MultiheadAttention(64, 4, device="cuda", dtype=t, batch_first=True), given(4, 100, 64, dtype=t),
        ),
    }  # fmt: skip
    yield from of_functions(rows)
    for p, size in itertools.product((1.0, 2.0, float("inf")), (20, 60)):
        yield from _distances(p, size)


def _distances(p: float, size: int) -> Named:
    distances = lambda _: (partial(torch.cdist, p=p), given(2, size, 32), given(2, size + 7, 32))  # noqa: E731
    yield from ((f"{name} {size} p={p}", each) for name, each in of_functions({"cdist": distances}, "f32"))


def autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return function(*args)

    return run


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention() -> Named:
    shapes = (
        *(((2, 8, 256, width),) * 2 for width in (32, 64, 72, 96, 128, 160, 256)),
        ((1, 4, 1000, 64),) * 2,
        ((2, 8, 100, 80), (2, 8, 700, 80)),
        ((1, 1, 64, 64), (1, 1, 8192, 64)),
        ((64, 8, 64, 64),) * 2,
        ((2, 8, 256, 64), (2, 2, 256, 64)),
        ((2, 4, 130, 36),) * 2,
    )
    for (name, backend), (query, key) in itertools.product(BACKENDS.items(), shapes):
        yield from _attention(name, backend, query, key)
    for (name, backend), (query, key) in itertools.product(list(BACKENDS.items())[1:], (shapes[1], shapes[8])):
        yield from _masked_attention(name, backend, query, key)
    permuted = lambda t: (  # noqa: E731
        lambda x: (
            attend(None, *x.view(2, 200, 3, 8, 64).permute(2, 0, 3, 1, 4).unbind(0))
            .transpose(1, 2)
            .reshape(2, 200, 512)
        ),
        given(2, 200, 1536, dtype=t),
    )
    yield from of_functions({"attention of one projection": permuted}, *FLOATS)


def _attention(name: str, backend: SDPBackend, query: tuple[int, ...], key: tuple[int, ...]) -> Named:
    options: dict[str, dict[str, Any]] = {"": {}, " dropout": {"dropout_p": 0.1}, " causal": {"is_causal": True}}
    rows = {
        f"{name}{title} {query} {key}": lambda t, more=more: (
            partial(attend, backend, **more), given(*query, dtype=t), given(*key, dtype=t), given(*key, dtype=t)
        )
        for title, more in options.items()
    }  # fmt: skip
    yield from of_functions(rows, *FLOATS)


def _masked_attention(name: str, backend: SDPBackend, query: tuple[int, ...], key: tuple[int, ...]) -> Named:
    size = (query[0], query[1], query[2], key[2])
    masks = {
        "mask": lambda _: mask(*size),
        "mask of all": lambda _: mask(1, 1, *size[2:]),
        "bias": lambda t: fixed(*size, dtype=t),
        "bias that learns": lambda t: given(*size, dtype=t),
    }
    rows = {
        f"{name} {title} {query} {key}": lambda t, make=make: (
            partial(attend, backend), given(*query, dtype=t), given(*key, dtype=t), given(*key, dtype=t), make(t)
        )
        for title, make in masks.items()
    }  # fmt: skip
    yield from of_functions(rows, *FLOATS)


def attend(
    backend: SDPBackend | None, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([backend] if backend else backends):
        return F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=grouped, **options)


def optimizers() -> Named:
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        "SGD plain": (torch.optim.SGD, {}),
        "SGD nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        "Adam": (torch.optim.Adam, {}),
        "Adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        "AdamW": (torch.optim.AdamW, {}),
        "Adagrad": (torch.optim.Adagrad, {}),
        "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        "Adadelta": (torch.optim.Adadelta, {}),
        "NAdam": (torch.optim.NAdam, {}),
        "RAdam": (torch.optim.RAdam, {}),
        "Adamax": (torch.optim.Adamax, {}),
        "Rprop": (torch.optim.Rprop, {}),
        "ASGD": (torch.optim.ASGD, {}),
        "Adafactor": (torch.optim.Adafactor, {}),
    }
    ways: dict[str, dict[str, Any]] = {
        "": {}, " foreach": {"foreach": True}, " fused": {"fused": True}, " one by one": {"foreach": False},
        " capturable": {"capturable": True},
    }  # fmt: skip
    for (name, (kind, options)), (title, more) in itertools.product(kinds.items(), ways.items()):
        yield name + title, partial(stepped, kind, {**options, **more})
    with_grads = {
        "clip_grad_norm_": lambda t: (nn.utils.clip_grad_norm_, trained(t), 1.0),
        "clip_grad_norm_ one by one": lambda t: (partial(nn.utils.clip_grad_norm_, foreach=False), trained(t), 1.0),
        "clip_grad_norm_ inf": lambda t: (partial(nn.utils.clip_grad_norm_, norm_type=float("inf")), trained(t), 1.0),
        "clip_grad_value_": lambda t: (nn.utils.clip_grad_value_, trained(t), 1.0),
    }
    yield from of_functions(with_grads)
    yield "GradScaler", scaled
    lists = {
        "foreach add": lambda t: (lambda xs: torch._foreach_add(xs, 1.0), trained(t)),
        "foreach mul": lambda t: (lambda xs: torch._foreach_mul(xs, xs), trained(t)),
        "foreach norm": lambda t: (torch._foreach_norm, trained(t)),
        "foreach norm inf": lambda t: (lambda xs: torch._foreach_norm(xs, float("inf")), trained(t)),
        "foreach max": lambda t: (torch._foreach_max, trained(t)),
        "foreach sqrt": lambda t: (torch._foreach_sqrt, trained(t)),
        "foreach lerp": lambda t: (lambda xs: torch._foreach_lerp(xs, xs, 0.5), trained(t)),
        "foreach addcdiv": lambda t: (lambda xs: torch._foreach_addcdiv(xs, xs, xs), trained(t)),
    }
    for name, each in of_functions(lists):
        yield name, without_gradients(each)


def without_gradients(made: Call) -> Call:
    def prepared() -> Callable[[], object]:
        return torch.no_grad()(made())

    return prepared


SIZES = ((300, 700), (700,), (70_000,), (1, 1), (3, 5, 7))


def trained(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Parameters with gradients."""
    parameters = [given(*shape, dtype=dtype) for shape in SIZES]
    for each in parameters:
        each.grad = fixed(*each.shape, dtype=dtype)
    return parameters


def stepped(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Callable[[], object]:
    optimizer = kind(trained(), lr=0.1, **options)

    def run() -> None:
        optimizer.step()
        optimizer.step()

    return run


def scaled() -> Callable[[], object]:
    parameters, scaler = trained(), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(parameters, 0.1)

    def run() -> None:
        scaler.scale(parameters[0].sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return run


def transforms() -> Named:
    rows: dict[str, Any] = {
        "stft": lambda _: (lambda x: torch.stft(x, 64, 16, return_complex=True), given(4, 2000)),
        "rfft": lambda _: (torch.fft.rfft, given(64, 256)),
        "irfft": lambda _: (torch.fft.irfft, given(64, 129, dtype=torch.complex64)),
        "fft2": lambda _: (torch.fft.fft2, given(4, 64, 64, dtype=torch.complex64)),
        "fftshift": lambda _: (torch.fft.fftshift, given(64, 256)),
        "cholesky": lambda _: (torch.linalg.cholesky, given(4, 32, 32)),
        "solve": lambda _: (torch.linalg.solve, given(4, 32, 32), given(4, 32, 8)),
        "triangular": lambda _: (partial(torch.linalg.solve_triangular, upper=True), given(4, 32, 32), given(4, 32, 8)),
        "svd": lambda _: (lambda x: torch.linalg.svd(x)[1], given(4, 32, 32)),
        "qr": lambda _: (torch.linalg.qr, given(4, 32, 32)),
        "eigh": lambda _: (lambda x: torch.linalg.eigh(x)[0], given(4, 32, 32)),
        "inverse": lambda _: (torch.linalg.inv, given(4, 32, 32)),
        "det": lambda _: (torch.linalg.det, given(4, 32, 32)),
        "matrix_exp": lambda _: (torch.matrix_exp, given(4, 32, 32)),
        "matrix_power": lambda _: (lambda x: torch.linalg.matrix_power(x, 5), given(4, 32, 32)),
        "sparse mm": lambda _: (sparse_product, whole(100, 2, 900), given(900), given(100, 32)),
        "sparse to dense": lambda _: (
            lambda i, v: torch.sparse_coo_tensor(i, v, (100, 100)).to_dense(), whole(100, 2, 900), given(900)
        ),
        "dense to sparse": lambda _: (lambda x: x.to_sparse()._values().sum(), fixed(100, 100)),
    }  # fmt: skip
    yield from of_functions(rows, "f32")


def sparse_product(places: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    return torch.sparse.mm(torch.sparse_coo_tensor(places, values, (100, 100)), dense)


FAMILIES = (
    reductions, losses, norms, indexing, sorting, images, activations, products, attention, optimizers, transforms
)  # fmt: skip


def calls() -> Iterator[tuple[str, Call]]:
    """Every call with its name."""
    for family in FAMILIES:
        yield from ((f"{family.__name__}: {name}", each) for name, each in family())
