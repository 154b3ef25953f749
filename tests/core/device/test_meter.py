"""How much a training took of its device."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_memguard.core.device import meter as meter_module
from lightning_memguard.core.device.host import MemoryInfo
from lightning_memguard.core.device.meter import ActualSnapshot, PeakMeter
from lightning_memguard.units import GIB, KIB, MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")

# The meter on the CPU

STEP_MIB = 128
"""What tensors of these programs are multiples of. Resident memory is compared in whole steps: other pages come and go
with the interpreter, the kernel and what else the machine does."""

METER = f"""
    import gc, json, torch
    from lightning_memguard.core.device import meter as meter_module
    from lightning_memguard.core.device.meter import PeakMeter
    STEP = {STEP_MIB} << 20
    def touched(steps): return torch.ones(steps * STEP, dtype=torch.uint8)
    def small(steps): return [torch.ones(1 << 16, dtype=torch.uint8) for _ in range(steps * STEP >> 16)]
    def in_steps(measured): return round(measured.peak_bytes / STEP)
    torch.set_num_threads(1)
    meter = PeakMeter(torch.device("cpu"))
"""


@pytest.fixture
def metered(run_program: Callable[..., object]) -> Callable[[str], object]:
    """A function that runs a program with a meter in a process of its own."""
    return lambda program: run_program(textwrap.dedent(METER) + textwrap.dedent(program))


@linux_only
def test_a_peak_that_has_gone_by_is_measured(metered):
    peak, source, parts = metered("""
        meter.start(already_held_bytes=0)
        tensor = touched(2)
        del tensor
        measured = meter.read({"parameters": 5})
        print(json.dumps([in_steps(measured), measured.source, measured.parts]))
    """)
    assert (peak, source, parts) == (2, "peak resident memory", {"parameters": 5})


@linux_only
def test_the_model_that_was_there_before_counts_and_every_epoch_is_measured_for_itself(metered):
    peaks = metered("""
        model, peaks = touched(1), []
        meter.start(already_held_bytes=STEP)
        for steps in (2, 3, 1):
            meter.restart()
            tensor = touched(steps)
            del tensor
            peaks.append(in_steps(meter.read({})))
        meter.close()
        print(json.dumps(peaks))
    """)
    assert peaks == [3, 4, 2]


@linux_only
def test_memory_that_was_freed_before_and_kept_by_the_c_library_does_not_hide_a_peak(metered):
    """Small tensors come and go, and the last one keeps the heap from shrinking by itself."""
    if os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("only glibc is asked to give freed memory back")
    assert metered("""
        past = small(3)
        kept = past[-1]
        del past
        gc.collect()
        meter.start(already_held_bytes=0)
        tensors = small(2)
        print(json.dumps([in_steps(meter.read({}))]))
    """) == [2]


@linux_only
def test_where_the_peak_may_not_be_reset_resident_memory_is_sampled_and_the_source_shows_it(metered):
    peak, later, source, alive = metered("""
        import threading, time
        def refused(*_): raise PermissionError("clear_refs")
        meter_module._HighWaterGauge.__init__ = refused
        meter.start(already_held_bytes=STEP)
        at_start, until = meter._gauge._peak_bytes, time.monotonic() + 60
        tensor = touched(2)
        while meter._gauge._peak_bytes < at_start + STEP and time.monotonic() < until:  # the thread has not looked
            time.sleep(0.001)
        del tensor
        measured = meter.read({})
        meter.restart()
        later = meter.read({})
        meter.close()
        alive = [thread.name for thread in threading.enumerate()]
        print(json.dumps([in_steps(measured), in_steps(later), measured.source, alive]))
    """)
    assert (peak, later) == (3, 1)
    assert source == "resident memory, sampled every 10 ms"
    assert alive == ["MainThread"]


# The meter on the CPU, to the byte: the counters say what the test wants


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., Path]:
    """A process's folder in /proc, with these sizes in KiB."""

    def write(resident: int, files: int, peak: int) -> Path:
        status = f"VmHWM: {peak} kB\nVmRSS: {resident} kB\nRssFile: {files} kB\nThreads: 1\n"
        (tmp_path / "status").write_text(status)
        return tmp_path

    return write


def test_pages_of_mapped_files_do_not_count(process):
    folder = process(resident=1000, files=300, peak=5000)
    gauge = meter_module._HighWaterGauge(held_bytes=50 * KIB, process=folder)
    process(resident=1200, files=420, peak=1700)
    assert gauge.read().peak_bytes == (50 + 1700 - 1000 - 120) * KIB
    process(resident=800, files=100, peak=900)
    assert gauge.read().peak_bytes == 50 * KIB


def test_the_kernel_is_asked_to_set_the_peak_back_at_the_start_and_at_every_epoch(process):
    folder = process(resident=1000, files=0, peak=5000)
    gauge = meter_module._HighWaterGauge(held_bytes=0, process=folder)
    for _ in range(2):
        assert (folder / "clear_refs").read_text() == "5"
        (folder / "clear_refs").unlink()
        gauge.restart()


def test_a_sampled_peak_is_the_most_that_was_seen_since_the_last_restart():
    taken, looked = [100], threading.Event()

    def ask() -> int:
        if threading.current_thread().name == "memguard-peak-meter":
            looked.set()
        return taken[0]

    gauge = meter_module._SampledGauge(ask, offset_bytes=-90, counter="resident memory")
    taken[0] = 300
    for _ in range(2):  # of two looks that begin after this, one has ended
        looked.clear()
        assert looked.wait(60)
    taken[0] = 150
    assert gauge.read() == meter_module.Measured(210, "resident memory, sampled every 10 ms")
    gauge.restart()
    assert gauge.read().peak_bytes == 60
    gauge.close()
    assert not gauge._thread.is_alive()


def test_a_meter_that_loses_its_counter_reports_unknown_and_lets_the_training_go_on(monkeypatch):
    meter = PeakMeter(CPU)
    assert meter.read({"buffers": 1}) == meter_module.Measured(0, "unknown", {"buffers": 1})
    meter.start(already_held_bytes=0)
    for name in ("read", "restart"):
        monkeypatch.setattr(type(meter._gauge), name, lambda self: 1 / 0)
    assert meter.read({}).source == "unknown"
    meter.restart()
    meter.close()
    assert meter.read({}).source == "unknown"


def test_a_closed_meter_can_start_again():
    meter = PeakMeter(CPU)
    meter.start(already_held_bytes=7 * MIB)
    meter.close()
    meter.start(already_held_bytes=5 * GIB)
    assert meter.read({}).peak_bytes >= 5 * GIB
    meter.close()
    assert "memguard-peak-meter" not in [thread.name for thread in threading.enumerate()]


# The meter on other devices


@pytest.fixture
def alone(gpu):
    """A GPU that no other process uses, with this one's context on it."""
    gpu.nvml = MemoryInfo(8 * GIB, 8 * GIB, "nvml", used_bytes=0)
    gpu.open_context(CUDA)
    return gpu


def started() -> PeakMeter:
    meter = PeakMeter(CUDA)
    meter.start(already_held_bytes=0)
    return meter


def test_on_cuda_the_peak_is_what_was_reserved_plus_the_context(alone):
    meter = started()
    alone.reserve(GIB)
    alone.peak_allocated = 900 * MIB
    measured = meter.read({"gradients": 3})
    assert (measured.peak_bytes, measured.source) == (GIB + 300 * MIB, "torch.cuda + nvml, whole device")
    assert (measured.peak_reserved_bytes, measured.peak_allocated_bytes) == (GIB, 900 * MIB)
    assert measured.parts == {"gradients": 3}
    assert not measured.is_reserved


def test_on_cuda_libraries_that_load_later_are_seen_at_the_next_reading(alone):
    meter = started()
    alone.take(50 * MIB)
    assert meter.read({}).peak_bytes == 350 * MIB


def test_on_cuda_retries_are_counted_by_epoch_and_the_peak_is_that_of_the_run(alone):
    meter = started()
    alone.peak_reserved, alone.stats = 2 * GIB, {"num_alloc_retries": 3, "num_ooms": 1}
    measured = meter.read({})
    assert (measured.peak_reserved_bytes, measured.alloc_retries, measured.ooms) == (2 * GIB, 3, 1)
    meter.restart()
    alone.stats = {"num_alloc_retries": 5, "num_ooms": 1}
    measured = meter.read({})
    assert (measured.peak_reserved_bytes, measured.alloc_retries, measured.ooms) == (2 * GIB, 2, 0)


def test_on_cuda_no_counter_of_the_users_is_reset(alone, monkeypatch):
    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("it is the user's"))
    meter = started()
    meter.restart()
    meter.read({})
    meter.close()


def test_on_cuda_what_a_higher_peak_of_earlier_work_hides_is_not_reported(alone):
    """PyTorch has one counter for the whole process, which stands at 3 GiB; of this run 1 GiB is there."""
    alone.peak_reserved, alone.peak_allocated = 4 * GIB, 3 * GIB
    meter = started()
    alone.reserve(GIB)
    measured = meter.read({})
    assert (measured.peak_reserved_bytes, measured.peak_allocated_bytes) == (GIB, None)
    alone.peak_allocated = alone.peak_reserved = 5 * GIB
    measured = meter.read({})
    assert (measured.peak_reserved_bytes, measured.peak_allocated_bytes) == (5 * GIB, 5 * GIB)


def test_on_cuda_a_user_may_reset_the_counters_in_between(alone):
    meter = started()
    alone.reserve(2 * GIB)
    alone.peak_allocated = 2 * GIB
    meter.read({})
    alone.reserved = alone.peak_reserved = GIB
    alone.peak_allocated = GIB
    measured = meter.read({})
    assert (measured.peak_reserved_bytes, measured.peak_allocated_bytes) == (2 * GIB, 2 * GIB)


def test_on_cuda_a_context_that_cannot_be_separated_from_other_processes_is_left_out_and_the_source_shows_it(gpu):
    gpu.open_context(CUDA)
    gpu.take(4 * GIB)
    meter = started()
    gpu.reserve(GIB)
    measured = meter.read({})
    assert (measured.peak_bytes, measured.source) == (GIB, "torch.cuda reserved, context not seen")
    assert measured.is_reserved
    gpu.own = GIB + 250 * MIB
    measured = meter.read({})
    assert (measured.peak_bytes, measured.source) == (GIB + 250 * MIB, "torch.cuda + nvml")


def test_on_cuda_the_lines_that_hold_memory_are_read_if_the_allocator_records_them(gpu, monkeypatch):
    frames = [{"filename": "/home/me/net.py", "line": 7, "name": "forward"}]
    blocks = [
        {"size": 3 * MIB, "state": "active_allocated", "frames": frames},
        {"size": MIB, "state": "inactive", "frames": frames},
    ]
    segment = {"device": 0, "address": 0, "total_size": 4 * MIB, "stream": 0, "segment_type": "large", "blocks": blocks}
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"segments": [segment], "device_traces": [[]]})
    assert meter_module.allocated_now(CUDA) == {"/home/me/net.py:7:forward": 3 * MIB}
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    assert meter_module.allocated_now(CUDA) == {}


def test_on_apple_gpus_the_drivers_figure_is_sampled(monkeypatch):
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 * GIB)
    meter = PeakMeter(torch.device("mps"))
    meter.start(already_held_bytes=GIB)
    measured = meter.read({})
    meter.close()
    assert (measured.peak_bytes, measured.source) == (3 * GIB, "torch.mps driver memory, sampled every 10 ms")


@pytest.mark.parametrize("kind", ["hpu", "meta"])
def test_a_device_that_keeps_no_peak_is_unknown(kind):
    meter = PeakMeter(torch.device(kind))
    meter.start(already_held_bytes=0)
    meter.restart()
    assert meter.read({}).source == "unknown"
    meter.close()


# A real GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_found_and_its_reserved_memory_measured(run_program):
    """Other processes, such as this one, may be on it, and come and go a little."""
    answer = run_program("""
        import json, torch
        from lightning_memguard.core.device.budget import read_budget
        from lightning_memguard.core.device.context import context_bytes
        from lightning_memguard.core.device.meter import PeakMeter
        gpu = torch.device("cuda", 0)
        before, context = read_budget(gpu, margin=0), context_bytes(gpu)
        torch.cuda.synchronize(gpu)
        after = read_budget(gpu, margin=0)
        meter = PeakMeter(gpu)
        meter.start(already_held_bytes=0)
        tensor = torch.ones(1 << 30, dtype=torch.uint8, device=gpu)
        measured = meter.read({})
        later = read_budget(gpu, margin=0, already_held_bytes=1 << 30)
        figures = [before.free_bytes, after.free_bytes, later.free_bytes, *context]
        figures += [measured.peak_bytes, measured.peak_reserved_bytes, torch.cuda.max_memory_reserved()]
        print(json.dumps([[before.source, measured.source], figures]))
    """)
    (source, measured_by), (before, after, later, least, _, most, peak, reserved, counted) = answer
    assert source == "nvml"
    assert reserved == counted >= GIB
    # a context, and one kernel
    assert peak == reserved if measured_by.endswith("not seen") else least <= peak - reserved <= most
    # the same to within what the kernel took meanwhile, whether the context is up and the model there or not
    assert after == pytest.approx(before, abs=256 * MIB)
    assert later == pytest.approx(before, abs=256 * MIB)


# The allocator's own snapshot


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """The calls to torch's recording of its allocator's history."""
    asked: list[tuple] = []
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled, **_: asked.append(("record", enabled))
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: asked.append(("write", path)))
    return asked


def test_an_actual_snapshot_records_until_it_is_saved(calls, tmp_path):
    recording = ActualSnapshot(torch.device("cuda"))
    assert calls == [("record", "all")]
    recording.save(tmp_path / "step.pickle")
    assert calls[1:] == [("write", str(tmp_path / "step.pickle")), ("record", None)]


def test_a_history_that_the_user_records_goes_on(calls, monkeypatch, tmp_path):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    ActualSnapshot(torch.device("cuda")).save(tmp_path / "step.pickle")
    assert calls == [("write", str(tmp_path / "step.pickle"))]


def test_canary_what_is_asked_of_the_allocators_history():
    """Private in torch 2.11 to 2.15."""
    given = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert next(iter(given)) == "enabled"
    assert {"stacks", "device"} <= set(given)
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"
    assert hasattr(torch._C, "_cuda_isHistoryEnabled") or not torch.backends.cuda.is_built()
