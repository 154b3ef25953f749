"""The command line: ``memguard plan``, ``layers``, ``gpus``, ``snapshot``, ``devices``.

What was typed is read here, and answered by the functions that a program would call; torch and Lightning are imported
where they are needed, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_memguard.errors import CannotTraceError, MemGuardError
from lightning_memguard.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_memguard.core.decision.advice import Advice
    from lightning_memguard.core.decision.decision import Budget
    from lightning_memguard.training.planning.plan import Plan, Subject

_T = TypeVar("_T")

FITS, DOES_NOT_FIT, BAD_USE, INTERRUPTED = 0, 1, 2, 130

_HOW_TO_DESCRIBE = (
    "If the batch is not what the step wants: --input-shape and --target-shape make a pair of tensors, --input "
    "NAME=SHAPE a dict, --datamodule takes one from your data."
)

COMMON_GPUS = ("T4", "RTX 3090", "RTX 4090", "A100 80GB", "H100")
"""What is planned for where no GPU is here and none was named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: what was typed behind ``memguard`` (default: this process's arguments).

    Returns:
        The exit status: 0 it fits, or is done; 1 it does not fit; 2 bad use.
    """
    try:
        options = _parser().parse_args(argv)
        return int(options.run(options))
    except SystemExit as error:  # argparse has said what was wrong
        return error.code if isinstance(error.code, int) else BAD_USE
    except CannotTraceError as error:
        print(f"memguard: {error}\n{_HOW_TO_DESCRIBE}", file=sys.stderr)
        return BAD_USE
    except MemGuardError as error:
        print(f"memguard: {error}", file=sys.stderr)
        return BAD_USE
    except KeyboardInterrupt:
        print("memguard: stopped.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FITS


# -- commands


def _plan(options: argparse.Namespace) -> int:
    with _working() as said:
        said("loading torch and Lightning")
        from lightning_memguard.training.planning.plan import Limits, plan_on

        _check_folder(options.report)
        limits = Limits(options.margin, _bytes(options.budget), options.min_batch_size, options.max_batch_size)
        devices = options.device or _default_devices()
        _check_devices(devices)
        subject = _subject(options, said)
        plans = []
        for device in devices:
            said(f"tracing the step on {device}")
            plan_it = functools.partial(plan_on, device=device, limits=limits)
            subject, found = _with_memory_if_need_be(options, subject, said, plan_it)
            plans.append(found)
        adviser = _worst(plans) if options.advise else None
        advice = _advice(adviser, said) if adviser else ()
        files = _report(options, subject, plans, said) if options.report else ()
    if options.json:
        _print_plan_json(options, subject, plans, adviser, advice)
    else:
        _print_plan(subject, plans, adviser, advice, files)
    return FITS if any(plan.fits for plan in plans) else DOES_NOT_FIT


def _print_plan(
    subject: Subject, plans: Sequence[Plan], adviser: Plan | None, advice: Sequence[Advice], files: Sequence[Path]
) -> None:
    from lightning_memguard.cli import tables

    console = _console()
    console.print(_headline(subject), markup=False)
    if len(plans) == 1:
        tables.print_plan(plans[0], console, "training" if subject.training else "inference", advised=bool(advice))
    else:
        tables.print_plans(plans, console, advised=bool(advice))
    if adviser is not None:
        tables.print_advice(advice, adviser, console)
    for path in files:
        console.print(f"Written: {path}", markup=False, soft_wrap=True)
    console.print(f"{sum(plan.seconds for plan in plans):.1f} s for {len(plans)} device{'s'[: len(plans) != 1]}.")


def _headline(subject: Subject) -> str:
    kind = "training" if subject.training else "inference"
    accumulate = subject.trainer.get("accumulate_grad_batches", 1)
    more = f", {accumulate} batches accumulated" if accumulate != 1 else ""
    if subject.training and subject.optimizer is not None:
        more += f", with {_name_of(subject.optimizer)}"
    return f"{type(subject.model).__name__}, {kind} at {subject.precision}{more}; example batch: {subject.shapes}."


def _name_of(optimizer: Any) -> str:
    return str(getattr(getattr(optimizer, "func", optimizer), "__name__", "its optimizer"))


def _print_plan_json(
    options: argparse.Namespace, subject: Subject, plans: Sequence[Plan], adviser: Plan | None, advice: Sequence[Advice]
) -> None:
    from lightning_memguard.cli import tables

    told: dict[str, Any] = {
        "model": type(subject.model).__name__,
        "training": subject.training,
        "precision": subject.precision,
        "batch_size": subject.batch_size,
        "batch": subject.shapes,
        "fits": any(plan.fits for plan in plans),
        "devices": [tables.plan_data(plan) for plan in plans],
    }
    if options.advise:
        told["advice_on"] = adviser.budget.device if adviser else None
        told["advice"] = [tables.advice_data(each) for each in advice]
    _print_json(told)


def _worst(plans: Sequence[Plan]) -> Plan:
    """The device to advise on: the first that it does not fit, else the smallest."""
    return next((plan for plan in plans if not plan.fits), min(plans, key=lambda plan: plan.budget.usable_bytes))


def _advice(plan: Plan, said: Any) -> Sequence[Advice]:
    from lightning_memguard.training.planning.advise import advise

    said(f"capturing remedies on {plan.budget.device}")
    return advise(plan.prediction, plan.footprint.batch_size, plan.budget, combinations=True, said=said)


def _report(options: argparse.Namespace, subject: Subject, plans: Sequence[Plan], said: Any) -> tuple[Path, ...]:
    from lightning_memguard.report.page import write_report
    from lightning_memguard.report.page_data import Report, curve_of
    from lightning_memguard.training.planning.plan import layers_on

    plan = plans[0]
    said(f"writing a report on {plan.budget.device}")
    decision, prediction = plan.asked if options.batch_size else plan.largest or plan.asked, plan.prediction
    layers = None
    with contextlib.suppress(CannotTraceError):
        shown = replace(subject, batch_size=decision.batch_size)
        layers = layers_on(shown, options.device[0] if options.device else plan.budget.device)
    report = Report(
        type(subject.model).__name__,
        decision,
        prediction.own_trace_at(decision.batch_size),
        prediction.settings,
        curve_of(prediction.footprint_at, decision),
        layers=layers,
    )
    return write_report(options.report, report)


def _layers(options: argparse.Namespace) -> int:
    with _working() as said:
        said("loading torch and Lightning")
        from lightning_memguard.core.layers.textbook import MOMENTS, textbook_sums, weight_memory
        from lightning_memguard.training.planning.plan import inference_of, layers_on, predict_on

        device = _one_device(options.device, "cpu")
        moments = (options.textbook or _textbook_name(options.optimizer)).lower()
        if moments not in MOMENTS:
            raise MemGuardError(f"--textbook {moments!r} is none of {', '.join(MOMENTS)}.")
        subject = _subject(options, said)
        said("running the layers")
        table = layers_on(subject, device)
        said(f"tracing the step on {device}")
        size = subject.batch_size
        predict_it = functools.partial(predict_on, device=device)
        subject, (prediction, _) = _with_memory_if_need_be(options, subject, said, predict_it)
        training = prediction.footprint_at(size)
        inference, why_not = None, ""
        try:
            inference = predict_it(inference_of(subject))[0].footprint_at(size)
        except MemGuardError as error:
            why_not = str(error)
        sums = textbook_sums(table, optimizer=moments)
        weights = weight_memory(table.parameters, table.trainable_parameters)
    from lightning_memguard.cli import tables
    from lightning_memguard.report.data import footprint_data

    if options.json:
        told = tables.layers_data(table, options.depth)
        told["model"] = type(subject.model).__name__
        told["device"] = device
        told["textbook"] = [tables.sum_data(each, training) for each in sums]
        told["training"] = footprint_data(training)
        told["inference"] = footprint_data(inference) if inference else None
        told["weights"] = {each.element: [each.total_bytes, each.trainable_bytes] for each in weights}
        _print_json(told)
        return FITS
    console = _console()
    console.print(_headline(subject), markup=False)
    tables.print_layers(table, console, options.depth)
    tables.print_textbook(sums, training, inference, why_not, console)
    tables.print_weights(weights, console)
    return FITS


def _textbook_name(optimizer: str | None) -> str:
    """What the textbook calls an optimizer; Adam where it has no name for it, or none was given."""
    from lightning_memguard.core.layers.textbook import MOMENTS

    name, *settings = (optimizer or "adam").split(",")
    name = name.replace(":", ".").rpartition(".")[2].lower()
    if name == "sgd" and any(each.strip().startswith("momentum=") for each in settings):
        return "momentum"
    return name if name in MOMENTS else "adam"


def _snapshot(options: argparse.Namespace) -> int:
    target = Path(options.output)
    if not target.parent.is_dir():
        raise MemGuardError(f"-o {target}: there is no folder {target.parent}; make it, or write elsewhere.")
    with _working() as said:
        said("loading torch and Lightning")
        from lightning_memguard.core.replay.snapshot import save_snapshot
        from lightning_memguard.training.planning.plan import predict_on

        device = _one_device(options.device, None)
        subject = _subject(options, said)
        said(f"tracing the step on {device}")
        predict_it = functools.partial(predict_on, device=device)
        subject, (prediction, _) = _with_memory_if_need_be(options, subject, said, predict_it)
        trace = prediction.own_trace_at(subject.batch_size)
        path = save_snapshot(trace, prediction.settings, target)
    if options.json:
        _print_json({"path": str(path), "events": len(trace), "batch_size": subject.batch_size})
        return FITS
    console = _console()
    console.print(_headline(subject), markup=False)
    console.print(
        f"Written: {path} ({len(trace):,} events, the predicted step at batch size {subject.batch_size} on {device}).\n"
        f"Open it: drop it on https://pytorch.org/memory_viz, or\n"
        f"  python -m torch.cuda._memory_viz trace_plot {path} -o {path.with_suffix('.html')}",
        markup=False,
        soft_wrap=True,
    )
    return FITS


def _gpus(options: argparse.Namespace) -> int:
    from lightning_memguard.cli import tables
    from lightning_memguard.core.gpus import CATALOGUE, find

    words = options.filter.lower().replace("-", " ").split()
    names = {gpu: " ".join((gpu.name, *gpu.aliases)).lower().replace("-", " ") for gpu in CATALOGUE}
    found = [gpu for gpu, name in names.items() if all(word in name for word in words)]
    if not found:
        found = [find(options.filter)]  # which says what is near
    if options.json:
        _print_json([tables.gpu_data(gpu) for gpu in found])
    else:
        tables.print_gpus(found, _console())
    return FITS


def _devices(options: argparse.Namespace) -> int:
    from lightning_memguard.cli import tables
    from lightning_memguard.report.data import budget_data

    with _working() as said:
        said("loading torch")
        budgets = {name: _budget_of(name) for name in _devices_here()}
    if options.json:
        told = [
            {"device": name, "problem": budget}
            if isinstance(budget, str)
            else {**budget_data(budget), "device": name, "name": budget.device}
            for name, budget in budgets.items()
        ]
        _print_json(told)
    else:
        tables.print_budgets(budgets, _console())
    return FITS


def _budget_of(name: str) -> Budget | str:
    import torch

    from lightning_memguard.core.device.budget import read_budget

    try:
        return read_budget(torch.device(name), margin=0.0)
    except MemGuardError as error:
        return str(error)


def _devices_here() -> list[str]:
    import torch

    found = ["cpu"]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        found += [f"{kind}:{index}" for index in range(module.device_count())] if module.is_available() else []
    return [*found, "mps"] if torch.backends.mps.is_available() else found


# -- what was typed -> what to plan for


def _subject(options: argparse.Namespace, said: Any, *, meta: bool = True) -> Subject:
    """Make the model and its batch as they were typed."""
    from lightning_memguard.cli import target as typed
    from lightning_memguard.training.planning import plan
    from lightning_memguard.training.planning.estimate import is_lightning

    if options.target is None and options.config is None:
        raise MemGuardError(
            "Give a TARGET (module:Class or path/to/file.py:Class) before the options, or --config of a LightningCLI."
        )
    said("making the model")
    given = typed.batch(options.input_shape, options.target_shape, options.input)
    trainer: dict[str, Any] = {}
    precision, datamodule = options.precision or "32-true", None
    if options.config:
        target = typed.load(options.target) if options.target else None
        data = typed.load(options.datamodule) if options.datamodule else None
        if options.args or options.data_args:
            raise MemGuardError("--args and --data-args stand in the --config file: change them there.")
        config = typed.config(options.config, target, data, meta=meta)
        model, datamodule, trainer = config.model, config.datamodule, dict(config.trainer)
        precision = options.precision or config.precision
    else:
        model = typed.made(typed.load(options.target), typed.arguments(options.args), options.target, meta=meta)
        if options.datamodule:
            data = typed.load(options.datamodule)
            datamodule = typed.build(data, typed.arguments(options.data_args), options.datamodule)
    precision = typed.precision(precision)
    if options.accumulate:
        trainer["accumulate_grad_batches"] = options.accumulate
    optimizer = typed.optimizer(options.optimizer) if options.optimizer else None
    if given is None and datamodule is None:
        example = getattr(model, "example_input_array", None)
        if example is not None:
            given = typed.with_targets(example, options.target_shape)
        elif not _brings_data(model):
            raise MemGuardError(
                "There is no batch to plan with: give --input-shape 8,3,224,224 (and --target-shape 8:int64), or "
                "--input name=8,512:int64 for a model with named inputs, or --datamodule module:Class."
            )
    step = None
    training = not getattr(options, "inference", False)
    if not is_lightning(model):
        has_target = bool(options.target_shape) or datamodule is not None
        step = typed.step(options.loss, has_target=has_target)
        optimizer = optimizer or typed.optimizer("torch.optim.AdamW")
    said("looking at the batch")
    with typed.users_code("Looking at the data"):
        subject = plan.look(
            model,
            given,
            batch_size=options.batch_size,
            precision=precision,
            step=step,
            optimizer=optimizer,
            datamodule=datamodule,
            trainer=trainer,
        )
    return subject if training else plan.inference_of(subject)


def _brings_data(model: Any) -> bool:
    """Whether a model is a LightningModule with a loader of its own."""
    from lightning_memguard.training.adapter.lightning_types import lightning_of
    from lightning_memguard.training.planning.estimate import is_lightning

    own = getattr(type(model), "train_dataloader", None)
    return is_lightning(model) and own is not lightning_of(model).LightningModule.train_dataloader


def _with_memory_if_need_be(
    options: argparse.Namespace, subject: Subject, said: Any, run: Callable[[Subject], _T]
) -> tuple[Subject, _T]:
    """Run; where the step wants to run for real, with a model that has memory."""
    from lightning_memguard.cli import target as typed

    try:
        return subject, run(subject)
    except CannotTraceError:
        if not typed.is_without_memory(subject.model) or not typed.has_room_for(subject.model):
            raise
    said("the step needs values: making the model once more, with memory")
    subject = _subject(options, said, meta=False)
    said("running the step at small sizes")
    return subject, run(subject)


def _check_folder(path: str | None) -> None:
    """Refuse a report that could not be written, before minutes are spent on it."""
    if path is None:
        return
    there = next(each for each in (Path(path).absolute(), *Path(path).absolute().parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise MemGuardError(f"--report {path} cannot be written: {there} is no folder that you may write to.")


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def _check_devices(names: Sequence[str]) -> None:
    """Say what is wrong with a name before the model is made."""
    from lightning_memguard.training.planning.plan import check_device

    for name in names:
        check_device(name)


def _default_devices() -> list[str]:
    """The accelerators that are here, or else some that many have."""
    return _devices_here()[1:] or list(COMMON_GPUS)


def _one_device(named: Sequence[str], default: str | None) -> str:
    if len(named or ()) > 1:
        raise MemGuardError(f"--device is given {len(named)} times; this command answers for one.")
    device = named[0] if named else default or _default_devices()[0]
    _check_devices([device])
    return device


# -- saying


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _width())


def _width() -> int:
    """Of what is no terminal: as wide as asked, or as a table wants."""
    return int(os.environ.get("COLUMNS", "140") or 140)


def _print_json(told: Any) -> None:
    print(json.dumps(told, indent=2, allow_nan=False))


_PATIENCE_SECONDS = 1.0


@contextlib.contextmanager
def _working() -> Iterator[Any]:
    """What is being done, on stderr, once it takes longer than a second; what others print goes there too."""
    progress = _Progress()
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield progress.say
    finally:
        progress.close()


class _Progress:
    """One line of what is being done: it moves on a terminal, and is a line each elsewhere."""

    def __init__(self) -> None:
        self.text = ""
        self.started = time.monotonic()
        self.status: Any = None
        self.shown = ""
        self.lock = threading.Lock()
        self.timer = threading.Timer(_PATIENCE_SECONDS, self._show)
        self.timer.daemon = True
        self.timer.start()
        self.stream = sys.stderr

    def say(self, text: str) -> None:
        """Tell what is being done from now on."""
        self.text = text
        if time.monotonic() - self.started >= _PATIENCE_SECONDS:
            self._show()

    def _show(self) -> None:
        with self.lock:
            if self.text == self.shown or self.timer is None:
                return
            self.shown = self.text
            if not self.stream.isatty():
                print(f"memguard: {self.text} ...", file=self.stream, flush=True)
            elif self.status is None:
                from rich.console import Console

                self.status = Console(stderr=True, highlight=False).status(f"{self.text} ...")
                self.status.start()
            else:
                self.status.update(f"{self.text} ...")

    def close(self) -> None:
        self.timer.cancel()
        with self.lock:
            if self.status is not None:
                self.status.stop()
            self.text = self.shown


# -- options


_EPILOG = """\
examples:
  memguard plan examples/char_gpt.py:CharGPT --args vocabulary_size=96 \\
      --datamodule examples/char_gpt.py:SourceCode --device "RTX 4090" --device H100
  memguard plan torchvision.models:resnet50 --input-shape 32,3,224,224 --target-shape 32:int64:1000 \\
      --optimizer torch.optim.SGD,momentum=0.9 --precision bf16-mixed --device T4
  memguard plan --config config.yaml --batch-size 64 --json
  memguard layers my_project.models:Net --input-shape 8,1,28,28 --target-shape 8:int64:10

exit status: 0 it fits on some device (or the command is done), 1 it fits on none, 2 bad use
"""


def _parser() -> argparse.ArgumentParser:
    from lightning_memguard import __version__

    parser = argparse.ArgumentParser(
        prog="memguard",
        description="Tells how much memory a training takes, before it runs, and on GPUs that are not here.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"memguard {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    plan = _command(commands, "plan", _plan, "does it fit, and the largest batch that does, on one or more devices")
    _add_target(plan)
    _add_device(plan, "may be given several times (default: the GPUs here, or some common ones)")
    group = plan.add_argument_group("what to choose from")
    group.add_argument("--margin", type=float, default=0.05, help="share of the memory kept free (default: 0.05)")
    group.add_argument("--budget", metavar="BYTES", help="memory it may take on each device, such as 20GiB")
    group.add_argument("--min-batch-size", type=_count, default=1, metavar="N", help="smallest (default: 1)")
    group.add_argument("--max-batch-size", type=_count, metavar="N", help="largest (default: what fits)")
    group = plan.add_argument_group("what to tell")
    group.add_argument("--inference", action="store_true", help="one forward pass under no_grad, no training")
    group.add_argument("--advise", action="store_true", help="what would make it fit, each remedy predicted")
    group.add_argument("--report", metavar="DIR", help="write memguard_report.html (of the first device) there")

    layers = _command(commands, "layers", _layers, "what each layer holds, keeps and computes, and the textbook's sums")
    _add_target(layers)
    _add_device(layers, "whose kernels run (default: cpu)")
    layers.add_argument("--depth", type=_depth, metavar="N", help="rows nested no deeper than this (default: all)")
    layers.add_argument(
        "--textbook",
        metavar="NAME",
        help="the optimizer of the textbook's sums: sgd, momentum, adagrad, rmsprop, adam, adamw (default: that of "
        "--optimizer, or adam)",
    )

    snapshot = _command(commands, "snapshot", _snapshot, "the predicted step as a PyTorch memory snapshot")
    _add_target(snapshot)
    _add_device(snapshot, "where it runs (default: the GPU here, or a T4)")
    snapshot.add_argument("-o", "--output", required=True, metavar="FILE", help="usually step.pickle")

    gpus = _command(commands, "gpus", _gpus, "the GPUs that can be planned for")
    gpus.add_argument("filter", nargs="?", default="", metavar="FILTER", help="words of their names, such as 'a100'")

    _command(commands, "devices", _devices, "what this machine has free, and who says so")
    return parser


def _command(commands: Any, name: str, run: Any, says: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=says, description=f"{says[0].upper()}{says[1:]}.", epilog=_EPILOGS.get(name)
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    return parser


_EPILOGS: Mapping[str, str] = {
    "plan": "Exit status: 0 it fits on some device, 1 on none, 2 bad use.",
    "snapshot": "Open the file on https://pytorch.org/memory_viz or with `python -m torch.cuda._memory_viz`.",
}


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="module:Class or path/to/file.py:Class of a LightningModule or any torch.nn.Module (a function that makes "
        "one will do); not needed where --config names it",
    )
    group = parser.add_argument_group("the model")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    group.add_argument("--args", **several, metavar="NAME=VALUE", help="arguments of TARGET: width=128 'sizes=[1, 2]'")
    group.add_argument(
        "--config",
        metavar="FILE",
        help="a LightningCLI's YAML file: model, data, optimizer, and the Trainer's precision, accumulation, clipping, "
        "devices and strategy",
    )
    group.add_argument("--precision", metavar="NAME", help="as a Trainer's: 32-true, bf16-mixed, 16-mixed, bf16-true")
    group.add_argument(
        "--optimizer",
        metavar="NAME[,K=V]",
        help="in place of the model's own: torch.optim.SGD,momentum=0.9, or adamw (default of a plain module: AdamW)",
    )
    group.add_argument(
        "--loss", metavar="NAME", help="of a plain module: torch.nn.functional:mse_loss (default: usual)"
    )
    group.add_argument(
        "--accumulate", type=_count, metavar="N", help="batches an optimizer step (accumulate_grad_batches)"
    )
    group = parser.add_argument_group("the batch (default: the module's example_input_array or train_dataloader)")
    repeated: dict[str, Any] = {"action": "append", "default": []}
    group.add_argument(
        "--input-shape", **repeated, metavar="SHAPE", help="8,3,224,224 or 8,128:int64, samples first; may be repeated"
    )
    group.add_argument("--target-shape", **repeated, metavar="SHAPE", help="what to learn: 8:int64:10 is ten classes")
    group.add_argument(
        "--input",
        **several,
        metavar="NAME=SHAPE",
        help="a batch by name: input_ids=8,512:int64 labels=8,512:int64",
    )
    group.add_argument("--datamodule", metavar="module:Class", help="a LightningDataModule to draw samples from")
    group.add_argument("--data-args", **several, metavar="NAME=VALUE", help="arguments of --datamodule")
    group.add_argument("--batch-size", type=_count, metavar="N", help="the size asked about (default: the batch's own)")


def _add_device(parser: argparse.ArgumentParser, says: str) -> None:
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help=f"cpu, cuda, or a GPU by name, such as 'RTX 4090', which need not be here; {says}",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; give a whole number of 1 or more")
    return int(text)


def _depth(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no depth; give a whole number of 0 or more")
    return int(text)
