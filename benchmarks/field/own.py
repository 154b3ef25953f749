"""Our own code in the style of the field: what people write in plain torch, and neighbors of what broke before."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint

from field.pattern import (
    Run,
    Step,
    adamw,
    classifier,
    classify,
    data,
    images,
    mlp,
    next_token,
    pattern,
    regress,
    regression,
    sgd,
    tokens,
    vectors,
)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Gpt(nn.Module):
    def __init__(
        self, vocabulary: int = 1000, width: int = 128, depth: int = 4, length: int = 128, tied: bool = True
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.checkpointed = False
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


@pattern()
def nanogpt() -> Run:
    return Run(lambda: Step(Gpt(), next_token, adamw), tokens(128))


@pattern()
def nanogpt_bf16_true() -> Run:
    return Run(lambda: Step(Gpt(), next_token, adamw), tokens(128), {"precision": "bf16-true"})


@pattern()
def nanogpt_bf16_mixed() -> Run:
    return Run(lambda: Step(Gpt(), next_token, adamw), tokens(128), {"precision": "bf16-mixed"})


@pattern(steps=4)
def nanogpt_checkpointed() -> Run:
    def build() -> Step:
        network = Gpt(depth=8)
        network.checkpointed = True
        return Step(network, next_token, adamw)

    return Run(build, tokens(128), {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2})


@pattern(sizes=(8, 32))
def transformer_with_mask() -> Run:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 128)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)
            self.head = nn.Linear(128, 1000)

        def forward(self, ids: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
            return self.head(self.encoder(self.embedding(ids), mask=mask))

    return Run(lambda: Step(Encoder(), next_token), tokens(48))


@pattern(sizes=(8, 32))
def transformer_seq2seq_padded() -> Run:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 96, padding_idx=0)
            self.net = nn.Transformer(96, 4, 2, 2, 256, batch_first=True)
            self.head = nn.Linear(96, 1000)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            mask = self.net.generate_square_subsequent_mask(target.shape[1], device=target.device)
            out = self.net(
                self.embedding(source),
                self.embedding(target),
                tgt_mask=mask,
                tgt_is_causal=True,
                src_key_padding_mask=source == 0,
                tgt_key_padding_mask=target == 0,
                memory_key_padding_mask=source == 0,
            )
            return self.head(out)

    def loss(network: nn.Module, batch: Any) -> Tensor:
        source, target = batch
        logits = network(source, target[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)

    def collate(items: list[Any]) -> tuple[Tensor, ...]:
        return tuple(pad_sequence(list(column), batch_first=True) for column in zip(*items, strict=True))

    lengths = torch.randint(12, 40, (64, 2)).tolist()
    lengths[0] = [40, 40]
    samples = data(lambda i: tuple(torch.randint(1, 1000, (n,)) for n in lengths[i]), collate)
    return Run(lambda: Step(Translator(), loss), samples)


@pattern(sizes=(64, 256))
def moe_by_where() -> Run:
    class Experts(nn.Module):
        def __init__(self, width: int = 64, experts: int = 8) -> None:
            super().__init__()
            self.gate = nn.Linear(width, experts)
            self.experts = nn.ModuleList(mlp(width, 256, width, 1) for _ in range(experts))
            self.head = nn.Linear(width, 10)

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows, slots = torch.where(chosen == index)
                out[rows] += weights[rows, slots, None] * expert(x[rows])
            return self.head(out)

    return Run(classifier(Experts), vectors(64))


@pattern(sizes=(64, 256))
def moe_by_mask() -> Run:
    class Experts(nn.Module):
        def __init__(self, width: int = 64, experts: int = 4) -> None:
            super().__init__()
            self.gate = nn.Linear(width, experts)
            self.experts = nn.ModuleList(mlp(width, 256, width, 1) for _ in range(experts))
            self.head = nn.Linear(width, 10)

        def forward(self, x: Tensor) -> Tensor:
            weight, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                mask = chosen == index
                if mask.any():
                    out[mask] = weight[mask, None] * expert(x[mask])
            return self.head(out)

    return Run(classifier(Experts), vectors(64))


@pattern(sizes=(16, 64))
def masked_sets() -> Run:
    class DeepSet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phi, self.rho = mlp(16, 128, 128), mlp(128, 128, 10)

        def forward(self, batch: Any) -> Tensor:
            x, mask = batch
            pooled = x.new_zeros(len(x), 128)
            rows = torch.arange(len(x), device=x.device)[:, None].expand_as(mask)[mask]
            pooled = pooled.index_add(0, rows, self.phi(x[mask]))
            return self.rho(pooled)

    counts = torch.randint(10, 33, (64,)).tolist()
    counts[0] = 32

    def sample(i: int) -> Any:
        return torch.randn(32, 16), torch.arange(32) < counts[i], i % 10

    return Run(lambda: Step(DeepSet(), lambda n, b: F.cross_entropy(n(b[:2]), b[2])), data(sample))


@pattern(sizes=(4, 16))
def packed_ctc() -> Run:
    class Recognizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(40, 128, 2, bidirectional=True, batch_first=True)
            self.head = nn.Linear(256, 30)

        def forward(self, x: Any) -> Any:
            packed, _ = self.lstm(x)
            out, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
            return self.head(out).log_softmax(-1), lengths

    def loss(network: nn.Module, batch: Any) -> Tensor:
        frames, targets, target_lengths = batch
        scores, lengths = network(frames)
        return F.ctc_loss(scores.transpose(0, 1), targets, lengths, target_lengths)

    def collate(items: list[Any]) -> Any:
        frames = pack_sequence([frame for frame, _ in items], enforce_sorted=False)
        return frames, torch.cat([text for _, text in items]), torch.tensor([len(text) for _, text in items])

    lengths = torch.randint(60, 121, (64,)).tolist()
    lengths[0] = 120
    return Run(
        lambda: Step(Recognizer(), loss),
        data(lambda i: (torch.randn(lengths[i], 40), torch.randint(1, 30, (lengths[i] // 6,))), collate),
    )


@pattern(sizes=(16, 64))
def finite_scalar_quantization() -> Run:
    class Fsq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 4, 4, 2, 1))
            self.up = nn.Sequential(nn.ConvTranspose2d(4, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1))
            self.register_buffer("levels", torch.tensor([8.0, 5.0, 5.0, 5.0]))

        def forward(self, x: Tensor) -> Tensor:
            half = (self.levels - 1)[None, :, None, None] / 2
            z = self.down(x).tanh() * half
            z = z + (z.round() - z).detach()
            return self.up(z / half)

    return Run(lambda: Step(Fsq(), lambda n, b: F.mse_loss(n(b[0]), b[0])), images(32))


@pattern(sizes=(16, 64))
def vq_straight_through() -> Run:
    class Quantizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 32, 4, 4), nn.ConvTranspose2d(32, 3, 4, 4)
            self.book = nn.Embedding(256, 32)

        def forward(self, x: Tensor) -> Any:
            z = self.down(x).permute(0, 2, 3, 1)
            nearest = torch.cdist(z.reshape(-1, 32), self.book.weight).argmin(-1)
            q = self.book(nearest).view_as(z)
            commit = F.mse_loss(z, q.detach()) + F.mse_loss(q, z.detach())
            return self.up((z + (q - z).detach()).permute(0, 3, 1, 2)), commit

    def loss(network: nn.Module, batch: Any) -> Tensor:
        out, commit = network(batch[0])
        return F.mse_loss(out, batch[0]) + commit

    return Run(lambda: Step(Quantizer(), loss), images(32))


@pattern(sizes=(16, 64))
def lstm_with_item() -> Run:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(32, 128, batch_first=True), nn.Linear(128, 10)

        def forward(self, x: Tensor) -> Tensor:
            out, _ = self.lstm(x)
            if out.abs().max().item() > 100:
                out = out.clamp(-1, 1)
            return self.head(out[:, -1])

    return Run(classifier(Classifier), data(lambda i: (torch.randn(50, 32), i % 10)))


@pattern(sizes=(16, 64))
def branch_on_loss_value() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        value = classify(network, batch)
        return value * 0.5 if value.item() > 1e6 else value

    return Run(lambda: Step(mlp(64, 512), loss), vectors(64))


@pattern(sizes=(8, 32))
def nan_guard() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        value = classify(network, batch)
        if torch.isnan(value):
            raise ValueError("the loss is NaN")
        return value

    return Run(lambda: Step(nn.Sequential(nn.Flatten(), mlp(3 * 32 * 32)), loss), images(32))


@pattern(sizes=(16, 64))
def gru_length_200() -> Run:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(32, 64, batch_first=True), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x)[0][:, -1])

    return Run(classifier(Classifier), data(lambda i: (torch.randn(200, 32), i % 10)))


@pattern(sizes=(16, 64))
def grucell_loop() -> Run:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(32, 64), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), 64)
            for step in x.unbind(1):
                state = self.cell(step, state)
            return self.head(state)

    return Run(classifier(Classifier), data(lambda i: (torch.randn(100, 32), i % 10)))


@pattern(sizes=(16, 64))
def lstm_padded_classifier() -> Run:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 64)
            self.lstm, self.head = nn.LSTM(64, 96, batch_first=True, bidirectional=True), nn.Linear(192, 2)

        def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.embedding(ids), lengths.cpu(), True, enforce_sorted=False)
            _, (hidden, _) = self.lstm(packed)
            return self.head(hidden.transpose(0, 1).flatten(1))

    def collate(items: list[Any]) -> Any:
        texts = [text for text, _ in items]
        labels = torch.tensor([label for _, label in items])
        return pad_sequence(texts, batch_first=True), torch.tensor([len(text) for text in texts]), labels

    lengths = torch.randint(10, 60, (64,)).tolist()
    lengths[0] = 60
    return Run(
        lambda: Step(Classifier(), lambda n, b: F.cross_entropy(n(b[0], b[1]), b[2])),
        data(lambda i: (torch.randint(1, 1000, (lengths[i],)), i % 2), collate),
    )


@pattern(steps=24, sizes=(16, 64))
def lbfgs_grows() -> Run:
    return Run(
        lambda: Step(mlp(64, 256, 1), regress, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=20)),
        regression(64),
    )


@pattern(steps=104, sizes=(16, 64))
def lbfgs_default_history() -> Run:
    """It is full after 101 steps."""
    return Run(
        lambda: Step(mlp(64, 256, 1), regress, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1)), regression(64)
    )


@pattern(steps=100, sizes=(16, 64))
def lbfgs_short_history() -> Run:
    return Run(
        lambda: Step(mlp(64, 256, 1), regress, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1, history_size=10)),
        regression(64),
    )


@pattern(steps=4, sizes=(16, 64))
def lbfgs_strong_wolfe() -> Run:
    return Run(
        lambda: Step(mlp(16, 64, 1), regress, lambda p: torch.optim.LBFGS(p, line_search_fn="strong_wolfe")),
        regression(16),
    )


@pattern(sizes=(16, 64))
def muon() -> Run:
    class Split(Step):
        def configure_optimizers(self) -> Any:
            return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=1e-3)

    return Run(lambda: Split(mlp(64, 256), classify), vectors(64))


@pattern(sizes=(8, 32))
def muon_and_adamw() -> Run:
    class Two(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(self.network, batch)
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            hidden = [p for n, p in self.named_parameters() if p.ndim == 2 and "blocks" in n]
            rest = [p for n, p in self.named_parameters() if not (p.ndim == 2 and "blocks" in n)]
            return torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)

    return Run(lambda: Two(Gpt(), next_token), tokens(64))


@pattern(sizes=(16, 64))
def complex_parameters() -> Run:
    class Spectral(nn.Module):
        def __init__(self, width: int = 32, modes: int = 12) -> None:
            super().__init__()
            self.lift, self.drop, self.modes = nn.Linear(1, width), nn.Linear(width, 1), modes
            self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(x).transpose(1, 2)
            f = torch.fft.rfft(x)
            out = torch.zeros_like(f)
            out[..., : self.modes] = torch.einsum("bim,iom->bom", f[..., : self.modes], self.weight)
            return self.drop(F.gelu(torch.fft.irfft(out, n=x.shape[-1])).transpose(1, 2))

    return Run(lambda: Step(Spectral(), regress), data(lambda _: (torch.randn(128, 1), torch.randn(128, 1))))


@pattern(sizes=(16, 64))
def prototype_update() -> Run:
    class Prototypes(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():
                self.network[-1].weight[0].mul_(0.9)
            return super().training_step(batch, batch_idx)

    return Run(lambda: Prototypes(mlp(64), classify), vectors(64))


@pattern(sizes=(16, 64))
def weight_normalized_prototypes() -> Run:
    class Swav(Step):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                weight = F.normalize(self.network[-1].weight.data.clone(), dim=1)
                self.network[-1].weight.copy_(weight)

    return Run(lambda: Swav(mlp(64, 256, 300), lambda n, b: F.cross_entropy(n(b[0]), b[1])), vectors(64))


@pattern(sizes=(16, 64))
def per_sample_gradients() -> Run:
    """Differential privacy with torch.func: one gradient a sample, clipped, averaged."""

    class Private(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            parameters = {name: p.detach() for name, p in self.network.named_parameters()}

            def loss_of(parameters: Any, x: Tensor, y: Tensor) -> Tensor:
                return F.cross_entropy(functional_call(self.network, parameters, (x[None],)), y[None])

            found = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, *batch)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            scale = (1 / (norms + 1e-6)).clamp(max=1)
            for name, p in self.network.named_parameters():
                p.grad = torch.einsum("b,b...->...", scale, found[name]) / len(scale)
            self.optimizers().step()

    return Run(lambda: Private(mlp(64, 128), classify), vectors(64))


@pattern(sizes=(32, 128))
def pinn_by_autograd() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        u = network(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        return (du[:, 1:2] - ddu[:, :1]).square().mean()

    return Run(
        lambda: Step(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), loss),
        regression(2),
    )


@pattern(sizes=(32, 128))
def pinn_by_torch_func() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        parameters = dict(network.named_parameters())

        def u(x: Tensor) -> Tensor:
            return functional_call(network, parameters, (x,)).squeeze(-1)

        slope = vmap(grad(u))(batch[0])
        return slope.square().mean() + (vmap(u)(batch[0]) - batch[1][:, 0]).square().mean()

    return Run(lambda: Step(nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 1)), loss), regression(2))


@pattern(sizes=(32, 128))
def forward_mode_jvp() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        parameters = dict(network.named_parameters())
        tangent = torch.ones_like(batch[0])
        out, slope = jvp(lambda x: functional_call(network, parameters, (x,)), (batch[0],), (tangent,))
        return F.cross_entropy(out, batch[1]) + slope.square().mean()

    return Run(lambda: Step(mlp(64, 128), loss), vectors(64))


@pattern(sizes=(4, 8))
def maml_inner_loop() -> Run:
    """Each sample is a task; the inner gradient is differentiated."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        total = torch.zeros(())
        for x, y in zip(*batch, strict=True):
            parameters = dict(network.named_parameters())
            inner = F.cross_entropy(functional_call(network, parameters, (x[:5],)), y[:5])
            slopes = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), slopes, strict=True)}
            total = total + F.cross_entropy(functional_call(network, fast, (x[5:],)), y[5:])
        return total / len(batch[0])

    return Run(lambda: Step(mlp(64, 128), loss), data(lambda _: (torch.randn(20, 64), torch.randint(10, (20,)))))


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).relu()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = g * ((x @ w) > 0)
        return g @ w.t(), x.t() @ g


@pattern(sizes=(32, 128))
def autograd_function() -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(64, 512) / 8), nn.Linear(512, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(_Scaled.apply(x, self.w))

    return Run(classifier(Net), vectors(64))


@torch.library.custom_op("field::smooth", mutates_args=())
def _smooth(x: Tensor) -> Tensor:
    wide = x.repeat(1, 8)
    return wide.view(len(x), 8, -1).mean(1) * 0.5 + x.roll(1, 1) * 0.5


_smooth.register_fake(torch.empty_like)
_smooth.register_autograd(lambda ctx, g: g * 0.5 + g.roll(-1, 1) * 0.5, setup_context=lambda ctx, inputs, output: None)


@pattern(sizes=(64, 256))
def custom_operator() -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.Linear(64, 1024), nn.Linear(1024, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(_smooth(self.up(x)))

    return Run(classifier(Net), vectors(64))


@pattern(sizes=(4, 16))
def adaptive_ode() -> Run:
    """A step size control in Python: how often it runs depends on values."""

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field, self.head = mlp(64, 128, 64, 1), nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            t, h = 0.0, 0.25
            while t < 1:
                slope = self.field(x)
                middle = x + h / 2 * slope
                better = x + h * self.field(middle)
                error = (better - x - h * slope).detach().abs().max()
                if error > 0.05 and h > 1e-3:
                    h /= 2
                    continue
                x, t, h = better, t + h, min(2 * h, 1 - t) if t < 1 else h
            return self.head(x)

    return Run(classifier(Ode), vectors(64))


@pattern(sizes=(64, 128))
def kmeans_initialization() -> Run:
    """A codebook that starts as k-means of the first batch, as in DeepCluster and SoundStream."""

    class Clustered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = mlp(64, 256, 32), nn.Linear(32, 10)
            self.register_buffer("centers", torch.zeros(32, 32))
            self.register_buffer("started", torch.tensor(False))

        @torch.no_grad()
        def start(self, z: Tensor) -> None:
            centers = z[torch.randperm(len(z))[:32]]
            for _ in range(10):
                nearest = torch.cdist(z, centers).argmin(1)
                sums = torch.zeros_like(centers).index_add(0, nearest, z)
                counts = torch.bincount(nearest, minlength=32)
                centers = torch.where(counts[:, None] > 0, sums / counts[:, None].clamp(min=1), centers)
            self.centers.copy_(centers)
            self.started.fill_(True)

        def forward(self, x: Tensor) -> Tensor:
            z = self.encoder(x)
            if not self.started:
                self.start(z)
            q = self.centers[torch.cdist(z, self.centers).argmin(1)]
            return self.head(z + (q - z).detach())

    return Run(classifier(Clustered), vectors(64))


class Moco(Step):
    """Momentum contrast: a copy that follows, and a queue of keys."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.momentum = copy.deepcopy(self.network).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(64, 2048), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        q = F.normalize(self.network(x), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(self.network.parameters(), self.momentum.parameters(), strict=True):
                theirs.mul_(0.999).add_(ours, alpha=0.001)
            k = F.normalize(self.momentum(x + 0.1 * torch.randn_like(x)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))
        at = int(self.at)
        self.queue[:, at : at + len(x)] = k.t()
        self.at[0] = (at + len(x)) % self.queue.shape[1]
        return loss


@pattern(sizes=(16, 64))
def moco_queue() -> Run:
    return Run(lambda: Moco(nn.Sequential(nn.Flatten(), mlp(3 * 32 * 32, 256, 64)), None), images(32))


@pattern(sizes=(16, 64), steps=8)
def growing_queue() -> Run:
    """A memory bank in a list that grows to a fixed length."""

    class Bank(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.bank: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            z = self.network[:-1](x)
            self.bank = [*self.bank[-5:], z.detach()]
            return F.cross_entropy(self.network[-1](z), y) + (z @ torch.cat(self.bank).t()).logsumexp(1).mean() * 0.01

    return Run(lambda: Bank(mlp(64), None), vectors(64))


@pattern(sizes=(16, 64), steps=40)
def outputs_of_an_epoch() -> Run:
    """Kept until its end, as `training_epoch_end` was given them."""

    class Keeping(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.outputs: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            logits = self.network(x)
            self.outputs.append(logits.detach())
            return F.cross_entropy(logits, y)

        def on_train_epoch_end(self) -> None:
            self.outputs.clear()

    return Run(lambda: Keeping(mlp(64, 256, 1000), None), vectors(64, 1000))


@pattern(sizes=(16, 64))
def byol_ema_target() -> Run:
    class Byol(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.target = copy.deepcopy(self.network).requires_grad_(False)
            self.predictor = mlp(64, 256, 64, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            one, two = (batch[0] + 0.1 * torch.randn_like(batch[0]) for _ in range(2))
            with torch.no_grad():
                targets = self.target(one), self.target(two)
            predictions = self.predictor(self.network(two)), self.predictor(self.network(one))
            return -sum(F.cosine_similarity(p, t).mean() for p, t in zip(predictions, targets, strict=True))

        def on_train_batch_end(self, *_: Any) -> None:
            for ours, theirs in zip(self.network.parameters(), self.target.parameters(), strict=True):
                theirs.data = 0.99 * theirs.data + 0.01 * ours.data

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 64),
        )

    return Run(lambda: Byol(network(), None), images(32))


@pattern(sizes=(8, 32))
def multi_crop_dino() -> Run:
    """Crops of two sizes in one batch, a centered teacher."""

    class Dino(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.teacher = copy.deepcopy(self.network).requires_grad_(False)
            self.register_buffer("center", torch.zeros(1, 128))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            large, small = batch
            with torch.no_grad():
                target = self.teacher(large.flatten(0, 1))
                self.center.mul_(0.9).add_(target.mean(0, keepdim=True), alpha=0.1)
                target = ((target - self.center) / 0.04).softmax(-1).chunk(2)
            views = (*self.network(large.flatten(0, 1)).chunk(2), *self.network(small.flatten(0, 1)).chunk(4))
            return sum(-(t * (v / 0.1).log_softmax(-1)).sum(-1).mean() for t in target for v in views)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 8, 8),
            nn.GELU(),
            nn.Conv2d(64, 128, 2, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 128),
        )

    return Run(lambda: Dino(network(), None), data(lambda _: (torch.randn(2, 3, 64, 64), torch.randn(4, 3, 32, 32))))


@pattern(sizes=(16, 64))
def siamese_triplet_hard_mining() -> Run:
    """Batch-hard triplets: which of them count depends on labels and distances."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        z = F.normalize(network(x), dim=1)
        distances = torch.cdist(z, z)
        same = y[:, None] == y[None]
        positive = (distances * same).max(1).values
        negative = distances.masked_fill(same, float("inf")).min(1).values
        margins = positive - negative + 0.2
        return margins[margins > 0].mean()

    return Run(lambda: Step(mlp(64, 256, 64), loss), vectors(64, 4))


@pattern(sizes=(16, 64))
def online_hard_example_mining() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(network(batch[0]), batch[1], reduction="none")
        return losses.topk(max(1, len(losses) // 4)).values.mean()

    return Run(lambda: Step(nn.Sequential(nn.Flatten(), mlp(3 * 32 * 32)), loss, sgd), images(32))


@pattern(sizes=(16, 64))
def mixup_and_soft_targets() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        order, share = torch.randperm(len(x)), torch.rand(())
        mixed = share * x + (1 - share) * x[order]
        soft = share * F.one_hot(y, 10).float() + (1 - share) * F.one_hot(y[order], 10).float()
        return F.cross_entropy(network(mixed), soft, label_smoothing=0.1)

    return Run(lambda: Step(nn.Sequential(nn.Flatten(), mlp(3 * 32 * 32)), loss, sgd), images(32))


@pattern(sizes=(4, 8))
def mae_random_masking() -> Run:
    """A masked autoencoder: a quarter of the patches, kept by an argsort of noise."""

    class Mae(nn.Module):
        def __init__(self, width: int = 128, patches: int = 64) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, width, 8, 8)
            self.position = nn.Parameter(torch.zeros(1, patches, width))
            self.encoder = nn.Sequential(*(Block(width, 4, False) for _ in range(3)))
            self.decoder = nn.Sequential(Block(width, 4, False), nn.Linear(width, 192))
            self.mask_token = nn.Parameter(torch.zeros(1, 1, width))

        def forward(self, x: Tensor) -> Tensor:
            target = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
            tokens = self.embed(x).flatten(2).transpose(1, 2) + self.position
            b, n, w = tokens.shape
            order = torch.rand(b, n, device=x.device).argsort(1)
            restore, kept = order.argsort(1), order[:, : n // 4]
            seen = self.encoder(tokens.gather(1, kept[..., None].expand(-1, -1, w)))
            full = torch.cat([seen, self.mask_token.expand(b, n - n // 4, -1)], 1)
            full = full.gather(1, restore[..., None].expand(-1, -1, w)) + self.position
            return F.mse_loss(self.decoder(full), target)

    return Run(lambda: Step(Mae(), lambda n, b: n(b[0])), images(64))


@pattern(sizes=(8, 16))
def bert_masked_positions() -> Run:
    """Masked language modeling that only computes the logits of masked positions."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 128)
            self.blocks = nn.Sequential(*(Block(128, 4, False) for _ in range(2)))
            self.head = nn.Linear(128, 1000)

        def forward(self, ids: Tensor) -> Tensor:
            masked = torch.rand(ids.shape, device=ids.device) < 0.15
            hidden = self.blocks(self.embedding(ids.masked_fill(masked, 1)))
            return F.cross_entropy(self.head(hidden[masked]), ids[masked])

    return Run(lambda: Step(Masked(), lambda n, b: n(b[0])), tokens(64))


@pattern(sizes=(16, 32), steps=30)
def stochastic_depth() -> Run:
    """A layer is skipped by a coin toss in Python: the graph varies."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 32, 3, 1, 1)
            self.layers = nn.ModuleList(nn.Conv2d(32, 32, 3, 1, 1) for _ in range(6))
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                if not self.training or torch.rand(()) < 0.8:
                    x = x + layer(x).relu()
            return self.head(x.mean((2, 3)))

    return Run(classifier(Net), images(32))


@pattern(sizes=(8, 32))
def graph_by_index_add() -> Run:
    """Message passing over graphs of different sizes, collated into one large graph."""

    class Gnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = mlp(16, 128, 64, 1), mlp(64, 128, 64, 1), nn.Linear(64, 10)

        def forward(self, x: Tensor, edges: Tensor, graph: Tensor, count: int) -> Tensor:
            for layer in (self.first, self.second):
                h = layer(x)
                x = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
            pooled = x.new_zeros(count, x.shape[1]).index_add(0, graph, x)
            return self.head(pooled)

    def collate(items: list[Any]) -> Any:
        starts = torch.tensor([0, *[len(x) for x, _, _ in items]]).cumsum(0).tolist()
        x = torch.cat([x for x, _, _ in items])
        edges = torch.cat([e + s for (_, e, _), s in zip(items, starts, strict=False)], 1)
        graph = torch.cat([torch.full((len(x),), i) for i, (x, _, _) in enumerate(items)])
        return x, edges, graph, torch.tensor([y for _, _, y in items])

    nodes = torch.randint(10, 40, (64,)).tolist()
    nodes[0] = 40

    def sample(i: int) -> Any:
        return torch.randn(nodes[i], 16), torch.randint(nodes[i], (2, 3 * nodes[i])), i % 10

    return Run(
        lambda: Step(Gnn(), lambda n, b: F.cross_entropy(n(b[0], b[1], b[2], len(b[3])), b[3])), data(sample, collate)
    )


@pattern(sizes=(32, 128))
def sparse_embeddings() -> Run:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(5000, 32, sparse=True), nn.Linear(32, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.bag(ids))

    return Run(classifier(Bag, lambda p: torch.optim.SGD(p, 0.1)), data(lambda i: (torch.randint(5000, (20,)), i % 10)))


@pattern(sizes=(64, 256))
def recommender_two_towers() -> Run:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(5000, 64), nn.Embedding(20000, 64)
            self.user, self.item = mlp(64, 128, 64, 1), mlp(64, 128, 64, 1)

        def forward(self, batch: Any) -> Tensor:
            users, items = self.user(self.users(batch[0])), self.item(self.items(batch[1]))
            return F.cross_entropy(users @ items.t() / 0.05, torch.arange(len(users), device=users.device))

    samples = data(lambda _: (torch.randint(5000, ()), torch.randint(20000, ())))
    return Run(lambda: Step(Towers(), lambda n, b: n(b), adamw), samples)


@pattern(sizes=(32, 128))
def dlrm_interactions() -> Run:
    class Dlrm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(1000, 32) for _ in range(8))
            self.bottom = mlp(13, 64, 32, 1)
            self.top = mlp(32 + 36, 128, 1)
            self.register_buffer("pairs", torch.triu_indices(9, 9, 1))

        def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
            d = self.bottom(dense)
            features = torch.stack([d, *(t(ids[:, i]) for i, t in enumerate(self.tables))], 1)
            crossed = torch.bmm(features, features.transpose(1, 2))
            return self.top(torch.cat([d, crossed[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)

    return Run(
        lambda: Step(Dlrm(), lambda n, b: F.binary_cross_entropy_with_logits(n(b[0], b[1]), b[2])),
        data(lambda i: (torch.randn(13), torch.randint(1000, (8,)), torch.tensor(float(i % 2)))),
    )


@pattern(sizes=(8, 32))
def unet_with_dice() -> Run:
    def double(a: int, b: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.BatchNorm2d(b),
            nn.ReLU(True),
            nn.Conv2d(b, b, 3, padding=1),
            nn.BatchNorm2d(b),
            nn.ReLU(True),
        )

    class Unet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = double(3, 16), double(16, 32), double(32, 64)
            self.up1, self.up2 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
            self.d, self.e, self.head = double(64, 32), double(32, 16), nn.Conv2d(16, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            b = self.b(F.max_pool2d(a, 2))
            c = self.c(F.max_pool2d(b, 2))
            d = self.d(torch.cat([self.up1(c), b], 1))
            return self.head(self.e(torch.cat([self.up2(d), a], 1)))

    def loss(network: nn.Module, batch: Any) -> Tensor:
        logits, y = network(batch[0]), batch[1]
        p, t = logits.softmax(1), F.one_hot(y, 4).permute(0, 3, 1, 2).float()
        dice = 1 - (2 * (p * t).sum((2, 3)) / (p + t).sum((2, 3)).clamp(min=1e-6)).mean()
        return dice + F.cross_entropy(logits, y)

    return Run(lambda: Step(Unet(), loss), data(lambda _: (torch.randn(3, 64, 64), torch.randint(4, (64, 64)))))


@pattern(sizes=(16, 64))
def ddpm_epsilon() -> Run:
    class Ddpm(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            t = torch.randint(1000, (len(x),), device=self.device)
            a = self.alphas[t][:, None, None, None]
            noise = torch.randn_like(x)
            return F.mse_loss(self.network(a.sqrt() * x + (1 - a).sqrt() * noise), noise)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 64, 3, 1, 1),
            nn.GroupNorm(8, 64),
            nn.SiLU(),
            nn.Conv2d(64, 64, 3, 1, 1),
            nn.GroupNorm(8, 64),
            nn.SiLU(),
            nn.Conv2d(64, 3, 3, 1, 1),
        )

    return Run(lambda: Ddpm(network(), None, adamw), images(32))


@pattern(sizes=(16, 64))
def vae() -> Run:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = mlp(784, 400, 40, 1), mlp(20, 400, 784, 1)

        def forward(self, x: Tensor) -> Tensor:
            mean, spread = self.down(x.flatten(1)).chunk(2, -1)
            posterior = torch.distributions.Normal(mean, spread.exp())
            out = self.up(posterior.rsample())
            prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
            error = F.binary_cross_entropy_with_logits(out, x.flatten(1).sigmoid(), reduction="none").sum(1)
            return (error + torch.distributions.kl_divergence(posterior, prior).sum(1)).mean()

    return Run(lambda: Step(Vae(), lambda n, b: n(b[0])), images(28, channels=1))


@pattern(sizes=(32, 128))
def ppo_minibatch() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        observations, actions, before, advantages, returns = batch
        out = network(observations)
        policy = torch.distributions.Categorical(logits=out[:, :6])
        ratio = (policy.log_prob(actions) - before).exp()
        clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -clipped.mean() + 0.5 * F.mse_loss(out[:, 6], returns) - 0.01 * policy.entropy().mean()

    def sample(i: int) -> Any:
        return torch.randn(64), torch.tensor(i % 6), torch.randn(()), torch.randn(()), torch.randn(())

    return Run(lambda: Step(mlp(64, 256, 7), loss), data(sample))


@pattern(sizes=(8, 32))
def convlstm_frames() -> Run:
    class ConvLstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates, self.head = nn.Conv2d(1 + 16, 64, 3, padding=1), nn.Conv2d(16, 1, 1)

        def forward(self, frames: Tensor) -> Tensor:
            h = c = frames.new_zeros(len(frames), 16, *frames.shape[-2:])
            outputs = []
            for frame in frames.unbind(1):
                i, f, o, g = self.gates(torch.cat([frame, h], 1)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                outputs.append(self.head(h))
            return torch.stack(outputs, 1)

    return Run(
        lambda: Step(ConvLstm(), regress), data(lambda _: (torch.randn(10, 1, 32, 32), torch.randn(10, 1, 32, 32)))
    )


@pattern(sizes=(8, 32))
def spectral_norm_critic() -> Run:
    def network() -> nn.Module:
        sn = nn.utils.parametrizations.spectral_norm
        return nn.Sequential(
            sn(nn.Conv2d(3, 32, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            sn(nn.Conv2d(32, 64, 4, 2, 1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            sn(nn.Linear(64 * 64, 10)),
        )

    return Run(classifier(network), images(32))


@pattern(sizes=(8, 32))
def wavenet_dilated() -> Run:
    class WaveNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv1d(1, 32, 1)
            self.layers = nn.ModuleList(nn.Conv1d(32, 64, 2, dilation=2**i, padding=2**i) for i in range(8))
            self.head = nn.Conv1d(32, 256, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            for layer in self.layers:
                a, b = layer(h)[..., : h.shape[-1]].chunk(2, 1)
                h = h + a.tanh() * b.sigmoid()
            return self.head(h)

    return Run(
        lambda: Step(WaveNet(), lambda n, b: F.cross_entropy(n(b[0]), b[1])),
        data(lambda _: (torch.randn(1, 512), torch.randint(256, (512,)))),
    )


@pattern(sizes=(8, 32))
def video_3d_convolutions() -> Run:
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(3, 16, 3, 1, 1),
            nn.BatchNorm3d(16),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(16, 32, 3, 1, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool3d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    return Run(classifier(network), data(lambda i: (torch.randn(3, 8, 32, 32), i % 10)))


@pattern(sizes=(16, 64))
def pointnet() -> Run:
    class PointNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 256, 1))
            self.head = mlp(256, 128, 10, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.local(x).max(-1).values)

    return Run(classifier(PointNet), data(lambda i: (torch.randn(3, 256), i % 10)))


@pattern(sizes=(8, 16))
def dgcnn_knn() -> Run:
    """Edges to the nearest neighbors, found anew in each layer."""

    class Dgcnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Conv2d(6, 32, 1), nn.Conv2d(64, 64, 1), nn.Linear(64, 10)

        def edges(self, x: Tensor, k: int = 8) -> Tensor:
            nearest = torch.cdist(x, x).topk(k, largest=False).indices
            rows = torch.arange(len(x), device=x.device)[:, None, None]
            around = x[rows, nearest]
            here = x[:, :, None].expand_as(around)
            return torch.cat([here, around - here], -1).permute(0, 3, 1, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(self.edges(x)).relu().max(-1).values.transpose(1, 2)
            x = self.second(self.edges(x)).relu().max(-1).values
            return self.head(x.max(-1).values)

    return Run(classifier(Dgcnn), data(lambda i: (torch.randn(128, 3), i % 10)))


@pattern(sizes=(16, 64))
def lora_by_parametrization() -> Run:
    class Lora(nn.Module):
        def __init__(self, out: int, into: int, rank: int = 4) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(rank, into)), nn.Parameter(torch.zeros(out, rank))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.b @ self.a

    def network() -> nn.Module:
        net = mlp(64, 256).requires_grad_(False)
        for layer in net:
            if isinstance(layer, nn.Linear):
                nn.utils.parametrize.register_parametrization(layer, "weight", Lora(*layer.weight.shape))
        return net

    return Run(classifier(network, adamw), vectors(64))


@pattern(sizes=(16, 64))
def reversible_recompute() -> Run:
    """Checkpoints of segments by `checkpoint_sequential`, with dropout."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(12))
            )
            self.stem, self.head = nn.Linear(64, 128), nn.Linear(128, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(
                torch.utils.checkpoint.checkpoint_sequential(self.layers, 4, self.stem(x), use_reentrant=False)
            )

    return Run(classifier(Deep), vectors(64))


@pattern(sizes=(8, 32))
def focal_loss_dense() -> Run:
    """A dense detector's loss: positives picked by a mask of the targets."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        out, (classes, boxes) = network(batch[0]), batch[1]
        scores, found = out[:, :5], out[:, 5:]
        targets = F.one_hot(classes, 6)[..., 1:].permute(0, 3, 1, 2).float()
        p = scores.sigmoid()
        focal = F.binary_cross_entropy_with_logits(scores, targets, reduction="none") * (p - targets).abs() ** 2
        positive = classes > 0
        return focal.sum() / positive.sum().clamp(min=1) + F.l1_loss(
            found.permute(0, 2, 3, 1)[positive], boxes[positive]
        )

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 9, 1)
        )

    def sample(_: int) -> Any:
        return torch.randn(3, 64, 64), (torch.randint(6, (16, 16)) * (torch.rand(16, 16) < 0.1), torch.rand(16, 16, 4))

    return Run(lambda: Step(network(), loss), data(sample))


@pattern(sizes=(8, 32))
def hungarian_matching() -> Run:
    """DETR's matching: SciPy on detached costs."""
    from scipy.optimize import linear_sum_assignment

    class Detr(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.queries = nn.Conv2d(3, 64, 8, 8), nn.Parameter(torch.randn(20, 64))
            self.decoder = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
            self.classes, self.boxes = nn.Linear(64, 6), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Any:
            memory = self.embed(x).flatten(2).transpose(1, 2)
            h = self.decoder(self.queries.expand(len(x), -1, -1), memory)
            return self.classes(h), self.boxes(h).sigmoid()

    def loss(network: nn.Module, batch: Any) -> Tensor:
        x, targets = batch
        logits, boxes = network(x)
        total = torch.zeros(())
        for scores, found, (labels, wanted) in zip(logits, boxes, targets, strict=True):
            cost = torch.cdist(found, wanted, p=1) - scores.softmax(-1)[:, labels]
            rows, columns = map(torch.as_tensor, linear_sum_assignment(cost.detach().cpu()))
            classes = torch.full((len(scores),), 5)
            classes[rows] = labels[columns]
            total = total + F.cross_entropy(scores, classes) + F.l1_loss(found[rows], wanted[columns])
        return total / len(x)

    counts = torch.randint(1, 8, (64,)).tolist()

    def collate(items: list[Any]) -> Any:
        return torch.stack([x for x, _ in items]), [target for _, target in items]

    samples = data(
        lambda i: (torch.randn(3, 64, 64), (torch.randint(5, (counts[i],)), torch.rand(counts[i], 4))), collate
    )
    return Run(lambda: Step(Detr(), loss), samples)


@pattern(sizes=(16, 64))
def gumbel_router() -> Run:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 4)
            self.experts = nn.ModuleList(mlp(64, 128, 64, 1) for _ in range(4))
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            weights = F.gumbel_softmax(self.gate(x), hard=True)
            return self.head(torch.einsum("be,ebd->bd", weights, torch.stack([e(x) for e in self.experts])))

    return Run(classifier(Router), vectors(64))


@pattern(sizes=(8, 32))
def nested_tensors() -> Run:
    """Jagged sequences without padding."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(32, 64), nn.Linear(64, 10)

        def forward(self, texts: list[Tensor]) -> Tensor:
            x = torch.nested.nested_tensor(texts, layout=torch.jagged)
            x = torch.nested.to_padded_tensor(self.inner(x).relu(), 0.0)
            return self.head(x.sum(1))

    lengths = torch.randint(5, 40, (64,)).tolist()
    lengths[0] = 40

    def collate(items: list[Any]) -> Any:
        return [x for x, _ in items], torch.tensor([y for _, y in items])

    return Run(classifier(Pooled), data(lambda i: (torch.randn(lengths[i], 32), i % 10), collate))
