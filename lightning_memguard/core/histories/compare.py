"""Two histories of one step -> where they differ: which requests, by how many bytes, and what that does to the peak.

The requests are aligned by their bytes, in order. A history may hold more than the step, or begin in the middle of a
process: the span that the other one matches best is compared.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from lightning_memguard.core.histories.history import History, Stack, line_of, operator_of, read_histories
from lightning_memguard.errors import MemGuardError

_NEVER = 1 << 62


class BlockRequest(NamedTuple):
    """A request of a history: its bytes, its stack, and the places of the entries that made and ended it."""

    nbytes: int
    stack: Stack
    begin: int
    end: int = _NEVER


@dataclass(frozen=True)
class Difference:
    """Requests of one kind that only one of the two histories has, or that it holds for longer at its peak.

    Attributes:
        kind: ``"only predicted"``, ``"only actual"``, or ``"held at the peak"`` in one of the two.
        operator: such as ``"aten::addmm"``; empty if the stack does not say.
        line: of the code, as ``file:line:function``; empty if there is none.
        nbytes: of each.
        count: how many; of those held, positive if the actual history has more.
        peak_bytes: what they add to the actual peak, less what they add to the predicted one.
    """

    kind: str
    operator: str
    line: str
    nbytes: int
    count: int
    peak_bytes: int


@dataclass(frozen=True)
class Comparison:
    """A predicted and an actual step.

    Attributes:
        predicted_requests, actual_requests: how many each has.
        equal_requests: how many of them are aligned: of equal bytes, in the same order.
        predicted_peak_bytes, actual_peak_bytes: of what is requested.
        predicted_before_bytes, actual_before_bytes: what was allocated when the step began.
        differences: that explain the rest, the largest effect on the peak first.
        predicted_left_out, actual_left_out: requests before and after the part that was compared.
        predicted_reserved_bytes, actual_reserved_bytes: the most that was reserved during the step.
        same_kind: ``"predicted"`` or ``"recorded"`` if both snapshots are; else empty.
    """

    predicted_requests: int
    actual_requests: int
    equal_requests: int
    predicted_peak_bytes: int
    actual_peak_bytes: int
    predicted_before_bytes: int
    actual_before_bytes: int
    differences: tuple[Difference, ...]
    predicted_left_out: int = 0
    actual_left_out: int = 0
    predicted_reserved_bytes: int = 0
    actual_reserved_bytes: int = 0
    same_kind: str = ""

    @property
    def peak_error(self) -> float:
        """Predicted over actual peak, less 1."""
        return self.predicted_peak_bytes / self.actual_peak_bytes - 1 if self.actual_peak_bytes else 0.0

    def without_lines(self) -> Comparison:
        """Return the comparison without lines of code: differences at several lines are added up."""
        added: dict[tuple[str, str, int], Difference] = {}
        for each in self.differences:
            key = each.kind, each.operator, each.nbytes
            known = added.get(key, replace(each, line="", count=0, peak_bytes=0))
            added[key] = replace(known, count=known.count + each.count, peak_bytes=known.peak_bytes + each.peak_bytes)
        return replace(self, differences=_largest_first(each for each in added.values() if each.count))


def compare(predicted: History, actual: History) -> Comparison:
    """Compare the last step of two histories, request by request.

    Args:
        predicted: of `lightning_memguard.core.replay.snapshot.save_snapshot`, or any other.
        actual: as recorded; if it has no entries, the blocks that it holds are compared with those at our peak.
    """
    ours, theirs = (_Step.of(history, _last_step(history)) for history in (predicted, actual))
    if not actual.entries:
        ours, theirs = ours.held_at_peak, theirs.held_at_peak
    sizes = [each.nbytes for each in ours.requests], [each.nbytes for each in theirs.requests]
    mine, yours = map(len, sizes)
    if actual.entries:
        pairs, (first, last), (first_of_theirs, last_of_theirs) = _matched(*sizes)
        ours, theirs = ours.only(first, last), theirs.only(first_of_theirs, last_of_theirs)
    else:
        pairs = aligned(*sizes)
    found = _differences(ours, theirs, pairs)
    return Comparison(
        predicted_requests=len(ours.requests),
        actual_requests=len(theirs.requests),
        equal_requests=len(pairs),
        predicted_peak_bytes=ours.peak[0],
        actual_peak_bytes=theirs.peak[0],
        predicted_before_bytes=ours.before_bytes,
        actual_before_bytes=theirs.before_bytes,
        differences=_largest_first(found),
        predicted_left_out=mine - len(ours.requests),
        actual_left_out=yours - len(theirs.requests),
        predicted_reserved_bytes=ours.reserved_bytes,
        actual_reserved_bytes=theirs.reserved_bytes,
        same_kind=("predicted" if actual.predicted else "recorded") if predicted.predicted == actual.predicted else "",
    )


def compare_files(predicted: str | os.PathLike[str], actual: str | os.PathLike[str]) -> Comparison:
    """Compare two snapshots; of several devices, the one that did most.

    Raises:
        MemGuardError: the recorded one is given first; see also `read_histories`.
    """
    ours = max(read_histories(predicted), key=lambda each: len(each.entries))
    theirs = max(read_histories(actual, held=True), key=lambda each: (len(each.entries), each.start_bytes))
    if theirs.predicted and not ours.predicted:
        raise MemGuardError(
            f"{actual} was predicted and {predicted} was recorded; swap them: the predicted one is first."
        )
    return compare(ours, theirs)


# -- reading the requests


@dataclass(frozen=True)
class _Step:
    """Consecutive requests of a history, and the blocks that were allocated when they began."""

    requests: list[BlockRequest]
    held: list[BlockRequest]
    reserved: tuple[int, ...]  # by the history, before its first entry and after each

    @classmethod
    def of(cls, history: History, first: int) -> _Step:
        """Collect the requests from one entry on."""
        table = history.stacks
        found = [
            BlockRequest(block.requested_bytes, table[block.stack] if block.stack >= 0 else (), -1)
            for segment in history.start
            for block in segment.blocks
        ]
        live = {block.address: at for at, block in enumerate(b for s in history.start for b in s.blocks)}
        for place, entry in enumerate(history.entries):
            if entry.action == "alloc" and entry.nbytes:
                live[entry.address] = len(found)
                found.append(BlockRequest(entry.nbytes, table[entry.stack] if entry.stack >= 0 else (), place))
            elif entry.action == "free_requested" and entry.address in live:
                at = live.pop(entry.address)
                found[at] = found[at]._replace(end=place)
        first = max(first, 0)
        return cls(
            [each for each in found if each.begin >= first],
            [each for each in found if each.begin < first <= each.end],
            history.reserved_bytes,
        )

    def only(self, begin: int, end: int) -> _Step:
        """A stretch of the requests."""
        first = self.requests[begin].begin if begin < len(self.requests) else 0
        earlier = [each for each in (*self.held, *self.requests[:begin]) if each.end >= first]
        return _Step(self.requests[begin:end], earlier, self.reserved)

    @property
    def held_at_peak(self) -> _Step:
        """The requests that are alive at the peak, by size: the order in which they came is not known."""
        alive = [each for each in (*self.held, *self.requests) if not self.requests or self.at_peak(each)]
        ordered = sorted(alive, key=lambda each: -each.nbytes)
        most = max(self.reserved)
        return _Step([each._replace(begin=0, end=_NEVER) for each in ordered], [], (most, most))

    @property
    def reserved_bytes(self) -> int:
        """The most that was reserved from the first to the last request."""
        begin, end = (self.requests[0].begin, self.requests[-1].begin) if self.requests else (0, 0)
        return max(self.reserved[begin : end + 2])

    @property
    def before_bytes(self) -> int:
        """Bytes allocated before the first request."""
        return sum(each.nbytes for each in self.held)

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The most that was requested at once, and the entry of the history that first reached it."""
        changes: defaultdict[int, int] = defaultdict(int)
        for each in (*self.held, *self.requests):
            changes[each.begin] += each.nbytes
            changes[each.end] -= each.nbytes
        last = self.requests[-1].begin if self.requests else _NEVER
        live, peak = 0, (0, -1)
        for place in sorted(changes):
            live += changes[place]
            if live > peak[0] and place <= last and (not self.requests or place >= self.requests[0].begin):
                peak = live, place
        return peak

    def at_peak(self, request: BlockRequest) -> bool:
        """Whether a request is alive at the peak."""
        return request.begin <= self.peak[1] < request.end


def _last_step(history: History) -> int:
    """Return the entry that begins the last step of a predicted history; its stacks end with the number of the step."""
    if not history.predicted:
        return 0
    ends = ["".join(history.stacks[entry.stack][-1:]) for entry in history.entries]
    steps = [end.partition(":")[0] if end.startswith("step ") else "" for end in ends]
    return steps.index(max(steps))


_GRAM = 4  # requests in a row by which a part is found
_MOST_PLACES = 32  # those that are in so many places say little
_NEAR = 8  # requests between two that are matched
_Pairs = list[tuple[int, int]]


def _matched(ours: Sequence[int], theirs: Sequence[int]) -> tuple[_Pairs, tuple[int, int], tuple[int, int]]:
    """Return the places of equal requests in the parts that are compared, and the bounds of these parts.

    The longer history is compared where it matches last. What precedes the match belongs to it as far as both have it:
    a history that begins in the middle of a step is compared from there on.
    """
    if len(ours) > len(theirs):
        pairs, yours, mine = _matched(theirs, ours)
        return [(a, b) for b, a in pairs], mine, yours
    begin, end = _last_occurrence(ours, theirs)
    found = _aligned_within(ours, theirs, begin, end)
    if (begin, end) != (0, len(theirs)):
        more = len(ours) // 16 + 8
        wider = _aligned_within(ours, theirs, max(0, begin - more), end + more)
        if len(wider) > len(found):
            found, end = wider, min(wider[-1][1] + len(ours) - wider[-1][0], len(theirs))
    lead = min(at := _first_solid(found))
    first, begin = at[0] - lead, at[1] - lead
    pairs = [(a - first, b - begin) for a, b in found if a >= first and b >= begin]
    return pairs, (first, len(ours)), (begin, end)


def _aligned_within(ours: Sequence[int], theirs: Sequence[int], begin: int, end: int) -> _Pairs:
    """Align with a part of the other history. Of equal sizes, those that are nearest to the middle are paired."""
    pairs = [(a, b + begin) for a, b in aligned(ours, theirs[begin:end])]
    middle = len(pairs) // 2
    for order, step in ((range(middle - 1, -1, -1), 1), (range(middle + 1, len(pairs)), -1)):
        for at in order:
            (mine, yours), (_, next_of_yours) = pairs[at], pairs[at + step]
            places = range(next_of_yours - step, yours, -step)
            pairs[at] = mine, next((place for place in places if theirs[place] == ours[mine]), yours)
    return pairs


def _first_solid(pairs: _Pairs) -> tuple[int, int]:
    """Return the first pair that is near to the next ones: others are equal by chance."""
    gaps = [max(c - a, d - b) for (a, b), (c, d) in pairwise(pairs)]
    near = (place for place in range(len(gaps)) if max(gaps[place : place + _GRAM - 1]) <= _NEAR)
    return pairs[next(near, 0)] if pairs else (0, 0)


def _last_occurrence(short: Sequence[int], long: Sequence[int]) -> tuple[int, int]:
    """Return the bounds of the last occurrence of the shorter history in the longer one."""
    places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, gram in enumerate(_grams(short)):
        places[gram].append(at)
    votes = Counter(
        at - place
        for at, gram in enumerate(_grams(long))
        if len(places.get(gram, ())) <= _MOST_PLACES
        for place in places.get(gram, ())
    )
    if not votes or len(long) < 1.5 * len(short):
        return 0, len(long)
    most = max(votes.values())
    begin = max(0, *(offset for offset, count in votes.items() if count >= 0.98 * most))
    return begin, begin + len(short)


def _grams(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return zip(*(sizes[shift:] for shift in range(_GRAM)), strict=False)


# -- aligning

_MOST_EDITS = 3000


def aligned(ours: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, int]]:
    """Places in both of what is equal, in order: a longest common subsequence (Myers, 1986).

    >>> aligned([1, 2, 3], [1, 3, 4])
    [(0, 0), (2, 1)]
    """
    furthest = {1: 0}  # by diagonal: how far into ours
    seen: list[dict[int, int]] = []
    for edits in range(min(len(ours) + len(theirs), _MOST_EDITS) + 1):
        seen.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            down = diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])
            at = furthest[diagonal + 1] if down else furthest[diagonal - 1] + 1
            while at < len(ours) and at - diagonal < len(theirs) and ours[at] == theirs[at - diagonal]:
                at += 1
            furthest[diagonal] = at
            if at >= len(ours) and at - diagonal >= len(theirs):
                return _walked_back(seen, len(ours), len(theirs))
    blocks = SequenceMatcher(None, ours, theirs).get_matching_blocks()
    return [(block.a + shift, block.b + shift) for block in blocks for shift in range(block.size)]


def _walked_back(seen: Sequence[dict[int, int]], mine: int, yours: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for edits in range(len(seen) - 1, -1, -1):
        furthest, diagonal = seen[edits], mine - yours
        down = diagonal == -edits or (
            diagonal != edits and furthest.get(diagonal - 1, -1) < furthest.get(diagonal + 1, -1)
        )
        before = diagonal + 1 if down else diagonal - 1
        start = furthest.get(before, 0) if edits else 0
        least = (start if down else start + 1) if edits else 0
        while mine > least:
            mine, yours = mine - 1, yours - 1
            pairs.append((mine, yours))
        mine, yours = start, start - before
    return pairs[::-1]


# -- naming the differences


def _largest_first(found: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(found, key=lambda each: (-abs(each.peak_bytes), -abs(each.count) * each.nbytes)))


def _differences(ours: _Step, theirs: _Step, pairs: Sequence[tuple[int, int]]) -> Iterator[Difference]:
    mine, yours = {a for a, _ in pairs}, {b for _, b in pairs}
    alone = Counter(
        (kind, operator_of(each.stack), line_of(each.stack), each.nbytes, step.at_peak(each))
        for kind, step, known in (("only predicted", ours, mine), ("only actual", theirs, yours))
        for place, each in enumerate(step.requests)
        if place not in known
    )
    held: Counter[tuple[str, str, int]] = Counter()
    for a, b in pairs:
        here, there = ours.requests[a], theirs.requests[b]
        where = operator_of(there.stack) or operator_of(here.stack), line_of(here.stack), here.nbytes
        held[where] += theirs.at_peak(there) - ours.at_peak(here)
    kinds: defaultdict[tuple[str, str, str, int], list[int]] = defaultdict(lambda: [0, 0])
    for (kind, operator, line, nbytes, at_peak), count in alone.items():
        sign = 1 if kind == "only actual" else -1
        kinds[kind, operator, line, nbytes][0] += count
        kinds[kind, operator, line, nbytes][1] += sign * at_peak * count * nbytes
    for (kind, operator, line, nbytes), (count, peak_bytes) in kinds.items():
        yield Difference(kind, operator, line, nbytes, count, peak_bytes)
    for (operator, line, nbytes), count in held.items():
        if count:
            yield Difference("held at the peak", operator, line, nbytes, count, count * nbytes)
