"""The memory that a training may take of its device, and which source reported it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memguard.core.device import host as host_module
from lightning_memguard.core.device.budget import device_name, read_budget
from lightning_memguard.core.device.context import context_bytes
from lightning_memguard.core.device.host import MemoryInfo, cgroup_memory, host_memory, rlimit_memory
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.usefixtures("host")
def test_the_margin_is_a_share_of_what_is_free():
    budget = read_budget(CPU, margin=0.1)
    assert (budget.free_bytes, budget.margin_bytes, budget.usable_bytes) == (10 * GIB, GIB, 9 * GIB)
    assert (budget.total_bytes, budget.source, budget.device) == (16 * GIB, "host", "CPU")


@pytest.mark.parametrize("tightest", ["host", "cgroup", "rlimit"])
def test_the_tightest_of_host_control_group_and_own_limits_binds_and_gives_its_name(host, tightest):
    memories = {source: MemoryInfo(20 * GIB, 12 * GIB, source) for source in ("host", "cgroup", "rlimit")}
    host(**memories | {tightest: MemoryInfo(8 * GIB, 3 * GIB, tightest)})
    budget = read_budget(CPU)
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (8 * GIB, 3 * GIB, tightest)


@pytest.mark.usefixtures("host")
def test_a_model_already_on_the_cpu_counts_as_free_for_it():
    assert read_budget(CPU, already_held_bytes=2 * GIB).free_bytes == 12 * GIB
    assert read_budget(CPU, already_held_bytes=99 * GIB).free_bytes == 16 * GIB


@pytest.mark.usefixtures("host")
def test_a_budget_that_fits_is_taken_without_a_warning(recwarn):
    budget = read_budget(CPU, budget=4 * GIB, margin=0.25)
    assert (budget.total_bytes, budget.free_bytes, budget.usable_bytes) == (16 * GIB, 4 * GIB, 3 * GIB)
    assert (budget.source, list(recwarn)) == ("given", [])


@pytest.mark.usefixtures("host")
def test_a_budget_above_what_is_free_is_kept_and_warned_about_with_both_numbers():
    with pytest.warns(
        UserWarning, match=r"budget=12\.0 GiB is more than is free on CPU: 10\.0 GiB of 16\.0 GiB .*lower `budget`"
    ):
        budget = read_budget(CPU, budget=12 * GIB)
    assert (budget.free_bytes, budget.source) == (12 * GIB, "given")


def test_where_nothing_is_known_a_given_budget_is_all_there_is(host):
    host()
    assert read_budget(CPU, budget=GIB, margin=0).total_bytes == GIB


def test_where_nothing_is_known_and_nothing_given_the_error_names_what_to_set(host):
    host()
    with pytest.raises(MemGuardError, match=r"memory of CPU is unknown: .* set `budget`, such as budget='24GiB'"):
        read_budget(CPU)


def test_a_source_that_breaks_is_passed_over(host, monkeypatch):
    host(host=MemoryInfo(16 * GIB, 10 * GIB, "host"), rlimit=MemoryInfo(8 * GIB, 3 * GIB, "rlimit"))
    monkeypatch.setattr(host_module, "host_memory", lambda: (_ for _ in ()).throw(OSError("no /proc/meminfo")))
    assert read_budget(CPU).source == "rlimit"


def test_this_machine_answers_for_its_cpu():
    budget = read_budget(CPU)
    assert 0 < budget.usable_bytes < budget.free_bytes <= budget.total_bytes
    assert budget.free_bytes <= host_memory().total_bytes


def test_a_machine_without_proc_goes_by_what_the_host_has(tmp_path, monkeypatch):
    monkeypatch.setattr(host_module, "cgroup_memory", lambda: cgroup_memory(tmp_path))
    monkeypatch.setattr(host_module, "rlimit_memory", lambda: rlimit_memory(tmp_path))
    assert read_budget(CPU).source == "host"


# A CUDA device, through torch


def test_before_the_context_is_up_a_process_may_take_what_nvml_has_free(gpu):
    budget = read_budget(CUDA, margin=0)
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (8 * GIB, 6 * GIB, "nvml")
    assert budget.device == "NVIDIA H200 (cuda:0)"
    assert not gpu.context_is_up


def test_cuda_without_an_index_is_the_current_device(gpu):
    assert read_budget(torch.device("cuda")).device == "NVIDIA H200 (cuda:0)"


def test_what_the_allocator_keeps_cached_is_free_and_what_other_tensors_hold_is_not(gpu):
    gpu.reserved, gpu.allocated = 1000 * MIB, 400 * MIB
    assert read_budget(CUDA).free_bytes == 6 * GIB + 600 * MIB


def test_a_model_already_on_the_gpu_counts_as_free_for_it(gpu):
    gpu.reserved, gpu.allocated = 1000 * MIB, 400 * MIB
    assert read_budget(CUDA, already_held_bytes=300 * MIB).free_bytes == 6 * GIB + 900 * MIB
    assert read_budget(CUDA, already_held_bytes=9 * GIB).free_bytes == 6 * GIB + 1000 * MIB


def test_where_nvml_is_silent_cuda_answers(gpu):
    gpu.nvml = None
    budget = read_budget(CUDA)
    assert (budget.total_bytes, budget.source) == (8 * GIB, "cuda")
    # asking opened the context, whose size is unknown: it is ours all the same, and at least this
    assert budget.free_bytes == 5 * GIB + context_bytes(CUDA).low


def test_where_cuda_is_silent_too_the_host_answers_within_the_size_of_the_gpu(gpu, host):
    gpu.nvml = gpu.info = None
    host(host=MemoryInfo(64 * GIB, 40 * GIB, "host"))
    budget = read_budget(CUDA)
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (8 * GIB, 8 * GIB, "host")
    host(host=MemoryInfo(64 * GIB, 3 * GIB, "host"))
    assert read_budget(CUDA).free_bytes == 3 * GIB


def test_an_integrated_gpu_has_what_the_host_has_available(gpu, host):
    gpu.properties.is_integrated = 1
    host(host=MemoryInfo(64 * GIB, 40 * GIB, "host"))
    budget = read_budget(CUDA)
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (64 * GIB, 40 * GIB, "host")


def test_a_cap_set_on_the_allocator_is_kept(gpu):
    gpu.fraction = 0.25  # of what the allocator reserves: the context is outside, and counted in the footprint
    context = context_bytes(CUDA).likely
    assert read_budget(CUDA).free_bytes == 2 * GIB + context
    gpu.reserved = gpu.allocated = GIB
    assert read_budget(CUDA).free_bytes == GIB + context
    assert read_budget(CUDA, already_held_bytes=GIB).free_bytes == 2 * GIB + context


def test_a_budget_above_what_the_gpu_has_free_warns_with_its_name(gpu):
    with pytest.warns(UserWarning, match=r"free on NVIDIA H200 \(cuda:0\): 6\.0 GiB of 8\.0 GiB \(nvml\)"):
        assert read_budget(CUDA, budget=7 * GIB).total_bytes == 8 * GIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there and answers")
def test_a_gpu_that_is_not_there_is_an_error_unless_the_budget_is_given():
    with pytest.raises(MemGuardError, match="memory of cuda:0 is unknown"):
        read_budget(CUDA)
    assert read_budget(CUDA, budget=24 * GIB).total_bytes == 24 * GIB


@pytest.mark.parametrize("kind", ["hpu", "meta"])
def test_a_device_that_pytorch_cannot_ask_is_an_error_unless_the_budget_is_given(kind):
    with pytest.raises(MemGuardError, match=f"memory of {kind} is unknown"):
        read_budget(torch.device(kind))
    assert read_budget(torch.device(kind), budget=GIB).device == kind


@given(
    context=st.integers(1, 3 * GIB),
    others=st.integers(0, 3 * GIB),
    reserved=st.integers(0, GIB),
    will_reserve=st.integers(0, 9 * GIB),
    nvml=st.booleans(),
)
def test_the_size_of_a_context_that_is_up_cancels_out(simulated_gpu, context, others, reserved, will_reserve, nvml):
    """Whatever its figure, a training fits only if its segments go into what can really be reserved."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = simulated_gpu(monkeypatch)
        gpu.context_is_up, gpu.reserved = True, reserved
        free = 8 * GIB - context - others - reserved
        gpu.nvml = MemoryInfo(8 * GIB, free, "nvml", used_bytes=8 * GIB - free) if nvml else None
        gpu.info = (free, 8 * GIB)
        predicted_to_fit = will_reserve + context_bytes(CUDA).likely <= read_budget(CUDA, margin=0).free_bytes
    room = free + reserved - will_reserve
    assert predicted_to_fit or room < 272 * MIB  # which libraries may still take
    assert not predicted_to_fit or room >= 0


def test_the_whole_card_is_offered_before_and_after_the_context_and_the_allocator_gets_the_rest(gpu):
    """An H100 with torch 2.11: NVML has 81,559 MiB, of which the driver keeps 480; the context took 527."""
    vars(gpu.properties).update(major=9, minor=0, multi_processor_count=132, total_memory=81_079 * MIB)
    gpu.nvml, gpu.context = MemoryInfo(81_079 * MIB, 81_079 * MIB, "nvml", used_bytes=0), 527 * MIB
    before = read_budget(CUDA, margin=0)
    gpu.open_context(CUDA)
    assert read_budget(CUDA, margin=0) == before
    assert before.free_bytes == 81_079 * MIB
    # another process, which took 753 MiB: NVML tells it from this one, or the least of a context counts as ours
    gpu.take(753 * MIB)
    assert 0 <= before.free_bytes - 753 * MIB - read_budget(CUDA, margin=0).free_bytes <= 26 * MIB
    gpu.own = 518 * MIB
    assert 0 <= before.free_bytes - 753 * MIB - read_budget(CUDA, margin=0).free_bytes <= 10 * MIB


# Apple, Intel


def test_apple_gpus_have_what_metal_recommends_less_what_the_process_took(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12 * GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2 * GIB)
    budget = read_budget(torch.device("mps"), already_held_bytes=GIB)
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (12 * GIB, 11 * GIB, "mps")
    assert budget.device == "Apple GPU (mps)"


def test_intel_gpus_answer_as_cuda_does(monkeypatch):
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda where: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda where: GIB)
    monkeypatch.setattr(torch.xpu, "memory_allocated", lambda where: 0)
    budget = read_budget(torch.device("xpu", 1))
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (8 * GIB, 7 * GIB, "xpu")


# Names


def test_devices_are_named_in_words(gpu):
    assert device_name(CPU) == "CPU"
    assert device_name(CUDA) == "NVIDIA H200 (cuda:0)"
    assert device_name(torch.device("meta")) == "meta"
