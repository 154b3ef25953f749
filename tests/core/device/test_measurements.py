"""The file of measurements: several processes write it, anything may be in it, and it stays small."""

from __future__ import annotations

import errno
import json
import multiprocessing
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_memguard.core.device import measurements
from lightning_memguard.core.device.measurements import (
    Measurement,
    Setting,
    Store,
    default_path,
    learned_from,
    setting_of,
)
from lightning_memguard.core.replay.learned import Sighting
from lightning_memguard.errors import MemGuardError

HERE = Setting("NVIDIA H200", "570.86.15", "2.13.0+cu130", "13.0", "91900", "")
FIRST = Measurement("a", "2026-11-23T10:00:00+00:00", "Net", "5e9", "bf16-mixed", 64, 1000, 1100, 900, 50, HERE)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "new" / "folder" / "measurements.jsonl")


def test_what_is_added_is_read(store: Store) -> None:
    assert store.read() == ([], 0)
    others = [replace(FIRST, run="b", batch_size=128), replace(FIRST, run="c", step="other")]
    for each in (FIRST, *others):
        store.add(each)
    assert store.read() == ([FIRST, *others], 0)
    store.clear()
    assert store.read() == ([], 0)
    assert not [*store.path.parent.iterdir()]


def test_a_line_from_before_times_were_stored_is_read(store: Store) -> None:
    store.add(timed := replace(FIRST, run="b", predicted_step_seconds=2.0, step_seconds=3.0))
    line = json.loads(store.path.read_text())
    old = {name: value for name, value in line.items() if not name.endswith("seconds")}
    store.path.write_text("".join(json.dumps(each) + "\n" for each in ({**old, "run": "a"}, line)))
    assert store.read() == ([FIRST, timed], 0)
    assert learned_from([FIRST, timed], "5e9").sightings == (Sighting(64, 1000, 1100, 2, 1.5),)
    store.path.write_text(json.dumps({**line, "step_seconds": "3"}))
    assert store.read() == ([], 1)


def test_a_later_epoch_of_a_run_replaces_its_earlier_ones(store: Store) -> None:
    store.add(FIRST)
    store.add(replace(FIRST, run="b"))
    store.add(later := replace(FIRST, measured_bytes=1200))
    assert store.read()[0] == [replace(FIRST, run="b"), later]


def _write(path: Path, name: str) -> None:
    for size in range(1, 101):
        Store(path).add(replace(FIRST, run=name, batch_size=size))


def test_processes_that_write_at_once_lose_nothing(store: Store) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(store.path, name)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found, damaged = store.read()
    assert damaged == 0
    assert {(each.run, each.batch_size) for each in found} == {(name, n) for name in "abcd" for n in range(1, 101)}


def test_a_file_that_is_held_by_another_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training does not wait for it."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(measurements, "_MOST_SECONDS", 0.05)
    store.add(FIRST)
    with store.path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            store.add(FIRST)


def test_a_file_that_cannot_be_locked_is_given_up_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems of networks cannot."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    monkeypatch.setattr(measurements, "_MOST_SECONDS", 1e9)
    with pytest.raises(OSError, match="No locks available"):
        store.add(FIRST)


def test_a_long_file_is_cut_to_its_later_half(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_MOST_LINES", 10)
    for number in range(11):
        store.add(replace(FIRST, run=str(number)))
    assert [each.run for each in store.read()[0]] == ["6", "7", "8", "9", "10"]
    assert sorted(path.name for path in store.path.parent.iterdir()) == ["measurements.jsonl", "measurements.lock"]


LINE = json.loads(json.dumps({**vars(FIRST), "setting": vars(HERE)}))


@pytest.mark.parametrize(
    "line",
    [
        "{", "[]", "null", "7", '"text"', "\x00\xff", "[" * 100_000, json.dumps({**LINE, "setting": 3}),
        *(json.dumps({**LINE, name: value}) for name, value in [
            ("batch_size", 0), ("batch_size", "64"), ("measured_bytes", -1), ("predicted_bytes", None), ("step", 3),
            ("measured_bytes", 1.5), ("measured_bytes", 1 << 63), ("batch_size", True), ("more", 1),
            ("setting", {**vars(HERE), "gpu": 5}),
        ]),
        json.dumps({name: value for name, value in LINE.items() if name != "step"}),
    ],
)  # fmt: skip
def test_a_damaged_line_is_counted_and_left_out(store: Store, line: str) -> None:
    store.add(FIRST)
    with store.path.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{line}\n")
    store.add(other := replace(FIRST, run="b"))
    assert store.read() == ([FIRST, other], 1)


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(MemGuardError, match=r"measurements in .* cannot be read"):
        Store(tmp_path).read()


def test_the_middle_of_the_latest_measurements_of_a_size_counts() -> None:
    measured = [5000, 1100, 1200, 1150, 1110, 1120]  # the oldest is forgotten
    found = [replace(FIRST, run=str(number), measured_bytes=nbytes) for number, nbytes in enumerate(measured)]
    other = replace(FIRST, step="other", measured_bytes=9000)
    larger = replace(FIRST, batch_size=128, predicted_bytes=2000, measured_bytes=2100)
    known = learned_from([*found, other, larger], FIRST.step)
    assert known.sightings == (Sighting(64, 1000, 1120, 5), Sighting(128, 2000, 2100, 1))


def test_what_differs_from_another_setting_is_named() -> None:
    there = replace(HERE, gpu="NVIDIA A100-SXM4-80GB", driver="")
    assert (
        HERE.difference(there) == "gpu NVIDIA A100-SXM4-80GB instead of NVIDIA H200, driver unset instead of 570.86.15"
    )
    assert HERE.difference(HERE) == ""


def test_the_file_is_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "lightning-memguard" / "measurements.jsonl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".cache" / "lightning-memguard" / "measurements.jsonl"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(MemGuardError, match="Set XDG_CACHE_HOME"):
        default_path()


def test_what_cudnn_may_choose_is_part_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    device, found = torch.device("cuda"), []
    for chosen in ({}, {"benchmark": True}, {"deterministic": True}, {"allow_tf32": False}, {"enabled": False}):
        with torch.backends.cudnn.flags(**{"enabled": True, "allow_tf32": True, **chosen}):
            found.append(setting_of(device))
    assert [each.cudnn for each in found if each] == [
        *("91900", "91900 benchmark", "91900 deterministic", "91900 without tf32", "off"),
    ]


def test_only_a_gpu_has_a_setting() -> None:
    assert setting_of(torch.device("cpu")) is None


def test_a_run_that_ran_out_of_memory_counts_until_one_at_its_size_has_run() -> None:
    """It took more than the 1,200 bytes that there were; that 900 were too little was predicted."""
    failed = replace(FIRST, run="b", measured_bytes=1200, measured_reserved_bytes=0, ran_out=True)
    assert learned_from([FIRST, failed], FIRST.step).sightings == (Sighting(64, 1000, 1200),)
    assert learned_from([FIRST, failed, FIRST], FIRST.step).sightings[0].measured_bytes == 1100
    expected = replace(failed, measured_bytes=900)
    assert learned_from([expected], FIRST.step).sightings == ()
    assert Measurement.read(json.dumps(asdict(failed))) == failed
