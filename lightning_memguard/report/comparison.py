"""Comparison -> the report of ``memguard compare``: text to read, or to attach to an issue."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_memguard._version import __version__
from lightning_memguard.core.histories.compare import Comparison, Difference
from lightning_memguard.core.histories.history import without_folders
from lightning_memguard.units import MIB, format_bytes

_MOST_ROWS, _MOST_WITHOUT_EFFECT = 30, 10
_ONE_STEP = 0.75  # if fewer are alike, the two are hardly the same step


def comparison_text(found: Comparison) -> str:
    """A predicted and an actual step in words: the peaks, what is alike, and each allocation that differs.

    It holds sizes, operators, and if the comparison has them, lines of code; nothing else.
    """
    before = found.actual_before_bytes - found.predicted_before_bytes
    here = found.predicted_peak_bytes - found.predicted_before_bytes
    there = found.actual_peak_bytes - found.actual_before_bytes
    requests = found.actual_requests - found.predicted_requests
    more = f"{requests:+,}" if requests else "none"
    lines = [
        f"MemGuard {__version__}: a predicted step next to an actual one. {_verdict(found.peak_error, here == there)}",
        *([f"Note: both snapshots are {found.same_kind}."] if found.same_kind else []),
        "",
        f"{'memory requested':24}{'predicted':>16}{'actual':>16}{'difference':>16}",
        _bytes("peak", found.predicted_peak_bytes, found.actual_peak_bytes),
        _bytes("  there before the step", found.predicted_before_bytes, found.actual_before_bytes),
        _bytes("  added by the step", here, there),
        _bytes("peak reserved", found.predicted_reserved_bytes, found.actual_reserved_bytes),
        f"{'allocations':24}{found.predicted_requests:>16,}{found.actual_requests:>16,}{more:>16}",
        "",
        f"{found.equal_requests:,} allocations are alike: of the same size, in the same order.",
        *_cautions(found),
    ]
    if before:
        lines.append(
            f"The actual step began with {format_bytes(abs(before))} {'more' if before > 0 else 'less'} than predicted,"
            " allocated before the step."
        )
    if not found.differences:
        return "\n".join([*lines, "No allocation of the step differs."])
    lines += [
        "",
        "Allocations that differ, the largest effect on the peak first; only those alive at the peak have one:",
    ]
    code = ", line" if any(each.line for each in found.differences) else ""
    lines.append(f"{'effect on the peak':>20}{'count':>8}{'bytes each':>16}  {'which':30}  operator{code}")
    effective = [each for each in found.differences if each.peak_bytes]
    others = [each for each in found.differences if not each.peak_bytes]
    lines += map(_row, [*effective[:_MOST_ROWS], *others[:_MOST_WITHOUT_EFFECT]])
    if rest := effective[_MOST_ROWS:]:
        lines.append(
            f"  ... and {len(rest):,} more rows with {_signed(sum(each.peak_bytes for each in rest))} in total"
        )
    if len(others) > _MOST_WITHOUT_EFFECT:
        lines.append(f"  ... and {len(others) - _MOST_WITHOUT_EFFECT:,} more rows without an effect")
    return "\n".join(lines)


def _verdict(error: float, step_is_exact: bool) -> str:
    if not error:
        return "The predicted peak is the actual one."
    share = "less than 0.001%" if abs(error) < 1e-5 else f"{abs(error):.{3 if abs(error) < 0.01 else 1}%}"
    off = f"The predicted peak is {share} too {'high' if error > 0 else 'low'}"
    return f"{off}; what the step adds was predicted to the byte." if step_is_exact else f"{off}."


def _cautions(found: Comparison) -> Iterator[str]:
    share = found.equal_requests / max(1, found.predicted_requests, found.actual_requests)
    if share < _ONE_STEP:
        yield (
            f"They are only {share:.0%} of all: these may be two different steps. Check that the model, the batch, its "
            "lengths and the precision are the same."
        )
    for name, count in (("predicted", found.predicted_left_out), ("actual", found.actual_left_out)):
        if count:
            where = "before or after the best match"
            yield f"The {name} history is longer: {count:,} of its allocations, {where}, are left out."


def _bytes(name: str, mine: int, yours: int) -> str:
    difference = _signed(yours - mine) if yours != mine else "none"
    return f"{name:24}{mine / MIB:>12,.1f} MiB{yours / MIB:>12,.1f} MiB{difference:>16}"


def _signed(nbytes: int) -> str:
    size = f"{abs(nbytes) / MIB:,.1f} MiB" if abs(nbytes) >= MIB else format_bytes(abs(nbytes))
    return f"{'-' if nbytes < 0 else '+'}{size}"


def _row(each: Difference) -> str:
    which = f"{each.kind.removeprefix('only ')} only"
    if each.kind == "held at the peak":
        which = f"both; at {'actual' if each.count > 0 else 'predicted'} peak only"
    where = ", ".join(filter(None, (each.operator or "operator not recorded", without_folders(each.line))))
    effect = _signed(each.peak_bytes) if each.peak_bytes else "none"
    return f"{effect:>20}{abs(each.count):>8,}{each.nbytes:>16,}  {which:30}  {where}"
