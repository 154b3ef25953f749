"""A pickle of plain values, read without loading a class, in memory in proportion to the file.

This file changes when Python's pickle format does; read as of protocols 2 to 5 (``pickletools``). `pickle` believes a
file: 12 bytes can make it allocate a memo of 2**32 places, and nested tuples as a key end the process. So the file is
checked first, for what a memory snapshot consists of: dicts, lists, text, numbers, and tuples of two numbers.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

from lightning_memguard.errors import MemGuardError

_NUMBER = rb"K.|M..|J.{4}|" + b"|".join(b"\x8a%c.{%d}" % (size, size) for size in range(10))
# What has a fixed length: numbers, pairs of numbers, floats, constants, containers, the memo, protocol and frames. At
# most 1,000 at a time, as `re` keeps a state for each.
_FIXED = re.compile(
    rb"(?:(?:%b){2}\x86|%b|h.|j.{4}|q.|[N\x88\x89\]}()aesu\x94]|G.{8}|\x80.|\x95.{8}){0,1000}" % (_NUMBER, _NUMBER),
    re.DOTALL,
)
_WITH_LENGTH = {b"\x8c": 1, b"X": 4, b"\x8d": 8, b"\x8a": 1}  # text, and long integers: bytes of their length
_PUT = b"r"
_LAST = (b".", b"c", b"\x93")  # the end, and the names of classes, at which reading ends as well


class _OnlyPlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise MemGuardError(
            f"it asks for {module}.{name}; a memory snapshot holds only plain values, and nothing else is loaded."
        )


def loads(content: bytes) -> Any:
    """Return the values in a pickle.

    Raises:
        MemGuardError: it holds something else than plain values, or claims to be larger than it is.
    """
    _check(content)
    return _OnlyPlainValues(io.BytesIO(content)).load()


def _check(content: bytes) -> None:
    at = 0
    while True:
        end = _FIXED.match(content, at).end()  # type: ignore[union-attr]  # an empty match at the least
        if end > at:
            at = end
            continue
        code = content[at : at + 1]
        if code in _LAST:
            return
        width = 4 if code == _PUT else _WITH_LENGTH.get(code)
        if width is None:
            what = f"has {code!r} at byte {at:,}" if code else "ends too early"
            raise MemGuardError(f"it {what}; a memory snapshot is a pickle of plain values (protocol 2 to 5).")
        at += 1 + width
        number = int.from_bytes(content[at - width : at], "little")
        if number > len(content):
            raise MemGuardError(f"it claims to hold {number:,} parts or bytes, and has only {len(content):,} bytes.")
        at += 0 if code == _PUT else number
