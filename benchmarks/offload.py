"""A step with its saved tensors elsewhere: the same step, as predicted, and what it costs.

fuzz       random programs (views, writes in place, detached and `.data` writes, checkpoints, fused attention, complex
           numbers, three precisions; backward inside and outside, twice, for a gradient penalty), with and without, for
           several `keep_bytes` and both tiers: the same bits, or the same error in PyTorch's own words. Only programs
           that write where autograd cannot see may differ, and are counted.
compiled   fused attention under Inductor, by block and whole, with the hooks switched on in mid-run (needs g++)
peaks      the predicted peak next to PyTorch's profiler, for the zoo and three values of `keep_bytes`
gpus       how far the predicted peak of a ResNet-50 and a GPT-2 falls on GPUs that are not there
cost       microseconds for each saved tensor that stays, and that moves; and seconds of a step on the CPU that is
           offloaded, or done in two halves whose gradients add up, next to the whole step, in turns

    python benchmarks/offload.py fuzz --count 5000
    python benchmarks/offload.py fuzz --show 17        # the program of one seed, and how it ends
    python benchmarks/offload.py peaks
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from lightning_memguard import estimate, offload_activations
from lightning_memguard.training.offload.engine import Offload
from lightning_memguard.training.offload.tiers import File, Host
from shared.predicted import predict_here
from shared.process import forked
from shared.truth import measure_here
from shared.zoo import (
    CASES,
    Case,
    EncoderClassifier,
    Supervised,
    case_named,
    cnn,
    images,
    mlp,
    token_classes,
    token_loss,
    vectors,
)

# -- random programs

N = 12


@dataclass(frozen=True)
class Program:
    """What is done to which of the tensors so far, each time a new one; then how it is run backward."""

    dtype: torch.dtype
    steps: Sequence[tuple[str, float, float, int]]
    held: int  # how many of the tensors stay in reach; a tensor that lives is never brought back
    ending: str


class Ran:
    """Tensors of N x N that a program has made, and its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.leaves = [torch.randn(N, N, dtype=dtype, requires_grad=True) for _ in range(2)]
        self.made = [leaf * 1 for leaf in self.leaves]
        self.loss = torch.zeros((), dtype=dtype)


class Reads(torch.autograd.Function):
    """Saves what it is given, another dtype's view of it, and its own result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        result = x * 2 + y
        ctx.save_for_backward(x, y.detach().view(torch.uint8) if y.is_contiguous() else y, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y, result = ctx.saved_tensors
        return grad * x, grad * result + y.sum().to(grad.dtype) * 1e-3


class Overwrites(torch.autograd.Function):
    """Uses the tensor it saved as memory for its gradient, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sin()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y.mul_(grad).clone()


def qkv(x: Tensor, y: Tensor) -> Tensor:
    q, k, v = torch.cat([x, y, x], 1).view(1, N, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(N, N)


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(1.01)
    return x


def write(x: Tensor, at: object, value: Tensor | float) -> Tensor:
    x[at] = value  # type: ignore[index]
    return x


def dropped(x: Tensor, y: Tensor) -> Tensor:
    (x.sin() * y).exp()  # without a backward pass
    return x


Op = Callable[[Ran, Tensor, Tensor, int], Tensor]
ANY: dict[str, Op] = {
    "sin": lambda r, x, y, n: x.sin(),
    "exp": lambda r, x, y, n: (x * 0.5).exp(),
    "mul": lambda r, x, y, n: x * y,
    "mm": lambda r, x, y, n: (x @ y) * 0.1,
    "turned mm": lambda r, x, y, n: (x.t() @ y.t()) * 0.1,
    "div": lambda r, x, y, n: x / (y.abs() + 1),
    "t": lambda r, x, y, n: x.t(),
    "every second": lambda r, x, y, n: F.pad(x[:, ::2], (0, N // 2)),
    "row": lambda r, x, y, n: x[n] * y,
    "column": lambda r, x, y, n: y * x[:, n : n + 1].exp(),
    "expand": lambda r, x, y, n: x[:1].expand(N, N) * y,
    "windows": lambda r, x, y, n: x.flatten().unfold(0, N, 2)[:N] * y,
    "flip": lambda r, x, y, n: x.flip(0) * y,
    "cat": lambda r, x, y, n: torch.cat([x[:6], y[6:]]),
    "chunk": lambda r, x, y, n: torch.cat([a * b for a, b in zip(x.chunk(3, 1), y.chunk(3, 1), strict=True)], 1),
    "permute": lambda r, x, y, n: x[torch.randperm(N)],
    "clone": lambda r, x, y, n: x.clone(),
    "detach": lambda r, x, y, n: x.detach(),
    "detached mul": lambda r, x, y, n: x.detach() * y,
    "data mul": lambda r, x, y, n: x.data * y,
    "mul_": lambda r, x, y, n: x.mul_(y * 0.1 + 1),
    "add_": lambda r, x, y, n: x.add_(1.0),
    "copy_": lambda r, x, y, n: x.copy_(y.clone()),
    "no_grad mul_": lambda r, x, y, n: without_gradient(x),
    "row add_": lambda r, x, y, n: (x[n : n + 1].add_(y[:1].clone()), x)[1],
    "column zero": lambda r, x, y, n: write(x, (slice(None), n), 0.0),
    "view mul_": lambda r, x, y, n: (x.view(-1)[::3].mul_(1.1) if x.is_contiguous() else x, x)[1],
    "checkpoint": lambda r, x, y, n: checkpoint(lambda a, b: (a * b).sin() * 0.5, x, y, use_reentrant=False),
    "reentrant": lambda r, x, y, n: checkpoint(lambda a, b: (a * b).sin() * b, x, y, use_reentrant=True),
    "dropout": lambda r, x, y, n: F.dropout(x, 0.3),
    "reads": lambda r, x, y, n: Reads.apply(x, y),  # type: ignore[no-untyped-call]
    "overwrites": lambda r, x, y, n: Overwrites.apply(x * 1),  # type: ignore[no-untyped-call]
    "dropped": lambda r, x, y, n: dropped(x, y),
    "unseen": lambda r, x, y, n: (x.data.mul_(1.5), x)[1],
    "norm": lambda r, x, y, n: (setattr(r, "loss", r.loss + x[:, ::3].norm(dim=1).sum()), x)[1],
    "loss": lambda r, x, y, n: (setattr(r, "loss", r.loss + (x * y).mean()), x)[1],
}
REAL: dict[str, Op] = {
    "relu_": lambda r, x, y, n: x.relu_(),
    "tanh_": lambda r, x, y, n: x.tanh_(),
    "sigmoid": lambda r, x, y, n: x.sigmoid(),
    "softmax": lambda r, x, y, n: x.softmax(1),
    "max": lambda r, x, y, n: x.max(1, keepdim=True).values * y,
    "std": lambda r, x, y, n: (setattr(r, "loss", r.loss + x[:, ::2].std(1).sum()), x)[1],
    "sort": lambda r, x, y, n: x.sort(1).values * y,
    "half norm": lambda r, x, y, n: F.layer_norm(torch.cat([F.layer_norm(x[:, :6], (6,)), y[:, 6:]], 1), (N,)),
    "batch norm": lambda r, x, y, n: F.batch_norm(x.view(3, 4, 4, 3)[:, 1:3], None, None, training=True).sum() * y,
    "attention": lambda r, x, y, n: qkv(x, y),
    "imaginary": lambda r, x, y, n: (
        torch.complex(x.float(), y.float()).conj().imag.to(x.dtype) * y
        + torch.complex(x.float(), y.float()).conj().abs().to(x.dtype)
    ),
}
COMPLEX: dict[str, Op] = {
    "conj": lambda r, x, y, n: x.conj() * y,
    "both": lambda r, x, y, n: x * y + x.conj() * y * 1j,
    "imag": lambda r, x, y, n: torch.complex(x.conj().imag * y.real, x.imag),
    "conj t": lambda r, x, y, n: (x.mH @ y) * 0.1,
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
ENDINGS = ("after", "after", "after", "inside", "retained", "penalty", "of one", "two")


def operators(dtype: torch.dtype) -> dict[str, Op]:
    return {**ANY, **(COMPLEX if dtype.is_complex else REAL)}


def program(seed: int) -> Program:
    draw = random.Random(seed)
    dtype = draw.choice(DTYPES)
    names = sorted(operators(dtype))
    steps = [(draw.choice(names), draw.random(), draw.random(), draw.randrange(9)) for _ in range(draw.randint(4, 14))]
    return Program(dtype, steps, draw.choice((2, 3, 5, 99)), draw.choice(ENDINGS))


def run(what: Program, hooks: AbstractContextManager[Any]) -> list[Tensor | None]:
    """Run it, and return its loss and gradients."""
    ran, does = Ran(what.dtype), operators(what.dtype)
    found: list[Tensor | None] = []
    with hooks:
        for name, first, second, n in what.steps:
            x, y = (ran.made[int(place * len(ran.made))] for place in (first, second))
            ran.made.append(does[name](ran, x, y, n))
            del x, y, ran.made[: -what.held]
        loss = ran.loss + sum(each.sum() for each in ran.made[-3:]) + (ran.made[-1] * ran.made[-2]).mean()
        loss = torch.view_as_real(loss).sum() if loss.is_complex() else loss
        if what.ending == "penalty":
            grads = torch.autograd.grad(loss, ran.leaves, create_graph=True, allow_unused=True)
            loss = loss + sum(each.abs().square().sum() for each in grads if each is not None)
        if what.ending == "inside":
            loss.backward()
    wanted = ran.made[-1:] if what.ending == "two" else []
    if what.held < len(what.steps):
        ran.made.clear()
    if what.ending == "of one":
        found += torch.autograd.grad(loss, ran.leaves[:1], allow_unused=True)
    elif what.ending != "inside":
        loss.backward(retain_graph=what.ending in ("retained", "two"))
    if what.ending == "retained":
        loss.backward()
    if what.ending == "two":
        found += torch.autograd.grad(loss, wanted, allow_unused=True)
    return [loss.detach(), *found, *(leaf.grad for leaf in ran.leaves)]


def outcome(what: Program, hooks: AbstractContextManager[Any]) -> list[Tensor | None] | str:
    try:
        return run(what, hooks)
    except Exception as error:  # noqa: BLE001 - it is compared
        return f"{type(error).__name__}: {error}"


def same(a: list[Tensor | None] | str, b: list[Tensor | None] | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (a, b)))


WAYS: dict[str, dict[str, Any]] = {
    "file": {"tier": "file"},
    "host": {"tier": "host"},
    "file, 2 KiB stay": {"tier": "file", "keep_bytes": 2048},
    "host, 700 B stay": {"tier": "host", "keep_bytes": 700},
    "all stays": {"keep_bytes": 1 << 40},
}


UNSEEN = ("unseen", "data mul")  # what shares memory with ``x.data`` is written to, by another counter of versions
MODIFIED = "has been modified by an inplace operation"


def without_source(text: str) -> str:
    """A version error without the operator that it names: of a view that is gone, autograd would make a new one."""
    return re.sub(r", which is output \d+ of [\w:]+,", "", text)


def verdict(what: Program, plain: list[Tensor | None] | str, offloaded: list[Tensor | None] | str) -> str:
    if same(plain, offloaded):
        return "same error" if isinstance(plain, str) else "same bits"
    if isinstance(plain, str):
        how = "error hidden" if not isinstance(offloaded, str) else "another error"
        if isinstance(offloaded, str) and without_source(plain) == without_source(offloaded):
            return "same error, names another operator"
        if isinstance(offloaded, str) and "modified inplace" in plain and MODIFIED in offloaded:
            return "the same write in other words"
    else:
        how = "raises" if isinstance(offloaded, str) else "other bits"
    return how + (" (unseen writes)" if any(step[0] in UNSEEN for step in what.steps) else "")


FINE = ("same", "the same")


def counting(function: Callable[..., None], tally: Counter[str], name: str) -> Callable[..., None]:
    def counted(*args: Any) -> None:
        tally[name] += 1
        function(*args)

    return counted


SHOWN = 12  # programs that differ


def fuzz(count: int, first: int, show: int | None) -> int:
    module, tally, shown = nn.Module(), Counter[str](), list[int]()
    held = {name: Offload(module, **how) for name, how in WAYS.items()}
    for kind in (File, Host):
        kind.read = counting(kind.read, tally, f"{kind.__name__}: copies brought back")  # type: ignore[method-assign]
    for seed in range(first, first + count) if show is None else (show,):
        what = program(seed)
        plain = outcome(what, nullcontext())
        if not same(plain, outcome(what, nullcontext())):
            tally["does not repeat itself"] += 1
            continue
        tally["raises by itself" if isinstance(plain, str) else "runs by itself"] += 1
        if show is not None:
            print(what, plain, sep="\n")
        for name, offload in held.items():
            found = outcome(what, offload)
            how = verdict(what, plain, found)
            if offload.kept_bytes > offload.keep_bytes or offload.trouble:
                how = f"KEPT TOO MUCH {offload.kept_bytes} {offload.trouble}"
            tally[f"{how}: {name}"] += 1
            if not how.startswith(FINE) and "unseen" not in how and len(shown) < SHOWN and seed not in shown:
                shown.append(seed)
                print(f"seed {seed}, {name}: {how}\n  {str(plain)[:400]}\n  {str(found)[:400]}")
    for key, number in sorted(tally.items()):
        print(f"{number:>7,}  {key}")
    wrong = [
        key
        for key in tally
        if not key.startswith((*FINE, "runs", "raises by", "does", "File", "Host")) and "unseen" not in key
    ]
    return 1 if wrong else 0


# -- Inductor


class Block(nn.Module):
    """A transformer's block whose attention reads views of one product."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 16).unbind(2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def eager(module: nn.Sequential) -> Any:
    return module


def by_block(module: nn.Sequential) -> Any:
    for child in module:
        child.compile()
    return module


def whole(module: nn.Sequential) -> Any:
    return torch.compile(module)


def trained(make: Callable[[nn.Sequential], Any], pattern: str, lengths: Sequence[int], **how: Any) -> Any:
    """Train for as many steps as the pattern has letters, offloaded at each "o": weights, bytes moved, graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block() for _ in range(3)])
    module, optimizer, moved = make(plain), torch.optim.SGD(plain.parameters(), 0.1), 0
    offload = Offload(plain, **how)
    for index, letter in enumerate(pattern):
        torch.manual_seed(index)
        x = torch.randn(8, lengths[index % len(lengths)], 64)
        with offload if letter == "o" else nullcontext():
            loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = max(moved, offload.moved_bytes)
    return (
        [p.detach().clone() for p in plain.parameters()],
        moved,
        torch._dynamo.utils.counters["stats"]["unique_graphs"],
    )


def compiled() -> int:
    import torch._dynamo.utils
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    wrong = 0
    for make in (eager, by_block, whole):
        for pattern, lengths in (("ppopo", (32,)), ("oppop", (32,)), ("poppo", (32, 40, 48, 56, 40))):
            plain, _, graphs = trained(make, "p" * len(pattern), lengths)
            for how in ({"tier": "file"}, {"tier": "host", "keep_bytes": 200_000}):
                found, moved, other = trained(make, pattern, lengths, **how)
                equal = all(map(torch.equal, plain, found)) and graphs == other
                wrong += not (equal and moved)
                print(f"{make.__name__:<9} {pattern} lengths {lengths}, {how}:", end=" ")
                print(f"equal {equal}, graphs {graphs} and {other}, moved {moved:,} B", flush=True)
    return 1 if wrong else 0


# -- predicted peaks


BF16 = {"precision": "bf16-mixed"}


def cases() -> list[Case]:
    """The zoo, and two of it in half precision."""
    halves = [replace(case_named(name), name=f"{name}, bf16", trainer_kwargs=BF16) for name in ("gpt", "resnet")]
    return [*CASES, *halves]


def offloaded(case: Case, keep_bytes: int, most: list[int] | None = None) -> Case:
    """The case with its training step offloaded; ``most`` is told how much stayed on the device."""

    def build(optimizer: str) -> Any:
        module = case.build(optimizer)
        kind = type(module)

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            with offload_activations(self, keep_bytes) as offload:
                loss = kind.training_step(self, batch, batch_idx)
            if offload.refused or offload.trouble or offload.kept_bytes > keep_bytes:
                raise RuntimeError(f"{offload.kept_bytes} B stayed. {offload.refused}{offload.trouble}")
            if most is not None:
                most.append(offload.kept_bytes)
            return loss

        module.__class__ = type(kind.__name__, (kind,), {"training_step": training_step, "__module__": kind.__module__})
        return module

    return replace(case, build=build)


def predicted_at(case: Case, optimizer: str, size: int) -> dict[str, Any]:
    return forked(lambda: asdict(predict_here(case, optimizer, size)), 1)


def measured_at(case: Case, optimizer: str, size: int) -> dict[str, Any]:
    return forked(lambda: asdict(measure_here(case, optimizer, size)), 1)


def saved_bytes(case: Case, optimizer: str, size: int) -> int:
    """The most that one of its steps saves."""

    def answer() -> dict[str, int]:
        most = list[int]()
        measure_here(offloaded(case, 1 << 60, most), optimizer, size)
        return {"most": max(most)}

    return forked(answer, 1)["most"]


def peaks(names: Sequence[str]) -> int:
    errors = []
    print(f"{'case':<24} {'keep_bytes':>12} {'predicted B':>14} {'measured B':>14} {'off by':>8}   at")
    for case in cases():
        if names and case.name not in names:
            continue
        at = case.optimizers[-1], case.batch_sizes[-1]
        saved = saved_bytes(case, *at)
        for keep_bytes in (None, 0, saved // 3, saved * 2 // 3):
            other = case if keep_bytes is None else offloaded(case, keep_bytes)
            ours, truth = predicted_at(other, *at), measured_at(other, *at)
            off = ours["peak_bytes"] - truth["peak_bytes"]
            errors += [off] if keep_bytes is not None else []
            kept = "not moved" if keep_bytes is None else f"{keep_bytes:,}"
            row = f"{case.name:<24} {kept:>12} {ours['peak_bytes']:>14,} {truth['peak_bytes']:>14,} {off:>+8,}"
            print(f"{row}   {truth['phase']}, {truth['operator']}", flush=True)
    print(f"{sum(not each for each in errors)} of {len(errors)} offloaded steps to the byte")
    return 1 if any(errors) else 0


# -- GPUs that are not there

LARGE = (
    ("resnet50", 64, "32-true", "NVIDIA H100", F.cross_entropy),
    ("resnet50", 64, "32-true", "RTX 3090", F.cross_entropy),
    ("gpt2_small", 16, "bf16-mixed", "NVIDIA H100", token_loss),
)


def gpus() -> int:
    for name, size, precision, device, loss in LARGE:
        case = case_named(name)
        network = case.build(case.optimizers[-1]).network
        batch = [torch.empty(size, *each.shape, dtype=each.dtype, device="meta") for each in case.dataset(1)[0]]
        for keep_gib in (None, 0, 2, 4):

            def step(model: nn.Module, batch: Any, keep_gib: int | None = keep_gib, loss: Any = loss) -> Tensor:
                with nullcontext() if keep_gib is None else offload_activations(model, keep_gib << 30):
                    return loss(model(batch[0]), batch[1])

            found = estimate(
                *(network, batch), step=step, optimizer=torch.optim.AdamW, device=device, precision=precision
            )
            kept = "not moved" if keep_gib is None else f"{keep_gib} GiB stay"
            print(f"{name} at {size}, {precision}, {device}, {kept}: {found.peak_allocated_bytes / 2**30:.2f} GiB")
    return 0


# -- what it costs

SAVED = 2000  # tensors of 1 KiB


def seconds(hooks: AbstractContextManager[Any]) -> tuple[float, float]:
    """Processor seconds of a forward pass that saves one result after another, and of its backward pass."""
    x, found = torch.randn(256, requires_grad=True), list[tuple[float, float]]()
    for _ in range(7):
        started = time.process_time()
        with hooks:
            results = [(x + 0).exp() for _ in range(SAVED)]
        ended = time.process_time()
        loss = torch.stack([each.sum() for each in results]).sum()
        del results
        begun = time.process_time()
        loss.backward()
        found.append((ended - started, time.process_time() - begun))
    return min(each[0] for each in found), min(each[1] for each in found)


def cost() -> int:
    ways: dict[str, AbstractContextManager[Any]] = {
        "hooks that do nothing": torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
        "torch's save_on_cpu": torch.autograd.graph.save_on_cpu(),
        "stays": Offload(nn.Module(), 1 << 40),
        "moves to a file": Offload(nn.Module(), tier="file"),
        "moves to the host": Offload(nn.Module(), tier="host"),
    }
    plain = seconds(nullcontext())
    for name, hooks in ways.items():
        forward, backward = (1e6 * (a - b) / SAVED for a, b in zip(seconds(hooks), plain, strict=True))
        print(
            f"{name:<22} {forward:6.2f} us in the forward pass, {backward:6.2f} us in the backward pass, a saved tensor"
        )
    for name, network, dataset, size in STEPPED:
        steps(name, Supervised(network(), "adam", F.cross_entropy), dataset(size))
    return 0


ROUNDS = 21  # the first warms up
PLAIN = nullcontext()
STEPPED: tuple[tuple[str, Callable[[], nn.Module], Callable[[int], Any], int], ...] = (
    ("mlp", mlp, vectors(512), 1024),
    ("cnn", cnn, images(3, 32), 64),
    ("transformer", lambda: EncoderClassifier(depth=4), token_classes(4000, 64), 32),
)


def steps(name: str, module: Supervised, dataset: Any) -> None:
    """Time a step that is whole, offloaded, and in two halves, in turns."""
    optimizer, offload = module.configure_optimizers(), Offload(module)
    batch = default_collate([dataset[place] for place in range(len(dataset))])
    halves = [tuple(half) for half in zip(*(each.chunk(2) for each in batch), strict=True)]

    def step(parts: Sequence[Any], hooks: AbstractContextManager[Any] = PLAIN) -> float:
        started = time.perf_counter()
        for part in parts:
            with hooks:
                loss = module.training_step(part, 0) / len(parts)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    rounds = [(step([batch]), step([batch], offload), step(halves)) for _ in range(ROUNDS)][1:]
    ratios = [statistics.quantiles(each[place] / each[0] for each in rounds) for place in (1, 2)]
    offloaded, halved = (f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in ratios)
    whole = 1e3 * statistics.median(each[0] for each in rounds)
    print(f"{name:<12} {whole:.1f} ms; offloaded {offloaded} times as long, {offload.moved_bytes:,} B; halved {halved}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    random_ones = commands.add_parser("fuzz")
    random_ones.add_argument("--count", type=int, default=1000)
    random_ones.add_argument("--first", type=int, default=0)
    random_ones.add_argument("--show", type=int)
    for name in ("compiled", "gpus", "cost"):
        commands.add_parser(name)
    predicted = commands.add_parser("peaks")
    predicted.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if arguments.command == "fuzz":
        return fuzz(arguments.count, arguments.first, arguments.show)
    if arguments.command == "peaks":
        return peaks(arguments.only)
    return {"compiled": compiled, "gpus": gpus, "cost": cost}[arguments.command]()


if __name__ == "__main__":
    sys.exit(main())
