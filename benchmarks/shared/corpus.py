"""What `record.py` records on a GPU: whole trainings, which `accuracy.py` predicts, and single operators.

Trainings: families, optimizers, precisions, sizes. Networks are the zoo's, in realistic shapes. Every training steps
four times on synthetic data and needs no download. Probes: one call of an operator each, to learn what its kernel
allocates in addition to its results.

`python benchmarks/record.py --list` and `--list-probes` print them.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

try:
    import pytorch_lightning as pl
except ModuleNotFoundError:  # the other package has the same classes; the zoo imports them by this name
    import lightning.pytorch as pl

    sys.modules["pytorch_lightning"] = pl

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import Dataset

from shared import zoo

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adamw_for_loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
}


@dataclass(frozen=True)
class Training:
    """One training of the corpus.

    Attributes:
        name: unique in the corpus.
        family: such as ``"cnn"``.
        network: the network and its loss.
        dataset: a function from a number of samples to a dataset.
        batch_size: samples per batch.
        optimizer: a key of `OPTIMIZERS`.
        precision: Lightning's name.
        trainer_kwargs: other settings of the Trainer.
        channels_last: whether model and images are channels last.
        compiled: whether the network goes through ``torch.compile``.
        tf32: whether float32 matrix products may run on TF32 tensor cores.
        cap_gib: memory PyTorch may take, so that its allocator has to release its cache; None for all of it.
        history: whether every event of the allocator is recorded.
    """

    name: str
    family: str
    network: Callable[[], nn.Module]
    dataset: Callable[[int], Dataset]
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    optimizer: str = "adamw"
    precision: str = "32-true"
    trainer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    channels_last: bool = False
    compiled: bool = False
    tf32: bool = False
    cap_gib: float | None = None
    history: bool = False

    def module(self) -> pl.LightningModule:
        """What the Trainer fits."""
        return {"gan": Gan, "contrastive": Contrastive}.get(self.family, Supervised)(self)

    def settings(self) -> dict[str, Any]:
        """What was trained, as a recording keeps it."""
        settings = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {name: value for name, value in settings.items() if name not in ("name", "network", "dataset", "loss")}


class Supervised(pl.LightningModule):
    """A network, a loss and one optimizer."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training_case = training
        network = training.network()
        if training.channels_last:
            network = network.to(memory_format=torch.channels_last)
        self.network = torch.compile(network) if training.compiled else network

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.training_case.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return self.training_case.loss(self.network(x), y)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.training_case.optimizer](self.parameters())


class Gan(zoo.GAN):
    """The zoo's GAN with an optimizer of the corpus."""

    def __init__(self, training: Training) -> None:
        super().__init__("adam")
        self.choose = OPTIMIZERS[training.optimizer]

    def configure_optimizers(self) -> Any:
        return [self.choose(self.generator.parameters()), self.choose(self.discriminator.parameters())], []


class Contrastive(zoo.Contrastive):
    """The zoo's contrastive loss with a tower and an optimizer of the corpus."""

    def __init__(self, training: Training) -> None:
        super().__init__("adam")
        self.tower = training.network()
        self.choose = OPTIMIZERS[training.optimizer]

    def configure_optimizers(self) -> Any:
        return self.choose(self.parameters())


# Networks in realistic shapes -----------------------------------------------------------------------------------------


class Llama(nn.Module):
    """Root mean square norms, rotary positions, grouped queries and a gated MLP."""

    def __init__(self, vocabulary: int = 32000, width: int = 1024, heads: int = 16, groups: int = 4, depth: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_attention(x))
        normed = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def attend(self, x: Tensor) -> Tensor:
        query = rotate(self.query(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2))
        key = rotate(self.key(x).unflatten(-1, (self.groups, self.size)).transpose(1, 2))
        value = self.value(x).unflatten(-1, (self.groups, self.size)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.project(attended.transpose(1, 2).flatten(-2))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * torch.arange(half, device=x.device) / half
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


class VisionTransformer(nn.Module):
    def __init__(self, side: int = 224, patch: int = 16, width: int = 384, depth: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(torch.zeros((side // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2) + self.position).mean(1))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(2048, 1000))


def separable() -> nn.Module:
    """Depthwise and pointwise convolutions, as in MobileNet."""

    def block(into: int, out: int, stride: int) -> list[nn.Module]:
        wide = 4 * into
        sizes = ((into, wide, 1, 1, 1), (wide, wide, 3, stride, wide), (wide, out, 1, 1, 1))
        found: list[nn.Module] = []
        for a, b, kernel, step, groups in sizes:
            found += [
                nn.Conv2d(a, b, kernel, step, kernel // 2, groups=groups, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU6(True),
            ]
        return found

    body = [*block(32, 32, 1), *block(32, 64, 2), *block(64, 64, 1), *block(64, 128, 2), *block(128, 256, 2)]
    stem = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6(True)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))


def tower() -> nn.Module:
    """A ResNet that ends in an embedding."""
    return nn.Sequential(*list(zoo.resnet_small())[:-1], nn.Linear(256, 128))


class LstmLanguageModel(nn.Module):
    def __init__(self, vocabulary: int = 16000, width: int = 650) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def gpt(
    tokens: int = 512, width: int = 768, depth: int = 6, dropout: float = 0.1, reentrant: bool | None = None
) -> Any:
    return lambda: zoo.GPT(32000, tokens, width, width // 64, depth, dropout, reentrant=reentrant)


def bert() -> nn.Module:
    return zoo.EncoderClassifier(vocabulary=30522, width=768, tokens=256, depth=6)


# The corpus -----------------------------------------------------------------------------------------------------------

IMAGES = zoo.images(3, 224, 1000)
TEXT = zoo.next_tokens(32000, 512)

BASES = (
    Training("resnet50", "cnn", zoo.resnet50, IMAGES, 64, history=True),
    Training("vgg", "cnn", vgg, zoo.images(3, 96, 1000), 128, history=True),
    Training("separable", "cnn", separable, zoo.images(3, 160, 1000), 128, history=True),
    Training("resnet_small", "cnn", zoo.resnet_small, zoo.images(3, 64), 256),
    Training("unet", "unet", lambda: zoo.UNet(64), zoo.masked_images(3, 128, 4), 16, history=True),
    Training("vit", "transformer", VisionTransformer, IMAGES, 64),
    Training("bert", "transformer", bert, zoo.token_classes(30522, 256), 32),
    Training("gpt", "transformer", gpt(), TEXT, 8, zoo.token_loss, history=True),
    Training("llama", "transformer", Llama, TEXT, 8, zoo.token_loss, history=True),
    Training("lstm", "lstm", LstmLanguageModel, zoo.next_tokens(16000, 128), 64, zoo.token_loss, history=True),
    Training("gan", "gan", nn.Identity, zoo.images(3, 32), 256),
    Training("mlp", "mlp", lambda: zoo.mlp(512, 4096, 4), zoo.vectors(512), 4096),
    Training("contrastive", "contrastive", tower, zoo.image_pairs(3, 64), 512),
)


def corpus() -> tuple[Training, ...]:
    """Every training: the plain ones first, then those under a cap; last the compiled ones, which take longest."""
    by_name = {base.name: base for base in BASES}
    found = list(BASES)
    for name, size, cap in (("resnet50", 96, 8.5), ("vgg", 160, 3.5), ("gpt", 12, 5.7), ("separable", 160, 9.4)):
        changes = {"batch_size": size, "cap_gib": cap, "history": True}
        found.append(dataclasses.replace(by_name[name], name=f"{name}_{size}_in_{cap:g}GiB", **changes))

    def vary(names: str, suffix: str, **changes: Any) -> None:
        found.extend(
            dataclasses.replace(by_name[name], name=f"{name}_{suffix}", history=False, **changes)
            for name in names.split()
        )

    vary("resnet50 vit bert gpt llama unet lstm mlp contrastive", "bf16-mixed", precision="bf16-mixed")
    vary("resnet50 bert gpt lstm gan", "16-mixed", precision="16-mixed")
    vary("gpt llama vit", "bf16-true", precision="bf16-true")
    vary("resnet50 vgg gpt", "tf32", tf32=True)
    vary("resnet50 gpt mlp", "sgd", optimizer="sgd")
    vary("resnet50 vgg lstm", "momentum", optimizer="momentum")
    vary("resnet50 gpt gan", "adam", optimizer="adam")
    vary("resnet50 gpt llama", "adamw_fused", optimizer="adamw_fused")
    vary("gpt mlp", "adamw_for_loop", optimizer="adamw_for_loop")
    vary("separable bert", "rmsprop", optimizer="rmsprop")
    vary("resnet_small", "adagrad", optimizer="adagrad")
    vary("resnet50 gpt lstm", "accumulate", trainer_kwargs={"accumulate_grad_batches": 2})
    vary("gpt bert", "clip_norm", trainer_kwargs={"gradient_clip_val": 1.0})
    vary("llama", "clip_value", trainer_kwargs={"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"})
    vary("resnet50 unet separable", "channels_last", channels_last=True)
    vary("resnet50", "channels_last_bf16", channels_last=True, precision="bf16-mixed")
    vary("gpt", "checkpointed", network=gpt(reentrant=False))
    vary("gpt", "checkpointed_reentrant", network=gpt(reentrant=True))
    vary("gpt", "without_dropout", network=gpt(dropout=0.0))
    vary("gpt", "wide", network=gpt(width=1536, depth=4))
    for name, size in (("resnet50", 8), ("resnet50", 256), ("vgg", 512), ("separable", 512), ("gpt", 1), ("gpt", 32)):
        found.append(dataclasses.replace(by_name[name], name=f"{name}_{size}", history=False, batch_size=size))
    vary("gpt mlp", "compiled", compiled=True)
    return tuple(found)


# Probes ---------------------------------------------------------------------------------------------------------------

PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Probe:
    """One call to record.

    Attributes:
        name: the operator, as ``aten.sort.default``, where it is one; else what is called, as ``lstm backward``.
        prepare: makes the arguments on a device and returns the call.
        flags: ``cudnn_benchmark`` and ``tf32``, for matrix products and convolutions alike.
    """

    name: str
    prepare: Callable[[str], partial]
    flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A tensor to create.

    Attributes:
        shape: its sizes.
        dtype: torch's name of the type.
        high: for whole numbers: the first that is too large.
        layout: ``"contiguous"``, ``"channels_last"``, ``"transposed"`` in its last two dimensions, or ``"sliced"`` out
            of a tensor whose rows are twice as long.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int = 0
    layout: str = "contiguous"

    def made(self, device: str) -> Tensor:
        dtype = getattr(torch, self.dtype)
        shape = list(self.shape)
        if self.layout == "transposed":
            shape[-2:] = reversed(shape[-2:])
        if self.layout == "sliced":
            shape[-1] *= 2
        if dtype == torch.bool:
            x = torch.rand(shape, device=device) > 0.5
        elif self.high:
            x = torch.randint(self.high, shape, device=device, dtype=dtype)
        else:
            x = torch.rand(shape, device=device, dtype=dtype)
        if self.layout == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        if self.layout == "transposed":
            x = x.transpose(-2, -1)
        return x[..., : self.shape[-1]] if self.layout == "sliced" else x


def made(argument: Any, device: str) -> Any:
    if isinstance(argument, Sample):
        return argument.made(device)
    return [made(part, device) for part in argument] if isinstance(argument, list) else argument


def operator(name: str, *arguments: Any, flags: Mapping[str, bool] | None = None, **keywords: Any) -> Probe:
    """A call of ``torch.ops.aten``; a `Sample` becomes a tensor, also within lists."""
    packet, _, overload = name.partition(".")
    called = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def prepare(device: str) -> partial:
        return partial(called, *made(list(arguments), device), **keywords)

    return Probe(f"aten.{packet}.{overload or 'default'}", prepare, flags or {})


def both_ways(name: str, function: Callable[..., Any], *samples: Sample, within: Any = None) -> Iterator[Probe]:
    """A function or a module, forward, and then backward through all its results.

    Args:
        name: what is called.
        function: of the tensors; where it is a class or a partial of one, the module is made first.
        samples: its arguments; gradients are asked for all that are real numbers, and for the module's parameters.
        within: a context to call it in, created for each call.
    """

    def forward(device: str) -> tuple[partial, list[Tensor]]:
        inputs = made(list(samples), device)
        wanted = [x.requires_grad_() for x in inputs if x.is_floating_point()]
        called = function
        if isinstance(getattr(function, "func", function), type):
            called = function().to(device, inputs[0].dtype if wanted else None)
            wanted += called.parameters()
        return partial(inside, *inputs, function=called, within=within), wanted

    def backward(device: str) -> partial:
        call, wanted = forward(device)
        outputs = [x for x in flat(call()) if x.requires_grad]
        gradients = [torch.ones_like(x) for x in outputs]
        return partial(torch.autograd.grad, outputs, wanted, gradients, retain_graph=True, allow_unused=True)

    yield Probe(f"{name} forward", lambda device: forward(device)[0])
    yield Probe(f"{name} backward", backward)


def inside(*arguments: Any, function: Callable[..., Any], within: Any) -> Any:
    with ExitStack() as contexts:
        if within is not None:
            contexts.enter_context(within())
        return function(*arguments)


def flat(values: Any) -> Iterator[Tensor]:
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from flat(value)


def probes() -> tuple[Probe, ...]:
    """Every probe; convolutions, which take longest, last."""
    return (
        *matrix_probes(),
        *norm_probes(),
        *index_probes(),
        *sort_probes(),
        *reduction_probes(),
        *loss_probes(),
        *image_probes(),
        *attention_probes(),
        *recurrent_probes(),
        *optimizer_probes(),
        *convolution_probes(),
    )


def matrix_probes() -> Iterator[Probe]:
    for dtype in PRECISIONS:
        for first in ("contiguous", "transposed", "sliced"):
            for second in ("contiguous", "transposed"):
                a, b = Sample((512, 768), dtype, layout=first), Sample((768, 1024), dtype, layout=second)
                yield operator("mm", a, b)
                a, b = (Sample((24, 128, 64), dtype, layout=first), Sample((24, 64, 128), dtype, layout=second))
                yield operator("bmm", a, b)
        yield operator("addmm", Sample((3072,), dtype), Sample((4096, 768), dtype), Sample((768, 3072), dtype))
        yield operator(
            "baddbmm", Sample((24, 128, 128), dtype), Sample((24, 128, 64), dtype), Sample((24, 64, 128), dtype)
        )
        yield operator("mm", Sample((1, 8192), dtype), Sample((8192, 16), dtype))  # long sums, few of them
        yield operator("mm", Sample((16, 65536), dtype), Sample((65536, 16), dtype))
        yield from both_ways("linear", partial(nn.Linear, 768, 3072), Sample((32, 128, 768), dtype))
    yield operator("mm", Sample((512, 768)), Sample((768, 1024)), flags={"tf32": True})
    yield operator("_euclidean_dist", Sample((512, 64)), Sample((512, 64)))


def norm_probes() -> Iterator[Probe]:
    for dtype in PRECISIONS:
        for rows, width in ((64, 1024), (2048, 256), (2048, 768), (16384, 768), (65536, 128), (4096, 4096)):
            x, weight, one = Sample((rows, width), dtype), Sample((width,), dtype), Sample((rows, 1))
            yield operator("native_layer_norm", x, [width], weight, weight, 1e-5)
            yield operator("native_layer_norm_backward", x, x, [width], one, one, weight, weight, [True, True, True])
            yield from both_ways("rms_norm", partial(nn.RMSNorm, width), x)
        for layout in ("contiguous", "channels_last"):
            for shape in ((8, 64, 56, 56), (64, 256, 14, 14), (256, 64, 28, 28)):
                x = Sample(shape, dtype, layout=layout)
                yield from both_ways("batch_norm", partial(nn.BatchNorm2d, shape[1]), x)
                yield from both_ways("group_norm", partial(nn.GroupNorm, 32, shape[1]), x)
        yield from both_ways("batch_norm", partial(nn.BatchNorm1d, 1024), Sample((256, 1024), dtype))


def index_probes() -> Iterator[Probe]:
    for tokens in (512, 3072, 3073, 8192, 65536):
        for vocabulary, width in ((1000, 128), (32000, 768), (50257, 768)):
            indices, grad = Sample((tokens,), "int64", vocabulary), Sample((tokens, width))
            yield operator("embedding_dense_backward", grad, indices, vocabulary, -1, False)
            half = Sample((tokens, width), "bfloat16")
            yield operator("embedding_dense_backward", half, indices, vocabulary, -1, False)
    for tokens in (512, 8192, 65536):
        table, indices = Sample((4096, 256)), Sample((tokens,), "int64", 4096)
        values = Sample((tokens, 256))
        yield operator("index.Tensor", table, [indices])
        yield operator("index_put", table, [indices], values, True)
        yield operator("index_put", table, [indices], values, False)
        yield operator("index_add", table, 0, indices, values)
        yield operator("index_select", table, 0, indices)
        yield operator("scatter_add", Sample((4096, 256)), 0, Sample((tokens, 256), "int64", 4096), values)
        yield operator("nonzero", Sample((tokens, 16), "bool"))
        yield operator("masked_select", Sample((tokens, 16)), Sample((tokens, 16), "bool"))
        yield from both_ways("embedding_bag", partial(nn.EmbeddingBag, 4096, 256), Sample((tokens, 4), "int64", 4096))


def sort_probes() -> Iterator[Probe]:
    for dtype in ("float32", "bfloat16", "int64"):
        for shape in ((1000,), (4096,), (100_000,), (10_000_000,), (64, 1000), (64, 5000), (1024, 100), (16, 100_000)):
            x = Sample(shape, dtype, 1 << 20 if dtype == "int64" else 0)
            yield operator("sort", x)
            yield operator("sort.stable", x, stable=True, dim=0, descending=True)
            yield operator("topk", x, 50)
            yield operator("cumsum", x, -1)
            yield operator("cumsum", x, 0)
            yield operator("median.dim", x, -1)
            if len(shape) == 1:
                yield operator("_unique2", x, True, True, True)
    for shape in ((1000,), (64, 1000), (16, 100_000)):
        yield operator("multinomial", Sample(shape), 5)
        yield operator("multinomial", Sample(shape), 5, True)


def reduction_probes() -> Iterator[Probe]:
    shapes = ((1_000_000,), (64, 100_000), (100_000, 64), (8192, 8192), (32, 64, 56, 56), (4096, 32))
    for dtype in PRECISIONS:
        for shape in shapes:
            x = Sample(shape, dtype)
            yield operator("sum", x)
            yield operator("amax", x)
            yield operator("argmax", x)
            yield operator("linalg_vector_norm", x, 2)
            for dimension in range(min(len(shape), 2)):
                yield operator("sum.dim_IntList", x, [dimension])
                yield operator("mean.dim", x, [dimension])
                yield operator("amax", x, [dimension])
                yield operator("argmax", x, dimension)
                yield operator("max.dim", x, dimension)
                yield operator("var_mean.correction", x, [dimension], correction=1)
                yield operator("logsumexp", x, [dimension])
        for layout in ("contiguous", "channels_last"):
            yield operator("sum.dim_IntList", Sample((32, 64, 56, 56), dtype, layout=layout), [0, 2, 3])
            yield operator("sum.dim_IntList", Sample((32, 64, 56, 56), dtype, layout=layout), [2, 3])
    for shape in shapes:
        yield operator("any", Sample(shape, "bool"))
        yield operator("sum.dim_IntList", Sample(shape, "bool"), [0])
        yield operator("count_nonzero", Sample(shape))


def loss_probes() -> Iterator[Probe]:
    for dtype in PRECISIONS:
        for rows, classes in ((256, 1000), (4096, 32000), (8192, 1000)):
            logits, target = Sample((rows, classes), dtype), Sample((rows,), "int64", classes)
            yield from both_ways("cross_entropy", F.cross_entropy, logits, target)
            yield operator("_log_softmax", logits, -1, False)
            yield operator("_softmax", logits, -1, False)
            yield operator("_softmax", logits, 0, False)
            yield from both_ways("softmax", partial(F.softmax, dim=-1), logits)
        pixels, labels = Sample((8, 21, 128, 128), dtype), Sample((8, 128, 128), "int64", 21)
        yield from both_ways("cross_entropy", F.cross_entropy, pixels, labels)
        x = Sample((256, 4096), dtype)
        for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
            yield from both_ways(name, getattr(F, name), x, x)


def image_probes() -> Iterator[Probe]:
    for dtype in PRECISIONS:
        for layout in ("contiguous", "channels_last"):
            x = Sample((32, 64, 56, 56), dtype, layout=layout)
            yield from both_ways("max_pool2d", partial(F.max_pool2d, kernel_size=3, stride=2, padding=1), x)
            yield from both_ways("avg_pool2d", partial(F.avg_pool2d, kernel_size=2), x)
            yield from both_ways("adaptive_avg_pool2d", partial(F.adaptive_avg_pool2d, output_size=7), x)
            yield from both_ways("upsample_nearest", partial(F.interpolate, scale_factor=2), x)
            yield from both_ways("upsample_bilinear", partial(F.interpolate, scale_factor=2, mode="bilinear"), x)
            yield from both_ways("pad", partial(F.pad, pad=(1, 1, 1, 1), mode="reflect"), x)
            yield from both_ways("pixel_shuffle", partial(F.pixel_shuffle, upscale_factor=2), x)
            yield from both_ways("unfold", partial(F.unfold, kernel_size=3), x)
        flat_x = Sample((4096, 1024), dtype)
        for name in ("gelu", "silu", "dropout", "normalize"):
            yield from both_ways(name, getattr(F, name), flat_x)
        yield from both_ways("prelu", nn.PReLU, flat_x)
    for shape in ((64, 4096), (16, 1000), (8, 3, 224, 224), (64, 1009)):
        yield from both_ways("rfft", torch.fft.rfft, Sample(shape))
        yield from both_ways("rfft2", lambda x: torch.fft.irfft2(torch.fft.rfft2(x)), Sample(shape))


def attention_probes() -> Iterator[Probe]:
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
        "chosen": None,
    }
    shapes = ((4, 12, 512, 64), (4, 12, 500, 64), (2, 16, 1024, 128), (2, 8, 256, 96), (16, 12, 197, 64))
    for name, backend in backends.items():
        within = partial(sdpa_kernel, backend) if backend is not None else None
        for dtype in PRECISIONS:
            for shape in shapes:
                x = Sample(shape, dtype)
                for causal, dropout in ((False, 0.0), (True, 0.0), (True, 0.1)):
                    attend = partial(F.scaled_dot_product_attention, is_causal=causal, dropout_p=dropout)
                    yield from both_ways(
                        f"attention {name} causal={causal} dropout={dropout}", attend, x, x, x, within=within
                    )
            few = Sample((4, 4, 512, 64), dtype)
            grouped = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
            yield from both_ways(
                f"attention {name} grouped", grouped, Sample((4, 12, 512, 64), dtype), few, few, within=within
            )
            masked = Sample((4, 1, 512, 512), "bool")
            x = Sample((4, 12, 512, 64), dtype)
            yield from both_ways(
                f"attention {name} masked", F.scaled_dot_product_attention, x, x, x, masked, within=within
            )


def recurrent_probes() -> Iterator[Probe]:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for dtype in PRECISIONS:
            for batch, tokens, width, layers in (
                (8, 32, 256, 1),
                (64, 128, 650, 2),
                (64, 128, 512, 2),
                (256, 32, 512, 1),
            ):
                for both in (False, True):
                    module = partial(kind, width, width, layers, batch_first=True, dropout=0.1, bidirectional=both)
                    name = f"{kind.__name__.lower()} layers={layers} bidirectional={both}"
                    yield from both_ways(name, module, Sample((batch, tokens, width), dtype))


SIZES = ((1024, 1024), (4096, 1024), (1024,), (17,), (512, 64, 3, 3), (32000, 256)) * 4


def parameters(device: str) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.rand(size, device=device)) for size in SIZES]
    for parameter in found:
        parameter.grad = torch.rand_like(parameter)
    return found


def optimizer_probes() -> Iterator[Probe]:
    """The first of the two calls creates the optimizer's state."""
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)
    for kind in (*kinds, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta):
        for way in ({"foreach": True}, {"foreach": False}, {"fused": True}):
            if "fused" in way and kind not in kinds[:3]:
                continue
            more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
            make = partial(kind, lr=1e-3, **way, **more)
            yield Probe(f"{kind.__name__} {next(iter(way))}={next(iter(way.values()))}", partial(stepping, make))
    for foreach in (True, False):
        clip = partial(nn.utils.clip_grad_norm_, max_norm=1.0, foreach=foreach)
        yield Probe(f"clip_grad_norm_ foreach={foreach}", partial(clipping, clip))
        clip = partial(nn.utils.clip_grad_value_, clip_value=0.5, foreach=foreach)
        yield Probe(f"clip_grad_value_ foreach={foreach}", partial(clipping, clip))
    yield Probe("GradScaler unscale_ and update", unscaling)


def stepping(make: Callable[..., torch.optim.Optimizer], device: str) -> partial:
    return partial(make(parameters(device)).step)


def clipping(clip: Callable[..., Any], device: str) -> partial:
    return partial(clip, parameters(device))


def unscaling(device: str) -> partial:
    optimizer = torch.optim.SGD(parameters(device), lr=0.1)
    scaler = torch.amp.GradScaler(torch.device(device).type)
    scaler.scale(torch.ones(1, device=device))

    def call() -> None:
        scaler.unscale_(optimizer)
        scaler.update()

    return partial(call)


@dataclass(frozen=True)
class Convolution:
    """A convolution's settings, the same in every dimension."""

    channels: tuple[int, int]
    sides: tuple[int, ...]
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = False

    def weight(self) -> tuple[int, ...]:
        into, out = self.channels
        ends = (into, out // self.groups) if self.transposed else (out, into // self.groups)
        return (*ends, *[self.kernel] * len(self.sides))

    def outputs(self) -> tuple[int, ...]:
        reach = self.dilation * (self.kernel - 1)
        if self.transposed:
            return tuple((side - 1) * self.stride - 2 * self.padding + reach + 1 for side in self.sides)
        return tuple((side + 2 * self.padding - reach - 1) // self.stride + 1 for side in self.sides)

    def arguments(self) -> list[Any]:
        count = len(self.sides)
        numbers = [[number] * count for number in (self.stride, self.padding, self.dilation)]
        return [*numbers, self.transposed, [0] * count, self.groups]


CONVOLUTIONS = (
    Convolution((64, 64), (56, 56), 3, padding=1),
    Convolution((256, 256), (14, 14), 3, padding=1),
    Convolution((256, 64), (56, 56), 1),
    Convolution((1024, 256), (14, 14), 1),
    Convolution((3, 64), (224, 224), 7, 2, 3),
    Convolution((3, 96), (224, 224), 4, 4),
    Convolution((144, 144), (56, 56), 3, padding=1, groups=144),
    Convolution((96, 96), (56, 56), 7, padding=3, groups=96),
    Convolution((256, 256), (28, 28), 3, padding=1, groups=32),
    Convolution((128, 128), (28, 28), 3, padding=2, dilation=2),
    Convolution((128, 64), (28, 28), 2, 2, transposed=True),
    Convolution((128, 64), (16, 16), 4, 2, 1, transposed=True),
    Convolution((64, 64), (1024,), 5, padding=2),
    Convolution((16, 32), (8, 56, 56), 3, padding=1),
)


def convolution_probes() -> Iterator[Probe]:
    """Middle batches first, so that a time limit leaves out the outer ones; searching takes longest."""
    for benchmark, batch in ((False, 64), (False, 8), (False, 256), (True, 64)):
        for dtype, tf32 in (("float32", True), ("bfloat16", False), ("float16", False), ("float32", False)):
            for layout in ("contiguous", "channels_last"):
                flags = {"cudnn_benchmark": benchmark, "tf32": tf32}
                for convolution in CONVOLUTIONS:
                    if layout == "contiguous" or len(convolution.sides) > 1:
                        yield from one_convolution(convolution, batch, dtype, layout, flags)


def one_convolution(
    convolution: Convolution, batch: int, dtype: str, layout: str, flags: Mapping[str, bool]
) -> Iterator[Probe]:
    into, out = convolution.channels
    x = Sample((batch, into, *convolution.sides), dtype, layout=layout)
    weight = Sample(convolution.weight(), dtype, layout=layout)
    grad = Sample((batch, out, *convolution.outputs()), dtype, layout=layout)
    yield operator("convolution", x, weight, None, *convolution.arguments(), flags=flags)
    for mask in ([True, False, False], [False, True, False]):
        more = (*convolution.arguments(), mask)
        yield operator("convolution_backward", grad, x, weight, None, *more, flags=flags)


def described(argument: Any) -> Any:
    """An argument as a recording keeps it: a tensor is ``[type, shape, strides]``, a list its parts."""
    if isinstance(argument, Tensor):
        return [str(argument.dtype).removeprefix("torch."), list(argument.shape), list(argument.stride())]
    if isinstance(argument, (list, tuple)):
        return [described(part) for part in argument]
    return argument if isinstance(argument, (bool, int, float, str, type(None))) else type(argument).__name__
