"""Predicted versus measured -> a picture: bars by part, the whole peak, and the limit as a line.

This file changes when the picture should look different. It is drawn with Pillow, of the extra `tensorboard`:
a picture took 12 milliseconds on two slow cores, and 27 more to be written as PNG. Matplotlib took 400 to 600 for such
bars, longer than some epochs, and its import put 38 MiB into the very process whose memory is measured on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from lightning_memguard.core.decision.decision import Decision, batch_sizes, part_words, prediction_of
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.report.words import COLORS, bounds_of, peak_range, source_words, ticks
from lightning_memguard.units import format_bytes, signed

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

Slice = tuple[str, int]
"""A piece of a bar: its part and its bytes."""

OUTSIDE = "cache, context"  # what the device holds for this process outside of tensors
UNATTRIBUTED = "not attributed"
REST = "everything else"
PEAK = "peak"

_COLORS = {**COLORS, OUTSIDE: "#66717e", UNATTRIBUTED: "#1f2328"}
_READABLE = ("parameters", "buffers", "optimizer_state", "gradients")
_FARTHEST = 2.5  # a limit that is this many times the peak would leave no room to compare the bars


@dataclass(frozen=True)
class Group:
    """A predicted bar and the measured one under it; ``measured`` is None if that is unknown."""

    name: str
    predicted: tuple[Slice, ...]
    measured: tuple[Slice, ...] | None = None

    @property
    def bars(self) -> tuple[tuple[Slice, ...], ...]:
        """The predicted bar and, once measured, the measured one."""
        return (self.predicted,) if self.measured is None else (self.predicted, self.measured)


@dataclass(frozen=True)
class Picture:
    """All that is drawn.

    Attributes:
        title: the line on top.
        figures: the line under it: the totals.
        source: where the figures are from.
        groups: bars, the whole peak last.
        limit_bytes: what the training may take on its device, margin included.
        usable_bytes: the same without the margin.
        bounds: the least and the most that the whole peak is predicted to be; None if it is known exactly.
    """

    title: str
    figures: str
    source: str
    groups: tuple[Group, ...]
    limit_bytes: int
    usable_bytes: int
    bounds: tuple[int, int] | None = None

    @cached_property
    def span_bytes(self) -> int:
        """The width of the picture in bytes: the limit is in it, unless it is so far off that bars get lost."""
        sums = (sum(nbytes for _, nbytes in bar) for group in self.groups for bar in group.bars)
        longest = max(1, *sums, *(self.bounds or ()))
        near = self.limit_bytes <= _FARTHEST * longest
        return round(1.05 * max(longest, self.limit_bytes) if near else 1.5 * longest)


# What is shown


def picture_of_setup(decision: Decision) -> Picture:
    """Return the picture of a prediction before anything can be measured."""
    footprint, budget = prediction_of(decision)
    return Picture(
        f"Batch size {batch_sizes(decision, decision.batch_size)}",
        f"predicted {peak_range(footprint)} of {format_bytes(budget.free_bytes)}",
        f"{budget.device}; not measured yet",
        groups_of(footprint, None),
        budget.free_bytes,
        budget.usable_bytes,
        bounds_of(footprint),
    )


def picture_of_epoch(record: EpochRecord) -> Picture:
    """Predicted versus measured."""
    footprint, measured = record.compared, record.measured
    error = f" ({signed(record.error_ratio)})" if record.has_error else ""
    peak = f"measured {format_bytes(measured.peak_bytes)}{error}"
    return Picture(
        f"Epoch {record.epoch}, batch size {batch_sizes(record, record.batch_size)}",
        f"predicted {peak_range(footprint)}, {peak if measured.peak_bytes else 'not measured'}",
        f"measured: {source_words(measured)}",
        groups_of(footprint, measured if measured.peak_bytes else None),
        record.budget_bytes,
        record.budget_bytes - record.margin_bytes,
        bounds_of(footprint),
    )


def groups_of(footprint: Footprint, measured: Measured | None) -> tuple[Group, ...]:
    """The bars of a picture.

    A part has bars of its own if its true size was read, and all of it is predicted to be alive at the peak: of
    gradients that are freed or come one by one, nothing measures how much was alive then. The remainder is one bar that
    cannot be attributed to parts; the allocator's own peak, if there is one, separates tensors from what else the
    device holds.
    """
    predicted = {part: footprint.parts[part] for part in COLORS if footprint.parts.get(part)}
    outside = footprint.peak_device_bytes - sum(predicted.values())
    everything = (*predicted.items(), *([(OUTSIDE, outside)] if outside > 0 else []))
    if measured is None:
        return (*(Group(part_words(part), ((part, nbytes),)) for part, nbytes in everything), Group(PEAK, everything))
    read = {
        part: measured.parts[part]
        for part in COLORS
        if part in _READABLE
        and measured.parts.get(part)
        and (part != "gradients" or predicted.get(part, 0) >= measured.parts[part])
    }
    tensors = measured.peak_allocated_bytes
    beyond = 0 if tensors is None else max(0, measured.peak_bytes - tensors)
    remainder = (UNATTRIBUTED, max(0, measured.peak_bytes - beyond - sum(read.values())))
    split = tensors is not None and (beyond > 0 or outside > 0)
    rest = tuple(piece for piece in everything if piece[0] not in read and not (split and piece[0] == OUTSIDE))
    groups = [
        *(Group(part_words(part), ((part, predicted.get(part, 0)),), ((part, read[part]),)) for part in read),
        Group(REST, rest, (remainder,)),
    ]
    if split:
        groups.append(Group(OUTSIDE, ((OUTSIDE, max(0, outside)),), ((OUTSIDE, beyond),)))
    whole = (*read.items(), remainder, *([(OUTSIDE, beyond)] if beyond else []))
    return (*groups, Group(PEAK, everything, whole))


# How it is drawn

_WIDTH, _MARGIN = 800, 20  # TensorBoard first shows 320 pixels of width: what is large here can be read there
_LEFT, _RIGHT = 172, 560  # of the bars; their names are left of them, their sums right of them
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

    bottom = _TOP + sum(len(group.bars) * _BAR + _GAP for group in picture.groups)
    image, hatch = (new(mode, (_WIDTH, bottom + 110), fill) for mode, fill in (("RGB", "white"), ("1", 0)))
    for x in range(-hatch.height, _WIDTH, 8):
        Draw(hatch).line((x, hatch.height, x + hatch.height, 0), fill=1, width=2)
    drawing = _Drawing(picture, image, hatch, Draw(image), bottom)
    drawing.text((_MARGIN, 12), picture.title, size=28)
    drawing.text((_MARGIN, 48), picture.figures, size=20)
    drawing.text((_MARGIN, 76), picture.source, fill=_PALE)
    drawing.scale()
    drawing.bars()
    drawing.limit()
    drawing.legend(bottom + 44)
    return image


@dataclass(frozen=True)
class _Drawing:
    """A picture on its way to an image; ``hatch`` are lines for what was measured; the bars end at ``bottom``."""

    picture: Picture
    image: Image
    hatch: Image
    pen: ImageDraw
    bottom: int

    def text(self, at: tuple[int, int], text: str, *, fill: str = _INK, size: int = 16, anchor: str = "la") -> None:
        # The font that comes with Pillow: it does not matter which ones the machine has.
        self.pen.text(at, text, fill=fill, font_size=size, anchor=anchor)

    def x(self, nbytes: float) -> int:
        """Return the position of a number of bytes on the scale; at its end if it is beyond."""
        return _LEFT + round((_RIGHT - _LEFT) * min(nbytes / self.picture.span_bytes, 1))

    def scale(self) -> None:
        for nbytes, label in ticks(self.picture.span_bytes):
            x = self.x(nbytes)
            self.pen.line((x, _TOP - 6, x, self.bottom), fill=_GRID)
            self.text((x, self.bottom + 4), label, fill=_PALE, anchor="ma")
        usable, limit = self.picture.usable_bytes, self.picture.limit_bytes
        if usable < self.picture.span_bytes:  # what is to be kept free of the budget, as a pale band
            self.pen.rectangle((self.x(usable), _TOP - 6, self.x(limit), self.bottom), "#fbe9e7")

    def limit(self) -> None:
        limit, margin = self.picture.limit_bytes, self.picture.limit_bytes - self.picture.usable_bytes
        x = self.x(limit)
        for y in range(_TOP - 6, self.bottom, 12):
            self.pen.line((x, y, x, min(y + 7, self.bottom)), fill=_ALERT, width=3)
        text = f"limit {format_bytes(limit)}" + (f" (with a margin of {format_bytes(margin)})" if margin else "")
        text += ", off the scale" if limit > self.picture.span_bytes else ""
        shift, anchor = (4, "rd") if x > _LEFT + 170 else (-4, "ld")
        self.text((x + shift, _TOP - 12), text, fill=_ALERT, anchor=anchor)

    def bars(self) -> None:
        y = _TOP + _GAP // 2
        for group in self.picture.groups:
            height = len(group.bars) * _BAR
            self.text((_LEFT - 12, y + height // 2), group.name, size=18, anchor="rm")
            for index, bar in enumerate(group.bars):
                top = y + index * _BAR
                self.bar(bar, top, hatched=bool(index))
                if group.name == PEAK and not index and self.picture.bounds:
                    self.bounds(*self.picture.bounds, top + (_BAR - 3) // 2)
                middle, value = top + _BAR // 2 - 1, format_bytes(sum(nbytes for _, nbytes in bar))
                self.text((_WIDTH - _MARGIN - 88, middle), value, size=18, anchor="rm")
                kind = "measured" if index else "predicted"
                self.text((_WIDTH - _MARGIN - 80, middle), kind, fill=_PALE, size=17, anchor="lm")
            y += height + _GAP

    def bar(self, bar: tuple[Slice, ...], top: int, *, hatched: bool) -> None:
        edges = [self.x(end) for end in accumulate((nbytes for _, nbytes in bar), initial=0)]
        for (part, _), left, right in zip(bar, edges, edges[1:], strict=False):  # one more edge than pieces
            if left < right:
                self.box((left, top, right - 1, top + _BAR - 3), _COLORS[part], hatched=hatched)

    def box(self, box: tuple[int, int, int, int], color: str, *, hatched: bool) -> None:
        """A filled box; white lines over it show without colors that it was measured."""
        self.pen.rectangle(box, color)
        if hatched:
            area = (*box[:2], box[2] + 1, box[3] + 1)
            self.image.paste("white", area, self.hatch.crop(area))

    def bounds(self, low_bytes: int, high_bytes: int, y: int) -> None:
        """A line from the least to the most that is predicted."""
        low, high = self.x(low_bytes), self.x(high_bytes)
        for fill, width in (("white", 6), (_INK, 2)):
            self.pen.line((low, y, high, y), fill=fill, width=width)
            for x in (low, high):
                self.pen.line((x, y - 6, x, y + 6), fill=fill, width=width)

    def legend(self, y: int) -> None:
        """Draw the legend of the stacked bars' colors; bars of one part have their name next to them."""
        groups = self.picture.groups
        shown = {part for group in groups for bar in group.bars for part, _ in bar}
        entries = [(color, part_words(part), False) for part, color in _COLORS.items() if part in shown]
        if any(group.measured is not None for group in groups):
            entries += [("#7d8590", "plain: predicted", False), ("#7d8590", "hatched: measured", True)]
        x = _MARGIN
        for color, text, hatched in entries:
            width = 22 + round(self.pen.textlength(text, font_size=16)) + 18
            if x + width > _WIDTH - _MARGIN + 18:
                x, y = _MARGIN, y + 22
            self.box((x, y, x + 15, y + 13), color, hatched=hatched)
            self.text((x + 22, y + 7), text, anchor="lm")
            x += width
