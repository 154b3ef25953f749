"""What a step leaves in its Trainer besides gradients: logged values, metrics, random states; kept, and put back.

Private names of Lightning were checked on 2.5.0 to 2.6.6, those of torchmetrics on 1.9.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lightning_memguard.core.capture.split import Rule, Rules, combine
from lightning_memguard.training.adapter.lightning_types import is_a

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


def metrics_of(module: nn.Module) -> list[Any]:
    """The metrics of torchmetrics in a module."""
    return [each for each in module.modules() if is_a(each, "Metric") and hasattr(each, "_defaults")]


def saved_metrics(metrics: Iterable[Any], *, in_place: bool = True) -> Callable[[], None]:
    """Note the states of metrics; call the result to put them back.

    Args:
        metrics: those of torchmetrics.
        in_place: whether their tensors may be written to; if not, none is copied.
    """
    saved = []
    for metric in metrics:
        values = vars(metric).copy()
        states = {name: values[name] for name in metric._defaults}
        lists = [(each, len(each)) for each in states.values() if isinstance(each, list)]
        if in_place:
            values |= {name: each.clone() for name, each in states.items() if isinstance(each, torch.Tensor)}
        saved.append((metric, values, lists))

    def put_back() -> None:
        for metric, values, lists in saved:
            for each, length in lists:
                del each[length:]
            vars(metric).clear()
            vars(metric).update(values)

    return put_back


class Noted(NamedTuple):
    """What there was before a step."""

    results: Any  # Lightning's collection of logged values
    hooks: tuple[Any, Any]  # that are running, by the module's and the Trainer's word
    values: Sequence[tuple[str, Any, dict[str, Any]]]
    metrics: Callable[[], None] | None
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]
    random: Sequence[tuple[torch.Generator, torch.Tensor]]


class StepState:
    """Notes what a step may change in its Trainer and its module, and puts it back.

    It is noted before each step: only what the step is known to change is copied.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._connector: Any = trainer._logger_connector
        self._module = module
        self._metrics = metrics_of(module)
        self._device = trainer.strategy.root_device
        self.expect()

    def expect(self, *, draws: bool = True, in_place: bool = True, buffers: Collection[str] = ()) -> None:
        """What steps do from now on: draw random numbers, write to the states of metrics, change buffers."""
        self._in_place = in_place
        self._buffers = [each for name, each in self._module.named_buffers() if name in buffers]
        self._generators = _generators(self._device) if draws else []

    def note(self, results: Any) -> Noted:
        """What there is now; ``results`` is the collection of values that is logged to."""
        return Noted(
            results,
            (self._module._current_fx_name, self._connector._current_fx),
            [(key, each, vars(each).copy()) for key, each in results.items()] if results else (),
            saved_metrics(self._metrics, in_place=self._in_place) if self._metrics else None,
            [(each, each.clone()) for each in self._buffers] if self._buffers else (),
            [(each, each.get_state()) for each in self._generators] if self._generators else (),
        )

    def put_back(self, noted: Noted) -> None:
        """Make everything as it was."""
        self._module._current_fx_name, self._connector._current_fx = noted.hooks
        if noted.results is not None:
            noted.results.clear()
        for key, result, values in noted.values:
            noted.results[key] = result
            vars(result).clear()
            vars(result).update(values)
        if noted.metrics is not None:
            noted.metrics()
        with torch.no_grad():
            for buffer, value in noted.buffers:
                buffer.copy_(value)
        for generator, state in noted.random:
            generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]


class Journal:
    """Keeps what is logged while parts of a batch run, and then logs it once for the batch.

    ``results`` is Lightning's collection of logged values; between `begin` and `end` it does not change.
    """

    def __init__(self, results: Any) -> None:
        self._results = results
        self._parts: list[list[tuple[str, Any, int, Any]]] = []
        self._counts: list[int] = []
        self._weights: list[float] = []
        self._batch = results.batch if results is not None else None

    def begin(self, batch: object, count: int) -> None:
        """A part of so many samples begins."""
        self._parts.append([])
        self._counts.append(count)
        self._weights.append(count)
        if self._results is not None:
            self._results.batch, self._results.batch_size = batch, None
            self._results.update_metrics = self._note

    def drop(self) -> None:
        """The part that began last has failed."""
        for each in (self._parts, self._counts, self._weights):
            each.pop()

    def forget(self) -> None:
        """Nothing was logged so far."""
        for each in (self._parts, self._counts, self._weights):
            each.clear()

    def weigh(self, weight: float) -> None:
        """The part that began last has this weight in the loss of the batch."""
        self._weights[-1] = weight

    def _note(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, torch.Tensor):
            self._parts[-1].append((key, value.detach().clone(), batch_size, None))
            return
        type(self._results).update_metrics(self._results, key, value, batch_size)  # a metric adds up by itself
        if isinstance(value._forward_cache, torch.Tensor):
            self._parts[-1].append((key, value._forward_cache, batch_size, value))

    def values(self) -> list[tuple[str, list[Any], list[int]]]:
        """What was logged: keys, the values of the parts that logged it, and the samples of these."""
        return [(merged.key, merged.values, merged.counts) for merged in self._merged()]

    def _merged(self) -> list[_Merged]:
        merged: dict[tuple[str, int], _Merged] = {}
        for count, weight, part in zip(self._counts, self._weights, self._parts, strict=True):
            times: dict[str, int] = {}
            for key, value, batch_size, metric in part:
                times[key] = times.get(key, 0) + 1
                entry = merged.setdefault((key, times[key]), _Merged(key, metric))
                entry.values.append(value)
                entry.counts.append(count)
                entry.weights.append(weight)
                entry.sizes.append(batch_size)
        return [*merged.values()]

    def end(self, rules: Rules | None = None) -> None:
        """Log what was kept once for the batch; without ``rules`` it is dropped."""
        results = self._results
        if results is None:
            return
        vars(results).pop("update_metrics", None)
        results.batch, results.batch_size = self._batch, None
        for each in self._merged() if rules else ():
            rule = rules.of(each.key, _default_of(results[each.key])) if rules else "mean"
            value = combine(each.values, each.weights if rule == "average" else each.counts, rule)
            if each.metric is not None:
                each.metric._forward_cache = results[each.key]._forward_cache = value
                continue
            sizes = each.sizes
            same = (
                len(set(sizes)) == 1 and sizes != each.counts
            )  # a number of samples that does not depend on the batch
            results.update_metrics(each.key, value, sizes[0] if same else sum(sizes))


@dataclass
class _Merged:
    """One value that was logged, by each part that logged it."""

    key: str
    metric: Any
    values: list[Any] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def _default_of(result: Any) -> Rule:
    meta = result.meta
    if meta.is_sum_reduction:
        return "sum"
    return "max" if meta.is_max_reduction else "min" if meta.is_min_reduction else "mean"
