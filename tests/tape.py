"""A tape: traces of a step, or the curve made of them, as a file that any torch reads, and nothing runs.

What follows a capture is arithmetic on records, so its tests read these in place of capturing a step. A tape is gzipped
JSON lines: a line that says which version of the format it is, then each record by its name and fields, and each event
and kernel on a line of its own. A kernel is the name of its operator, whose rule the package knows, and numbers.
`make tapes` makes them.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightning_memguard.core.trace.packed import PackedGrowth

VERSION = 1
FOLDER = Path(__file__).parent / "tapes"

_ROOT = "lightning_memguard.core."
_HOMES = {  # loaded when a tape has one: those of captures load torch
    "batch.batches": ("Epoch",),
    "capture.capture": ("Variant",),
    "capture.curve": ("Curve", "Gap", "Proof", "Terms"),
    "kernels.templates": ("Placeholder", "RuleTemplate", "TorchName"),
    "range": ("Range",),
    "replay.learned": ("Learned", "Sighting"),
    "replay.settings": ("AllocatorSettings",),
    "trace.growth": ("Growth",),
    "trace.kept": ("Kept",),
    "trace.scratch": ("CpuTarget", "CudaTarget"),
    "trace.trace": ("Event", "Kernel", "Note", "ScratchSpan", "Trace"),
    "trace.work": ("Work",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MOST_IN_A_LINE = 8  # records
_MEASURED = ("seconds", "speed")  # fields that no two runs share; a tape has none of them


def write(value: object, path: Path) -> None:
    """Write a record made of traces."""
    text = "".join(f"{placeless(line)}\n" for line in lines_of(value))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


@functools.cache
def read(name: str) -> Any:
    """Read one of the tapes that are kept."""
    return value_of(gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()).decode().splitlines())


def played(program: Any, batch_size: int, method: str = "fake", *_: object, **__: object) -> Any:
    """In place of a capture: the step of a small training at that size, from its tapes, whatever the program is.

    Asked for the states alone, it is those of another training.
    """
    kind = "fit" if program.trains else "fit_validation"
    kind = "fit_accumulating" if (program.batches_per_step or 1) > 1 else kind
    growth = read("fit_gpu" if program.device.type == "cuda" else kind).growth
    trace = read("fails").trace_at(batch_size) if method == "states" else growth.at(batch_size)
    return replace(trace, batch=program.expected_batch(batch_size))


def lines_of(value: object) -> list[str]:
    """Write a record as lines."""
    lines = [json.dumps({"tape": VERSION})]
    whole = _written(value, lines)
    return [*lines, json.dumps(whole)]


def placeless(line: str) -> str:
    """Leave out where the code is that a line names."""
    return re.sub(r"/[^\" ]*/([^/\"]+\.py:\d+)", r"\1", line)


def value_of(lines: Sequence[str]) -> Any:
    """Return the record that lines say.

    Raises:
        ValueError: they are of another version of the format.
    """
    header, *rows = map(json.loads, lines)
    if header != {"tape": VERSION}:
        raise ValueError(f"Not a tape of version {VERSION}: {header}")
    return _Reader(rows).value(rows[-1])


def _written(value: Any, lines: list[str]) -> Any:
    """A value as JSON has it."""
    value = value.unpacked() if isinstance(value, PackedGrowth) else value
    name = type(value).__name__
    if value is None or type(value) in (bool, int, float, str):
        return value
    if name in _HOME_OF:
        return {name: _fields(value, lines)}
    if isinstance(value, Mapping):
        return {"map": [[_written(each, lines) for each in pair] for pair in value.items()]}
    return _sequence(value, lines)


def _sequence(value: Sequence[Any], lines: list[str]) -> Any:
    """A sequence as JSON has it. Many records of a kind are lines of their own, and their place is what is left."""
    kinds = {type(each).__name__ for each in value}
    if kinds == {"Fraction"}:
        return {"polynomial": [*map(str, value)]}
    if len(value) <= _MOST_IN_A_LINE or len(kinds) > 1 or not kinds & _HOME_OF.keys():
        return [_written(each, lines) for each in value]
    rows = [json.dumps(_fields(each, lines)) for each in value]
    lines += rows
    return {"lines": [*kinds, len(lines) - len(rows) - 1, len(rows)]}


def _fields(value: Any, lines: list[str]) -> Any:
    """Fields by name, or in their order; those that are as they are by default are left out."""
    if type(value).__name__ == "Note":
        return [value.kind, str(value)]
    if is_dataclass(value):
        given = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        plain = {each.name: _default(each) for each in fields(value)}
        return {
            key: _written(each, lines)
            for key, each in given.items()
            if key not in _MEASURED and not (plain[key] == each and type(plain[key]) is type(each))
        }
    given = [0.0 if key in _MEASURED else each for key, each in zip_longest(getattr(value, "_fields", ()), value)]
    plain = getattr(value, "_field_defaults", {})
    for key in reversed(getattr(value, "_fields", ())):
        if key not in plain or given[-1] != plain[key]:
            break
        given.pop()
    return [_written(each, lines) for each in given]


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


class _Reader:
    """Makes values of a tape's lines; equal polynomials are one object, as in the growth that was written."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows
        self._polynomials: dict[str, Any] = {}

    def value(self, written: Any) -> Any:
        if isinstance(written, list):
            return tuple([self.value(each) for each in written])
        if not isinstance(written, dict):
            return written
        ((name, content),) = written.items()
        if name == "lines":
            kind, start, count = content
            return tuple([self._record(kind, row) for row in self._rows[start : start + count]])
        if name == "polynomial":
            return self._polynomials.setdefault(str(content), tuple(map(Fraction, content)))
        if name == "map":
            return {self.value(key): self.value(each) for key, each in content}
        return self._record(name, content)

    def _record(self, name: str, content: Any) -> Any:
        kind = getattr(importlib.import_module(_ROOT + _HOME_OF[name]), name)
        if isinstance(content, dict):
            return kind(**{key: self.value(each) for key, each in content.items()})
        return kind(*map(self.value, content))


def differences(here: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    """The first lines in which two tapes differ, but for line numbers of the code."""
    for mine, its in zip(here, there, strict=False):
        if re.sub(r"(\.py):\d+", r"\1", mine) != re.sub(r"(\.py):\d+", r"\1", its):
            yield f"{mine} and {its}"
    if len(here) != len(there):
        yield f"{len(here)} lines and {len(there)}"
