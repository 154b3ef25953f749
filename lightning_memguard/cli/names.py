"""Names typed on a command line -> the model, batch, optimizer and loss that they mean.

A name without a meaning raises a MemGuardError with the name, the kind of thing it should be, and similar names.
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
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lightning_memguard.core.capture.capture import quiet
from lightning_memguard.core.capture.recorder import part_bytes
from lightning_memguard.core.device.budget import read_budget
from lightning_memguard.core.objects import is_installed
from lightning_memguard.errors import MemGuardError
from lightning_memguard.training.planning.subject import MakeOptimizer, Step

PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""The current names of the precisions for which Lightning accepts older names."""
_CALL = re.compile(r"([\w.]+(?:/[\w./-]+)?:[\w.]+)(\(.*\))", re.DOTALL)
_SHAPE = re.compile(  # as people write them: 8,3,64,64 or 8x3x64x64 or (8, 3, 64, 64)
    r"[(\[]?(?P<shape>\d+(?:\s*[,xX\u00d7]\s*\d+|\s+\d+)*),?[)\]]?"
    r"(?::\s*(?:torch\.)?(?P<dtype>[a-zA-Z]\w*))?(?::(?P<bound>\d+))?"
)
_DTYPES = {"int": "int64", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # not as torch has them
_KNOWN_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_MOST_BYTES = 1 << 26  # larger examples have shapes and no values


def load(name: str) -> Any:
    """Import the object that a name such as ``package.module:Class`` or ``path/to/file.py:Class`` refers to."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        dotted = name.rpartition(".")
        meant = f" Did you mean {dotted[0]}:{dotted[2]}?" if dotted[1] and not name.endswith(".py") else ""
        raise MemGuardError(f"{name!r} does not name a class; write module:Class or path/to/file.py:Class.{meant}")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would
    found: Any = _file(Path(place)) if place.endswith(".py") else _module(place)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise MemGuardError(f"{place} has no {attribute!r}. {_similar(part, _public(found))}")
        found = getattr(found, part)
    return found


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        others = sorted(each.name for each in path.parent.glob("*.py"))
        raise MemGuardError(f"There is no file {path.name} in {path.parent.resolve()}. {_similar(path.name, others)}")
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


def _module(name: str) -> ModuleType:
    try:
        with users_code(f"Importing {name}"):
            return importlib.import_module(name)
    except MemGuardError as error:
        cause = error.__cause__
        if not (isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}.")):
            raise
        raise MemGuardError(
            f"There is no module {cause.name!r} (looked in {Path.cwd()} and in the packages of {sys.prefix}). Write "
            "module:Class, naming the module as in `import`, or path/to/file.py:Class."
        ) from error


def _public(thing: object) -> list[str]:
    """Names of its own classes, or else of all classes, or else of everything."""
    names = [name for name in dir(thing) if not name.startswith("_")]
    classes = [name for name in names if inspect.isclass(getattr(thing, name, None))]
    home = getattr(thing, "__name__", "")
    own = [name for name in classes if str(getattr(thing, name).__module__).startswith(home)]
    return own or classes or names


def _similar(name: str, names: Sequence[str]) -> str:
    lower = {each.lower(): each for each in names}
    if similar := [lower[each] for each in get_close_matches(name.lower(), lower)]:
        return f"Did you mean {' or '.join(similar)}?"
    return f"It has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}." if names else "It has none."


@contextlib.contextmanager
def users_code(doing: str) -> Iterator[None]:
    """Turn what the user's code raises into one line that says where; a script that parses arguments finds none."""
    typed, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    except MemGuardError:
        raise
    except (Exception, SystemExit) as error:
        text = str(error).strip() or "no message"
        raise MemGuardError(f"{doing} raised {type(error).__name__}: {text}{_where(error)}") from error
    finally:
        sys.argv = typed


def _where(error: BaseException) -> str:
    """The last line of the user's own code in the traceback, and the line that raised it if that is another."""
    ours = ("<frozen", str(Path(__file__).parents[1]), contextlib.__file__, importlib.__file__)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
    own = [frame for frame in frames if not is_installed(frame.filename)]
    shown = (*own[-1:], *frames[-1:])
    lines = [f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in shown]
    return "".join(dict.fromkeys(lines))


def arguments(pairs: Iterable[str]) -> dict[str, Any]:
    """``["width=8", "name=x"]`` as ``{"width": 8, "name": "x"}``: Python literals, or else text.

    A value such as ``transformers:LlamaConfig(hidden_size=512)`` is what that call returns.
    """
    given = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise MemGuardError(f"{pair!r} is not an argument; write name=value, such as width=128.")
        given[key] = _value(value)
    return given


def _value(text: str) -> Any:
    if called := _CALL.fullmatch(text):
        return build(load(called[1]), _keywords(called[2], text), called[1])
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(text, text)


def _keywords(call: str, text: str) -> dict[str, Any]:
    try:
        tree: Any = ast.parse(f"f{call}", mode="eval").body
        return {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords if not tree.args}
    except (SyntaxError, ValueError) as error:
        raise MemGuardError(f"{text!r} is not a call with literals: write module:Class(name=value).") from error


def build(thing: object, given: Mapping[str, Any], name: str) -> Any:
    """Call a class or a function, and say what is missing if that is not possible."""
    if not callable(thing) or isinstance(thing, nn.Module):
        raise MemGuardError(f"{name} is a {type(thing).__name__}; pass a class, or a function that returns a model.")
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
    if unknown := [key for key in given if key not in names and not free]:
        raise MemGuardError(f"{name} takes no argument {unknown[0]!r}. {_similar(unknown[0], names)}")
    required = [each.name for each in parameters if each.default is each.empty and each.name in names]
    if missing := [key for key in required if key not in given]:
        example = " ".join(f"{key}=..." for key in missing)
        where = "--args, or --data-args for a datamodule"
        raise MemGuardError(f"{name} needs {', '.join(missing)}: pass {example} ({where}).")


def make(thing: object, given: Mapping[str, Any], name: str, *, meta: bool = True) -> nn.Module:
    """Make the model that the class or function ``name`` returns, on the meta device if that works."""
    model = None
    if meta:
        with contextlib.suppress(MemGuardError), quiet(), torch.device("meta"):
            model = build(thing, given, name)
    model = build(thing, given, name) if model is None else model
    if not isinstance(model, nn.Module):
        raise MemGuardError(f"{name} returned a {type(model).__name__}, which is not a torch.nn.Module.")
    return model


def could_have_memory(module: nn.Module) -> bool:
    """Whether a model on the meta device fits twice in this machine's memory: to make it, and to copy it."""
    if not any(parameter.is_meta for parameter in module.parameters()):
        return False
    needed = part_bytes({"model": [*module.parameters(), *module.buffers()]}, "meta")["model"]
    return 2 * needed < read_budget(torch.device("cpu")).usable_bytes


def tensor(text: str, option: str = "--input-shape", dtype: str = "float32") -> torch.Tensor:
    """An example tensor: ``8,3,224,224`` or ``8x3x224x224``, ``8,128:int64``, ``8:int64:10`` (values from 0 to 9)."""
    match = _SHAPE.fullmatch(text.strip())
    shape = [int(size) for size in re.findall(r"\d+", match["shape"])] if match else []
    if match is None or 0 in shape:
        raise MemGuardError(
            f"{option} {text!r} is not a shape: write its sizes, the batch size first, then a data type and, for "
            "classes, their number: 8,3,224,224 or 8,128:int64 or 8:int64:10."
        )
    name = match["dtype"] or dtype
    name = _DTYPES.get(name, name)
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise MemGuardError(f"{option} {text!r}: {name!r} is not a data type. {_similar(name, _KNOWN_DTYPES)}")
    if math.prod(shape) * kind.itemsize > _MOST_BYTES:
        return torch.empty(shape, dtype=kind, device="meta")
    if match["bound"]:
        return torch.arange(math.prod(shape)).remainder(max(1, int(match["bound"]))).to(kind).reshape(shape)
    return torch.zeros(shape, dtype=kind)


def batch(inputs: Sequence[str], targets: Sequence[str], named: Sequence[str]) -> Any:
    """The example batch: one tensor, a tuple of inputs and targets, or a dict by name; None if nothing is given."""
    if named:
        if inputs or targets:
            raise MemGuardError("Pass either --input name=shape, or --input-shape and --target-shape, not both.")
        return dict(map(_named, named))
    if not inputs:
        return None
    tensors = [tensor(text) for text in inputs]
    size = tensors[0].shape[0]
    for text in targets:
        tensors.append(tensor(text, "--target-shape", "int64"))
        if not any(length % size == 0 for length in tensors[-1].shape):
            raise MemGuardError(
                f"--input-shape {inputs[0]} is a batch of {size}, and --target-shape {text} is one of "
                f"{tensors[-1].shape[0]}: begin each with the same batch size, as in --input-shape 8,3,224,224 "
                "--target-shape 8:int64:1000."
            )
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _named(text: str) -> tuple[str, torch.Tensor]:
    key, equals, shape = text.partition("=")
    if not equals or not key:
        raise MemGuardError(f"--input {text!r} has no name: write name=shape, such as input_ids=8,512:int64.")
    return key, tensor(shape, f"--input {key}=")


def optimizer(text: str) -> MakeOptimizer:
    """``torch.optim.SGD,momentum=0.9``, ``adamw`` or ``module:Class,name=value`` as a function of the parameters."""
    name, *pairs = re.split(r",(?=\s*[A-Za-z_]\w*=)", text)  # commas inside a tuple are not before name=
    kind = _optimizer_class(name)
    given = arguments(pairs)
    takes = inspect.signature(kind).parameters
    if "lr" in takes and takes["lr"].default is inspect.Parameter.empty:
        given.setdefault("lr", 1e-3)  # memory does not depend on it
    first = next(iter(takes), "params")
    _check_arguments(kind, {first: None, **given}, name)
    return functools.partial(kind, **given)


def _optimizer_class(name: str) -> Any:
    place, _, last = name.rpartition(".")
    if ":" in name or place not in ("", "torch.optim"):
        return load(name if ":" in name else f"{place}:{last}")
    known = {each.lower(): each for each in dir(torch.optim) if inspect.isclass(getattr(torch.optim, each))}
    known.pop("optimizer", None)
    if last.lower() not in known:
        raise MemGuardError(f"torch.optim has no {last!r}. {_similar(last, sorted(known.values()))}")
    return getattr(torch.optim, known[last.lower()])


def step(loss: str | None, *, has_target: bool) -> Step:
    """How to train a plain module: the loss is its own, the one named ``loss``, or the usual one of its target."""
    named = load(loss) if loss else None
    compare = build(named, {}, str(loss)) if inspect.isclass(named) else named

    def run(module: nn.Module, given: Any) -> Any:
        if isinstance(given, Mapping) or hasattr(given, "keys"):
            return _loss(module(**given), None, compare)
        if not isinstance(given, (list, tuple)):
            return _loss(module(given), None, compare)
        inputs, target = (given[:-1], given[-1]) if has_target and len(given) > 1 else (given, None)
        return _loss(module(*inputs), target, compare)

    return run


def _loss(result: object, target: torch.Tensor | None, compare: Callable[..., Any] | None) -> Any:
    own = getattr(result, "loss", None)
    if own is not None:  # as in models of Hugging Face
        return own
    output: Any = getattr(result, "logits", result)
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
