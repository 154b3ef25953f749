"""Other people's private names, and what MemGuard says where one has moved.

They are read by functions with a meaning, in the ports: `torch_port`, and of Lightning `lightning_port`. Those of torch
that one file follows are in ``foreign.ini``. The engine is imported when a run is set up, and what fails says so in the
words of either (`reason_of`); what every run needs is looked up once (`gaps`), and operators that this torch lacks are
left out of our rules (`aten`). `tests/core/test_foreign.py` trains without each in turn,
and finds names that are read elsewhere.
"""

from __future__ import annotations

import configparser
import contextlib
import dis
import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from lightning_memguard.errors import CannotTraceError


@dataclass(frozen=True)
class Need:
    """Private names that serve one purpose: a section of ``foreign.ini``, or a function of a port.

    Attributes:
        purpose: completes "which MemGuard needs to".
        part: the runs that need them.
        paths: the full path of each.
        without: what becomes of such a run.
    """

    purpose: str
    part: str
    paths: tuple[str, ...]
    without: str

    def lacks(self, path: str) -> str:
        """Say that a name is missing, and what it is for."""
        return f"{_version_of(path)} does not have {path}, which MemGuard needs to {self.purpose}"


_TORCH = "lightning_memguard.core.torch_port"
PORTS = {_TORCH: ("torch", "every run"), "lightning_memguard.training.facts.lightning_port": ("trainer", "lightning")}
"""The files that read private names: where their paths begin, and the runs that need a function of theirs."""


@functools.cache
def table() -> tuple[Need, ...]:
    """Read ``foreign.ini``."""
    sections = configparser.ConfigParser(delimiters="=", interpolation=None)
    sections.read_string(files("lightning_memguard.core").joinpath("foreign.ini").read_text(encoding="utf-8"))
    rows = ((purpose, sections[purpose]) for purpose in sections.sections())
    return tuple(Need(purpose, row["part"], tuple(_paths(row["names"])), row["without"]) for purpose, row in rows)


@functools.cache
def port_table(name: str = _TORCH) -> tuple[Need, ...]:
    """Return what each function of a port is for, with the names that its code spells out."""
    port, (root, usual) = importlib.import_module(name), PORTS[name]
    functions = [each for each in vars(port).values() if getattr(each, "__module__", "") == name]
    return tuple(
        Need(_purpose_of(each), part, (*_names_in(each, root),), _WITHOUT.get(part, "such runs are not tuned"))
        for each in functions
        if not isinstance(each, type)
        for part in port.PARTS.get(each.__name__, (usual,))
    )


_WITHOUT = {
    "every run": "some steps are run on a copy instead of simulated, or not predicted",
    "offload": "saved activations stay on the device",
    "lightning": "runs are not tuned",
    "logging": "no picture is logged",
}


def _purpose_of(function: object) -> str:
    first = re.split(r"[.;]\s", f"{inspect.getdoc(function)}\n")[0]
    return first[:1].lower() + first[1:].strip(" .")


def _names_in(function: Callable[..., object], root: str) -> Iterator[str]:
    path = ""
    for step in dis.get_instructions(inspect.unwrap(function)):
        if path and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path += f".{step.argval}"
            continue
        if path:
            yield path
        is_root = step.opname.startswith(("LOAD_GLOBAL", "LOAD_FAST")) and step.argval == root
        is_written = step.opname == "LOAD_CONST" and _WRITTEN.fullmatch(str(step.argval))
        path = str(step.argval) if is_root or is_written else ""


_WRITTEN = re.compile(r"torch(\.\w+)+( or torch(\.\w+)+)*")


def _paths(names: str) -> Iterator[str]:
    home = ""
    for word in names.split():
        if word.endswith(":"):
            home = word[:-1]
        else:
            yield f"{home}.{word}"


NEWEST_TESTED = {"torch": (2, 15), "Lightning": (2, 6)}  # as in benchmarks/matrix.py and the canary's workflow

LIBRARIES = frozenset(("torch", "pytorch_lightning", "lightning", "lightning_fabric", "lightning_memguard"))
"""The packages around the user's code; whose code it is, is asked by them."""
# Where a path begins, if not at a trainer or another object of Lightning's.
_OF_TORCH = ("torch", "operator", "definition", "mode", "storage", "node", "memory", "cuda", "optimizer")


class Absent:
    """Placeholder for a name that is missing: a key that nothing equals, and a function that raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def overloads(self) -> tuple[str, ...]:
        """Return no overloads, as if this were an operator."""
        return ()

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._path}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        """Refuse, in one sentence."""
        raise CannotTraceError(f"{_version_of(self._path)} does not have {self._path}")


class _Operators:
    """``torch.ops.aten``, without an error for operators that this torch lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"].ops.aten, name, None) or Absent(f"torch.ops.aten.{name}")


aten: Any = _Operators()


def find(path: str, **roots: object) -> Any:
    """Return the object at a dotted path, from torch or from one of ``roots``; an `Absent` if there is none.

    A name that another version has under another path is written ``"torch._new or torch._old"``.
    """
    for each in path.split(" or "):
        found = _find(each, **roots)
        if not isinstance(found, Absent):
            return found
    return Absent(path)


def _find(path: str, **roots: object) -> Any:
    first, *names = path.split(".")
    found: Any = roots[first] if first in roots else importlib.import_module(first)
    for name in names:
        home, found = found, getattr(found, name, _NOTHING)
        if found is _NOTHING and "__path__" in getattr(home, "__dict__", ()):
            with contextlib.suppress(ImportError):  # a part that is not loaded yet
                found = importlib.import_module(f"{home.__name__}.{name}")
        if found is _NOTHING:
            return Absent(path)
    return found


_NOTHING = object()


def nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of a function that is not to run."""


def call_around(
    owner: object, name: str, before: Callable[..., object] = nothing, after: Callable[..., object] = nothing
) -> None:
    """Call functions before and after a method, if there is one, with its arguments."""
    method = getattr(owner, name, nothing)

    @functools.wraps(method)
    def calling(*args: object, **kwargs: object) -> Any:
        before(*args, *kwargs.values())
        result = method(*args, **kwargs)
        after(*args, *kwargs.values())
        return result

    setattr(owner, name, calling)


def patched(owner: object, /, **values: object) -> contextlib.AbstractContextManager[None]:
    """Replace attributes of a module, a class or an object, and restore them at the end.

    Raises:
        AttributeError: it lacks one.
    """
    for name in values:
        getattr(owner, name)
    return added(owner, **values)


@contextlib.contextmanager
def added(owner: object, /, **values: object) -> Iterator[None]:
    """Replace attributes as `patched` does, or add them if the owner lacks them."""
    before = {name: vars(owner).get(name, _NOTHING) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def gaps(*parts: str, **roots: object) -> str:
    """Say what MemGuard cannot do since names of the table, or of parts of it, are missing; empty if all are there."""
    found = [
        f"{need.lacks(path)}: {need.without}"
        for need, path in _rows(*parts)
        if path.partition(".")[0] in ("torch", *roots) and isinstance(find(path, **roots), Absent)
    ]
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "") if found else ""


def newest_tested() -> str:
    """Write `NEWEST_TESTED`."""
    return " and ".join(f"{name} {major}.{minor}" for name, (major, minor) in NEWEST_TESTED.items())


def untested() -> str:
    """Say that torch or Lightning is newer than any that the tests have run on; empty if neither is."""
    versions = [_version_of("torch"), _version_of("trainer")]
    newer = [
        each for each in versions if tuple(map(int, re.findall(r"\d+", each)[:2])) > NEWEST_TESTED[each.split()[0]]
    ]
    return f"MemGuard is tested up to {newest_tested()}; this is {' and '.join(newer)}." if newer else ""


def reason_of(error: BaseException, text: str = "") -> str:
    """Why something failed: in the table's words if a name of it is missing, else in ``text``, or the error's own."""
    missing = ""
    with contextlib.suppress(Exception):  # what fails may keep the table from being read, too
        missing = missing_in(error)
    return missing or f"{type(error).__name__}: {text or error}"


def missing_in(error: BaseException) -> str:
    """Say which private name an error is about, and what it is for; empty if it is about another."""
    port, function = _failed_in_port(error)
    if port:
        named = getattr(sys.modules.get(port), "__dict__", {}).get(function)
        place = f"{port.rpartition('.')[2]}.{function}: {type(error).__name__}: {error}"
        purpose = _purpose_of(named) if named else "predict"
        return f"{_version_of(PORTS[port][0])} does not let MemGuard {purpose} ({place})"
    if isinstance(error, (AttributeError, ImportError)):
        words, owner = set(re.findall(r"\w+", str(error))), getattr(error, "obj", None)
        home = str(getattr(owner, "__module__", None) or getattr(owner, "__name__", "")).partition(".")[0]
        for need, path in _rows():
            named = any(name.startswith("_") and name in words for name in path.split("."))
            is_theirs = home in LIBRARIES | {"torchmetrics"}  # of whose objects Lightning's private names are read
            missing = isinstance(find(path), Absent) if named and path.startswith("torch.") else is_theirs
            if named and missing:
                return need.lacks(path)
    return ""


def _failed_in_port(error: BaseException) -> tuple[str, str]:
    """Name the port and its function in which an error arose, or in what of torch it called; empty for others."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames and str(frames[-1].f_globals.get("__name__", "")).partition(".")[0] == "torch":
        frames.pop()
    port = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return (port, frames[-1].f_code.co_name) if port in PORTS else ("", "")


def _rows(*parts: str) -> Iterator[tuple[Need, str]]:
    needs = (*table(), *(need for port in PORTS if port in sys.modules for need in port_table(port)))
    return ((need, path) for need in needs if not parts or need.part in parts for path in need.paths)


def _version_of(path: str) -> str:
    if path.partition(".")[0] in _OF_TORCH:
        return f"torch {sys.modules['torch'].__version__}"
    known = [sys.modules[name] for name in ("pytorch_lightning", "lightning") if name in sys.modules]
    return f"Lightning {known[0].__version__}" if known else "Lightning"
