"""The programs behind recorded histories, in our own words, and their steps predicted blind.

The course transformer writes softmax, cross entropy and matrix products (``einsum``) out, makes its mask again in each
block, and its AdamW makes new tensors for its states. The regressor's layers do not learn; Adam changes the image, with
anomaly detection. The cellular automaton fills the GPU at the full resolution, so that the allocator gives back what it
has cached. The torch that was recorded resized volumes to contiguous ones; today's keep channels last, and take two
copies more on the way.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_memguard.core.capture.program import tensors
from lightning_memguard.core.capture.recorder import Recorder, gradients_of, states_of, watching
from lightning_memguard.core.gpus import find
from lightning_memguard.core.histories.compare import compare
from lightning_memguard.core.histories.history import History, histories_of
from lightning_memguard.core.replay.footprint import footprint
from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.replay.snapshot import save_snapshot, snapshot
from lightning_memguard.core.simulation.fake import fake_copy
from lightning_memguard.core.simulation.fake_cuda import FAKE_DEVICE
from lightning_memguard.core.trace.trace import Trace
from shared.as_recorded import replay_as_recorded

VOCABULARY = 10_000


# -- the course transformer


class Project(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, self.weight)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(2, context, width // 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x.reshape(*x.shape[:-1], -1, 2).permute(4, 0, 1, 2, 3).unbind(0)
        cosine, sine = self.angles[:, : x.shape[-2], :].unbind(0)
        first = cosine * even - sine * odd
        second = sine * even + cosine * odd
        return torch.cat((first, second), dim=-1)


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, values)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.queries, self.keys, self.values, self.out = (Project(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.queries(x), self.keys(x), self.values(x)
        queries, keys, values = (
            each.reshape(*each.shape[:2], self.heads, -1).transpose(1, 2) for each in (queries, keys, values)
        )
        queries, keys = self.rotary(queries), self.rotary(keys)
        places = torch.arange(x.shape[1], device=x.device)
        mask = (places[:, None] >= places[None, :])[None, ...]
        mixed = attend(queries, keys, values, mask)
        mixed = mixed.transpose(1, 2).reshape(x.shape).contiguous()
        return self.out(mixed)


class Gated(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.down, self.up = Project(width, inner), Project(inner, width), Project(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, rotary: Rotary) -> None:
        super().__init__()
        self.attention, self.gated = Attention(width, heads, rotary), Gated(width, inner)
        self.before, self.between = Norm(width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.before(x))
        summed = x + mixed
        lifted = self.gated(self.between(summed))
        return summed + lifted


class Tokens(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens, :]


class Transformer(nn.Module):
    def __init__(self, width: int, inner: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, rotary = Tokens(width), Rotary(context, width // heads)
        self.layers = nn.ModuleList(Layer(width, heads, inner, rotary) for _ in range(depth))
        self.last, self.head = Norm(width), Project(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens)  # alive until the end
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.last(x)
        return self.head(x)


def log_softmax(x: Tensor) -> Tensor:
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, target.unsqueeze(-1)))


class NewStates(torch.optim.Optimizer):
    """An AdamW whose step makes new moments, with the old ones still in its state."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad.data, self.state[parameter]
            parameter.data -= 1e-5 * parameter.data
            first = state.get("first", torch.zeros_like(gradient))
            second = state.get("second", torch.zeros_like(gradient))
            new_first = 0.9 * first + (0.1 * gradient)
            new_second = 0.999 * second + (0.001 * torch.square(gradient))
            parameter.data -= 1e-3 * new_first / (torch.sqrt(new_second) + 1e-8)
            state["first"], state["second"] = new_first, new_second


# -- a regressor on a stack of images, whose input is trained


class Regressor(nn.Module):
    def __init__(self, channels: tuple[int, ...], widths: tuple[int, ...]) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding="same") for a, b in pairwise(channels))
        self.norms = nn.ModuleList(nn.BatchNorm2d(each) for each in channels[1:])
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((channels[-1], *widths)))
        self.out = nn.Linear(widths[-1], 1)
        self.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolution(x).relu())
            x = nn.functional.max_pool2d(x, 2)
        x = nn.functional.max_pool2d(x, x.shape[-1])
        x = x.flatten(1)
        for linear in self.linears:
            x = linear(nn.functional.dropout(x, 0.2)).relu()
        return self.out(x)


def trains_its_input(recorder: Recorder, model: nn.Module) -> None:
    """Two steps of Adam on the image itself, with anomaly detection."""
    image = torch.empty(1, 30, 256, 256)
    known = model(image.to("cuda"))
    there, changed = image.to("cuda"), image.to("cuda").requires_grad_()
    optimizer = torch.optim.Adam([changed], lr=0.005)
    with torch.autograd.set_detect_anomaly(True):
        for step in range(2):
            recorder.mark("forward", step=step)
            found = model(changed)
            loss = ((changed - there) ** 2).mean() - (found - known) ** 2
            images = ((changed - there) ** 2).mean().detach()
            labels = -((found - known) ** 2).detach()
            recorder.mark("backward")
            loss.backward()
            recorder.mark("optimizer")
            optimizer.step()
            recorder.label(states_of([optimizer]), "optimizer_state")
            optimizer.zero_grad()
    del images, labels


# -- a cellular automaton on a volume, at a low and at the full resolution


class Cells(nn.Module):
    """Compute each cell's next state from its own and its neighborhood; the first three channels stay as they are."""

    def __init__(self, kernel: int, channels: int = 16, hidden: int = 64) -> None:
        super().__init__()
        around = {"padding": kernel // 2, "padding_mode": "reflect", "groups": channels}
        self.look = nn.Conv3d(channels, channels, kernel, **around)
        self.into, self.out = nn.Linear(2 * channels, hidden), nn.Linear(hidden, channels, bias=False)
        self.norm = nn.BatchNorm3d(hidden, track_running_stats=False)

    def around(self, x: Tensor) -> Tensor:
        seen = self.look(x)
        return torch.cat((x, seen), 1)

    def update(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 4)
        change = self.around(x)
        change = change.transpose(1, 4)
        change = self.into(change)
        change = change.transpose(1, 4)
        change = self.norm(change)
        change = change.transpose(1, 4)
        change = nn.functional.relu(change, inplace=True)
        change = self.out(change)
        awake = torch.rand(*change.shape[:-1], 1) > 0.5
        awake = awake.float().to("cuda")
        change = change * awake
        x = x + change.transpose(1, 4)
        return x.transpose(1, 4)

    def forward(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            new = self.update(x).clone()
            x = torch.cat((x[..., :3], new[..., 3:]), 4)
        return x


def grows(recorder: Recorder, model: nn.Module) -> None:
    """40 steps at a quarter of the resolution, then 20 at the full one, without gradients."""
    low, full = (60, 106, 50), (240, 424, 200)
    with torch.no_grad():
        seed = torch.zeros(1, *low, 16, device="cuda")
        recorder.mark("prediction")
        state = model["low"](seed, 40)
        state = state.permute(0, 4, 1, 2, 3)
        state = nn.functional.interpolate(state, size=full)
        state[0, :3] = torch.empty(3, *full)
        state = state.permute(0, 2, 3, 4, 1)
        state = model["full"](state, 20)


# -- what ran


Loop = Callable[[Recorder, nn.Module], None]


@dataclass(frozen=True)
class KnownProgram:
    """A program whose history was recorded: what it builds, and what it does until the record ends."""

    build: Callable[[], nn.Module]
    run: Loop
    gpu: str = "RTX 4090"  # compute capability 8.x: as the records' cuBLAS workspaces
    fills: bool = False  # whether it needs so much that the allocator gives back what it has cached


SMALL, MEDIUM = (768, 3072, 12, 12), (1024, 4096, 24, 16)


def tokens(count: int, batch: int, context: int) -> Tensor:
    return torch.randint(VOCABULARY, (count, batch, context), device="cuda")


def trains(batch: int, context: int, *, autocast: bool = False, optimizer: bool = True) -> Loop:
    def run(recorder: Recorder, model: nn.Module) -> None:
        inputs, targets = tokens(2, batch, context), tokens(2, batch, context)
        stepper = NewStates(model.parameters()) if optimizer else None
        output = loss = None
        for step in range(2):
            recorder.mark("forward", step=step)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                output = model(inputs[step])
                loss = cross_entropy(output, targets[step])
            recorder.mark("backward")
            loss.backward()
            recorder.label(gradients_of([stepper] if stepper else [], model), "gradients")
            if stepper is None:
                continue
            recorder.mark("optimizer")
            stepper.step()
            recorder.label(states_of([stepper]), "optimizer_state")
            if step == 0:
                stepper.zero_grad()
                del output, loss

    return run


def infers(
    batch: int, context: int, *, autocast: bool = False, times: int = 2, mode: Callable = torch.inference_mode
) -> Loop:
    def run(recorder: Recorder, model: nn.Module) -> None:
        inputs = tokens(times, batch, context)
        model.eval()
        with mode():
            for step in range(times):
                recorder.mark("validation", step=step)
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    model(inputs[step])

    return run


def program_of(size: tuple[int, int, int, int], context: int, run: Loop) -> KnownProgram:
    return KnownProgram(lambda: Transformer(*size, context=context), run)


PROGRAMS = {
    "cs336_medium_128_train": program_of(MEDIUM, 128, trains(4, 128)),
    "cs336_medium_256_train": program_of(MEDIUM, 256, trains(4, 256)),
    "cs336_medium_512_train_bf16": program_of(MEDIUM, 512, trains(4, 512, autocast=True)),
    "cs336_medium_128_inference": program_of(MEDIUM, 128, infers(4, 128)),
    "cs336_medium_512_inference_bf16": program_of(MEDIUM, 512, infers(4, 512, autocast=True)),
    "windows_cs336_forward_backward": program_of(SMALL, 256, trains(32, 256, optimizer=False)),
    "cs336_small_cold_no_grad": program_of(SMALL, 512, infers(4, 512, times=2, mode=torch.no_grad)),
    "turing_cnn_anomaly": KnownProgram(
        lambda: Regressor((30, 16, 32, 64), (200, 100, 20)), trains_its_input, gpu="Quadro RTX 6000"
    ),
    "octree_nca_a": KnownProgram(
        lambda: nn.ModuleDict({"low": Cells(7), "full": Cells(3)}), grows, gpu="RTX 3090", fills=True
    ),
}


def captured(program: KnownProgram) -> Trace:
    gpu = find(program.gpu)
    recorder = Recorder("cuda", kernel_target=gpu.kernel_target)
    model = program.build()
    with tensors(fake=True, gpu=gpu) as mode:
        copy = fake_copy(model, mode, FAKE_DEVICE)
        with watching(recorder, copy):
            program.run(recorder, copy)
    return recorder.trace(1, "fake")


@dataclass(frozen=True)
class Predicted:
    """A known program's step, predicted and recorded."""

    lines: tuple[str, ...]  # the peaks, and where the events differ
    outside: tuple[float, ...]  # how far the recorded peaks, allocated and reserved, are outside the bounds, as shares
    widths: tuple[float, ...]  # of the bounds, as shares of the recorded peaks


def predicted(name: str, history: History, *, events: bool = False, save: Path | None = None) -> Predicted:
    """Predict the step of one of `PROGRAMS` blind, and compare it with its history."""
    program, settings = PROGRAMS[name], AllocatorSettings()
    if program.fills:
        settings = replace(settings, capacity_bytes=find(program.gpu).capacity_bytes)
    trace = captured(program)
    content = snapshot(trace, settings)
    if save:
        save_snapshot(trace, settings, save / f"{name}.pickle")
    (ours,) = histories_of(content)
    found, here, there = compare(ours, history), replay(trace.only("point"), settings), replay_as_recorded(history)[0]
    added = found.predicted_peak_bytes - found.predicted_before_bytes
    really = found.actual_peak_bytes - found.actual_before_bytes
    reserved = max(history.reserved_bytes)
    peaks = f"{here.peak_allocated_bytes:,} predicted, {there.peak_allocated_bytes:,} recorded"
    off = here.peak_allocated_bytes / there.peak_allocated_bytes - 1, here.peak_reserved_bytes / reserved - 1
    equal = f"{found.equal_requests:,} requests equal of {found.predicted_requests:,} and {found.actual_requests:,}"
    peaks += f" ({off[0]:+.4%}); reserved {here.peak_reserved_bytes:,} and {reserved:,} ({off[1]:+.2%})"
    step = f"requested by the step above what was there {added:,} and {really:,} ({added - really:+,})"
    lines = [f"{name}: peak allocated {peaks}; {step}; {equal}"]
    for each in found.differences if events else ():
        where = f"{each.operator} {each.line.rpartition('/')[2]}"
        lines.append(f"    {each.kind:16} {each.count:>5} x {each.nbytes:>12,}  peak {each.peak_bytes:>+14,}  {where}")
    allocated, reserved_bounds = bounds(trace, settings)
    spans = (*allocated, there.peak_allocated_bytes), (*reserved_bounds, reserved)
    for label, (low, high, truth) in zip(("allocated", "reserved"), spans, strict=True):
        held = "holds the recorded peak" if low <= truth <= high else "does not hold it"
        lines.append(f"    {label}: {low:,} to {high:,} {held}")
    outside = tuple(max(low - truth, truth - high, 0) / truth for low, high, truth in spans)
    return Predicted(tuple(lines), outside, tuple((high - low) / truth for low, high, truth in spans))


def bounds(trace: Trace, settings: AllocatorSettings) -> tuple[tuple[int, int], tuple[int, int]]:
    """At least and at most, of allocated and of reserved; the same figure twice where all is known."""
    found = footprint(trace, settings)
    low, high = found.lowest, found.highest
    return (low.allocated_bytes, high.allocated_bytes), (low.reserved_bytes, high.reserved_bytes)
