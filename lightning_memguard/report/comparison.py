"""Comparison -> the report of ``memguard compare``: text to read, or to attach to an issue."""

from __future__ import annotations

from lightning_memguard.core.replay.compare import Comparison, Difference
from lightning_memguard.units import MIB, format_bytes

_MOST_ROWS = 40


def comparison_text(found: Comparison) -> str:
    """A predicted and an actual step in words: the peaks, what is alike, and each allocation that differs.

    It holds sizes, operators, and where the comparison has them, lines of code; nothing else.
    """
    before = found.actual_before_bytes - found.predicted_before_bytes
    here = found.predicted_peak_bytes - found.predicted_before_bytes
    there = found.actual_peak_bytes - found.actual_before_bytes
    lines = [
        f"MemGuard: a predicted step next to an actual one. {_verdict(found.peak_error, here == there)}",
        "",
        f"{'':24}{'predicted':>16}{'actual':>16}{'difference':>16}",
        _bytes("peak", found.predicted_peak_bytes, found.actual_peak_bytes),
        _bytes("  there before the step", found.predicted_before_bytes, found.actual_before_bytes),
        _bytes("  added by the step", here, there),
        _counts(found.predicted_requests, found.actual_requests),
        "",
        f"{found.equal_requests:,} allocations are alike: of the same size, in the same order.",
    ]
    if before:
        lines.append(
            f"The actual step began with {format_bytes(abs(before))} {'more' if before > 0 else 'less'} than predicted:"
            " not the step's own, but from what ran before, or from the allocator, which rounds sizes up."
        )
    shown = found.differences[:_MOST_ROWS]
    if not shown:
        return "\n".join([*lines, "No allocation of the step differs."])
    lines += ["", "Allocations that differ, the largest effect on the peak first:"]
    lines.append(f"{'effect on the peak':>20}{'count':>8}{'bytes each':>16}  {'which':30}  operator, line")
    lines += map(_row, shown)
    if len(found.differences) > len(shown):
        lines.append(f"  ... and {len(found.differences) - len(shown)} more")
    return "\n".join(lines)


def _verdict(error: float, step_is_exact: bool) -> str:
    if not error:
        return "The predicted peak is the actual one."
    off = f"The predicted peak is {abs(error):.3%} too {'high' if error > 0 else 'low'}"
    return f"{off}; what the step adds was predicted to the byte." if step_is_exact else f"{off}."


def _bytes(name: str, mine: int, yours: int) -> str:
    less = yours - mine
    difference = f"{'+' if less > 0 else '-'}{format_bytes(abs(less))}" if less else "none"
    return f"{name:24}{mine / MIB:>12,.1f} MiB{yours / MIB:>12,.1f} MiB{difference:>16}"


def _counts(mine: int, yours: int) -> str:
    return f"{'allocations':24}{mine:>16,}{yours:>16,}{yours - mine:>+16,}"


def _row(each: Difference) -> str:
    which = f"{each.kind.removeprefix('only ')} only"
    if each.kind == "held at the peak":
        which = f"both, at the {'actual' if each.count > 0 else 'predicted'} peak only"
    line = each.line.replace("\\", "/").rpartition("/")[2]  # no folders
    where = ", ".join(filter(None, (each.operator or "an unknown operator", line)))
    effect = f"{each.peak_bytes:+,} B" if each.peak_bytes else "none"
    return f"{effect:>20}{abs(each.count):>8,}{each.nbytes:>16,}  {which:30}  {where}"
