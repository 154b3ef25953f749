"""Histories: what a snapshot says is read whole, undone to its start, and replayed to the address."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lightning_memguard.core.histories.alternatives import alternatives
from lightning_memguard.core.histories.history import (
    allocated_by_line,
    histories_of,
    line_of,
    operator_of,
    out_of_memory,
    read_histories,
    replay_history,
)
from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import SETTINGS, AllocatorSettings
from lightning_memguard.core.replay.snapshot import snapshot
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import MIB
from tests.scripts import benchmark

SIZES = (700, 4096, 50_000, MIB, 3 * MIB, 7 * MIB + 512, 12 * MIB, 30 * MIB + 4096)
KINDS = {
    "default": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
    "rounded": AllocatorSettings(roundup_power2_divisions=(4,) * 16),
    "unsplit": AllocatorSettings(max_split_size_bytes=25 * MIB),
}


@pytest.fixture(scope="module")
def replay_as_recorded() -> Any:
    return benchmark("shared/as_recorded").replay_as_recorded


def random_trace(seed: int, count: int = 400, streams: int = 2) -> Trace:
    draw = random.Random(seed)
    events: list[Event] = []
    live: list[Event] = []
    for block in range(count):
        if live and draw.random() < 0.48:
            taken = live.pop(draw.randrange(len(live)))
            events.append(taken._replace(action="free"))
        taken = Event("alloc", block, draw.choice(SIZES), stream=draw.randrange(streams), operator="aten.add.Tensor")
        events.append(taken)
        live.append(taken)
    return Trace(8, "cuda", "fake", tuple(events))


def without_first(content: dict[str, Any], share: float) -> dict[str, Any]:
    """A history that began later, as PyTorch's does when recording starts in the middle of a process."""
    entries = content["device_traces"][0]
    return {**content, "device_traces": [entries[int(share * len(entries)) :]]}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_history_is_replayed_to_the_address(kind: str, share: float, replay_as_recorded: Any) -> None:
    for seed in range(5):
        content = without_first(snapshot(random_trace(seed), KINDS[kind]), share)
        if kind == "rounded":  # a snapshot of torch says it; ours has fewer words
            sizes = {str(1 << place): 4 for place in range(16)}
            content["allocator_settings"]["roundup_power2_divisions"] = sizes
        (history,) = histories_of(content)
        _, differences = replay_as_recorded(history)
        assert differences.allocations > 50
        assert differences.total == 0, differences


def test_what_was_allocated_before_is_known(replay_as_recorded: Any) -> None:
    trace = random_trace(3)
    content = snapshot(trace, AllocatorSettings())
    (whole,) = histories_of(content)
    (later,) = histories_of(without_first(content, 0.5))
    assert whole.start == ()
    assert later.start_bytes > 0
    assert replay_as_recorded(later)[0].peak_reserved_bytes == replay_as_recorded(whole)[0].peak_reserved_bytes


def test_the_replay_of_a_predicted_history_is_that_of_its_trace() -> None:
    trace = random_trace(1)
    for settings in (AllocatorSettings(), AllocatorSettings(expandable_segments=True)):
        (history,) = histories_of(snapshot(trace, settings))
        expected, found = replay(trace, settings), replay_history(history)
        assert history.predicted
        assert found.peak_allocated_bytes == expected.peak_allocated_bytes
        assert found.peak_reserved_bytes == expected.peak_reserved_bytes


def test_the_free_memory_at_the_peak_is_where_it_is_said_to_be() -> None:
    (history,) = histories_of(snapshot(random_trace(2), AllocatorSettings()))
    found = replay_history(history)
    held = sum(holder.allocated_bytes for holder in found.holders)
    assert held + found.cached_bytes + found.pinned_bytes == found.peak_reserved_bytes
    assert sum(holder.free_bytes for holder in found.holders) == pytest.approx(found.pinned_bytes, abs=10)


def emptied_after_each_layer(layers: int = 4) -> dict[str, Any]:
    """Each layer takes 30 MiB, gives it back, and empties the cache; the next takes more."""
    entries: list[dict[str, Any]] = []

    def add(action: str, address: int, size: int) -> None:
        entries.append({"action": action, "addr": address, "size": size, "stream": 0, "frames": []})

    for layer in range(layers):
        address, size = (1 + layer) << 32, (30 + 2 * layer) * MIB
        add("segment_alloc", address, size)
        add("alloc", address, size)
        add("free_requested", address, size)
        add("free_completed", address, size)
        add("segment_free", address, size)
    return {"segments": [], "device_traces": [entries], "allocator_settings": {}}


def test_a_cache_that_was_emptied_is_emptied_again(replay_as_recorded: Any) -> None:
    (history,) = histories_of(emptied_after_each_layer())
    assert replay_history(history).peak_reserved_bytes == max(history.reserved_bytes) == 36 * MIB
    assert replay_as_recorded(history)[1].total == 0


def test_a_cache_that_the_code_emptied_is_no_sign_of_pressure() -> None:
    content = emptied_after_each_layer()
    for entry in content["device_traces"][0]:
        entry["frames"] = [{"filename": "torch/cuda/memory.py", "line": 192, "name": "empty_cache"}]
    (history,) = histories_of(content)
    assert history.ran_short_at_bytes is None
    assert replay_history(history, AllocatorSettings(capacity_bytes=100 * MIB)).peak_reserved_bytes == 36 * MIB


def test_memory_is_released_under_pressure_where_a_capacity_is_given() -> None:
    entries = emptied_after_each_layer(2)["device_traces"][0]
    for entry in entries:  # what is released makes room: together they would be more than there ever was
        entry["size"] = 40 * MIB if entry["addr"] == 1 << 32 else 44 * MIB
    content = {"segments": [], "device_traces": [entries[:-1]], "allocator_settings": {}}
    content["segments"] = [
        {
            "address": 2 << 32,
            "total_size": 44 * MIB,
            "stream": 0,
            "segment_type": "large",
            "device": 0,
            "blocks": [{"size": 44 * MIB, "state": "inactive"}],
        }
    ]
    (history,) = histories_of(content)
    small, large = (replay_history(history, AllocatorSettings(capacity_bytes=size * MIB)) for size in (50, 100))
    assert (small.peak_reserved_bytes, small.retries) == (44 * MIB, 1)
    assert (large.peak_reserved_bytes, large.retries) == (84 * MIB, 0)
    assert history.ran_short_at_bytes == 84 * MIB


def test_a_setting_is_tried_and_a_capacity_compared() -> None:
    (history,) = histories_of(snapshot(random_trace(5), AllocatorSettings()))
    peak = replay_history(history).peak_reserved_bytes
    rows = {row.setting: row for row in alternatives(history, capacity_bytes=peak)}
    assert [*rows] == ["", *SETTINGS]
    assert rows[""].fits
    assert rows["expandable_segments:True"].replay.peak_reserved_bytes < peak
    assert not alternatives(history, (), capacity_bytes=peak // 4)[0].fits
    assert alternatives(history, ())[0].fits is None


# Reading


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("it ran",))


def test_a_file_that_names_a_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[Evil()]]}))
    with pytest.raises(MemGuardError, match=r"asks for builtins\.print"):
        read_histories(path)
    assert "it ran" not in capsys.readouterr().out


def recorded(*actions: tuple[str, int, int], held: dict[int, list[int]] | None = None, **settings: Any) -> Any:
    """A snapshot of actions at addresses in MiB; ``held``: the segments at its end, the free sizes in them negative."""
    entries = [
        {"action": action, "device_free" if action == "oom" else "addr": at * MIB, "size": size * MIB, "stream": 0}
        for action, at, size in actions
    ]
    segments = [
        {
            "address": begin * MIB,
            "total_size": sum(map(abs, sizes)) * MIB,
            "stream": 0,
            "segment_type": "large",
            "blocks": [
                {"size": abs(size) * MIB, "state": "active_allocated" if size > 0 else "inactive"} for size in sizes
            ],
        }
        for begin, sizes in (held or {}).items()
    ]
    return {"segments": segments, "device_traces": [entries], "allocator_settings": settings}


# 60 MiB, then three times 20 MiB in their place, of which the second is given back; 30 MiB more do not fit into 85.
REFUSED: Any = recorded(
    *(("segment_alloc", 100, 60), ("alloc", 100, 60), ("free_requested", 100, 60), ("free_completed", 100, 60)),
    *(("alloc", 100, 20), ("alloc", 120, 20), ("alloc", 140, 20)),
    *(("free_requested", 120, 20), ("free_completed", 120, 20), ("oom", 25, 30)),
    held={100: [20, -20, 20]},
)


def test_a_request_that_was_refused_is_asked_again() -> None:
    (history,) = histories_of(REFUSED)
    found = out_of_memory(history)
    assert found is not None
    assert (found.place, found.entry.nbytes) == (9, 30 * MIB)
    assert (found.capacity_bytes, found.short_bytes) == (85 * MIB, 5 * MIB)
    assert (found.reserved_bytes, found.allocated_bytes, found.largest_free_bytes) == (60 * MIB, 40 * MIB, 20 * MIB)
    assert sum(holder.allocated_bytes for holder in found.holders) == 40 * MIB
    own, expandable = alternatives(history, ["expandable_segments:True"], found.capacity_bytes)
    assert (own.fits, own.replay.peak_reserved_bytes, own.replay.out_of_memory_entry) == (False, 90 * MIB, 9)
    assert (expandable.fits, expandable.replay.peak_reserved_bytes) == (True, 80 * MIB)
    assert alternatives(history, (), 90 * MIB)[0].fits
    assert replay_history(history).peak_reserved_bytes == 90 * MIB


def test_an_earlier_request_that_was_refused_does_not_end_the_replay() -> None:
    content = {**REFUSED, "device_traces": [[{**REFUSED["device_traces"][0][-1], "size": 70 * MIB}]]}
    content["device_traces"][0] += REFUSED["device_traces"][0][4:]
    content["device_traces"][0][:0] = REFUSED["device_traces"][0][:4]
    (history,) = histories_of(content)
    found = out_of_memory(history)
    assert found is not None
    assert (found.place, found.earlier, found.capacity_bytes) == (10, 1, 85 * MIB)
    assert [row.fits for row in alternatives(history, ["expandable_segments:True"], 85 * MIB)] == [False, True]


def test_a_limit_below_the_memory_of_the_device_is_noticed() -> None:
    content = {**REFUSED, "device_traces": [[*REFUSED["device_traces"][0]]]}
    content["device_traces"][0][-1] = {**content["device_traces"][0][-1], "device_free": 900 * MIB}
    (history,) = histories_of(content)
    found = out_of_memory(history)
    assert found is not None
    assert found.missing_bytes < found.entry.address
    assert found.capacity_bytes == 90 * MIB - 1


def test_a_history_that_never_grows_is_laid_out_again_for_other_settings() -> None:
    warm = [("alloc", 120, 20), ("free_requested", 120, 20), ("free_completed", 120, 20)]
    (history,) = histories_of(recorded(*warm, held={100: [20, -20, 20], 200: [-60]}))
    own, again, expandable = alternatives(history, ["expandable_segments:True"])
    assert [row.laid_out_again for row in (own, again, expandable)] == [False, True, True]
    assert [row.replay.peak_reserved_bytes // MIB for row in (own, again, expandable)] == [120, 60, 60]
    assert (own.replay.pinned_bytes, own.replay.cached_bytes) == (0, 60 * MIB)
    assert [row.fits for row in alternatives(history, (), 70 * MIB)] == [True, True]
    assert [row.fits for row in alternatives(history, (), 50 * MIB)] == [False, False]


def test_alternatives_start_from_the_settings_of_the_record() -> None:
    (history,) = histories_of(
        {
            **REFUSED,
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:40,max_split_size_mb:128",
                "max_split_size": 128 * MIB,
                "expandable_segments": True,
            },
        }
    )
    assert history.settings.text == "expandable_segments:True,max_split_size_mb:128,large_segment_size_mb:40"
    rows = {row.setting: row.was for row in alternatives(history)}
    assert rows["expandable_segments:False"] == "expandable_segments:True"
    assert rows["max_split_size_mb:512"] == "max_split_size_mb:128"
    assert rows["roundup_power2_divisions:4"] == ""
    assert rows.keys().isdisjoint({"expandable_segments:True", "max_split_size_mb:128"})


def test_each_device_has_a_history() -> None:
    traces = REFUSED["device_traces"][0]
    segments = [{**segment, "device": device} for segment in REFUSED["segments"] for device in (1, 3)]
    found = [*histories_of({**REFUSED, "segments": segments, "device_traces": [[], traces, [], traces]})]
    assert [history.device for history in found] == [1, 3]


HEAD = b"\x80\x04"
TRACES = b"}(\x8c\x08segments]\x8c\x0ddevice_traces"
ENTRY: Any = {"action": "alloc", "addr": MIB, "size": 512, "stream": 0}


def with_entries(*entries: Any, **more: Any) -> bytes:
    return pickle.dumps({"segments": [], "device_traces": [[*entries]], "allocator_settings": {}, **more}, protocol=4)


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] * 10
    return value


HOSTILE: dict[str, tuple[bytes, str]] = {
    "a memo of 2**32 places": (HEAD + b"}r\xff\xff\xff\xff.", "claims to hold 4,294,967,295"),
    "a memo, as text": (HEAD + b"}p4294967295\n.", "pickle of plain values"),
    "text of 2**63 bytes": (HEAD + b"\x8d" + b"\xff" * 7 + b"\x7f.", "claims to hold"),
    "bytes of 2**40 bytes": (HEAD + b"\x8e\0\0\0\0\0\1\0\0.", "pickle of plain values"),
    "a byte array of 2**40 bytes": (HEAD + b"\x96\0\0\0\0\0\1\0\0.", "pickle of plain values"),
    "a number of 2**31 bytes": (HEAD + b"\x8b\xff\xff\xff\x7f.", "pickle of plain values"),
    "a frame of 2**63 bytes": (HEAD + b"\x95" + b"\xff" * 7 + b"\x7f}.", "cannot be read|not what torch"),
    "duplicates": (HEAD + b"](" + b"2" * 5000 + b"e.", "pickle of plain values"),
    "tuples in tuples as a key": (HEAD + b"}(" + b")" + b"\x85" * 50_000 + b"Nu.", "pickle of plain values"),
    "pairs in pairs as a key": (HEAD + b"}(N" + b"N\x86" * 50_000 + b"Nu.", "pickle of plain values"),
    "lists in lists": (HEAD + b"]" * 50_000 + b"a" * 49_999 + b".", "not what torch"),
    "a list of one list": (
        HEAD + TRACES + b"](](" + b"N" * 3000 + b"e\x94" + b"h\0" * 3000 + b"eu.",
        "repeats its own",
    ),
    "no end": (with_entries(ENTRY)[:-9], "cannot be read|ends too early"),
    "nothing": (b"", "ends too early"),
    "zeros": (b"\0" * 4096, "pickle of plain values"),
    "no pickle": (b"no pickle", "pickle of plain values"),
    "another pickle": (pickle.dumps([1, 2]), "not what torch.cuda.memory._dump_snapshot writes"),
    "no history": (pickle.dumps({"segments": [], "device_traces": [[]]}), "holds no history"),
    "a persistent id": (HEAD + b"NQ.", "pickle of plain values"),
    "JSON in JSON": (b'{"segments": ' + b"[" * 200_000, "cannot be read"),
    "a number of 5,000 digits": (
        b'{"segments": [], "device_traces": [[["alloc", ' + b"9" * 5000 + b"]]]}",
        "cannot be",
    ),
    "short entries": (b'{"segments": [], "device_traces": [[["alloc", 1]]]}', "cannot be read"),
    "gzip of 200 MiB of blanks": (lambda: gzip.compress(b"{" + b" " * (200 * MIB), 1), "unpacks to more than"),
    "gzip of 5,000,000 empty lists": (
        lambda: gzip.compress(b'{"segments": [' + b"[]," * 5_000_000 + b"[]]}", 1),
        "unpacks to more than",
    ),
    "gzip of nothing": (b"\x1f\x8b\x08\0", "cannot be read"),
    "text within text": (
        with_entries({**ENTRY, "frames": [{"filename": nested(9), "line": 1, "name": "f"}]}),
        "a list for text",
    ),
    "2**70 bytes": (with_entries({**ENTRY, "size": 1 << 70}), r"a size of 1\.18e\+21"),
    "fewer than no bytes": (with_entries({**ENTRY, "size": -512}), "a size of -512"),
    "text for an address": (with_entries({**ENTRY, "addr": "7f00"}), "an address of a str"),
    "another allocator": (
        with_entries(ENTRY, allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
        "backend:cudaMallocAsync, where the CUDA driver decides",
    ),
    "its order reversed": (
        pickle.dumps({**REFUSED, "device_traces": [REFUSED["device_traces"][0][::-1]]}),
        "contradicts itself: entry",
    ),
    "two blocks in one place": (
        pickle.dumps(recorded(("free_completed", 100, 40), ("free_completed", 120, 20), held={100: [-60]})),
        "overlap",
    ),
    "a block in no segment": (pickle.dumps(recorded(("free_completed", 500, 40), held={100: [-60]})), "in no segment"),
    "blocks larger than their segment": (
        pickle.dumps({**REFUSED, "segments": [{**REFUSED["segments"][0], "total_size": MIB}]}),
        "not as large as",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_history_is_refused_at_once(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / ("file.json.gz" if "gzip" in name else "file.pickle")
    path.write_bytes(content() if callable(content) else content)
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(MemGuardError, match=message):
        read_histories(path)
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 5
    assert peak < 128 * MIB


def test_private_pools_are_refused(tmp_path: Path) -> None:
    content = emptied_after_each_layer()
    content["segments"] = [{"address": 0, "segment_pool_id": (0, 1), "blocks": []}]
    (tmp_path / "file.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(MemGuardError, match="private pools"):
        read_histories(tmp_path / "file.pickle")


def test_the_compact_form_is_the_same_history(tmp_path: Path, replay_as_recorded: Any) -> None:
    content = snapshot(random_trace(7), AllocatorSettings())
    stacks: list[list[str]] = []
    rows = []
    for entry in content["device_traces"][0]:
        stacks.append([f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in entry["frames"]])
        rows.append([entry["action"], entry["addr"], entry["size"], entry["stream"], len(stacks) - 1])
    path = tmp_path / "history.json.gz"
    compact = {**content, "frames": stacks, "device_traces": [rows]}
    path.write_bytes(gzip.compress(json.dumps(compact).encode()))
    (plain,) = histories_of(content)
    (read,) = read_histories(path)
    assert read.predicted
    assert [entry[:4] for entry in read.entries] == [entry[:4] for entry in plain.entries]
    assert replay_as_recorded(read)[1] == replay_as_recorded(plain)[1]


def test_an_operator_and_a_line_are_found_in_a_stack() -> None:
    recorded = (
        "??:0:at::detail::empty_cuda(c10::ArrayRef<long>)",
        "??:0:at::_ops::empty_strided::redispatch(c10::DispatchKeySet)",
        "??:0:at::_ops::scatter_add_::call(at::Tensor&)",
        "/env/site-packages/torch/nn/modules/module.py:1790:_call_impl",
        "/home/someone/model.py:54:forward",
    )
    predicted = ("layers.0:0:aten.addmm.default", "/home/someone/model.py:12:forward", "step 2:0:forward")
    assert (operator_of(recorded), line_of(recorded)) == ("aten::scatter_add_", "/home/someone/model.py:54:forward")
    assert (operator_of(predicted), line_of(predicted)) == ("aten::addmm", "/home/someone/model.py:12:forward")
    assert (operator_of(("a.py:1:f",)), line_of(())) == ("", "")


def test_what_is_allocated_at_the_end_is_told_by_line() -> None:
    events = [
        Event("alloc", 0, 3 * MIB, source="/home/me/net.py:7:forward"),
        Event("alloc", 1, MIB, "parameters"),
        Event("alloc", 2, 4 * MIB, source="/home/me/net.py:9:forward"),
        Event("free", 2, 4 * MIB),
    ]
    content = snapshot(Trace(8, "cuda", "fake", tuple(events)), AllocatorSettings())
    assert allocated_by_line(content, 0) == {"/home/me/net.py:7:forward": 3 * MIB, "": MIB}
    assert not allocated_by_line(content, 1)
