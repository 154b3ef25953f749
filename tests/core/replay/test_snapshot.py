"""The predicted step in PyTorch's own snapshot format: what viewers read of it, and what they fail on."""

from __future__ import annotations

import pickle
import pickletools
import random
from dataclasses import replace

import pytest
import torch.cuda._memory_viz as viz

from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.replay.snapshot import save_snapshot, snapshot
from lightning_memguard.core.trace.trace import PARTS, Event, Trace
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, KIB, MIB
from tests import tape

CUDA = AllocatorSettings()
CPU = AllocatorSettings(kind="exact")
SETTINGS = {
    "cpu": CPU,
    "cuda": CUDA,
    "expandable": AllocatorSettings(expandable_segments=True),
    "never split above 20 MiB": AllocatorSettings(max_split_size_bytes=20 * MIB, capacity_bytes=410 * MIB),
    "a full device": AllocatorSettings(capacity_bytes=470 * MIB),
    "a full device, expandable": AllocatorSettings(capacity_bytes=450 * MIB, expandable_segments=True),
    "collects garbage": AllocatorSettings(
        capacity_bytes=600 * MIB, garbage_collection_threshold=0.5, per_process_memory_fraction=0.9
    ),
}

# What MemoryViz.js, the viewer's script, can read of a pickle (its function `unpickle`, torch 2.6).
# fmt: off
OPCODES_OF_THE_VIEWER = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1",
    "LONG_BINGET", "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND",
    "NEWFALSE", "BINPUT", "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3",
    "LONG_BINPUT", "LIST", "DICT", "SETITEM",
}
# fmt: on

STEP = Trace(
    8,
    "cuda",
    "fake",
    (
        Event("alloc", 0, 3 * MIB, "parameters", "setup", 0),
        Event("alloc", 1, 1000, "activations", "forward", 0, "encoder.layers.1", "aten.mm.default"),
        Event("alloc", 2, 0, "temporaries", "forward", 0, "encoder", "aten.empty.memory_format"),
        Event("alloc", 3, 40 * MIB, "activations", "forward", 0, "head", "aten.addmm.default"),
        Event("free", 2, 0, "temporaries", "forward", 0),
        Event("free", 3, 40 * MIB, "activations", "backward", 1),
        Event("free", 1, 1000, "activations", "backward", 1),
    ),
)


def random_trace(seed: int, events: int = 400, most_live: int = 300 * MIB) -> Trace:
    """Blocks of all sizes, as many as fit ``most_live`` at a time, from two streams."""
    chance = random.Random(seed)
    live: dict[int, Event] = {}
    written = []
    for block in range(events):
        nbytes = int(2 ** chance.uniform(0, 26))
        while live and sum(event.nbytes for event in live.values()) + nbytes > most_live:
            gone = live.pop(chance.choice(list(live)))
            written.append(gone._replace(action="free"))
        live[block] = Event("alloc", block, nbytes, chance.choice(PARTS), "forward", 0, f"m{block % 7}", "aten.mm", 0)
        written.append(live[block])
    return Trace(4, "cuda", "fake", tuple(written))


def checked(taken: dict) -> tuple[int, int]:
    """Walk a snapshot's own trace as a viewer does; the peaks of allocated and of reserved bytes."""
    segments: dict[int, int] = {}
    live: dict[int, tuple[int, int]] = {}
    peaks = [0, 0]
    for entry in taken["device_traces"][0]:
        address, size = entry["addr"], entry["size"]
        match entry["action"]:
            case "segment_alloc" | "segment_map":
                assert all(address + size <= other or other + n <= address for other, n in segments.items())
                segments[address] = size
            case "segment_free":
                assert segments.pop(address) == size
            case "segment_unmap":
                segments = without(segments, address, address + size)
            case "alloc":
                allocated = entry["allocated_size"]
                assert 0 < size <= allocated
                assert covered(segments, address, address + allocated)
                assert all(address + allocated <= other or other + n <= address for other, (_, n) in live.items())
                live[address] = size, allocated
            case "free_requested":
                assert live[address][0] == size
            case "free_completed":
                del live[address]
        peaks = [max(peaks[0], sum(n for _, n in live.values())), max(peaks[1], sum(segments.values()))]
    blocks = {b["address"]: b for s in taken["segments"] for b in s["blocks"] if b["state"] == "active_allocated"}
    assert {a: (b["requested_size"], b["size"]) for a, b in blocks.items()} == live
    assert sum(s["total_size"] for s in taken["segments"]) == sum(segments.values())
    return peaks[0], peaks[1]


def without(segments: dict[int, int], begin: int, end: int) -> dict[int, int]:
    assert covered(segments, begin, end)
    rest = [(a, min(a + n, begin)) for a, n in segments.items()] + [(max(a, end), a + n) for a, n in segments.items()]
    return {a: stop - a for a, stop in rest if stop > a}


def covered(segments: dict[int, int], begin: int, end: int) -> bool:
    return sum(max(0, min(a + n, end) - max(a, begin)) for a, n in segments.items()) == end - begin


# What it says


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", range(4))
def test_its_own_trace_comes_to_the_peaks_that_were_predicted(settings: AllocatorSettings, seed: int):
    trace = random_trace(seed)
    expected = replay(trace, settings)
    assert expected.out_of_memory_event is None
    assert checked(snapshot(trace, settings)) == (expected.peak_allocated_bytes, expected.peak_reserved_bytes)


def test_segments_that_came_and_went_are_in_it():
    """Otherwise the settings above would test nothing: full devices give back and take again."""
    seen = {
        name: {entry["action"] for seed in range(4) for entry in snapshot(random_trace(seed), s)["device_traces"][0]}
        for name, s in SETTINGS.items()
    }
    assert "segment_free" in seen["a full device"] & seen["never split above 20 MiB"] & seen["collects garbage"]
    assert {"segment_map", "segment_unmap"} <= seen["a full device, expandable"]
    assert "segment_free" not in seen["cuda"]


@pytest.mark.parametrize("settings", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_traced_step_comes_to_its_footprint(settings: AllocatorSettings):
    trace = tape.read("cnn_gpu").trace_at(32).only("point")
    expected = replay(trace, settings)
    assert checked(snapshot(trace, settings)) == (expected.peak_allocated_bytes, expected.peak_reserved_bytes)


def test_where_the_step_does_not_fit_it_is_shown_all_the_same():
    full = replace(CUDA, capacity_bytes=30 * MIB)
    assert replay(STEP, full).out_of_memory_event is not None
    assert checked(snapshot(STEP, full)) == checked(snapshot(STEP, CUDA))


def test_sizes_are_what_was_asked_for_as_in_pytorchs_own():
    allocs = [e for e in snapshot(STEP, CUDA)["device_traces"][0] if e["action"] == "alloc"]
    assert [(e["size"], e["allocated_size"]) for e in allocs] == [
        (3 * MIB, 3 * MIB),
        (1000, KIB),
        (40 * MIB, 40 * MIB),
    ]


def test_a_block_of_unknown_size_has_its_most_likely_one():
    cases = [Event("alloc", n, n * MIB, "workspaces", case=case) for n, case in ((1, "low"), (2, "point"), (4, "high"))]
    entries = snapshot(Trace(1, "cuda", "fake", tuple(cases)), CUDA)["device_traces"][0]
    assert [e["size"] for e in entries if e["action"] == "alloc"] == [2 * MIB]


def test_each_block_tells_its_part_and_where_it_came_from():
    allocs = [e for e in snapshot(STEP, CUDA)["device_traces"][0] if e["action"] == "alloc"]
    assert [e["category"] for e in allocs] == ["parameters", "activations", "activations"]
    assert [(f["filename"], f["line"], f["name"]) for f in allocs[1]["frames"]] == [
        ("encoder.layers.1", 0, "aten.mm.default"),
        ("encoder.layers", 0, "module"),
        ("encoder", 0, "module"),
        ("step 1", 0, "forward"),
    ]
    assert allocs[0]["frames"][0] == {"filename": "outside any module", "line": 0, "name": "parameters"}


def test_the_line_of_the_models_code_stands_between_the_operator_and_the_modules_around_it():
    asked = Event("alloc", 0, 512, module="head", operator="aten.mm.default", source="C:/net.py:12:forward")
    (entry,) = [e for e in snapshot(Trace(1, "cuda", "fake", (asked,)), CUDA)["device_traces"][0] if "category" in e][
        :1
    ]
    assert [(f["filename"], f["line"], f["name"]) for f in entry["frames"]] == [
        ("head", 0, "aten.mm.default"),
        ("C:/net.py", 12, "forward"),
        ("step 1", 0, "forward"),
    ]


# What reads it


def test_the_viewer_can_read_the_pickle(tmp_path):
    content = save_snapshot(random_trace(1, 3000), CUDA, tmp_path / "step.pickle").read_bytes()
    assert {code.name for code, _, _ in pickletools.genops(content)} <= OPCODES_OF_THE_VIEWER
    assert content[:2] == b"\x80\x04"


def test_the_viewer_finds_the_category_it_cannot_do_without(tmp_path):
    """MemoryViz.js stops at a misspelt name where there are categories and none is "unknown"."""
    taken = pickle.loads(save_snapshot(STEP, CUDA, tmp_path / "step.pickle").read_bytes())
    assert taken["device_traces"][0][-1]["category"] == "unknown"


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_command_of_memory_viz_runs_on_it(settings: AllocatorSettings, tmp_path):
    def read() -> dict:
        return pickle.loads(save_snapshot(random_trace(2), settings, tmp_path / "step.pickle").read_bytes())

    active = sum(segment["active_size"] for segment in read()["segments"])
    assert f"total_reserved: {viz.Bytes(sum(s['total_size'] for s in read()['segments']))}" in viz.segsum(read())
    assert "cudaMalloc" in viz.trace(read()) or settings.expandable_segments
    for flamegraph in (viz.memory, viz.segments):
        lines = flamegraph(read(), format_flamegraph=lambda text: text).splitlines()
        assert sum(int(line.rpartition(" ")[2]) for line in lines if ";active_allocated;" in line) == active
    for plot in (viz.trace_plot, viz.segment_plot):
        assert "snapshot.pickle" in plot(read())
    assert "snapshot.pickle" in viz.trace_plot(read(), filter_freed=True)


def test_a_large_one_stays_small(tmp_path):
    """Equal stacks are written once: real snapshots take kilobytes an entry."""
    trace = random_trace(3, 6000, most_live=GIB)
    size = save_snapshot(trace, CUDA, tmp_path / "step.pickle").stat().st_size
    assert size < 110 * 3 * len(trace)


# What can go wrong


@pytest.mark.parametrize("name", ["no/such/folder/step.pickle", "."])
def test_a_path_that_cannot_be_written_is_named(name: str, tmp_path):
    with pytest.raises(MemGuardError, match="cannot be written") as raised:
        save_snapshot(STEP, CUDA, tmp_path / name)
    assert str(tmp_path) in str(raised.value)


def test_an_empty_trace_is_a_snapshot_of_nothing():
    taken = snapshot(Trace(1, "cuda", "fake", ()), CUDA)
    assert taken["segments"] == []
    assert checked(taken) == (0, 0)
