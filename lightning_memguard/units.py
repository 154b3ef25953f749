"""Bytes to text and back. Bytes stay ``int`` until the moment they are printed."""

from __future__ import annotations

import re
from decimal import Decimal

from lightning_memguard.errors import MemGuardError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BINARY = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_QUANTITY = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def format_bytes(nbytes: int) -> str:
    """Write a number of bytes for a person, in binary units.

    >>> format_bytes(25_757_220_864)
    '24.0 GiB'
    """
    if abs(nbytes) < KIB:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= KIB
        if abs(round(size, 1)) < KIB:
            return f"{size:.1f} {unit}"
    return f"{size / KIB:.1f} TiB"


def format_count(count: int) -> str:
    """Write a count for a person, in decimal units; nothing for 0.

    >>> format_count(58_982_400), format_count(640)
    ('59.0 M', '640')
    """
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return str(count or "")


def counted(count: int, noun: str) -> str:
    """A count and what it counts: ``"1 epoch"``, ``"3 epochs"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def signed(ratio: float, digits: int = 1) -> str:
    """Write a relative difference as a percentage with its sign; zero has the sign of none that is below it.

    >>> signed(-0.1234), signed(-0.0001)
    ('-12.3%', '+0.0%')
    """
    return f"{round(ratio, digits + 2) + 0.0:+.{digits}%}"


def share_of(nbytes: int, whole: int) -> str:
    """Write bytes and the whole that they are a part of, with the unit once if both have the same.

    >>> share_of(512 * MIB, 17 * GIB), share_of(2 * GIB, 17 * GIB)
    ('512.0 MiB of 17.0 GiB', '2.0 of 17.0 GiB')
    """
    part, (number, unit) = format_bytes(nbytes), format_bytes(whole).split()
    return f"{part.removesuffix(f' {unit}')} of {number} {unit}"


def parse_bytes(quantity: int | str, name: str = "") -> int:
    """Read a number of bytes as people write it.

    Args:
        quantity: an ``int`` of bytes, or text such as ``"24GiB"``, ``"800 MB"`` or ``"1_000_000"``.
            ``KiB``, ``MiB``, ``GiB``, ``TiB`` are powers of 1024; ``KB``, ``MB``, ``GB``, ``TB`` powers of 1000.
        name: the setting that it was passed as, for errors.

    Returns:
        The number of bytes, rounded down.

    Raises:
        MemGuardError: the text is not a quantity of bytes, or it is not positive.

    >>> parse_bytes("24GiB")
    25769803776
    """
    passed = f"{name}={quantity!r}" if name else repr(quantity)
    if isinstance(quantity, bool) or not isinstance(quantity, (int, str)):
        raise MemGuardError(f"{passed} is not a number of bytes; pass an int, or text such as '24GiB'.")
    nbytes = quantity if isinstance(quantity, int) else _parse_text(quantity, passed)
    if nbytes <= 0:
        raise MemGuardError(f"{passed} is not a positive number of bytes; pass an int, or text such as '24GiB'.")
    return nbytes


def _parse_text(text: str, passed: str) -> int:
    match = _QUANTITY.fullmatch(text)
    scale = (_BINARY | _DECIMAL).get(match[2].upper()) if match else None
    if match is None or scale is None:
        raise MemGuardError(
            f"{passed} is not a quantity of bytes; pass an int, or text such as '24GiB', '800MB' or '512 MiB'."
        )
    return int(Decimal(match[1].replace("_", "")) * scale)
