"""Departures of a run from its prediction, in words: a larger batch, a budget passed, memory that ran out, or will."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning_memguard.core.decision.decision import Budget, Decision, Verdict, part_words, verdict
from lightning_memguard.core.decision.record import AFTER, Measured
from lightning_memguard.core.device.host import MemoryInfo
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.replay.timeline import LineShare
from lightning_memguard.core.trace.kept import Kept, places, remedy
from lightning_memguard.core.trace.trace import Shapes
from lightning_memguard.report.words import at_size, measured_words, peak_words, size_of
from lightning_memguard.units import MIB, counted, format_bytes

_MOST_SHAPES = 6
_MOST_NAMED = 3
_MOST_SHARES = 5
_OF_LINES = ("activations", "temporaries", "workspaces")
_WORTH_NAMING = 0.02  # of the predicted peak
_NOISE_BYTES = 16 * MIB  # of a process's resident memory
FRAMES = "the frames of this error, until it is let go"
"""Holders of the activations of a step that failed."""

_LESS_MEMORY = "bf16-mixed precision, activation checkpointing, or a smaller model"


@dataclass(frozen=True)
class Larger:
    """A batch that is larger than the one the prediction is based on, and the memory it needs."""

    shapes: Shapes
    predicted_shapes: Shapes
    footprint: Footprint
    budget: Budget

    @property
    def verdict(self) -> Verdict:
        """Whether it fits nevertheless."""
        return verdict(self.footprint, self.budget)


@dataclass(frozen=True)
class Offloaded:
    """A step with all its saved activations on the host: what stays on the device, and how many bytes move."""

    footprint: Footprint
    moved_bytes: int


def announcement(larger: Larger, role: str, batch_idx: int, offloaded: Offloaded | None = None) -> str:
    """Announce how much memory a batch that is larger than predicted needs, and whether it fits.

    Args:
        larger: the batch.
        role: of its loader.
        batch_idx: its place in the epoch.
        offloaded: its step with activations on the host, if it runs so.
    """
    need, budget = larger.footprint.most_device_bytes, larger.budget
    least = "at least " if larger.footprint.is_partial else ""
    kind = "Training" if role == "train" else "Evaluation"
    fits = {
        "fits": "It fits",
        "unknown": "Whether it fits is unknown, as its activations are",
        "does not fit": f"It may run out of memory: lower {size_of(larger.footprint)} or truncate long samples",
    }[larger.verdict]
    if offloaded and larger.verdict != "fits":
        fits = _on_host(offloaded, budget.usable_bytes)
    return (
        f"{kind} batch {batch_idx} has {_listed(larger.shapes)}, larger than the {_listed(larger.predicted_shapes)} "
        f"of the prediction. It is predicted to need {least}{format_bytes(need)}; {budget.device} offers "
        f"{format_bytes(budget.usable_bytes)} after the margin. {fits}."
    )


def less_room_words(predicted: Footprint, budget: Budget, usable_bytes: int, offloaded: Offloaded | None) -> str:
    """Announce that steps do not fit what the device has, and run with their activations on the host.

    Args:
        predicted: what a step needs.
        budget: what there was at setup.
        usable_bytes: what there is.
        offloaded: the step with its activations on the host; None if that could not be predicted.
    """
    now = "offers" if usable_bytes == budget.usable_bytes else "now offers"
    how = _on_host(offloaded, usable_bytes) if offloaded else "Steps run with their activations on the host"
    return (
        f"A step is predicted to need {format_bytes(predicted.most_device_bytes)} {at_size(predicted)}; "
        f"{budget.device} {now} {format_bytes(usable_bytes)} after the margin. {how}."
    )


def _on_host(offloaded: Offloaded, usable_bytes: int) -> str:
    footprint = offloaded.footprint
    need, moved = format_bytes(footprint.most_device_bytes), format_bytes(offloaded.moved_bytes)
    place = "a temporary file" if footprint.device == "cpu" else "host memory"
    if footprint.most_device_bytes <= usable_bytes:
        return f"It runs whole, with what does not fit of its {moved} of saved activations in {place}"
    lower = f"lower {size_of(footprint)} or truncate long samples"
    return f"Even with its {moved} of saved activations in {place} it needs {need}. It may run out of memory: {lower}"


def surprise_words(moved_bytes: int) -> str:
    """Announce that a step saved more than was predicted, so that some of it went to the host."""
    moved = format_bytes(moved_bytes)
    return f"A step saved more activations than were predicted: {moved} of them went to the host, so that it fits."


def overrun_words(
    predicted: Footprint,
    measured: Measured,
    budget: Budget,
    would_fit: int | None,
    larger: Larger | None,
    kept: Sequence[Kept] = (),
    outside: Outside | None = None,
) -> str:
    """Say by how much a run passed its budget, and what would have kept it within.

    Args:
        predicted: the footprint that the batch size was chosen by.
        measured: what was taken.
        budget: what there was.
        would_fit: the largest batch size that would have kept the budget; 0 if none would, None if it is not known.
        larger: a batch that was larger than those predicted from; None if there was none.
        kept: what the run leaves behind until memory runs out, if that is known: no batch size helps then.
        outside: what else there was; None if the memory of a step explains the peak.
    """
    taken, most = measured.taken_bytes, format_bytes(predicted.most_device_bytes)
    if larger:
        most += f", for a batch of {_listed(larger.shapes)} {format_bytes(larger.footprint.most_device_bytes)}"
    way_out = f"Lower {size_of(predicted)}, or raise `margin`"
    if outside is not None:
        way_out = _outside_of_steps((larger.footprint if larger else predicted).most_device_bytes, measured, outside)
    elif would_fit is not None:
        way_out = f"{_size_that_fits(would_fit, larger is not None)} stayed within it: {_remedy(would_fit)}"
    if kept:
        way_out = f"It grows by what is left behind{places(kept[:1])}, as reported before"
    return (
        f"This run has taken {format_bytes(taken)} ({measured.of_process().source}) {at_size(predicted)}, "
        f"{format_bytes(taken - budget.free_bytes)} over its budget of {format_bytes(budget.free_bytes)}; at most "
        f"{most} were predicted. {way_out}{', or truncate long samples' if larger else ''}."
    )


@dataclass(frozen=True)
class Outside:
    """Memory that a run took besides its steps: ``held`` now, by what takes it, and what came after the first step.

    ``within_until``: the last batch before which the run was within its budget; None if unknown. ``hooks`` of the user
    run around the steps, whose batches had so many ``shapes``.
    """

    held: Mapping[str, int]
    shapes: int = 0
    stayed_bytes: int = 0
    within_until: int | None = None
    hooks: Sequence[str] = ()


def steps_explain(predicted: Footprint, measured: Measured, stayed_bytes: int = 0) -> bool:
    """Whether a peak is that of the steps: its tensors are a step's, and the process took little in addition.

    It is not if the prediction holds for what is left of it without ``stayed_bytes``.
    """
    if measured.process_bytes is None:
        return True
    most, noise = predicted.highest, _NOISE_SHARE * measured.peak_bytes
    if stayed_bytes > noise and measured.taken_bytes - stayed_bytes <= (1 + _NOISE_SHARE) * most.device_bytes:
        return False
    return measured.where not in AFTER and measured.process_bytes - measured.peak_bytes <= most.outside_bytes + noise


def _outside_of_steps(most_bytes: int, measured: Measured, outside: Outside) -> str:
    """Say what took memory that no step did, as far as that was measured."""
    if measured.where in AFTER:
        tensors = format_bytes(measured.peak_bytes)
        return f"Its tensors took {tensors} in {measured.where}, not in a step: another batch size changes little"
    step_bytes = min(measured.peak_bytes, most_bytes) if outside.stayed_bytes else measured.peak_bytes
    rest_bytes = measured.taken_bytes - step_bytes
    # malloc may also use pages that the process had before: what it holds is no more than the process has grown by
    shown, left = list[str](), rest_bytes
    for what, nbytes in outside.held.items():  # those that have grown come before those that may have been there
        if nbytes >= MIB and left:
            shown.append(f"{what} {format_bytes(min(nbytes, left))}")
            left -= min(nbytes, left)
    named, more = ", ".join(shown), ""
    if 2 * left > rest_bytes:
        after = "" if outside.within_until is None else f", and came after batch {outside.within_until}"
        hooks = f": {', '.join(outside.hooks[:_MOST_NAMED])} may have taken it" if outside.hooks else ""
        more = f". Most of it is gone by now{after}{hooks}"
    if outside.shapes >= _MANY_SHAPES:
        more += (
            f". oneDNN keeps kernels for shapes that it has seen, here {outside.shapes}: "
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY=16 in the environment keeps fewer"
        )
    return (
        f"The memory of a step does not explain it, and another batch size may not help: tensors of a step took "
        f"{format_bytes(step_bytes)}, and {format_bytes(rest_bytes)} are outside of them"
        f"{f' (now: {named})' if named else ''}{more}"
    )


_MANY_SHAPES = 8
_NOISE_SHARE = 0.1


def _size_that_fits(size: int, alike: bool) -> str:
    subject = f"batch size {size}" if size else "not even one sample"
    return f"{f'For batches like it, {subject}' if alike else subject.capitalize()} would have"


def _remedy(size: int) -> str:
    return f"set max_batch_size={size}, or raise `margin`" if size else f"use {_LESS_MEMORY}"


def kept_words(decision: Decision) -> str:
    """Warn of memory that is left behind until none is left; empty if the run ends before that."""
    end, budget, kept = decision.runs_out_at, decision.budget, [each for each in decision.kept if each.lasts]
    if end is None or budget is None or not kept:
        return ""
    when = kept[0].when
    named = [each for each in kept if each.when == when][:_MOST_NAMED]
    size = (when == "validation" and decision.validation_batch_size) or decision.batch_size
    nbytes = format_bytes(sum(each.bytes_at(size) for each in named))
    who = {"step": "training batch", "validation": "validation batch", "epoch": "epoch"}[when]
    moment = f"in epoch {end.epoch}" if when == "epoch" else f"at batch {end.step} of epoch {end.epoch}"
    begun = f"Each {who} leaves {nbytes} behind"
    ended = f"; the memory of {'the host' if kept[0].on_host else budget.device} ends {moment}."
    if not places(named[:1]):
        return f"{begun}, in Python objects of the process{ended}"
    return f"{begun}{places(named)}{ended} {remedy(named[0])}, or clear it at the end of each epoch."


@dataclass(frozen=True)
class Failure:
    """An out-of-memory error, and what was known when it was raised.

    Attributes:
        predicted: the footprint that the batch size was chosen by.
        measured: the peak up to then; None if it cannot be measured.
        budget: what the device offered at setup.
        budget_now: what it offers now; None if it does not report it.
        shapes: of the batch that failed.
        predicted_shapes: of the batch the prediction is based on.
        would_fit: the largest batch size that would have fit; 0 if not even one sample would, None if it is not known.
        larger: the footprint of that batch if it is larger than those predicted from.
        at_peak: the lines and parts that hold the most at the predicted peak of the step that failed.
        elsewhere: bytes on the device that are not a part of the step, by who keeps them.
        own_bytes: what this process holds of what the device does not offer now.
        between_steps: optimizer steps done, and bytes held then: after the first step, and when last measured.
    """

    predicted: Footprint
    measured: Measured | None
    budget: Budget
    budget_now: Budget | None
    shapes: Shapes
    predicted_shapes: Shapes
    would_fit: int | None
    larger: Footprint | None = None
    at_peak: Sequence[LineShare] = ()
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    own_bytes: int = 0
    between_steps: Sequence[tuple[int, int]] = ()


def note(failure: Failure) -> str:
    """Predicted versus measured, what else is on the device, which batch it was, and what would have fit."""
    notes = [f"Note on the prediction: {text}." for text in failure.predicted.notes]
    lines = [_predicted(failure), *_held(failure), _room(failure), _batch(failure), *notes, _advice(failure)]
    return "\n".join(lines)


def _held(failure: Failure) -> Iterator[str]:
    """List what the step holds at its peak, what else is on the device, and what has grown from step to step."""
    if failure.at_peak:
        peak = (failure.larger or failure.predicted).peak_allocated_bytes
        yield f"At the predicted peak of {format_bytes(peak)}, most is held by:"
    for share in failure.at_peak[:_MOST_SHARES]:
        actual = share.actual_bytes
        if actual is None and failure.measured and not share.line:
            actual = failure.measured.parts.get(share.part)
        found = "" if actual is None else f"; actual: {format_bytes(actual)}"
        yield f"  {format_bytes(share.nbytes):>10}  {_place(share)}{found}"
    least = _WORTH_NAMING * failure.predicted.peak_device_bytes
    named = [f"{who} ({format_bytes(nbytes)})" for who, nbytes in failure.elsewhere.items() if nbytes > least]
    if named:
        yield f"Not a part of the step, but kept on the device: {', '.join(named[:_MOST_SHARES])}."
    if len(failure.between_steps) > 1:
        (first, before), (last, now) = failure.between_steps
        if now - before > max(_NOISE_BYTES, least):
            yield (
                f"Between steps, this process held {format_bytes(before)} after step {first} and {format_bytes(now)} "
                f"after step {last}: {format_bytes(now - before)} more."
            )


def _place(share: LineShare) -> str:
    if not share.line:
        return part_words(share.part) + (", of no known line" if share.part in _OF_LINES else "")
    file, line, function = share.line.replace("\\", "/").rpartition("/")[2].rsplit(":", 2)
    more = f" and {counted(len(share.modules) - 1, 'more module')}" if len(share.modules) > 1 else ""
    module = f", in {share.modules[0]}{more}" if share.modules else ""
    return f"{part_words(share.part)} of {file}:{line} ({function}){module}"


def _predicted(failure: Failure) -> str:
    predicted, measured = failure.predicted, failure.measured
    alone = ""
    if measured is not None and measured.is_reserved and predicted.outside_bytes:
        predicted, alone = predicted.reserved_alone(), "reserved "
    peak, most = format_bytes(predicted.peak_device_bytes), predicted.most_device_bytes
    at_most = "" if most == predicted.peak_device_bytes else f" (at most {format_bytes(most)})"
    so_far = "the peak up to this error could not be measured"
    if measured is not None and measured.peak_bytes:
        so_far = f"the measured peak up to this error is {measured_words(measured)}"
    if predicted.method == "cut":
        return f"MemGuard predicted at least {peak}, from part of a step, as time was up at setup; {so_far}."
    if predicted.is_partial:
        return f"MemGuard predicted {peak} without activations, which are unknown; {so_far}."
    where = f"{peak_words(predicted)} {at_size(predicted)}"
    return f"MemGuard predicted a {alone}peak of {peak}{at_most} in the {where}; {so_far}."


def _room(failure: Failure) -> str:
    budget, now = failure.budget, failure.budget_now
    then = f"{budget.device} offered {format_bytes(budget.free_bytes)} at setup ({budget.source})"
    if now is None:
        return f"{then}."
    held = max(0, now.total_bytes - now.free_bytes - failure.own_bytes)
    others = f", and other processes hold {format_bytes(held)}"
    return (
        f"{then}; now it offers {format_bytes(now.free_bytes)} of {format_bytes(now.total_bytes)} to this run "
        f"({now.source}){'' if now.source == 'rlimit' else others}."
    )


def _batch(failure: Failure) -> str:
    if not failure.shapes:
        return "Memory ran out before the first batch."
    shapes, larger = _listed(failure.shapes), failure.larger
    if failure.shapes == failure.predicted_shapes:
        return f"The batch had the predicted shape: {shapes}."
    of_larger = f", and this batch is predicted to need {format_bytes(larger.most_device_bytes)}" if larger else ""
    return f"The batch had {shapes}; the prediction is for {_listed(failure.predicted_shapes)}{of_larger}."


def _listed(shapes: Shapes) -> str:
    listed = ", ".join(str(list(shape)) for shape in shapes[:_MOST_SHAPES])
    return listed + (f" and {len(shapes) - _MOST_SHAPES} more" if len(shapes) > _MOST_SHAPES else "")


def _advice(failure: Failure) -> str:
    size, predicted = failure.would_fit, failure.larger or failure.predicted
    if failure.predicted.batch:
        return f"The data sets the sizes of its batches: lower {size_of(failure.predicted)}, or use {_LESS_MEMORY}."
    if predicted.is_partial or size is None:
        return "Which batch size would have fit is unknown: try a smaller one."
    measured_bytes = failure.measured.on_device(predicted) if failure.measured else 0
    offered = min(each.usable_bytes for each in (failure.budget, failure.budget_now) if each)
    if max(predicted.most_device_bytes, measured_bytes) <= offered:
        figures = f"what was predicted and measured fits in {format_bytes(offered)}"
        where = "how much was asked for where it was raised, and at what else took memory then"
        return f"These figures do not explain the error, as {figures}: look at {where}."
    over = size and measured_bytes > predicted.peak_device_bytes
    scaled = ", assuming other steps exceed it by the same factor" if over else ""
    truncate = ", or truncate long samples" if failure.larger else ""
    return f"{_size_that_fits(size, failure.larger is not None)} fit{scaled}: {_remedy(size)}{truncate}."


def snapshot_words(predicted: Path, actual: Path | None) -> str:
    """Say where the snapshots of a step that ran out of memory are."""
    text = f"Memory snapshot of the predicted step: {predicted}"
    return f"{text}; of the device: {actual} (`memguard compare` reads both)." if actual else f"{text}."


def worker_words(
    shared_bytes: int | None, needed_bytes: int, others_bytes: int, host: MemoryInfo | None, kills: int | None
) -> str:
    """Say why a loader's worker died, and what helps.

    ``shared_bytes``, all that /dev/shm holds, if that is what it ran out of; None if it was killed. ``needed_bytes``
    of batches are there at most, and the workers that are left hold ``others_bytes``; 0 if unknown. ``kills``: how
    often the kernel has killed for want of memory since the run began; None if unknown.
    """
    needed = f" Batches that are fetched ahead take up to {format_bytes(needed_bytes)}." if needed_bytes else ""
    if shared_bytes is not None:
        return (
            f"A worker of the loader ran out of /dev/shm, which has {format_bytes(shared_bytes)} in all.{needed} In "
            "Docker, use --shm-size or --ipc=host; or set prefetch_factor=1, fewer workers, or a smaller batch; "
            "num_workers=0 needs none of it. The sharing strategy file_system takes as much."
        )
    if kills == 0:
        return (
            "A worker of the loader was killed, but not by the kernel for want of memory: a scheduler, a daemon such "
            "as systemd-oomd, or a person did."
        )
    known = f"the kernel has killed a process for want of memory {counted(kills or 0, 'time')} since this run began"
    why = known if kills else "most often that is the kernel, when the host's memory runs out"
    free = (
        f" Now {format_bytes(host.free_bytes)} of {format_bytes(host.total_bytes)} ({host.source}) are free."
        if host
        else ""
    )
    others = f" The other workers hold {format_bytes(others_bytes)}." if others_bytes else ""
    return (
        f"A worker of the loader was killed: {why}.{free}{others}{needed} Use fewer workers, prefetch_factor=1 or a "
        "smaller batch, and keep datasets in arrays or files: each worker gets a copy of the Python objects it touches."
    )
