"""What would make a step fit: each remedy is run on a copy of the step, alone and in pairs.

A remedy turns a program into another one. Nothing is reckoned by a rule of thumb: what cannot be run is left out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any
from unittest import mock
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer, _adafactor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from lightning_memguard.core.capture.fake import UnknownFloat
from lightning_memguard.core.capture.predict import Prediction, capture, predict
from lightning_memguard.core.capture.program import LoopProgram, Program
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.decision.advice import Advice, by_savings
from lightning_memguard.core.decision.decision import Budget
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.trace.trace import Trace
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.adapter import ddp
from lightning_memguard.training.adapter.program import LightningProgram

_KINDS_PAIRED = 4  # the best remedy of each of so many kinds is tried in pairs: at most six
_BLOCKS_TRIED = 2  # sorts of repeated blocks whose checkpointing is tried
_FIRST_WITH_BF16 = (8, 0)  # compute capability; older GPUs are given float16
_LISTS = (nn.ModuleList, nn.Sequential)
_FEW_PATHS = 4  # are all named
_MOST_SHARES = 10  # a batch is halved no more often than this


@dataclass(frozen=True)
class Advised:
    """All that came of trying.

    Attributes:
        advice: what saves memory, most first.
        left_out: the others by name, and why.
        not_tried: how many were not tried, for lack of time.
    """

    advice: tuple[Advice, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    not_tried: int = 0


def advise(
    prediction: Prediction,
    batch_size: int,
    budget: Budget,
    *,
    combinations: bool = True,
    said: Callable[[str], None] | None = None,
) -> tuple[Advice, ...]:
    """Find out what would make a step take less memory, by predicting it with each remedy and with two of them.

    Args:
        prediction: the step as it is.
        batch_size: samples a batch.
        budget: what the step is to fit into.
        combinations: try pairs of the best remedies too.
        said: told the name of each remedy before it is tried, and why one was left out.

    Returns:
        What saves memory, most first.

    Example:
        ```python
        prediction = predict(program, 64, settings, scalable=False)
        for each in advise(prediction, 64, budget, said=print):
            print(text(each))
        ```
    """
    return remedies_tried(prediction, batch_size, budget, combinations=combinations, said=said).advice


def remedies_tried(
    prediction: Prediction,
    batch_size: int,
    budget: Budget,
    *,
    combinations: bool = True,
    said: Callable[[str], None] | None = None,
    most_seconds: float | None = None,
) -> Advised:
    """The same as `advise`, with what was left out; nothing is begun after ``most_seconds``."""
    until = None if most_seconds is None else time.monotonic() + most_seconds
    run = _Run(prediction, batch_size, budget, said or _silent, until)
    singles = [
        (family, found)
        for family in _families(prediction, batch_size)
        if (found := run.mildest([(remedy,) for remedy in family]))
    ]
    singles = _best_blocks(singles)
    known = [found for _, found in singles]
    for first, second in itertools.combinations(_to_pair(singles), 2) if combinations else ():
        pair = run.mildest(list(itertools.product(first[0], second[0])))
        if pair and pair.saved_bytes > max(first[1].saved_bytes, second[1].saved_bytes):
            known.append(pair)
    return Advised(by_savings(known), tuple(run.left_out), run.not_tried)


# -- trying


@dataclass(frozen=True)
class _Remedy:
    """One thing to change: ``changed`` gives the program with it. Two of one ``kind`` do not go together.

    ``share`` is how many times smaller its batches are. ``during`` is what its run has to stand in.
    """

    name: str
    kind: str
    how: str
    cost: str
    changed: Callable[[Any], Program]
    share: int = 1
    during: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


_Family = tuple[_Remedy, ...]
"""One remedy, or the degrees of one, from the mildest to the strongest."""

_Single = tuple[_Family, Advice]


class _DoesNotApplyError(CannotTraceError):
    """A remedy has nothing to work on, or is in use already."""


@dataclass
class _Run:
    """The step as it is, what has been tried of it so far, and how long that may take."""

    prediction: Prediction
    batch_size: int
    budget: Budget
    said: Callable[[str], None]
    until: float | None = None
    left_out: list[tuple[str, str]] = field(default_factory=list)
    not_tried: int = 0

    @property
    def is_over(self) -> bool:
        return self.until is not None and time.monotonic() > self.until

    def mildest(self, degrees: Sequence[_Family]) -> Advice | None:
        """Of remedies from mildest to strongest: the mildest that fits; where none does, the mildest of all."""
        if self.is_over:
            self.not_tried += 1
            return None
        first = self.advice_for(degrees[0])
        if first is None or first.fits or len(degrees) == 1:
            return first
        best = self.advice_for(degrees[-1])
        if best is None or not best.fits:
            return first
        too_mild, enough = 0, len(degrees) - 1
        while enough - too_mild > 1 and not self.is_over:
            middle = (too_mild + enough) // 2
            found = self.advice_for(degrees[middle])
            if found is None or not found.fits:
                too_mild = middle
            else:
                enough, best = middle, found
        return best

    def advice_for(self, remedies: Sequence[_Remedy]) -> Advice | None:
        """The step with these remedies; None where it cannot be run with them, or they save nothing."""
        name = " + ".join(remedy.name for remedy in remedies)
        self.said(name)
        try:
            found = self.footprint_with(remedies)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything when it is run otherwise
            self.leave_out(name, _reason(error))
            return None
        saved = self.prediction.footprint_at(self.batch_size).most_device_bytes - found.most_device_bytes
        if saved <= 0:
            self.leave_out(name, "it saves nothing here")
            return None
        return Advice(
            tuple(remedy.name for remedy in remedies),
            tuple(remedy.how for remedy in remedies),
            tuple(remedy.cost for remedy in remedies),
            found,
            saved,
            found.most_device_bytes <= self.budget.usable_bytes,
        )

    def footprint_with(self, remedies: Sequence[_Remedy]) -> Footprint:
        """Captured in the way in which the step as it is was, so that the two can be compared."""
        known = self.prediction
        program: Any = functools.reduce(lambda program, remedy: remedy.changed(program), remedies, known.program)
        size = self.batch_size
        with contextlib.ExitStack() as during:
            for remedy in remedies:
                size //= remedy.share
                during.enter_context(remedy.during())
            if known.method in ("fake", "worst-case"):
                changed = replace(known, program=program, growth=None, traces={})
            else:
                changed = predict(program, size, known.settings, context_bytes=known.context_bytes, scalable=False)
                changed = replace(changed, share=known.share)
            if changed.method != known.method:
                raise CannotTraceError(f"it could be predicted by its {changed.method} alone")
            return changed.footprint_at(size)

    def leave_out(self, name: str, why: str) -> None:
        self.left_out.append((name, why))
        self.said(f"{name}: left out, {why}")


def _silent(_: str) -> None:
    return None


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200] if isinstance(error, CannotTraceError) else f"{type(error).__name__}: {lines[0][:200]}"


def _best_blocks(singles: Sequence[_Single]) -> list[_Single]:
    """Where several sorts of blocks could be checkpointed, the one that saves most."""
    blocks = [single for single in singles if single[0][0].kind == "checkpointing"]
    best = max(blocks, key=_saved, default=None)
    return [single for single in singles if single not in blocks or single is best]


def _to_pair(singles: Sequence[_Single]) -> list[_Single]:
    """The best of each kind, of the kinds that save most."""
    best: dict[str, _Single] = {}
    for single in sorted(singles, key=_saved, reverse=True):
        best.setdefault(single[0][0].kind, single)
    return list(best.values())[:_KINDS_PAIRED]


def _saved(single: _Single) -> int:
    return single[1].saved_bytes


# -- remedies


def _families(prediction: Prediction, batch_size: int) -> Iterator[_Family]:
    """All that apply, those first that change least in the result: they are tried where time is short."""
    program = prediction.program
    if not _trains(program):
        yield from _precisions(program)
        return
    yield from _fused_or_not()
    yield from _bucket_views(program)
    layout = _layout(program)
    yield from _checkpointing(layout, prediction.trace_at(batch_size))
    yield from _accumulation(program, batch_size)
    yield from _precisions(program)
    yield from _smaller_states(program)
    yield from _frozen(layout)


def _trains(program: Program) -> bool:
    return program.stage == "fit" if isinstance(program, LightningProgram) else getattr(program, "training", False)


def _precisions(program: Any) -> Iterator[_Family]:
    now = program.precision or program.trainer.precision if isinstance(program, LightningProgram) else program.precision
    bits = "bf16" if program.gpu is None or program.gpu.compute_capability >= _FIRST_WITH_BF16 else "16"
    digits, scaled = ("3", "") if bits == "bf16" else ("3 to 4", ", and losses are scaled")
    costs = {
        f"{bits}-mixed": f"matrix products and their results have {digits} decimal digits instead of 7{scaled}",
        f"{bits}-true": f"weights and optimizer state have {digits} decimal digits too, so small updates are lost",
    }
    for name, cost in costs.items():
        if now in ("32-true", "32", 32) or (name.endswith("-true") and not str(now).endswith("-true")):
            how = f'Trainer(precision="{name}")' if isinstance(program, LightningProgram) else f'precision="{name}"'
            yield (_Remedy(name, "precision", how, cost, functools.partial(_with_precision, name=name)),)


def _with_precision(program: Any, name: str) -> Program:
    return _renewed(program, precision=name)


def _renewed(program: Any, **changes: Any) -> Program:
    """The program with other fields; what its batches look like is then to be seen anew."""
    fresh: dict[str, Any] = {"seen": {}} if isinstance(program, LightningProgram) else {}
    renewed: Program = replace(program, **fresh, **changes)
    return renewed


def _accumulation(program: Any, batch_size: int) -> Iterator[_Family]:
    ours = isinstance(program, LightningProgram)
    if ours and not getattr(program.module, "automatic_optimization", True):
        return  # when to step is written in the module itself
    now = program.accumulate_grad_batches or program.trainer.accumulate_grad_batches if ours else 1
    shares = [1 << doubling for doubling in range(1, _MOST_SHARES) if 1 << doubling <= batch_size]
    if shares:
        yield tuple(_accumulating(ours, now * share, batch_size // share, share) for share in shares)


def _accumulating(ours: bool, batches: int, size: int, share: int) -> _Remedy:
    how = f"Trainer(accumulate_grad_batches={batches})" if ours else f"an optimizer step every {batches} batches"
    return _Remedy(
        f"accumulation over {batches} batches of {size}",
        "batch size",
        f"batch_size={size}, {how}",
        f"{share} forward and backward passes for one, each on fewer samples (batch norm sees these alone)",
        functools.partial(_renewed, accumulate_grad_batches=batches) if ours else _accumulating_loop,
        share=share,
    )


class _AccumulatingLoop(LoopProgram):
    """A plain loop whose batches find the gradients of the batch before, as all but the first of a step do."""

    def _step(self, recorder: Recorder, module_copy: nn.Module, batch: Any) -> Any:
        learns = [parameter for parameter in module_copy.parameters() if parameter.requires_grad]
        for parameter in learns:
            parameter.grad = torch.zeros_like(parameter)
        recorder.label([parameter.grad for parameter in learns], "gradients")
        return super()._step(recorder, module_copy, batch)


def _accumulating_loop(program: LoopProgram) -> Program:
    return _AccumulatingLoop(**{each.name: getattr(program, each.name) for each in fields(program)})


def _bucket_views(program: Any) -> Iterator[_Family]:
    strategy = getattr(program, "strategy", None)
    if not ddp.wraps_in_ddp(strategy) or ddp.Arguments.of(strategy).gradient_as_bucket_view:
        return
    yield (
        _Remedy(
            "gradient_as_bucket_view",
            "strategy",
            "DDPStrategy(gradient_as_bucket_view=True)",
            "none, unless your code calls detach_() on gradients",
            functools.partial(_renewed, strategy=ddp.with_bucket_views(strategy)),
        ),
    )


# -- other optimizers


def _fused_or_not() -> Iterator[_Family]:
    yield (
        _Remedy(
            "fused optimizer",
            "optimizer",
            "give the optimizer fused=True",
            "none: one kernel updates all parameters, most often faster",
            _with_optimizer(functools.partial(_same_but, fused=True)),
        ),
    )
    yield (
        _Remedy(
            "per-parameter optimizer",
            "optimizer",
            "give the optimizer foreach=False",
            "a slower optimizer step: one parameter after the other",
            _with_optimizer(functools.partial(_same_but, foreach=False)),
        ),
    )


def _smaller_states(program: Program) -> Iterator[_Family]:
    if program.device.type == "cuda":  # where its kernels run
        yield (
            _Remedy(
                "8-bit optimizer states",
                "optimizer",
                "bitsandbytes.optim.AdamW8bit(parameters, lr=...)",
                "moments are rounded to 8 bits in blocks, which seldom shows; needs the package bitsandbytes",
                _with_optimizer(_eight_bit),
            ),
        )
    yield (
        _Remedy(
            "Adafactor",
            "optimizer",
            "torch.optim.Adafactor(parameters, lr=...)",
            "keeps second moments by row and column and no momentum: another learning rate, a slower optimizer step",
            _with_optimizer(_adafactor_of),
            during=lambda: mock.patch.object(_adafactor, "max", _larger, create=True),
        ),
    )
    yield (
        _Remedy(
            "SGD",
            "optimizer",
            "torch.optim.SGD(parameters, lr=...), without momentum",
            "no momentum and no step size of each parameter's own: another learning rate, slower or no convergence",
            _with_optimizer(_plain_sgd),
        ),
    )


def _with_optimizer(swap: Callable[[Optimizer], Optimizer]) -> Callable[[Any], Program]:
    """Turn programs into those whose optimizers are replaced as soon as they are made."""

    def change(module_copy: Any) -> None:
        made = module_copy.configure_optimizers
        module_copy.configure_optimizers = lambda: _replaced(made(), swap)

    def changed(program: Any) -> Program:
        if not isinstance(program, LoopProgram):
            return _changed(program, change)
        made = program.optimizer
        if made is None:
            raise _DoesNotApplyError("there is no optimizer")
        return replace(program, optimizer=lambda parameters: swap(made(parameters)))

    return changed


def _replaced(made: Any, swap: Callable[[Optimizer], Optimizer]) -> Any:
    """What ``configure_optimizers`` gave, with other optimizers, whose rates the same schedulers set."""
    others = {id(old): swap(old) for old in tree_leaves(made) if isinstance(old, Optimizer)}
    if not others:
        raise _DoesNotApplyError("there is no optimizer")
    for scheduler in tree_leaves(made):
        if id(getattr(scheduler, "optimizer", None)) in others:
            scheduler.optimizer = others[id(scheduler.optimizer)]
    return tree_map(lambda leaf: others.get(id(leaf), leaf), made)


def _same_but(optimizer: Optimizer, **setting: bool) -> Optimizer:
    name, value = next(iter(setting.items()))
    if name not in optimizer.defaults:
        raise _DoesNotApplyError(f"{type(optimizer).__name__} has no {name}=")
    if all(group[name] is value for group in optimizer.param_groups):
        raise _DoesNotApplyError(f"it has {name}={value} already")
    groups = [{k: v for k, v in group.items() if k not in ("fused", "foreach")} for group in optimizer.param_groups]
    make: Any = type(optimizer)
    other: Optimizer = make(groups, **setting)
    return other


def _adafactor_of(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, torch.optim.Adafactor):
        raise _DoesNotApplyError("it is Adafactor already")
    return _of_class(torch.optim.Adafactor, optimizer)


def _plain_sgd(optimizer: Optimizer) -> Optimizer:
    if isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups):
        raise _DoesNotApplyError("it is SGD without momentum already")
    return _of_class(torch.optim.SGD, optimizer)


def _eight_bit(optimizer: Optimizer) -> Optimizer:
    if "8bit" in type(optimizer).__name__.lower():
        raise _DoesNotApplyError("its states have 8 bits already")
    if "adam" not in type(optimizer).__name__.lower():
        raise _DoesNotApplyError(f"it is {type(optimizer).__name__}, and the one with 8 bits is Adam")
    return _of_class(EightBitAdam, optimizer)


def _of_class(kind: Any, optimizer: Optimizer) -> Optimizer:
    """Another optimizer for the same groups of parameters, with its own defaults, and what schedulers look for."""
    groups = [{"params": group["params"], "lr": group.get("lr", 1e-3)} for group in optimizer.param_groups]
    other: Optimizer = kind(groups)
    for mine, theirs in zip(other.param_groups, optimizer.param_groups, strict=True):
        for name, value in theirs.items():
            mine.setdefault(name, value)
    return other


def _larger(first: float, second: float) -> float:
    """``max`` for Adafactor, which scales its update by a norm. Fake tensors do not know it; no block depends on it."""
    return first if isinstance(second, UnknownFloat) else max(first, second)


class EightBitAdam(Optimizer):
    """What ``bitsandbytes.optim.AdamW8bit`` keeps; for predictions alone, since it updates nothing.

    Two moments of a byte an element, and for each 256 of them a float32 scale; 32 bits for tensors below 4096
    elements; two tables of 256 float32 for all. The update is one kernel that takes nothing. Read in bitsandbytes 0.49,
    ``Optimizer2State.init_state`` in bitsandbytes/optim/optimizer.py (blocks had 2048 elements before 0.45).
    """

    block_elements = 256
    min_8bit_elements = 4096

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.tables: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the states of parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = self._states_of(parameter)
        return loss

    def _states_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        small = parameter.numel() < self.min_8bit_elements
        dtype = torch.float32 if small else torch.uint8
        moments = {f"state{at}": torch.zeros_like(parameter, dtype=dtype) for at in (1, 2)}
        if small:
            return moments
        blocks = -(-parameter.numel() // self.block_elements)
        for at in (1, 2):
            if f"qmap{at}" not in self.tables:
                self.tables[f"qmap{at}"] = parameter.new_empty(256, dtype=torch.float32)
            moments[f"absmax{at}"] = parameter.new_zeros(blocks, dtype=torch.float32)
        return {**moments, **self.tables}


# -- changes to the module


def _changed(program: Any, change: Callable[[Any], None]) -> Program:
    """The program whose copies are changed before they run."""
    if isinstance(program, LightningProgram):
        return _renewed(program, changes=(*program.changes, change))
    done: WeakSet[Any] = WeakSet()
    step = program.step

    def changing_first(model: Any, batch: Any) -> Any:
        if model not in done:
            change(model)
            done.add(model)
        return step(model, batch)

    return _renewed(program, step=changing_first)


@dataclass(frozen=True)
class _Blocks:
    """Modules of one class that stand side by side, by path; ``how`` is an expression that gives them."""

    name: str
    how: str
    paths: tuple[str, ...]

    def held_bytes(self, trace: Trace) -> int:
        """What was kept in them for the backward pass."""
        inside = {*self.paths}
        return sum(
            event.nbytes
            for event in trace.events
            if event.action == "alloc"
            and event.part == "activations"
            and any(prefix in inside for prefix in itertools.accumulate(event.module.split("."), "{}.{}".format))
        )


@dataclass(frozen=True)
class _Layout:
    """What of a module's structure remedies work on.

    ``root`` is what its owner calls it. ``checkpoints_itself`` are the parts that have a switch for it. ``head`` is the
    last child with parameters, empty where there is but one, or where the others are frozen already.
    """

    root: str
    blocks: tuple[_Blocks, ...]
    checkpoints_itself: tuple[str, ...]
    head: str

    @classmethod
    def of(cls, module: nn.Module, root: str) -> _Layout:
        return cls(root, tuple(_repeated_blocks(module, root)), tuple(_with_switch(module)), _head_of(module))


def _layout(program: Any) -> _Layout:
    """The structure of the module as it trains, which ``configure_model`` or ``setup`` may have made."""
    if not isinstance(program, LightningProgram):
        return _Layout.of(program.model, "model")
    seen: list[_Layout] = []

    def look(module_copy: nn.Module) -> None:
        seen.append(_Layout.of(module_copy, "self"))
        raise _DoesNotApplyError("all is seen")

    with contextlib.suppress(Exception):
        capture(_changed(program, look), 1, "states")
    return seen[0] if seen else _Layout.of(program.module, "self")


def _checkpointing(layout: _Layout, trace: Trace) -> Iterator[_Family]:
    cost = "each block runs forward twice, once more in the backward pass"
    if layout.checkpoints_itself:
        options = "gradient_checkpointing_kwargs={'use_reentrant': False}"
        calls = [
            f"{_code(layout.root, path)}.gradient_checkpointing_enable({options})" for path in layout.checkpoints_itself
        ]
        change = functools.partial(_switch_on, paths=layout.checkpoints_itself)
        yield (
            _Remedy(
                f"activation checkpointing of {', '.join(path or layout.root for path in layout.checkpoints_itself)}",
                "checkpointing",
                "; ".join(calls),
                cost,
                functools.partial(_changed, change=change),
            ),
        )
        return
    held = {blocks: blocks.held_bytes(trace) for blocks in layout.blocks}
    for blocks in sorted(filter(held.get, held), key=lambda each: -held[each])[:_BLOCKS_TRIED]:
        how = (
            f"for block in {blocks.how}: "
            "block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
        )
        change = functools.partial(_checkpoint, paths=blocks.paths)
        yield (
            _Remedy(
                f"activation checkpointing of {blocks.name}",
                "checkpointing",
                how,
                cost,
                functools.partial(_changed, change=change),
            ),
        )


def _checkpoint(module_copy: nn.Module, paths: Sequence[str]) -> None:
    for path in paths:
        block: Any = module_copy.get_submodule(path)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _switch_on(module_copy: nn.Module, paths: Sequence[str]) -> None:
    for path in paths:
        model: Any = module_copy.get_submodule(path)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _with_switch(module: nn.Module) -> Iterator[str]:
    """Models of Hugging Face's transformers; in evaluation mode their switch does nothing."""
    found: list[str] = []
    for path, each in module.named_modules():
        has = callable(getattr(each, "gradient_checkpointing_enable", None)) and each.training
        inner = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if has and not inner and getattr(each, "supports_gradient_checkpointing", True):
            found.append(path)
            if not getattr(each, "is_gradient_checkpointing", False):
                yield path


def _repeated_blocks(module: nn.Module, root: str) -> Iterator[_Blocks]:
    """Children of one parent that share a class and have parts of their own; of one class anywhere, all together."""
    classes: dict[type[nn.Module], list[str]] = {}
    for path, parent in module.named_modules():
        for kind in {type(child): None for child in parent.children()}:
            paths = [_join(path, name) for name, child in parent.named_children() if type(child) is kind]
            if len(paths) < 2 or issubclass(kind, (nn.ModuleList, nn.ModuleDict)):
                continue
            if not any(True for at in paths for _ in module.get_submodule(at).children()):
                continue
            if kind is nn.Sequential:  # says nothing of what is in it: those of another parent are another sort
                yield _Blocks(
                    _named(path or root, paths, parent, kind), _these(root, path, paths, parent), tuple(paths)
                )
            else:
                classes.setdefault(kind, []).append(path)
    for kind, parents in classes.items():
        paths = [path for path, each in module.named_modules() if type(each) is kind]
        parent = module.get_submodule(parents[0])
        alone = len(parents) == 1 and len(paths) == len([child for child in parent.children() if type(child) is kind])
        if alone:
            name = _named(parents[0] or root, paths, parent, kind)
            yield _Blocks(name, _these(root, parents[0], paths, parent), tuple(paths))
        else:
            how = f"[m for m in {root}.modules() if type(m) is {kind.__name__}]"
            yield _Blocks(f"the {len(paths)} {kind.__name__} modules", how, tuple(paths))


def _named(path: str, paths: Sequence[str], parent: nn.Module, kind: type[nn.Module]) -> str:
    if len(paths) <= _FEW_PATHS and not isinstance(parent, _LISTS):
        return " and ".join([", ".join(paths[:-1]), paths[-1]])
    if len(list(parent.children())) == len(paths):
        return path
    return f"the {len(paths)} {kind.__name__} modules of {path}"


def _these(root: str, path: str, paths: Sequence[str], parent: nn.Module) -> str:
    if len(list(parent.children())) == len(paths) and isinstance(parent, _LISTS):
        return _code(root, path)
    return f"({', '.join(_code(root, each) for each in paths)})"


def _frozen(layout: _Layout) -> Iterator[_Family]:
    if not layout.head:
        return
    head = _code(layout.root, layout.head)
    yield (
        _Remedy(
            f"freezing all but {layout.head}",
            "freezing",
            f"{layout.root}.requires_grad_(False); {head}.requires_grad_(True)",
            f"only {layout.head} learns",
            functools.partial(_changed, change=functools.partial(_freeze, head=layout.head)),
        ),
    )


def _freeze(module_copy: nn.Module, head: str) -> None:
    module_copy.requires_grad_(False)
    module_copy.get_submodule(head).requires_grad_(True)
    for parameter in module_copy.parameters():
        if not parameter.requires_grad:
            parameter.grad = None  # of the batches before, where a plain loop accumulates


def _head_of(module: nn.Module) -> str:
    """The path of the last child with parameters, looked for where there are several."""
    path = ""
    while True:
        parent = module.get_submodule(path)
        children = [name for name, child in parent.named_children() if any(True for _ in child.parameters())]
        if len(children) != 1 or any(True for _ in parent.parameters(recurse=False)):
            break
        path = _join(path, children[0])
    if not children:
        return ""
    head = _join(path, children[-1])
    kept = {id(parameter) for parameter in module.get_submodule(head).parameters()}
    learns = any(parameter.requires_grad and id(parameter) not in kept for parameter in module.parameters())
    return head if learns else ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _code(root: str, path: str) -> str:
    """Python's way to write a path: ``net.0`` of ``self`` is ``self.net[0]``."""
    return root + "".join(f"[{name}]" if name.isdigit() else f".{name}" for name in path.split(".") if name)
