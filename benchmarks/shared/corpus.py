"""The trainings that `record.py` records on a GPU and `accuracy.py` predicts: families, optimizers, precisions, sizes.

Networks are the zoo's, in realistic shapes. Every training steps four times on synthetic data, without a download.
`python benchmarks/record.py --list` prints them.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

try:
    import pytorch_lightning as pl
except ModuleNotFoundError:  # the other package has the same classes; the zoo imports them by this name
    import lightning.pytorch as pl

    sys.modules["pytorch_lightning"] = pl

import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
    """One training of the corpus."""

    name: str  # unique in the corpus
    family: str
    network: Callable[[], nn.Module]
    dataset: Callable[[int], Dataset]  # of a number of samples
    batch_size: int
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    optimizer: str = "adamw"  # a key of `OPTIMIZERS`
    precision: str = "32-true"  # Lightning's name
    trainer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    channels_last: bool = False  # the model and its images
    compiled: bool = False  # the network, by ``torch.compile``
    tf32: bool = False  # whether float32 matrix products may run on TF32 tensor cores
    cap_gib: float | None = None  # memory PyTorch may take, so that its allocator has to release its cache
    history: bool = False  # whether every event of the allocator is recorded

    def module(self) -> pl.LightningModule:
        """The module that the Trainer fits."""
        choose = OPTIMIZERS[self.optimizer]
        if self.family == "gan":
            return zoo.GAN(choose)
        return zoo.Contrastive(choose, self.network()) if self.family == "contrastive" else Supervised(self)

    def settings(self) -> dict[str, Any]:
        """The settings of a training, as a recording keeps it."""
        settings = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {name: value for name, value in settings.items() if name not in ("name", "network", "dataset", "loss")}


class Supervised(zoo.Supervised):
    """A network, a loss and one optimizer."""

    def __init__(self, training: Training) -> None:
        network = training.network()
        if training.channels_last:
            network = network.to(memory_format=torch.channels_last)
        network = torch.compile(network) if training.compiled else network
        super().__init__(network, OPTIMIZERS[training.optimizer], training.loss)
        self.channels_last = training.channels_last

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.contiguous(memory_format=torch.channels_last) if self.channels_last else x)


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
            convolution = nn.Conv2d(a, b, kernel, step, kernel // 2, groups=groups, bias=False)
            found += [convolution, nn.BatchNorm2d(b), nn.ReLU6(True)]
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
    Training("unet", "unet", lambda: zoo.UNet(64), zoo.images(3, 128, 4, masks=True), 16, history=True),
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
        changes = {"history": False, **changes}
        found.extend(dataclasses.replace(by_name[name], name=f"{name}_{suffix}", **changes) for name in names.split())

    vary("resnet50 vit bert gpt llama unet lstm mlp contrastive", "bf16-mixed", precision="bf16-mixed", history=True)
    vary("resnet50 bert gpt lstm gan", "16-mixed", precision="16-mixed", history=True)
    vary("gpt llama vit", "bf16-true", precision="bf16-true")
    vary("resnet50 vgg gpt", "tf32", tf32=True, history=True)
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
    vary("resnet50 unet separable", "channels_last", channels_last=True, history=True)
    vary("resnet50", "channels_last_bf16", channels_last=True, precision="bf16-mixed", history=True)
    vary("gpt", "checkpointed", network=gpt(reentrant=False))
    vary("gpt", "checkpointed_reentrant", network=gpt(reentrant=True))
    vary("gpt", "without_dropout", network=gpt(dropout=0.0))
    vary("gpt", "wide", network=gpt(width=1536, depth=4))
    for name, size in (("resnet50", 8), ("resnet50", 256), ("vgg", 512), ("separable", 512), ("gpt", 1), ("gpt", 32)):
        found.append(dataclasses.replace(by_name[name], name=f"{name}_{size}", history=True, batch_size=size))
    vary("resnet50 vit bert gpt unet mlp", "compiled", compiled=True, history=True)
    return tuple(found)
