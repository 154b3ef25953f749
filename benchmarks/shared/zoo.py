"""The models the benchmarks measure: one small case for each way a training step uses memory.

Every case is plain torch and synthetic data, needs no download, and steps in well under a second on two cores.
`CASES` is the zoo. `LARGE` holds a ResNet-50 and a GPT-2 small in their true shapes, for timing the prediction.

`python benchmarks/cpu_truth.py --list` prints the cases with their parameters.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}
ALL_OPTIMIZERS = tuple(OPTIMIZERS)


@dataclass(frozen=True)
class Case:
    """One model with its data, the settings of its Trainer, and the batch sizes and optimizers to measure it at."""

    name: str
    build: Callable[[str], pl.LightningModule]
    dataset: Callable[[int], Dataset]
    batch_sizes: tuple[int, int, int]
    optimizers: tuple[str, ...] = ("sgd", "adam")
    trainer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    period: int = 1  # batches after which the training repeats


class Repeating(Dataset):
    """A dataset of any length that owns only a few samples and returns views of them."""

    def __init__(self, length: int, *columns: Tensor) -> None:
        self.length = length
        self.columns = columns

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index % len(column)] for column in self.columns)


# Data ----------------------------------------------------------------------------------------------------------------

POOL = 64
CLASSES = 10


def columns(make: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[int], Dataset]:
    return lambda length: Repeating(length, *make())


def vectors(features: int) -> Callable[[int], Dataset]:
    return columns(lambda: (torch.randn(POOL, features), torch.randint(CLASSES, (POOL,))))


def images(channels: int, side: int, classes: int = CLASSES, *, masks: bool = False) -> Callable[[int], Dataset]:
    labels = (POOL, side, side) if masks else (POOL,)
    return columns(lambda: (torch.randn(POOL, channels, side, side), torch.randint(classes, labels)))


def token_classes(vocabulary: int, tokens: int) -> Callable[[int], Dataset]:
    return columns(lambda: (torch.randint(vocabulary, (POOL, tokens)), torch.randint(CLASSES, (POOL,))))


def next_tokens(vocabulary: int, tokens: int) -> Callable[[int], Dataset]:
    return columns(lambda: tuple(torch.randint(vocabulary, (POOL, tokens)) for _ in range(2)))


def image_pairs(channels: int, side: int) -> Callable[[int], Dataset]:
    return columns(lambda: tuple(torch.randn(POOL, channels, side, side) for _ in range(2)))


# Modules -------------------------------------------------------------------------------------------------------------


Choice = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]  # a name of `OPTIMIZERS`, or what makes one


class Module(pl.LightningModule):
    """A module with an optimizer of all its parameters."""

    def __init__(self, optimizer: Choice) -> None:
        super().__init__()
        self.choose = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer

    def configure_optimizers(self) -> Any:
        return self.choose(self.parameters())


class Supervised(Module):
    """A network, a loss and one optimizer: what most LightningModules are."""

    def __init__(self, network: nn.Module, optimizer: Choice, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(optimizer)
        self.network, self.loss = network, loss

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self(x), y)


def classifier(network: Callable[[], nn.Module], loss: Any = F.cross_entropy) -> Callable[[str], pl.LightningModule]:
    return lambda optimizer: Supervised(network(), optimizer, loss)


def language_model(network: Callable[[], nn.Module]) -> Callable[[str], pl.LightningModule]:
    return classifier(network, token_loss)


def token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def mlp(features: int = 512, width: int = 1024, depth: int = 3) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(features, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def conv_bn(into: int, out: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(into, out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out))


def cnn() -> nn.Module:
    first = (conv_bn(3, 32), nn.ReLU(), nn.MaxPool2d(2), conv_bn(32, 64), nn.ReLU(), nn.MaxPool2d(2))
    second = (conv_bn(64, 128), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 8 * 8, 256), nn.ReLU())
    return nn.Sequential(*first, *second, nn.Dropout(0.2), nn.Linear(256, CLASSES))


class Residual(nn.Module):
    """A residual block around any body, with a projection where the shape changes."""

    def __init__(self, body: nn.Module, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = in_channels == out_channels and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(in_channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def basic_block(into: int, out: int, stride: int) -> nn.Module:
    body = nn.Sequential(conv_bn(into, out, 3, stride), nn.ReLU(inplace=True), conv_bn(out, out))
    return Residual(body, into, out, stride)


def bottleneck(into: int, out: int, stride: int) -> nn.Module:
    inner = out // 4
    first = (conv_bn(into, inner, 1), nn.ReLU(inplace=True), conv_bn(inner, inner, 3, stride), nn.ReLU(inplace=True))
    return Residual(nn.Sequential(*first, conv_bn(inner, out, 1)), into, out, stride)


def resnet(
    stem: Iterable[nn.Module], block: Any, into: int, widths: Sequence[int], depths: Sequence[int], classes=CLASSES
) -> nn.Sequential:
    blocks = []
    for position, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for index in range(depth):
            blocks.append(block(into, width, 2 if index == 0 and position > 0 else 1))
            into = width
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, classes))


def resnet_small() -> nn.Module:
    return resnet((conv_bn(3, 32), nn.ReLU(inplace=True)), basic_block, 32, (32, 64, 128, 256), (1, 1, 1, 1))


def resnet18(*stem: nn.Module) -> nn.Module:
    return resnet(stem, basic_block, 64, (64, 128, 256, 512), (2, 2, 2, 2))


def resnet50() -> nn.Module:
    stem = (conv_bn(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
    return resnet(stem, bottleneck, 64, (256, 512, 1024, 2048), (3, 4, 6, 3), 1000)


def double_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(conv_bn(in_channels, out_channels), nn.ReLU(), conv_bn(out_channels, out_channels), nn.ReLU())


class UNet(nn.Module):
    """Three scales down and up again; the skips are alive from forward to backward."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.downs = nn.ModuleList(double_conv(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.bottom = double_conv(widths[-1], 2 * widths[-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.joins = nn.ModuleList(double_conv(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, join, skip in zip(self.ups, self.joins, reversed(skips), strict=True):
            x = join(torch.cat((up(x), skip), dim=1))
        return self.head(x)


class LSTMClassifier(nn.Module):
    def __init__(self, vocabulary: int = 4000, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states[:, -1])


class EncoderClassifier(nn.Module):
    def __init__(self, vocabulary: int = 4000, width: int = 128, tokens: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(tokens, width))
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.position).mean(dim=1))


class Block(nn.Module):
    """A GPT block: causal attention and an MLP, each normalized before and added after."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.norm_attention(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.norm_mlp(x)), self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.project(attended.transpose(1, 2).flatten(-2))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int, tokens: int, width: int, heads: int, depth: int, dropout: float, *, reentrant=None
    ) -> None:
        super().__init__()
        self.reentrant = reentrant  # None: no activation checkpointing
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def gpt_small(dropout: float = 0.1, reentrant: bool | None = None, depth: int = 3) -> nn.Module:
    return GPT(vocabulary=1024, tokens=64, width=192, heads=4, depth=depth, dropout=dropout, reentrant=reentrant)


def gpt2_small() -> nn.Module:
    return GPT(vocabulary=50257, tokens=1024, width=768, heads=12, depth=12, dropout=0.1)


def encoder(width: int = 32) -> nn.Sequential:
    first = (nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2))
    return nn.Sequential(*first, nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.LeakyReLU(0.2))


def decoder(width: int = 32) -> nn.Sequential:
    def up(into: int, out: int) -> tuple[nn.Module, ...]:
        return nn.ConvTranspose2d(into, out, 4, 2, 1), nn.BatchNorm2d(out), nn.ReLU()

    first = (*up(4 * width, 2 * width), *up(2 * width, width))
    return nn.Sequential(*first, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())


class Autoencoder(Supervised):
    def __init__(self, optimizer: Choice) -> None:
        super().__init__(nn.Sequential(encoder(), decoder()), optimizer, F.mse_loss)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, _ = batch
        return self.loss(self(x), x)


class GAN(Module):
    """Two networks that step in turn by hand, each while the other is frozen."""

    def __init__(self, optimizer: Choice, latent: int = 64) -> None:
        super().__init__(optimizer)
        self.automatic_optimization, self.latent = False, latent
        self.generator = nn.Sequential(nn.Linear(latent, 128 * 4 * 4), nn.Unflatten(1, (128, 4, 4)), decoder())
        self.discriminator = nn.Sequential(encoder(), nn.Flatten(), nn.Linear(128 * 4 * 4, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        real, _ = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        noise = torch.randn(len(real), self.latent, device=real.device)

        self.toggle_optimizer(generator_optimizer)
        judged = self.discriminator(self.generator(noise))
        generator_optimizer.zero_grad()
        self.manual_backward(F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged)))
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.toggle_optimizer(discriminator_optimizer)
        judged_real = self.discriminator(real)
        judged_fake = self.discriminator(self.generator(noise).detach())
        loss = F.binary_cross_entropy_with_logits(judged_real, torch.ones_like(judged_real))
        loss = loss + F.binary_cross_entropy_with_logits(judged_fake, torch.zeros_like(judged_fake))
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

    def configure_optimizers(self) -> Any:
        return [self.choose(self.generator.parameters()), self.choose(self.discriminator.parameters())], []


class TwoOptimizers(Module):
    """A body and a head, one backward, two optimizers stepped by hand; the body's only every second batch."""

    def __init__(self, optimizer: Choice) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.body = nn.Sequential(*list(mlp(width=1024))[:-1])
        self.head = nn.Sequential(nn.Linear(1024, 512), nn.GELU(), nn.Linear(512, CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        body_optimizer, head_optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self.head(self.body(x)), y))
        head_optimizer.step()
        head_optimizer.zero_grad()
        if batch_idx % 2 == 1:
            body_optimizer.step()
            body_optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return self.choose(self.body.parameters()), torch.optim.SGD(self.head.parameters(), lr=0.1)


class Contrastive(Module):
    """Every sample against every other: the loss grows with the square of the batch size."""

    def __init__(self, optimizer: Choice, tower: nn.Module | None = None) -> None:
        super().__init__(optimizer)
        layers = (nn.Flatten(), nn.Linear(3 * 16 * 16, 512), nn.GELU(), nn.Linear(512, 128))
        self.tower = tower or nn.Sequential(*layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        first, second = (F.normalize(self.tower(view), dim=-1) for view in batch)
        similarity = first @ second.T / 0.07
        same = torch.arange(len(first), device=first.device)
        return (F.cross_entropy(similarity, same) + F.cross_entropy(similarity.T, same)) / 2


class Logged(Supervised):
    """Logs its loss, keeps a torchmetrics accuracy and steps a learning rate schedule."""

    def __init__(self, optimizer: Choice) -> None:
        super().__init__(cnn(), optimizer, F.cross_entropy)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = self.loss(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# The zoo -------------------------------------------------------------------------------------------------------------

WORDS = next_tokens(1024, 64)
CLIP_NORM = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}
CLIP_VALUE = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}
ACCUMULATE = {"accumulate_grad_batches": 4}
CASES = (
    Case("mlp", classifier(mlp), vectors(512), (64, 256, 1024), ALL_OPTIMIZERS),
    Case("cnn_batch_norm", classifier(cnn), images(3, 32), (16, 32, 64), ALL_OPTIMIZERS),
    Case("resnet", classifier(resnet_small), images(3, 48), (8, 16, 32)),
    Case("unet", classifier(UNet), images(3, 48, 4, masks=True), (4, 8, 16)),
    Case("lstm", classifier(LSTMClassifier), token_classes(4000, 32), (8, 32, 64)),
    Case("transformer", classifier(EncoderClassifier), token_classes(4000, 64), (8, 16, 32)),
    Case("gpt", language_model(gpt_small), WORDS, (4, 8, 16), ALL_OPTIMIZERS),
    Case("gpt_fused_attention", language_model(lambda: gpt_small(dropout=0.0)), WORDS, (4, 8, 16)),
    Case("gan", GAN, images(3, 32), (16, 32, 64), ("sgd", "adam", "rmsprop")),
    Case("autoencoder", Autoencoder, images(3, 64), (8, 16, 32)),
    Case("two_optimizers", TwoOptimizers, vectors(512), (64, 256, 1024), ("sgd", "adam", "adagrad"), period=2),
    Case("clip_by_norm", language_model(lambda: gpt_small(depth=2)), WORDS, (4, 8, 16), ("sgd", "adamw"), CLIP_NORM),
    Case("clip_by_value", classifier(mlp), vectors(512), (64, 256, 1024), ("sgd", "adamw"), CLIP_VALUE),
    Case("accumulate_4", classifier(cnn), images(3, 32), (8, 16, 32), trainer_kwargs=ACCUMULATE, period=4),
    Case("checkpointed", language_model(lambda: gpt_small(reentrant=False)), WORDS, (4, 8, 16)),
    Case("checkpointed_reentrant", language_model(lambda: gpt_small(reentrant=True)), WORDS, (4, 8, 16)),
    Case("contrastive", Contrastive, image_pairs(3, 16), (64, 256, 1024)),
    Case("logged", Logged, images(3, 32), (16, 32, 64), ("sgd", "adamw")),
)

LARGE = (
    Case("resnet50", classifier(resnet50), images(3, 224, 1000), (4, 8, 16), ("sgd",)),
    Case("gpt2_small", language_model(gpt2_small), next_tokens(50257, 1024), (1, 2, 4), ("adamw",)),
)


def case_named(name: str) -> Case:
    for case in (*CASES, *LARGE):
        if case.name == name:
            return case
    raise SystemExit(f"No case is named {name!r}. The cases are: {', '.join(c.name for c in (*CASES, *LARGE))}.")
