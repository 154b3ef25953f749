"""Comparison -> the report of ``memguard compare``: text to read, or to attach to an issue."""

from __future__ import annotations

from lightning_memguard.core.replay.compare import Comparison, Difference
from lightning_memguard.units import format_bytes

_MOST_ROWS = 40


def comparison_text(found: Comparison) -> str:
    """A predicted and an actual step in words: the peaks, how many requests are equal, and each difference.

    It holds sizes, operators, and where the comparison has them, lines of code; nothing else.
    """
    before = found.actual_before_bytes - found.predicted_before_bytes
    here = found.predicted_peak_bytes - found.predicted_before_bytes
    there = found.actual_peak_bytes - found.actual_before_bytes
    rows = [
        ("Peak of requested bytes", found.predicted_peak_bytes, found.actual_peak_bytes),
        ("  before the step", found.predicted_before_bytes, found.actual_before_bytes),
        ("  added by the step", here, there),
        ("Requests", found.predicted_requests, found.actual_requests),
    ]
    lines = [
        f"MemGuard: a predicted step next to an actual one. The predicted peak is {_off(found.peak_error)}.",
        "",
        f"{'':26}{'predicted':>20}{'actual':>20}{'actual - predicted':>22}",
        *(f"{name:26}{mine:>20,}{yours:>20,}{yours - mine:>+22,}" for name, mine, yours in rows),
        "",
        f"{found.equal_requests:,} requests are equal, in the same order.",
    ]
    if before:
        lines.append(
            f"Before the step, {format_bytes(abs(before))} {'more' if before > 0 else 'less'} was allocated than "
            "predicted: by what ran earlier, or by blocks that are larger than what was requested."
        )
    shown = found.differences[:_MOST_ROWS]
    if shown:
        lines += ["", "Differences, those with the largest effect on the peak first (bytes: actual less predicted):"]
        lines += [f"  {_row(each)}" for each in shown]
    if len(found.differences) > len(shown):
        lines.append(f"  ... and {len(found.differences) - len(shown)} more")
    if not shown:
        lines.append("There is no difference within the step.")
    return "\n".join(lines)


_KINDS = {
    "only predicted": "predicted, but not requested",
    "only actual": "requested, but not predicted",
    "held at the peak": "requested in both, but only the",
}


def _off(error: float) -> str:
    return f"{abs(error):.3%} too {'high' if error > 0 else 'low'}" if error else "the actual one"


def _row(each: Difference) -> str:
    kind = _KINDS[each.kind]
    if each.kind == "held at the peak":
        kind += f" {'actual' if each.count > 0 else 'predicted'} step holds it at its peak"
    line = each.line.replace("\\", "/").rpartition("/")[2]  # no folders
    where = " at ".join(filter(None, (each.operator or "an unknown operator", line)))
    effect = f"peak {each.peak_bytes:+,}" if each.peak_bytes else "no effect on the peak"
    return f"{abs(each.count):,} x {each.nbytes:,} B, {where}: {kind}; {effect}"
