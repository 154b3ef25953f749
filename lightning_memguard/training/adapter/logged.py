"""What a step leaves in its Trainer besides gradients: logged values, metrics, random states; kept, and put back.

Private names of Lightning were checked on 2.5.0 to 2.6.6, those of torchmetrics on 1.9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_memguard.core.capture.split import Rule, Rules, combine
from lightning_memguard.training.adapter.lightning_types import is_a

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


def metrics_of(module: nn.Module) -> list[Any]:
    """The metrics of torchmetrics in a module."""
    return [each for each in module.modules() if is_a(each, "Metric") and hasattr(each, "_defaults")]


def saved_metrics(metrics: Iterable[Any]) -> Callable[[], None]:
    """Note the states of metrics; call the result to put them back."""
    saved = []
    for metric in metrics:
        values = dict(vars(metric))
        lists = [(values[name], len(values[name])) for name in metric._defaults if isinstance(values[name], list)]
        tensors = {name: values[name].clone() for name in metric._defaults if isinstance(values[name], torch.Tensor)}
        saved.append((metric, values | tensors, lists))

    def put_back() -> None:
        for metric, values, lists in saved:
            for each, length in lists:
                del each[length:]
            vars(metric).clear()
            vars(metric).update(values)

    return put_back


class StepState:
    """What a step may change in its Trainer and its module, as it was when this was made.

    Args:
        trainer: the Trainer.
        module: its module.
        metrics: those of torchmetrics in it.
        buffers: those that a step changes.
        draws: whether a step draws random numbers.
    """

    __slots__ = ("_buffers", "_fx", "_metrics", "_random", "_results", "_trainer")

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        metrics: Sequence[Any],
        buffers: Sequence[torch.Tensor],
        *,
        draws: bool,
    ) -> None:
        connector: Any = trainer._logger_connector
        self._trainer = trainer
        self._fx = module._current_fx_name, connector._current_fx
        self._results = {key: dict(vars(each)) for key, each in (trainer._results or {}).items()}
        self._metrics = saved_metrics(metrics) if metrics else None
        self._buffers = [(each, each.clone()) for each in buffers]
        self._random = _random_states(trainer.strategy.root_device) if draws else ()

    def put_back(self) -> None:
        """Make everything as it was."""
        trainer: Any = self._trainer
        trainer.lightning_module._current_fx_name, trainer._logger_connector._current_fx = self._fx
        results = trainer._results if trainer._results is not None else {}
        for key in [key for key in results if key not in self._results]:
            del results[key]
        for key, values in self._results.items():
            vars(results[key]).clear()
            vars(results[key]).update(values)
        if self._metrics:
            self._metrics()
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for state, restore in self._random:
            restore(state)


def _random_states(device: torch.device) -> tuple[tuple[torch.Tensor, Callable[[torch.Tensor], None]], ...]:
    states: list[Any] = [(torch.get_rng_state(), torch.set_rng_state)]
    if device.type == "cuda":
        states.append((torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device)))
    return tuple(states)


class Journal:
    """Keeps what is logged while parts of a batch run, and then logs it once for the batch.

    ``results`` is Lightning's collection of logged values; between `begin` and `end` it does not change.
    """

    def __init__(self, results: Any) -> None:
        self._results = results
        self._parts: list[list[tuple[str, Any, int, Any]]] = []
        self._counts: list[int] = []
        self._batch = results.batch if results is not None else None

    def begin(self, batch: object, count: int) -> None:
        """A part of so many samples begins."""
        self._parts.append([])
        self._counts.append(count)
        if self._results is not None:
            self._results.batch, self._results.batch_size = batch, None
            self._results.update_metrics = self._note

    def drop(self) -> None:
        """The part that began last has failed."""
        self._parts.pop()
        self._counts.pop()

    def _note(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, torch.Tensor):
            self._parts[-1].append((key, value.detach().clone(), batch_size, None))
            return
        type(self._results).update_metrics(self._results, key, value, batch_size)  # a metric adds up by itself
        if isinstance(value._forward_cache, torch.Tensor):
            self._parts[-1].append((key, value._forward_cache, batch_size, value))

    def values(self) -> list[tuple[str, list[Any], list[int]]]:
        """What was logged: keys, the values of the parts that logged it, and the samples of these."""
        return [(key, values, counts) for key, _, values, counts, _, _ in self._merged()]

    def _merged(self) -> list[tuple[str, int, list[Any], list[int], list[int], Any]]:
        merged: dict[tuple[str, int], tuple[list[Any], list[int], list[int], Any]] = {}
        for count, part in zip(self._counts, self._parts, strict=True):
            times: dict[str, int] = {}
            for key, value, batch_size, metric in part:
                times[key] = times.get(key, 0) + 1
                entry = merged.setdefault((key, times[key]), ([], [], [], metric))
                entry[0].append(value)
                entry[1].append(count)
                entry[2].append(batch_size)
        return [(*name, *entry) for name, entry in merged.items()]

    def end(self, rules: Rules | None = None) -> None:
        """Log what was kept once for the batch; without ``rules`` it is dropped."""
        results = self._results
        if results is None:
            return
        vars(results).pop("update_metrics", None)
        results.batch, results.batch_size = self._batch, None
        for key, _, values, counts, sizes, metric in self._merged() if rules else ():
            rule = rules.of(key, _default_of(results[key])) if rules else "mean"
            value = combine(values, counts, rule)
            if metric is not None:
                metric._forward_cache = results[key]._forward_cache = value
                continue
            same = len(set(sizes)) == 1 and sizes != counts  # a number of samples that does not depend on the batch
            results.update_metrics(key, value, sizes[0] if same else sum(sizes))


def _default_of(result: Any) -> Rule:
    meta = result.meta
    if meta.is_sum_reduction:
        return "sum"
    return "max" if meta.is_max_reduction else "min" if meta.is_min_reduction else "mean"
