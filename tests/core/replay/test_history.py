"""Histories: what a snapshot says is read whole, undone to its start, and replayed to the address."""

from __future__ import annotations

import gzip
import importlib.util
import json
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_memguard.core.replay.alternatives import SETTINGS, alternatives
from lightning_memguard.core.replay.history import (
    allocated_by_line,
    histories_of,
    line_of,
    operator_of,
    read_histories,
    replay_history,
)
from lightning_memguard.core.replay.replay import replay
from lightning_memguard.core.replay.settings import AllocatorSettings
from lightning_memguard.core.replay.snapshot import snapshot
from lightning_memguard.core.trace.trace import Event, Trace
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import MIB

SIZES = (700, 4096, 300_000, MIB, 3 * MIB, 7 * MIB + 512, 12 * MIB, 30 * MIB + 4096)
KINDS = {
    "default": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
    "rounded": AllocatorSettings(roundup_power2_divisions=(4,) * 16),
    "unsplit": AllocatorSettings(max_split_size_bytes=25 * MIB),
}


AS_RECORDED = Path(__file__).parents[3] / "benchmarks" / "shared" / "as_recorded.py"


@pytest.fixture(scope="module")
def replay_as_recorded() -> Any:
    if not AS_RECORDED.exists():  # as in a source distribution
        pytest.skip("the benchmarks are not here")
    spec: Any = importlib.util.spec_from_file_location("as_recorded_of_test_history", AS_RECORDED)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.replay_as_recorded


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
    assert found.allocated_at_peak_bytes + found.cached_bytes + found.pinned_bytes == found.peak_reserved_bytes
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no pickle", "cannot be read as a memory snapshot"),
        (pickle.dumps([1, 2]), "not what torch.cuda.memory._dump_snapshot writes"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "holds no history"),
    ],
)
def test_what_is_no_history_is_said(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file.pickle").write_bytes(content)
    with pytest.raises(MemGuardError, match=message):
        read_histories(tmp_path / "file.pickle")


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
