"""What somebody typed on a command line -> the model, batch, optimizer and settings that it means.

Every refusal names what was typed, what was looked for, and what is near it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.errors import MemGuardError
from lightning_memguard.training.adapter.lightning_types import lightning_of
from lightning_memguard.training.adapter.program import quiet
from lightning_memguard.training.planning.subject import MakeOptimizer, Step

# -- names of classes


def load(name: str) -> Any:
    """What a name such as ``package.module:Class`` or ``path/to/file.py:Class`` stands for.

    Raises:
        MemGuardError: it is no such name, nothing is there, or importing it failed.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        dotted = name.rpartition(".")
        meant = f" Is {dotted[0]}:{dotted[2]} meant?" if dotted[1] and not name.endswith(".py") else ""
        raise MemGuardError(f"{name!r} names no class; write module:Class or path/to/file.py:Class.{meant}")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would
    module = _file(Path(place)) if place.endswith(".py") else _module(place)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise MemGuardError(f"{place} has no {attribute!r}. {_near(part, _public(found))}")
        found = getattr(found, part)
    return found


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise MemGuardError(f"There is no file {path} (looked in {Path.cwd()}).{_files_near(path)}")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    name = path.stem if known is None else f"{path.stem}_of_{path.resolve().parent.name}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look themselves up there
    sys.path.insert(0, str(path.resolve().parent))  # as `python path/to/file.py` would
    try:
        with users_code(f"Importing {path}"):
            spec.loader.exec_module(module)
    except MemGuardError:
        del sys.modules[name]
        raise
    return module


def _files_near(path: Path) -> str:
    with contextlib.suppress(OSError):
        names = [each.name for each in path.parent.glob("*.py")]
        near = get_close_matches(path.name, names, n=3)
        return f" Near it: {', '.join(str(path.parent / each) for each in near)}." if near else ""
    return ""


def _module(name: str) -> ModuleType:
    try:
        with users_code(f"Importing {name}"):
            return importlib.import_module(name)
    except MemGuardError as error:
        cause = error.__cause__
        missing = isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}.")
        if not missing:
            raise
        assert isinstance(cause, ModuleNotFoundError)
        raise MemGuardError(
            f"There is no module {cause.name!r} (looked in {Path.cwd()} and in the packages of {sys.prefix}). Write "
            "module:Class, with the module as `import` would name it, or path/to/file.py:Class."
        ) from error


def _public(thing: Any) -> list[str]:
    """Names of the models and data that it has, or else of all."""
    names = [name for name in dir(thing) if not name.startswith("_")]
    classes = [name for name in names if inspect.isclass(getattr(thing, name, None))]
    home = getattr(thing, "__name__", "")
    own = [name for name in classes if str(getattr(thing, name).__module__).startswith(home)]
    return own or classes or names


def _near(name: str, names: Sequence[str]) -> str:
    lower = {each.lower(): each for each in names}
    near = [lower[each] for each in get_close_matches(name.lower(), lower, n=4)]
    if near:
        return f"Near it: {', '.join(near)}."
    return f"It has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}." if names else "It defines nothing."


@contextlib.contextmanager
def users_code(doing: str) -> Iterator[None]:
    """What somebody else's code raises, in one line that says where."""
    try:
        yield
    except MemGuardError:
        raise
    except (Exception, SystemExit) as error:
        text = str(error).strip() or "no message"
        raise MemGuardError(f"{doing} raised {type(error).__name__}: {text}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """The last line of the user's own that an error came through, and the one that raised it where that is another."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    own = [
        frame for frame in frames if not re.search(r"site-packages|dist-packages|[/\\]lib[/\\]python", frame.filename)
    ]
    lines = [
        f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in (*own[-1:], *frames[-1:])
    ]
    return "".join(dict.fromkeys(lines))


def _is_ours(filename: str) -> bool:
    return filename.startswith(("<frozen", str(Path(__file__).parents[1]), contextlib.__file__, importlib.__file__))


# -- arguments


def arguments(pairs: Iterable[str]) -> dict[str, Any]:
    """``["width=8", "name=x"]`` as ``{"width": 8, "name": "x"}``: Python's literals, and text for what is none.

    A value such as ``transformers:LlamaConfig(hidden_size=512)`` is what that call gives.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise MemGuardError(f"{pair!r} is no argument; write name=value, such as width=128.")
        found[key] = _value(value)
    return found


_CALL = re.compile(r"([\w.]+(?:/[\w./-]+)?:[\w.]+)(\(.*\))", re.DOTALL)


def _value(text: str) -> Any:
    called = _CALL.fullmatch(text)
    if called:
        return build(load(called[1]), _keywords(called[2], text), called[1])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(text, text)


def _keywords(call: str, text: str) -> dict[str, Any]:
    try:
        tree = ast.parse(f"f{call}", mode="eval").body
        assert isinstance(tree, ast.Call)
        return {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords if not tree.args}
    except (SyntaxError, ValueError) as error:
        raise MemGuardError(f"{text!r} is no call of a class with literals: write module:Class(name=value).") from error


def build(thing: Any, given: Mapping[str, Any], name: str) -> Any:
    """Call a class or a function, and say what is missing where that cannot be.

    Raises:
        MemGuardError: arguments are missing or unknown, or the call raised.
    """
    if not callable(thing):
        raise MemGuardError(f"{name} is a {type(thing).__name__}; give a class, or a function that makes a model.")
    _check_arguments(thing, given, name)
    with users_code(f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"):
        return thing(**given)


def _check_arguments(thing: Callable[..., Any], given: Mapping[str, Any], name: str) -> None:
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return
    free = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    unknown = [key for key in given if key not in names and not free]
    if unknown:
        raise MemGuardError(f"{name} takes no argument {unknown[0]!r}. {_near(unknown[0], names)}")
    needed = [
        each.name for each in parameters if each.default is each.empty and each.name in names and each.name not in given
    ]
    if needed:
        example = " ".join(f"{key}=..." for key in needed)
        raise MemGuardError(
            f"{name} needs {', '.join(needed)}: give {example} (--args, or --data-args of a datamodule)."
        )


# -- the model


def made(thing: Any, given: Mapping[str, Any], name: str, *, meta: bool = True) -> nn.Module:
    """Make a model, on the meta device where that works.

    Args:
        thing: a class or a function.
        given: its keyword arguments.
        name: how it was called.
        meta: False to give it memory.

    Raises:
        MemGuardError: it cannot be made, or it is no module.
    """
    found = None
    if meta:
        with contextlib.suppress(MemGuardError), quiet():
            found = _on_meta(thing, given, name)
    if found is None:
        found = build(thing, given, name)
    if not isinstance(found, nn.Module):
        raise MemGuardError(f"{name} made a {type(found).__name__}, which is no torch.nn.Module.")
    return found


def _on_meta(thing: Any, given: Mapping[str, Any], name: str) -> Any:
    _check_arguments(thing, given, name)
    with torch.device("meta"):
        return build(thing, given, name)


def is_without_memory(module: nn.Module) -> bool:
    """Whether a model's parameters are on the meta device."""
    return any(parameter.is_meta for parameter in module.parameters())


def has_room_for(module: nn.Module) -> bool:
    """Whether this machine could hold the model's parameters twice: to make them, and to copy them."""
    needed = part_bytes({"model": [*module.parameters(), *module.buffers()]}, "meta")["model"]
    return 2 * needed < read_budget(torch.device("cpu")).usable_bytes


# -- batches


_SHAPE = re.compile(r"(?P<shape>\d+(?:,\d+)*)(?::(?P<dtype>[a-zA-Z]\w*))?(?::(?P<bound>\d+))?")
_DTYPES = {
    "float": "float32",
    "half": "float16",
    "double": "float64",
    "int": "int64",
    "long": "int64",
    "bf16": "bfloat16",
}
_MOST_BYTES = 1 << 26  # larger examples have shapes and no values


def tensor(text: str, option: str = "--input-shape", dtype: str = "float32") -> torch.Tensor:
    """An example tensor: ``8,3,224,224``, ``8,128:int64``, ``8:int64:10`` (whole numbers from 0 to 9).

    Raises:
        MemGuardError: it is no shape, or no type of number.
    """
    match = _SHAPE.fullmatch(text.replace(" ", "").replace("x", ",") if "," not in text else text.replace(" ", ""))
    shape = [int(size) for size in match["shape"].split(",")] if match else []
    if match is None or 0 in shape:
        raise MemGuardError(
            f"{option} {text!r} is no shape: write sizes with commas, of 1 or more, then the type of number and, of "
            "classes, their count: 8,3,224,224 or 8,128:int64 or 8:int64:10."
        )
    name = _DTYPES.get(match["dtype"] or dtype, match["dtype"] or dtype)
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        known = sorted(each for each in dir(torch) if isinstance(getattr(torch, each), torch.dtype))
        raise MemGuardError(f"{option} {text!r}: {name!r} is no type of number. {_near(name, known)}")
    if math.prod(shape) * kind.itemsize > _MOST_BYTES:
        return torch.empty(shape, dtype=kind, device="meta")
    if match["bound"]:
        return torch.arange(math.prod(shape)).remainder(max(1, int(match["bound"]))).to(kind).reshape(shape)
    return torch.zeros(shape, dtype=kind)


def batch(inputs: Sequence[str], targets: Sequence[str], named: Sequence[str]) -> Any:
    """The example batch: one tensor, a tuple of inputs and targets, or a dict by name; None where nothing is given.

    Raises:
        MemGuardError: a shape is none, or two kinds of batch are mixed.
    """
    if named:
        if inputs or targets:
            raise MemGuardError("Give --input name=shape alone, or --input-shape and --target-shape; not both.")
        return {key: tensor(text, f"--input {key}=") for key, text in map(_named, named)}
    if not inputs:
        return None
    first = [tensor(text) for text in inputs]
    size = first[0].shape[0]
    for text in targets:
        target = tensor(text, "--target-shape", "int64")
        if not any(length % size == 0 for length in target.shape):
            raise MemGuardError(
                f"--target-shape {text} has nothing for each of the {size} samples that --input-shape {inputs[0]} "
                f"begins with: begin it with {size} too."
            )
        first.append(target)
    return first[0] if len(first) == 1 else tuple(first)


def with_targets(example: Any, targets: Sequence[str]) -> Any:
    """A model's own example input, with what it shall learn behind it."""
    if not targets:
        return example
    first = tuple(example) if isinstance(example, (list, tuple)) else (example,)
    return (*first, *(tensor(text, "--target-shape", "int64") for text in targets))


def _named(text: str) -> tuple[str, str]:
    key, equals, shape = text.partition("=")
    if not equals or not key:
        raise MemGuardError(f"--input {text!r} has no name: write name=shape, such as input_ids=8,512:int64.")
    return key, shape


# -- precision, optimizers and losses


_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


def precision(text: str) -> str:
    """A precision by the name that `estimate` knows: Lightning's older names mean the same there."""
    return _PRECISIONS.get(text, text)


def optimizer(text: str) -> MakeOptimizer:
    """``torch.optim.SGD,momentum=0.9``, ``adamw`` or ``module:Class,name=value`` as a function of the parameters.

    Raises:
        MemGuardError: there is no such optimizer, or it takes no such argument.
    """
    name, *pairs = _split(text)
    kind = _optimizer_class(name)
    given = arguments(pairs)
    takes = inspect.signature(kind).parameters
    if "lr" in takes and takes["lr"].default is inspect.Parameter.empty:
        given.setdefault("lr", 1e-3)  # memory does not depend on it
    first = next(iter(takes), "params")
    _check_arguments(kind, {first: None, **given}, name)
    return functools.partial(kind, **given)


def _split(text: str) -> list[str]:
    """At commas that stand before a name: those inside of a tuple do not."""
    return re.split(r",(?=\s*[A-Za-z_]\w*=)", text)


def _optimizer_class(name: str) -> Any:
    if ":" in name:
        return load(name)
    place, _, last = name.rpartition(".")
    if place and place != "torch.optim":
        return load(f"{place}:{last}")
    known = {each.lower(): each for each in dir(torch.optim) if inspect.isclass(getattr(torch.optim, each))}
    known.pop("optimizer", None)
    if last.lower() not in known:
        raise MemGuardError(f"torch.optim has no {last!r}. {_near(last, sorted(known.values()))}")
    return getattr(torch.optim, known[last.lower()])


def step(loss: str | None, *, has_target: bool) -> Step:
    """How a plain module is trained: called with the inputs, its loss from ``loss``, its own, or the usual one.

    Args:
        loss: name of a function or class of losses, such as ``torch.nn.functional:mse_loss``; None for the usual.
        has_target: the last tensor of a batch is what to learn.
    """
    found: Any = load(loss) if loss else None
    compare = build(found, {}, str(loss)) if inspect.isclass(found) else found

    def run(module: Any, given: Any) -> Any:
        if isinstance(given, Mapping) or hasattr(given, "keys"):
            result, target = module(**given), None
        elif isinstance(given, (list, tuple)):
            inputs, target = (given[:-1], given[-1]) if has_target and len(given) > 1 else (given, None)
            result = module(*inputs)
        else:
            result, target = module(given), None
        return _loss(result, target, compare)

    return run


def _loss(result: Any, target: Any, compare: Any) -> Any:
    own = getattr(result, "loss", None)
    if own is not None:  # Hugging Face's models bring theirs
        return own
    output = getattr(result, "logits", result)
    output = output[0] if isinstance(output, (list, tuple)) else output
    if target is None:
        return output.float().sum()
    if compare is not None:
        return compare(output, target)
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target)
    if output.shape[:-1] == target.shape and output.dim() > 2:  # the classes come last in language models
        output, target = output.flatten(0, -2), target.flatten()
    return nn.functional.cross_entropy(output, target)


# -- a LightningCLI's configuration


@dataclass(frozen=True)
class Config:
    """What a LightningCLI's configuration file asks for.

    Attributes:
        model: the LightningModule, with its optimizer where the file names one.
        datamodule: the LightningDataModule, or None.
        precision: of the Trainer.
        trainer: the Trainer's other settings that bear on memory.
    """

    model: Any
    datamodule: Any
    precision: str = "32-true"
    trainer: Mapping[str, Any] = field(default_factory=dict)


_SETTINGS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "max_steps",
    "max_time",
    "overfit_batches",
    "limit_train_batches",
    "detect_anomaly",
    "inference_mode",
    "devices",
    "num_nodes",
    "strategy",
    "sync_batchnorm",
    "use_distributed_sampler",
    "reload_dataloaders_every_n_epochs",
)
# Of the subcommand that the file was saved by, and what memory does not depend on.
_NOT_OURS = ("seed_everything", "ckpt_path", "weights_only", "return_predictions", "verbose")


def config(path: str, model_class: Any = None, data_class: Any = None, *, meta: bool = True) -> Config:
    """Read a LightningCLI's configuration by LightningCLI itself.

    Args:
        path: the YAML file, with class paths, or with the arguments of ``model_class`` and ``data_class``.
        model_class: the class that the user's own LightningCLI was made with, if it was made with one.
        data_class: the same of the data.
        meta: make the model without memory.

    Raises:
        MemGuardError: jsonargparse is not there, the file cannot be read, or does not fit the classes.
    """
    try:
        import jsonargparse
        import yaml
    except ImportError as error:
        raise MemGuardError(f"--config needs {error.name}: pip install 'jsonargparse[signatures]'.") from error
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MemGuardError(f"--config {path} cannot be read: {error}.") from error
    if not isinstance(content, Mapping):
        raise MemGuardError(f"--config {path} holds no settings; give the YAML file of a LightningCLI.")
    content = dict(content.get("fit") or content)
    told = dict(content.get("trainer") or {})
    for name in ("logger", "callbacks", "profiler", "plugins", "default_root_dir", "accelerator"):
        told.pop(name, None)
    settings = {key: told[key] for key in _SETTINGS if told.get(key) is not None}
    wanted = str(told.get("precision") or "32-true")
    plain = {key: value for key, value in content.items() if key not in (*_NOT_OURS, "trainer")}
    plain["trainer"] = {key: told[key] for key in settings if isinstance(told[key], Mapping)}
    with users_code(f"--config {path}"), _exits_as(jsonargparse, path):
        cli = _read(plain, content, model_class, data_class, meta=meta)
    read = cli.config_init.get("trainer") or {}
    settings |= {key: read[key] for key in plain["trainer"]}
    return Config(cli.model, cli.datamodule, precision(wanted), settings)


@contextlib.contextmanager
def _exits_as(jsonargparse: Any, path: str) -> Iterator[None]:
    try:
        yield
    except jsonargparse.ArgumentError as error:
        raise MemGuardError(f"--config {path}: {str(error).strip()}") from error


def _read(plain: dict[str, Any], content: Mapping[str, Any], model_class: Any, data_class: Any, *, meta: bool) -> Any:
    pl = _package(content, model_class)
    base = importlib.import_module(f"{pl.__name__}.cli").LightningCLI

    class Reader(base):  # type: ignore[misc,valid-type]
        """Makes the model and the data, and no Trainer."""

        def before_instantiate_classes(self) -> None:
            if meta:
                self.parser.add_instantiator(_without_memory, pl.LightningModule, subclasses=True, prepend=True)

        def instantiate_trainer(self, **_: Any) -> None:
            return None

    return Reader(
        model_class,
        data_class,
        save_config_callback=None,
        seed_everything_default=False,
        parser_kwargs={"exit_on_error": False},
        args=plain,
        run=False,
    )


def _without_memory(kind: type, *args: Any, **given: Any) -> Any:
    given.pop("applied_instantiation_links", None)
    try:
        with torch.device("meta"), quiet():
            return kind(*args, **given)
    except Exception:  # noqa: BLE001 - what the class needs memory for can be anything
        return kind(*args, **given)


def _package(content: Mapping[str, Any], model_class: Any) -> Any:
    """The Lightning package that the model comes from."""
    kind = model_class
    if kind is None:
        section = content.get("model")
        name = section.get("class_path") if isinstance(section, Mapping) else section
        if not isinstance(name, str) or "." not in name:
            raise MemGuardError(
                "The configuration names no model: give `class_path: module.Class` under `model:`, or the class that "
                "your LightningCLI was made with as TARGET."
            )
        place, _, last = name.rpartition(".")
        kind = load(f"{place}:{last}")
    if not inspect.isclass(kind):
        raise MemGuardError("Beside --config, TARGET is a class, as LightningCLI's own: a function will not do.")
    return lightning_of(kind.__new__(kind))
