"""Predicted beside measured -> a picture: bars by part, the whole peak, and the limit as a line.

This file changes when the picture should look different. It is drawn with Pillow, which TensorBoard brings along: a
picture took 12 milliseconds on two slow cores, and 27 more to be written as PNG. Matplotlib took 400 to 600 for such
bars, longer than some epochs, and its import put 38 MiB into the very process whose memory is measured on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lightning_memguard.core.decision.decision import Decision
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.report.colors import COLOURS
from lightning_memguard.units import GIB, KIB, MIB, format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

Slice = tuple[str, int]
"""A piece of a bar: its part and its bytes."""

OUTSIDE = "reserve, context"  # what the device holds for us beside tensors
UNTOLD = "not told apart"
REST = "all else"
PEAK = "peak"

_COLOURS = {**COLOURS, OUTSIDE: "#66717e", UNTOLD: "#1f2328"}
_READABLE = ("parameters", "buffers", "optimizer_state", "gradients")
_FARTHEST = 2.5  # a limit that is this many times the peak would leave no room to compare the bars


@dataclass(frozen=True)
class Group:
    """A predicted bar and the measured one under it; ``measured`` is None where that cannot be known."""

    name: str
    predicted: tuple[Slice, ...]
    measured: tuple[Slice, ...] | None = None

    @cached_property
    def bars(self) -> tuple[tuple[Slice, ...], ...]:
        """Both bars, or the one there is."""
        return (self.predicted,) if self.measured is None else (self.predicted, self.measured)


@dataclass(frozen=True)
class Picture:
    """All that is drawn.

    Attributes:
        title: the line on top.
        figures: the line under it: what it comes to.
        source: where the figures are from.
        groups: bars, the whole peak last.
        limit_bytes: what the training may take on its device, margin included.
        usable_bytes: the same without the margin.
        bounds: the least and the most that the whole peak is predicted to be; None where it is known exactly.
    """

    title: str
    figures: str
    source: str
    groups: tuple[Group, ...]
    limit_bytes: int
    usable_bytes: int
    bounds: tuple[int, int] | None = None

    @cached_property
    def longest_bytes(self) -> int:
        """The longest bar or bound."""
        sums = (sum(nbytes for _, nbytes in bar) for group in self.groups for bar in group.bars)
        return max(1, *sums, *(self.bounds or ()))

    @cached_property
    def span_bytes(self) -> int:
        """What the width of the picture stands for: the limit is in it, unless it is so far off that bars are lost."""
        near = self.limit_bytes <= _FARTHEST * self.longest_bytes
        return round(1.05 * max(self.longest_bytes, self.limit_bytes) if near else 1.5 * self.longest_bytes)


# What is shown


def picture_of_setup(decision: Decision) -> Picture | None:
    """What is predicted, before anything can be measured; None where nothing was predicted."""
    footprint, budget = decision.footprint, decision.budget
    if footprint is None or budget is None:
        return None
    peak, limit = format_bytes(footprint.peak_device_bytes), format_bytes(budget.free_bytes)
    return Picture(
        f"Batch size {footprint.batch_size}",
        f"predicted {peak} of {limit}{_range(footprint)}",
        f"{budget.device}; nothing is measured yet",
        groups_of(footprint, None),
        budget.free_bytes,
        budget.usable_bytes,
        _bounds(footprint),
    )


def picture_of_epoch(record: EpochRecord) -> Picture:
    """Predicted beside measured."""
    footprint, measured = record.predicted, record.measured
    seen = f"measured {format_bytes(measured.peak_bytes)} ({record.error_ratio:+.1%})"
    foreseen = f"predicted {format_bytes(footprint.peak_device_bytes)}{_range(footprint)}"
    return Picture(
        f"Epoch {record.epoch}, batch size {record.batch_size}",
        f"{foreseen}, {seen if measured.peak_bytes else 'nothing measured'}",
        f"measured: {measured.source}",
        groups_of(footprint, measured if measured.peak_bytes else None),
        record.budget_bytes,
        record.budget_bytes - record.margin_bytes,
        _bounds(footprint),
    )


def _bounds(footprint: Footprint) -> tuple[int, int] | None:
    low, high = footprint.low, footprint.high
    return (low.device_bytes, high.device_bytes) if low and high else None


def _range(footprint: Footprint) -> str:
    bounds = _bounds(footprint)
    return f" ({format_bytes(bounds[0])} to {format_bytes(bounds[1])})" if bounds else ""


def groups_of(footprint: Footprint, measured: Measured | None) -> tuple[Group, ...]:
    """The bars of a picture.

    A part stands by itself where its true size was read, and all of it is predicted to stand at the peak: of gradients
    that are freed or come bit by bit, nobody measures how much stood there. What is left is one bar that nobody can
    tell apart; the allocator's own peak, where there is one, tells tensors from what the device holds beside them.
    """
    predicted = {part: footprint.parts[part] for part in COLOURS if footprint.parts.get(part)}
    outside = footprint.peak_device_bytes - sum(predicted.values())
    everything = (*predicted.items(), *([(OUTSIDE, outside)] if outside > 0 else []))
    if measured is None:
        return (*(Group(_words(part), ((part, nbytes),)) for part, nbytes in everything), Group(PEAK, everything))
    read = {
        part: nbytes
        for part, nbytes in measured.parts.items()
        if part in _READABLE and nbytes and (part != "gradients" or predicted.get(part, 0) >= nbytes)
    }
    alone = [part for part in COLOURS if part in read]
    groups = [Group(_words(part), ((part, predicted.get(part, 0)),), ((part, read[part]),)) for part in alone]
    tensors, beside = measured.peak_allocated_bytes, 0
    if tensors is not None:
        beside = max(0, measured.peak_bytes - tensors)
    untold = max(0, measured.peak_bytes - beside - sum(read.values()))
    inside = tuple((part, nbytes) for part, nbytes in everything if part not in read)
    if tensors is not None and (beside or outside > 0):
        inside = tuple(piece for piece in inside if piece[0] != OUTSIDE)
        groups.append(Group(REST, inside, ((UNTOLD, untold),)))
        groups.append(Group(OUTSIDE, ((OUTSIDE, max(0, outside)),), ((OUTSIDE, beside),)))
    else:
        groups.append(Group(REST, inside, ((UNTOLD, untold),)))
    whole = [*((part, read[part]) for part in alone), (UNTOLD, untold), *([(OUTSIDE, beside)] if beside else [])]
    return (*groups, Group(PEAK, everything, tuple(whole)))


def _words(part: str) -> str:
    return part.replace("_", " ")


# How it is drawn

_WIDTH, _MARGIN = 800, 20  # TensorBoard first shows 320 pixels of width: what is large here can be read there
_LEFT, _RIGHT = 172, 560  # of the bars; left of them stand their names, right of them what they come to
_TOP = 140
_BAR, _GAP = 26, 16  # the height of a bar; the room between two groups
_INK, _PALE, _GRID, _ALERT = "#1f2328", "#59636e", "#e4e7eb", "#b3261e"


def draw(picture: Picture) -> Image:
    """Draw it.

    Returns:
        A Pillow image in RGB, 800 pixels wide; its height follows from the number of bars.
    """
    from PIL.Image import new
    from PIL.ImageDraw import Draw

    rows = sum(len(group.bars) * _BAR + _GAP for group in picture.groups)
    bottom = _TOP + rows
    image = new("RGB", (_WIDTH, bottom + 110), "white")
    pen = Draw(image)
    pen.text((_MARGIN, 12), picture.title, fill=_INK, font=_font(28))
    pen.text((_MARGIN, 48), picture.figures, fill=_INK, font=_font(20))
    pen.text((_MARGIN, 76), picture.source, fill=_PALE, font=_font(16))
    _draw_scale(pen, picture, bottom)
    _draw_margin(pen, picture, bottom)
    _draw_bars(image, pen, picture)
    _draw_limit(pen, picture, bottom)
    _draw_legend(image, pen, picture, bottom + 44)
    return image


def _font(size: int) -> FreeTypeFont | ImageFont:
    """The font that comes with Pillow: which ones the machine has does not matter."""
    from PIL.ImageFont import load_default

    return load_default(size)


def _x(picture: Picture, nbytes: float) -> int:
    """Where a number of bytes stands on the scale; what lies beyond it stands at its end."""
    return _LEFT + round((_RIGHT - _LEFT) * min(nbytes / picture.span_bytes, 1))


def _draw_scale(pen: ImageDraw, picture: Picture, bottom: int) -> None:
    for nbytes in _ticks(picture.span_bytes):
        x = _x(picture, nbytes)
        pen.line((x, _TOP - 6, x, bottom), fill=_GRID)
        pen.text((x, bottom + 4), _tick(nbytes), fill=_PALE, font=_font(16), anchor="ma")


def _ticks(span_bytes: int) -> Iterator[int]:
    """Up to six round numbers from 0 up to the span: 1, 2 or 5 of a power of ten, in the unit they are told in."""
    unit = _unit(span_bytes)
    step = next(step for step in _round_steps() if span_bytes / unit / step <= 5)
    yield from (round(unit * step * index) for index in range(int(span_bytes / unit / step) + 1))


def _round_steps() -> Iterator[float]:
    power = 0.1
    while True:
        yield from (power, 2 * power, 5 * power)
        power *= 10


def _unit(nbytes: int) -> int:
    return next((unit for unit in (GIB, MIB, KIB) if nbytes >= unit), 1)


def _tick(nbytes: int) -> str:
    return format_bytes(nbytes).replace(".0 ", " ") if nbytes else "0"


def _draw_margin(pen: ImageDraw, picture: Picture, bottom: int) -> None:
    """The part of the budget that is to be kept free, as a pale band."""
    if picture.usable_bytes < picture.span_bytes:
        pen.rectangle(
            (_x(picture, picture.usable_bytes), _TOP - 6, _x(picture, picture.limit_bytes), bottom), "#fbe9e7"
        )


def _draw_limit(pen: ImageDraw, picture: Picture, bottom: int) -> None:
    x = _x(picture, picture.limit_bytes)
    for y in range(_TOP - 6, bottom, 12):
        pen.line((x, y, x, min(y + 7, bottom)), fill=_ALERT, width=3)
    margin = picture.limit_bytes - picture.usable_bytes
    text = f"limit {format_bytes(picture.limit_bytes)}"
    text += f" ({format_bytes(margin)} of it kept free)" if margin else ""
    text += ", far to the right" if picture.limit_bytes > picture.span_bytes else ""
    to_the_left = x > _LEFT + 170
    at = (x + 4 if to_the_left else x - 4, _TOP - 12)
    pen.text(at, text, fill=_ALERT, font=_font(16), anchor="rd" if to_the_left else "ld")


def _draw_bars(image: Image, pen: ImageDraw, picture: Picture) -> None:
    y = _TOP + _GAP // 2
    for group in picture.groups:
        height = len(group.bars) * _BAR
        pen.text((_LEFT - 12, y + height // 2), group.name, fill=_INK, font=_font(18), anchor="rm")
        for index, bar in enumerate(group.bars):
            top = y + index * _BAR
            _draw_bar(image, pen, picture, bar, top, hatched=bool(index))
            if group.name == PEAK and not index and picture.bounds:
                _draw_bounds(pen, picture, top)
            _draw_value(pen, sum(nbytes for _, nbytes in bar), ("predicted", "measured")[index], top + _BAR // 2 - 1)
        y += height + _GAP


def _draw_bar(
    image: Image, pen: ImageDraw, picture: Picture, bar: tuple[Slice, ...], top: int, *, hatched: bool
) -> None:
    before = 0
    for part, nbytes in bar:
        left, right = _x(picture, before), _x(picture, before + nbytes)
        before += nbytes
        if right <= left:
            continue
        box = (left, top, right - 1, top + _BAR - 3)
        pen.rectangle(box, _COLOURS[part])
        if hatched:
            _hatch(image, box)


def _hatch(image: Image, box: tuple[int, int, int, int]) -> None:
    """White lines over a box: who sees no colours sees which bar was measured."""
    from PIL.Image import new
    from PIL.ImageDraw import Draw

    left, top, right, bottom = box
    width, height = right - left + 1, bottom - top + 1
    lines = new("1", (width, height))
    pen = Draw(lines)
    for x in range(-(left % 8) - height, width, 8):
        pen.line((x, height, x + height, 0), fill=1, width=2)
    image.paste("white", (left, top), lines)


def _draw_bounds(pen: ImageDraw, picture: Picture, top: int) -> None:
    """A line from the least to the most that is predicted."""
    assert picture.bounds is not None
    low, high = (_x(picture, nbytes) for nbytes in picture.bounds)
    middle = top + (_BAR - 3) // 2
    for fill, width in (("white", 6), (_INK, 2)):
        pen.line((low, middle, high, middle), fill=fill, width=width)
        for x in (low, high):
            pen.line((x, middle - 6, x, middle + 6), fill=fill, width=width)


def _draw_value(pen: ImageDraw, nbytes: int, kind: str, y: int) -> None:
    pen.text((_WIDTH - _MARGIN - 88, y), format_bytes(nbytes), fill=_INK, font=_font(18), anchor="rm")
    pen.text((_WIDTH - _MARGIN - 80, y), kind, fill=_PALE, font=_font(17), anchor="lm")


def _draw_legend(image: Image, pen: ImageDraw, picture: Picture, y: int) -> None:
    """What the colours of the stacked bars mean; bars of one part have their name beside them."""
    shown = {part for group in picture.groups for bar in group.bars for part, _ in bar}
    entries = [(_COLOURS[part], _words(part), False) for part in _COLOURS if part in shown]
    if any(group.measured is not None for group in picture.groups):
        entries += [("#7d8590", "plain: predicted", False), ("#7d8590", "hatched: measured", True)]
    font, x = _font(16), _MARGIN
    for colour, text, hatched in entries:
        width = 22 + round(font.getlength(text)) + 18
        if x + width > _WIDTH + 18:
            x, y = _MARGIN, y + 22
        box = (x, y, x + 15, y + 13)
        pen.rectangle(box, colour)
        if hatched:
            _hatch(image, box)
        pen.text((x + 22, y + 7), text, fill=_INK, font=font, anchor="lm")
        x += width
