"""Our own code in the style of the field: what people write in plain torch, and neighbors of what broke before."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils.rnn import pad_sequence
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


@pattern(sizes=(16, 64))
def branch_on_loss_value() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        value = classify(network, batch)
        return value * 0.5 if value.item() > 1e6 else value

    return Run(lambda: Step(mlp(64, 512), loss), vectors(64))


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


@pattern(sizes=(16, 64))
def online_hard_example_mining() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        losses = F.cross_entropy(network(batch[0]), batch[1], reduction="none")
        return losses.topk(max(1, len(losses) // 4)).values.mean()

    return Run(lambda: Step(nn.Sequential(nn.Flatten(), mlp(3 * 32 * 32)), loss, sgd), images(32))


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


@pattern(sizes=(32, 128))
def sparse_embeddings() -> Run:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(5000, 32, sparse=True), nn.Linear(32, 10)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.bag(ids))

    return Run(classifier(Bag, lambda p: torch.optim.SGD(p, 0.1)), data(lambda i: (torch.randint(5000, (20,)), i % 10)))


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
