"""A step of a training -> whether the same step can be taken in parts of its batch, and how.

A copy of the module takes one small step on real tensors in a child: on three samples, and on one and two of them. Loss
and gradients of the parts tell whether the loss is a mean or a sum over samples, or neither. Parameters and samples get
a little noise first, since a layer of zeros, or equal samples, would hide what couples the samples. Random numbers are
replaced by constants.

Private names of Lightning were checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memguard.core.capture.averages import Average, Averages
from lightning_memguard.core.capture.batch import map_tensors, tensors_in
from lightning_memguard.core.capture.capture import CaptureFailedError, Isolated
from lightning_memguard.core.capture.fake import seed_all
from lightning_memguard.core.capture.split import (
    Cut,
    Rule,
    Rules,
    are_alike,
    cut_of,
    is_close,
    join,
    numbers_in,
    part_of,
    rule_of,
)
from lightning_memguard.core.device.host import available_memory
from lightning_memguard.training.adapter.logged import Journal, metrics_of, saved_metrics
from lightning_memguard.training.adapter.no_collectives import NAMES

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule
    from typing_extensions import Self

    from lightning_memguard.training.adapter.program import LightningProgram

_SAMPLES, _FIRST = 3, 1  # the batch that is tried, and the first of its two parts
_NOISE = 0.02
_GRADIENT_ERROR, _GRADIENT_FLOOR = 1e-3, 1e-6  # of a parameter's gradient, and of the norm of all
_MOST_SHARE = 0.2  # of the free host memory, for a copy of the module with two sets of gradients
_WAIT_SECONDS = {"cpu": 30.0}  # for the child, once all else is known; it goes on next to a GPU's training
_WAIT_OTHERS_SECONDS = 2.0
_LATE_SECONDS = 60.0  # once it is needed
_UNKNOWN = "whether it is the same step is unknown: {}"
_NORMS = "batch norm ({}) would normalize each part by its own statistics"


@dataclass(frozen=True)
class SameStep:
    """How a step is taken in parts of its batch.

    Attributes:
        cut: how batches are cut; None where that follows from the first dimensions alone.
        weighting: whether the loss is the sum over samples or a mean: over samples, or over what `averages` counts.
        changes: what would not be as in one step, in plain words; empty where it is the same step.
        rules: how logged values, and what the step returns, are combined.
        draws: whether it draws random numbers.
        buffers: names of buffers that it changes.
        atomic: whether a backward pass adds to each gradient at most once.
        collectives: whether it talks to other ranks by itself.
        in_place: whether it writes to the states of metrics, instead of replacing them.
        averages: the places, among all divisions of the step, of those that parts are weighted by.
        counted: whether these do not count samples alone, but depend on values.
    """

    cut: Cut | None = None
    weighting: Literal["mean", "sum"] = "mean"
    changes: tuple[str, ...] = ()
    rules: Rules = field(default_factory=Rules)
    draws: bool = True
    buffers: tuple[str, ...] = ()
    atomic: bool = True
    collectives: bool = False
    in_place: bool = True
    averages: tuple[int, ...] = ()
    counted: bool = False


def unknown(reason: str) -> SameStep:
    """A step that was not tried in parts."""
    return SameStep(changes=(reason,))


class Probe:
    """Finds out in a child whether a step can be taken in parts; open it before anything else runs on the device."""

    def __init__(self, program: LightningProgram) -> None:
        self._device = program.device.type
        self._found: SameStep | None = None
        self._isolated: Isolated[int, SameStep] | None = None
        self._reason = obstacle(program)
        if not self._reason:
            work = try_parts if program.trains else try_evaluation
            self._isolated = Isolated[int, SameStep](lambda _: work(program), most=1)

    def start(self) -> Self:
        """Begin."""
        if self._isolated is not None:
            self._isolated.start(0)
        return self

    def wait(self) -> None:
        """Wait a while for the result; where it is still missing, one that trains on the CPU gives it up."""
        if self._isolated is None or self._isolated.is_done(0, _WAIT_SECONDS.get(self._device, _WAIT_OTHERS_SECONDS)):
            self.result()
        elif self._device == "cpu":
            self.give_up(_UNKNOWN.format("trying it took too long"))

    @property
    def found(self) -> SameStep | None:
        """What was found so far."""
        return self._found

    def result(self) -> SameStep:
        """What was found."""
        if self._found is None and self._isolated is None:
            self._found = unknown(self._reason)
        elif self._found is None and self._isolated is not None:
            try:
                done = self._isolated.is_done(0, _LATE_SECONDS)
                self._found = self._isolated.result(0) if done else unknown(_UNKNOWN.format("trying it took too long"))
            except CaptureFailedError as error:
                self._found = unknown(_UNKNOWN.format(f"trying it failed ({error.reason})"))
            self.close()
        return self._found or unknown(self._reason)

    def give_up(self, reason: str) -> None:
        """Do without a result."""
        self._found = self._found or unknown(reason)
        self.close()

    def close(self) -> None:
        """End the child."""
        if self._isolated is not None:
            self._isolated.close()
            self._isolated = None


def obstacle(program: LightningProgram) -> str:
    """Why a step cannot be tried; empty where it can."""
    if program.trains and not program.module.automatic_optimization:
        return "with manual optimization, training_step calls the optimizers itself"
    norms = _batch_norms(program.module)
    if norms and program.trains:
        return _NORMS.format(_listed(norms, "layer"))
    nbytes = sum(p.numel() * 4 for p in program.module.parameters())
    free = available_memory()
    if free is not None and 4 * nbytes > _MOST_SHARE * free.free_bytes:
        return _UNKNOWN.format("a copy of the module in host memory, to try it on, would be too large")
    return ""


def _batch_norms(module: nn.Module) -> list[str]:
    """Names of the layers whose output for a sample depends on the others."""
    return [name or "self" for name, each in module.named_modules() if isinstance(each, _BatchNorm) and each.training]


def try_parts(program: LightningProgram) -> SameStep:
    """The same in this process, on copies.

    Raises:
        CannotTraceError: batches cannot be cut by sample.
        Exception: whatever the user's own code raised.
    """
    return _tried(program, _Trial)


def try_evaluation(program: LightningProgram) -> SameStep:
    """The same for a step of validation or test.

    Raises: see `try_parts`.
    """
    return _tried(program, _EvaluationTrial)


def _tried(program: LightningProgram, kind: type[_Trial]) -> SameStep:
    unit = program.multiple
    sizes = _SAMPLES * unit, (_SAMPLES + 1) * unit
    larger: list[Any] = []
    found: list[SameStep] = []

    def keep(_: LightningModule, batch: Any, __: Callable[[Any], Any]) -> None:
        larger.append(batch)

    def examine(module_copy: LightningModule, batch: Any, step: Callable[[Any], Any]) -> None:
        cut = cut_of(batch, larger[0], *sizes)
        found.append(kind(module_copy, step, cut, unit).result(batch))

    program.with_first_step(sizes[1], keep)
    program.with_first_step(sizes[0], examine)
    return found[0]


@dataclass
class _Pass:
    """One forward and backward pass."""

    loss: torch.Tensor
    gradients: list[torch.Tensor | None]
    output: Any
    metrics: list[torch.Tensor]
    journal: Journal
    averages: list[Average]


class _Trial:
    """A module's copy, and a step of it that is taken on a batch and on two parts of it."""

    def __init__(self, module: LightningModule, step: Callable[[Any], Any], cut: Cut, unit: int) -> None:
        self.module: Any = module
        self.step = step
        self.cut = cut
        self.unit = unit
        self.parameters = [each for each in module.float().parameters() if each.requires_grad]
        self.buffers = {name: each.detach().clone() for name, each in module.named_buffers()}
        self.metrics = metrics_of(module)
        self.collectives = self.in_place = False
        self.draws = _Draws()
        self.averages = Averages()

    def result(self, batch: Any) -> SameStep:
        _add_noise(self.parameters)
        batch = map_tensors(batch, _noisy)
        put_back = saved_metrics(self.metrics)
        total, first = _SAMPLES * self.unit, _FIRST * self.unit
        counts = [first, total - first]
        before, versions = _attributes(self.module), _versions(self.parameters)
        with self._watched():
            whole = self._pass(batch, total)
            put_back()
            changes = self._left_behind(before, versions)
            places = [(0, first), (first, total)]
            parts = [part_of(batch, self.cut, total, *place) for place in places]
            passes = [self._pass(part, count) for part, count in zip(parts, counts, strict=True)]
            atomic = self._is_atomic(parts[0])
        weighting, unequal = self._weighting(whole, passes, counts)
        return SameStep(
            self.cut,
            weighting.kind,
            (*changes, *unequal, *self._unequal_metrics(whole, passes[-1])),
            _rules(whole, passes, counts, weighting.weights),
            self.draws.seen,
            tuple(self._changed_buffers()),
            atomic,
            self.collectives,
            self.in_place,
            weighting.averages,
            weighting.counted,
        )

    def _weighting(self, whole: _Pass, parts: Sequence[_Pass], counts: Sequence[int]) -> tuple[_Weighting, list[str]]:
        found = _weighting(whole, parts, counts)
        unequal = ["the loss is neither a mean nor the sum of what each sample contributes"] if found is None else []
        return found or _Weighting("mean"), unequal

    def _pass(self, batch: Any, count: int) -> _Pass:
        """Metrics add up over the passes; all else is as before the first."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
        states = [each for metric in self.metrics for each in _tensors_of(metric)]
        versions = _versions(states)
        journal = Journal(self.module.trainer._results)
        journal.begin(batch, count)
        self.averages = Averages()
        try:
            loss, output = self._run(batch)
        finally:
            journal.end()
        self.in_place |= _versions(states) != versions
        gradients = [None if p.grad is None else p.grad.clone() for p in self.parameters]
        metrics = [_state_of(metric, name) for metric in self.metrics for name in metric._defaults]
        return _Pass(loss, gradients, output, metrics, journal, self.averages.found())

    def _run(self, batch: Any) -> tuple[torch.Tensor, Any]:
        return self._backward(batch)

    def _backward(self, batch: Any, *, keep: bool = False) -> tuple[torch.Tensor, Any]:
        seed_all(0)
        randoms = _random_numbers()
        for parameter in self.parameters if not keep else ():
            parameter.grad = None
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            with self.averages:
                output = self.step(batch)
            loss = output.get("loss") if isinstance(output, dict) else output
            if not isinstance(loss, torch.Tensor):
                raise TypeError("training_step returned no loss")
            loss.backward()
        self.draws.seen |= randoms != _random_numbers()
        rest = {k: v for k, v in output.items() if k != "loss"} if isinstance(output, dict) else {}
        return loss.detach(), map_tensors(rest, torch.Tensor.detach)

    def _is_atomic(self, batch: Any) -> bool:
        """Whether a second backward pass has added to each gradient once."""
        before = [p.grad._version if p.grad is not None else 0 for p in self.parameters]
        self._backward(batch, keep=True)
        after = [p.grad._version if p.grad is not None else 0 for p in self.parameters]
        return all(now - then <= 1 for then, now in zip(before, after, strict=True))

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Notice random numbers and calls to other ranks."""
        own_log = self.module.log

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            self.collectives |= bool(kwargs.get("sync_dist")) and kwargs.get("on_step") is not False
            own_log(name, value, *args, **kwargs)

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                self.collectives = True
                return call(*args, **kwargs)

            return run

        with ExitStack() as exits:
            exits.enter_context(mock.patch.object(self.module, "log", log))
            strategy = self.module.trainer.strategy
            exits.enter_context(mock.patch.object(strategy, "all_gather", watched(strategy.all_gather)))
            for name in NAMES if dist.is_available() else ():
                if hasattr(dist, name):
                    exits.enter_context(mock.patch.object(dist, name, watched(getattr(dist, name))))
            exits.enter_context(self.draws)
            yield

    # -- what is not the same

    def _left_behind(self, before: dict[str, Any], versions: list[int]) -> list[str]:
        changes = []
        if _versions(self.parameters) != versions:
            changes.append("training_step changes parameters")
        buffers = self._changed_buffers()
        if buffers:
            changes.append(f"training_step changes {_listed(buffers, 'buffer')} once a part")
        attributes = [name for name, value in _attributes(self.module).items() if before.get(name) != value]
        if attributes:
            changes.append(f"training_step sets {_listed(attributes, 'attribute')} of the module once a part")
        return changes

    def _changed_buffers(self) -> list[str]:
        inside = {id(each) for metric in self.metrics for each in metric.buffers()}
        return [
            name
            for name, buffer in self.module.named_buffers()
            if id(buffer) not in inside and not torch.equal(buffer, self.buffers.get(name, buffer))
        ]

    def _unequal_metrics(self, whole: _Pass, last: _Pass) -> list[str]:
        names = [f"{type(metric).__name__}" for metric in self.metrics for _ in metric._defaults]
        pairs = zip(names, whole.metrics, last.metrics, strict=True)
        unequal = {name for name, mine, theirs in pairs if not is_close(mine, theirs)}
        return [f"the metric {name} depends on how its batches are cut" for name in sorted(unequal)]


class _EvaluationTrial(_Trial):
    """The same without gradients: what a step logs and returns is all there is."""

    def _run(self, batch: Any) -> tuple[torch.Tensor, Any]:
        seed_all(0)
        randoms = _random_numbers()
        with torch.autocast("cpu", enabled=False):
            output = self.step(batch)
        self.draws.seen |= randoms != _random_numbers()
        return torch.zeros(()), map_tensors(output, torch.Tensor.detach)

    def _is_atomic(self, _: Any) -> bool:
        return True

    def _weighting(self, whole: _Pass, parts: Sequence[_Pass], counts: Sequence[int]) -> tuple[_Weighting, list[str]]:
        rules = _rules(whole, parts, counts)
        logged = {key for each in (whole, *parts) for key, _, _ in each.journal.values()}
        unequal = sorted(key.rpartition(".")[2] for key in logged if key not in rules.by_name)
        changes = [f"`{name}`, which it logs, does not follow from its values for parts of a batch" for name in unequal]
        joined = join([each.output for each in parts], counts, rules, "output")
        if not are_alike(joined, whole.output):
            changes.append("what it returns cannot be joined from what it returns for parts of a batch")
        return _Weighting("mean"), changes


@dataclass(frozen=True)
class _Weighting:
    kind: Literal["mean", "sum"]
    averages: tuple[int, ...] = ()
    counted: bool = False
    weights: Sequence[float] = ()


def _weighting(whole: _Pass, parts: Sequence[_Pass], counts: Sequence[int]) -> _Weighting | None:
    """How parts are weighted so that they add up to the whole: by their samples, not at all, or by what is counted."""
    places = _that_add_up(whole, parts)
    shares = {place: [part.averages[place].count / whole.averages[place].count for part in parts] for place in places}
    by_samples = [count / sum(counts) for count in counts]
    for kind, weights in (("mean", by_samples), ("sum", [1.0] * len(parts)), *(("counts", s) for s in shares.values())):
        loss = sum(part.loss * weight for part, weight in zip(parts, weights, strict=True))
        if not (is_close(whole.loss, loss) and _same_gradients(whole, parts, weights)):
            continue
        if kind == "sum":
            return _Weighting("sum")
        same = tuple(place for place, share in shares.items() if is_close(share, weights))
        values = kind == "counts" or any(whole.averages[place].elements is None for place in same)
        return _Weighting("mean", same, values, weights)
    return None


def _that_add_up(whole: _Pass, parts: Sequence[_Pass]) -> list[int]:
    """The places of divisions by numbers that add up over parts, as counts do."""
    if any(len(part.averages) != len(whole.averages) for part in parts):
        return []
    return [
        place
        for place, average in enumerate(whole.averages)
        if average.count > 0 and is_close(average.count, sum(part.averages[place].count for part in parts))
    ]


def _same_gradients(whole: _Pass, parts: Sequence[_Pass], weights: Sequence[float]) -> bool:
    norm = sum(float(each.norm()) ** 2 for each in whole.gradients if each is not None) ** 0.5
    if not norm > 0:
        return False
    for place, gradient in enumerate(whole.gradients):
        given = [part.gradients[place] for part in parts]
        pairs = [(each, weight) for each, weight in zip(given, weights, strict=True) if each is not None]
        if gradient is None and not pairs:
            continue
        expected = torch.zeros_like(pairs[0][0]) if gradient is None else gradient.clone()
        size = float(expected.norm())
        for each, weight in pairs:
            expected -= each * weight
        if not float(expected.norm()) <= _GRADIENT_ERROR * size + _GRADIENT_FLOOR * norm:
            return False
    return True


def _rules(whole: _Pass, parts: Sequence[_Pass], counts: Sequence[int], weights: Sequence[float] = ()) -> Rules:
    """How each value that was logged, and each number returned, follows from those of the parts."""
    rules: dict[str, Rule] = {}
    one = {key: values[0] for key, values, _ in whole.journal.values()}
    logged: list[dict[str, Any]] = [{key: values[0] for key, values, _ in part.journal.values()} for part in parts]
    one |= {f"output{name}": value for name, value in numbers_in(whole.output).items()}
    for part, values in zip(parts, logged, strict=True):
        values |= {f"output{name}": value for name, value in numbers_in(part.output).items()}
    for name, value in one.items():
        if all(name in values for values in logged):
            rule = rule_of(value, [values[name] for values in logged], counts, weights)
            if rule is not None:
                rules[name] = rule
    return Rules(rules)


def _tensors_of(metric: Any) -> list[torch.Tensor]:
    states = [getattr(metric, name) for name in metric._defaults]
    return [each for each in states if isinstance(each, torch.Tensor)]


def _state_of(metric: Any, name: str) -> torch.Tensor:
    value = getattr(metric, name)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    rows = [each.detach().reshape(-1) for each in value if isinstance(each, torch.Tensor)]
    return torch.cat(rows) if rows else torch.zeros(0)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Of a module's own plain attributes, what shows whether they were changed: values, lengths, identities."""
    found: dict[str, Any] = {}
    for path, child in module.named_modules():
        if hasattr(child, "_defaults") and hasattr(child, "_forward_cache"):
            continue  # a metric
        for name, value in vars(child).items():
            if name not in _NOT_OWN and not name.startswith(("_forward", "_backward")):
                found[f"{path}.{name}".lstrip(".")] = _shown(value)
    return found


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each was written to; tensors made in inference mode do not count it."""
    return [0 if each.is_inference() else each._version for each in tensors]


def _shown(value: Any) -> Any:
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), *_versions([value])
    return id(value), len(value) if isinstance(value, (list, tuple, dict, set)) else 0


# what Lightning and torch themselves set while a step runs
_NOT_OWN = {"_current_fx_name", "_metric_attributes", "training_step", "log", "_log_hyperparams", "_trainer", "trainer"}


def _listed(names: Sequence[str], kind: str) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the {kind}{'s' if len(names) > 1 else ''} {shown}{more}"


# -- noise and random numbers


def _add_noise(parameters: Sequence[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in parameters:
            size = float(each.float().square().mean().sqrt()) or 1.0
            each.add_(_NOISE * size * torch.randn(each.shape, generator=generator))


def _noisy(tensor: torch.Tensor) -> torch.Tensor:
    """Floats a little smaller each in its own way, so that they stay in their range and are not all equal."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(2)
    return tensor.float() * (1 - 5 * _NOISE * torch.rand(tensor.shape, generator=generator))


def _random_numbers() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators."""
    numpy: Any = np.random.get_state()  # noqa: NPY002 - users draw from the global one
    return random.getstate(), numpy[1].tolist()


class _Draws(TorchDispatchMode):
    """Has constants drawn in place of random numbers, and an order that moves every sample."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if not name.startswith(_RANDOM):
            return func(*args, **(kwargs or {}))
        torch.default_generator.manual_seed(0)  # whatever was drawn before, the first number is the same
        output = func(*args, **(kwargs or {}))
        self.seen = True
        if name.startswith("randperm"):
            return output.copy_(torch.arange(len(output)).roll(1))
        if name.startswith("native_dropout"):
            return args[0].clone(), torch.ones_like(output[1])
        for each in tensors_in(output if isinstance(output, (tuple, list)) else [output]):
            each.fill_(1 if name.startswith("bernoulli") else each.flatten()[0].item())
        return output


_RANDOM = (
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "native_dropout",
    "normal",
    "poisson",
    "rand",
    "rrelu_with_noise",
    "uniform",
)
