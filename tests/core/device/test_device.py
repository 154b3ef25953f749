"""What a device has free for a training, who said so, and how much the training took of it."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memguard.core.device import budget as budget_module
from lightning_memguard.core.device import context as context_module
from lightning_memguard.core.device import meter as meter_module
from lightning_memguard.core.device import nvml as nvml_module
from lightning_memguard.core.device.budget import device_name, read_budget
from lightning_memguard.core.device.context import context_bytes, outside_allocator_bytes
from lightning_memguard.core.device.host import cgroup_room, host_room, rlimit_room
from lightning_memguard.core.device.meter import PeakMeter
from lightning_memguard.core.device.nvml import GpuFacts, gpu_facts
from lightning_memguard.core.device.recording import ActualSnapshot
from lightning_memguard.core.device.room import Room
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, KIB, MIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
REPOSITORY = Path(__file__).parents[3]
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")


def in_a_process_of_its_own(program: str, **environment: str) -> dict[str, object]:
    """Run a program that prints JSON last."""
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


# The budget


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A host that says what we tell it to say."""

    def say(**rooms: Room | None) -> None:
        for source in ("host", "cgroup", "rlimit"):
            monkeypatch.setattr(budget_module, f"{source}_room", lambda source=source: rooms.get(source))

    say(host=Room(16 * GIB, 10 * GIB, "host"))
    return say


@pytest.mark.usefixtures("host")
def test_the_margin_is_a_share_of_what_is_free():
    budget = read_budget(CPU, margin=0.1)
    assert (budget.free_bytes, budget.margin_bytes, budget.usable_bytes) == (10 * GIB, GIB, 9 * GIB)
    assert (budget.total_bytes, budget.source, budget.device) == (16 * GIB, "host", "CPU")


@pytest.mark.parametrize("tightest", ["host", "cgroup", "rlimit"])
def test_the_tightest_of_host_control_group_and_own_limits_binds_and_gives_its_name(host, tightest):
    rooms = {source: Room(20 * GIB, 12 * GIB, source) for source in ("host", "cgroup", "rlimit")}
    host(**rooms | {tightest: Room(8 * GIB, 3 * GIB, tightest)})
    budget = read_budget(CPU)
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (8 * GIB, 3 * GIB, tightest)


@pytest.mark.usefixtures("host")
def test_the_model_that_lies_on_the_cpu_already_is_not_in_its_own_way():
    assert read_budget(CPU, already_held_bytes=2 * GIB).free_bytes == 12 * GIB
    assert read_budget(CPU, already_held_bytes=99 * GIB).free_bytes == 16 * GIB


@pytest.mark.usefixtures("host")
def test_a_budget_that_fits_is_taken_without_a_word(recwarn):
    budget = read_budget(CPU, budget=4 * GIB, margin=0.25)
    assert (budget.total_bytes, budget.free_bytes, budget.usable_bytes) == (16 * GIB, 4 * GIB, 3 * GIB)
    assert (budget.source, list(recwarn)) == ("given", [])


@pytest.mark.usefixtures("host")
def test_a_budget_above_what_is_free_is_kept_and_warned_about_with_both_numbers():
    with pytest.warns(UserWarning, match=r"budget=12\.0 GiB .* CPU has 10\.0 GiB of 16\.0 GiB free .*lower `budget`"):
        budget = read_budget(CPU, budget=12 * GIB)
    assert (budget.free_bytes, budget.source) == (12 * GIB, "given")


def test_where_nothing_is_known_a_given_budget_is_all_there_is(host):
    host()
    assert read_budget(CPU, budget=GIB, margin=0).total_bytes == GIB


def test_where_nothing_is_known_and_nothing_given_the_error_says_what_to_set(host):
    host()
    with pytest.raises(MemGuardError, match=r"CPU was asked .* set `budget`, such as budget='24GiB'"):
        read_budget(CPU)


def test_a_source_that_breaks_is_passed_over(host, monkeypatch):
    host(host=Room(16 * GIB, 10 * GIB, "host"), rlimit=Room(8 * GIB, 3 * GIB, "rlimit"))
    monkeypatch.setattr(budget_module, "host_room", lambda: (_ for _ in ()).throw(OSError("no /proc/meminfo")))
    assert read_budget(CPU).source == "rlimit"


def test_this_machine_answers_for_its_cpu():
    budget = read_budget(CPU)
    assert 0 < budget.usable_bytes < budget.free_bytes <= budget.total_bytes
    assert budget.free_bytes <= host_room().total_bytes


# Control groups

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:15 - cgroup cgroup rw,memory\n"
CPU_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


def make_files(root: Path, **files: object) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(str(text))
    return root


def make_groups(root: Path, mounts: str, own: str, groups: dict[str, dict[str, object]]) -> Path:
    """A file system with control groups, each with its files."""
    make_files(root, **{"proc/self/mountinfo": mounts, "proc/self/cgroup": own})
    for folder, files in groups.items():
        make_files(root / f"sys/fs/cgroup/{folder}", **files)
    return root


def v2(limit: object, use: int, cache: int = 0) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": use, "memory.stat": f"anon 1\ninactive_file {cache}\nslab 2\n"}


def v1(limit: int, use: int, cache: int = 0) -> dict[str, object]:
    stat = f"cache 1\ninactive_file 7\ntotal_cache 2\ntotal_inactive_file {cache}\n"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": use, "memory.stat": stat}


@pytest.mark.parametrize(
    ("mounts", "own", "folder", "group"),
    [(V2, "0::/job\n", "job", v2), (CPU_V1 + V1, "5:cpu:/else\n4:memory:/job\n", "memory/job", v1)],
    ids=["v2", "v1"],
)
def test_page_cache_that_can_be_dropped_is_not_use(tmp_path, mounts, own, folder, group):
    root = make_groups(tmp_path, mounts, own, {folder: group(1000, 700, cache=300)})
    assert cgroup_room(root) == Room(1000, 600, "cgroup")


@pytest.mark.parametrize(
    ("mounts", "own", "top", "group"),
    [(V2, "0::/a/b/c\n", "", v2), (V1, "4:memory:/a/b/c\n", "memory/", v1)],
    ids=["v2", "v1"],
)
@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
def test_the_tightest_group_on_the_way_up_binds(tmp_path, mounts, own, top, group, tightest):
    groups = {f"{top}{path}": group(1000 if path == tightest else 5000, 100) for path in ("a", "a/b", "a/b/c")}
    assert cgroup_room(make_groups(tmp_path, mounts, own, groups)) == Room(1000, 900, "cgroup")


def test_a_loose_group_that_is_nearly_full_binds_before_a_tight_one_that_is_empty(tmp_path):
    root = make_groups(tmp_path, V2, "0::/a/b\n", {"a": v2(5000, 4900), "a/b": v2(1000, 0)})
    assert cgroup_room(root) == Room(5000, 100, "cgroup")


def test_a_container_with_a_namespace_of_its_own_sees_its_group_as_the_top(tmp_path):
    root = make_groups(tmp_path, V2, "0::/\n", {"": v2(1000, 100)})
    assert cgroup_room(root) == Room(1000, 900, "cgroup")


def test_a_container_without_one_finds_its_group_where_it_is_mounted(tmp_path):
    mounts = "35 31 0:32 /docker/f00 /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
    root = make_groups(tmp_path, mounts, "4:memory:/docker/f00\n", {"memory": v1(1000, 100)})
    assert cgroup_room(root) == Room(1000, 900, "cgroup")


def test_a_group_outside_what_is_mounted_leaves_the_mounted_one(tmp_path):
    root = make_groups(tmp_path, V2, "0::/../elsewhere\n", {"": v2(1000, 100)})
    make_files(tmp_path / "sys/fs/elsewhere", **v2(10, 0))
    assert cgroup_room(root) == Room(1000, 900, "cgroup")


def test_of_both_versions_side_by_side_the_one_with_the_memory_counts(tmp_path):
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    own = "9:name=systemd:/\n4:cpu,memory:/job\n0::/job\n"
    root = make_groups(tmp_path, V1 + unified, own, {"memory/job": v1(1000, 100), "unified/job": {"cgroup.procs": 1}})
    assert cgroup_room(root) == Room(1000, 900, "cgroup")


def test_a_group_is_slowed_to_a_crawl_above_memory_high_so_that_is_its_limit(tmp_path):
    root = make_groups(tmp_path, V2, "0::/job\n", {"job": v2("max", 100) | {"memory.high": 800}})
    assert cgroup_room(root) == Room(800, 700, "cgroup")


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(tmp_path):
    assert cgroup_room(make_groups(tmp_path, V2, "0::/job\n", {"job": v2(100, 150)})) == Room(100, 0, "cgroup")


@pytest.mark.parametrize(
    ("mounts", "own", "groups"),
    [
        (V2, "0::/job\n", {"job": v2("max", 100)}),
        (V1, "4:memory:/job\n", {"memory/job": v1(9223372036854771712, 100)}),
        (V2, "0::/job\n", {}),
        (CPU_V1, "5:cpu:/job\n", {"cpu/job": v1(1000, 100)}),
    ],
    ids=["v2 says max", "v1 says a huge number", "no files", "no memory controller"],
)
def test_without_a_limit_control_groups_say_nothing(tmp_path, mounts, own, groups):
    assert cgroup_room(make_groups(tmp_path, mounts, own, groups)) is None


def test_a_machine_without_proc_goes_by_what_the_host_has(tmp_path, monkeypatch):
    monkeypatch.setattr(budget_module, "cgroup_room", lambda: cgroup_room(tmp_path))
    monkeypatch.setattr(budget_module, "rlimit_room", lambda: rlimit_room(tmp_path))
    assert read_budget(CPU).source == "host"


# The process's own limits


@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({"RLIMIT_AS": 1000 * KIB}, Room(1000 * KIB, 400 * KIB, "rlimit")),
        ({"RLIMIT_DATA": 500 * KIB}, Room(500 * KIB, 300 * KIB, "rlimit")),
        ({"RLIMIT_AS": 1000 * KIB, "RLIMIT_DATA": 500 * KIB}, Room(500 * KIB, 300 * KIB, "rlimit")),
        ({"RLIMIT_AS": 100 * KIB}, Room(100 * KIB, 0, "rlimit")),
        ({}, None),
    ],
)
def test_a_limit_leaves_what_the_process_does_not_take_yet(tmp_path, monkeypatch, limits, room):
    resource = pytest.importorskip("resource", reason="Windows has no resource limits")
    soft = {getattr(resource, name): nbytes for name, nbytes in limits.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft.get(kind, resource.RLIM_INFINITY), 0))
    make_files(tmp_path, status="Name:\tpython\nVmSize:\t     600 kB\nVmData:\t     200 kB\nThreads:\t4\n")
    assert rlimit_room(tmp_path) == room


@linux_only
def test_a_real_address_space_limit_binds_and_the_room_is_what_can_really_be_taken():
    answer = in_a_process_of_its_own("""
        import json, resource, torch
        from pathlib import Path
        from lightning_memguard.core.device.budget import read_budget
        from lightning_memguard.core.device.host import status_bytes
        limit = status_bytes(Path("/proc/self"))["VmSize"] + (512 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        budget = read_budget(torch.device("cpu"))
        torch.empty(budget.free_bytes - (8 << 20), dtype=torch.uint8)
        try:
            torch.empty(budget.free_bytes + (8 << 20), dtype=torch.uint8)
        except RuntimeError as error:
            refused = "allocate memory" in str(error)
        print(json.dumps([budget.source, budget.total_bytes == limit, budget.free_bytes, refused]))
    """)
    source, total_is_the_limit, free_bytes, refused = answer
    assert (source, total_is_the_limit, refused) == ("rlimit", True, True)
    assert free_bytes == pytest.approx(512 * MIB, abs=16 * MIB)


# A CUDA device, through torch


class Gpu:
    """What torch.cuda says of one GPU, and NVML beside it; 8 GiB, 6 of them free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.context_is_up, self.reserved, self.allocated, self.fraction = False, 0, 0, 1.0
        self.nvml: Room | None = Room(8 * GIB, 6 * GIB, "nvml", used_bytes=2 * GIB)
        self.info: tuple[int, int] | None = (5 * GIB, 8 * GIB)
        self.peak_allocated = self.peak_reserved = 0
        self.properties = types.SimpleNamespace(total_memory=8 * GIB, is_integrated=0, uuid="aaaa")
        answers = {
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "synchronize": self.open_context,
            "get_device_name": lambda where: "NVIDIA H200",
            "get_device_properties": lambda where: self.properties,
            "get_per_process_memory_fraction": lambda where: self.fraction,
            "mem_get_info": self.mem_get_info,
            "memory_reserved": lambda where: self.reserved,
            "memory_allocated": lambda where: self.allocated,
            "max_memory_reserved": lambda where: self.peak_reserved,
            "max_memory_allocated": lambda where: self.peak_allocated,
            "reset_peak_memory_stats": self.reset_peak,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: self.context_is_up, raising=False)
        for module in (budget_module, nvml_module):
            monkeypatch.setattr(module, "nvml_room", lambda gpu: self.nvml)
        self.context = 300 * MIB

    def take(self, nbytes: int) -> None:
        """Somebody takes memory; NVML sees it go."""
        free, used = self.nvml.free_bytes - nbytes, self.nvml.used_bytes + nbytes
        self.nvml = Room(self.nvml.total_bytes, free, "nvml", used)

    def open_context(self, where: torch.device) -> None:
        if not self.context_is_up and self.nvml:
            self.take(self.context)
        self.context_is_up = True

    def reserve(self, nbytes: int) -> None:
        self.take(nbytes)
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def mem_get_info(self, where: torch.device) -> tuple[int, int]:
        if self.info is None:
            raise RuntimeError("CUDA error: unknown error")
        self.open_context(where)
        return self.info

    def reset_peak(self, where: torch.device) -> None:
        self.peak_reserved, self.peak_allocated = self.reserved, self.allocated


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


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


def test_the_model_that_lies_on_the_gpu_already_is_not_in_its_own_way(gpu):
    gpu.reserved, gpu.allocated = 1000 * MIB, 400 * MIB
    assert read_budget(CUDA, already_held_bytes=300 * MIB).free_bytes == 6 * GIB + 900 * MIB
    assert read_budget(CUDA, already_held_bytes=9 * GIB).free_bytes == 6 * GIB + 1000 * MIB


@given(
    context=st.integers(1, 3 * GIB),
    others=st.integers(0, 3 * GIB),
    reserved=st.integers(0, GIB),
    will_reserve=st.integers(0, 9 * GIB),
    nvml=st.booleans(),
)
def test_the_size_of_a_context_that_is_up_cancels_out(context, others, reserved, will_reserve, nvml):
    """Whatever we take it for, a training is said to fit only if its segments go into what can really be reserved."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        gpu = Gpu(monkeypatch)
        gpu.context_is_up, gpu.reserved = True, reserved
        free = 8 * GIB - context - others - reserved
        gpu.nvml = Room(8 * GIB, free, "nvml", used_bytes=8 * GIB - free) if nvml else None
        gpu.info = (free, 8 * GIB)
        said_to_fit = will_reserve + context_bytes(CUDA) <= read_budget(CUDA, margin=0).free_bytes
    fits = will_reserve <= free + reserved
    assert fits or not said_to_fit
    if context + others >= context_module._UNMEASURED_CONTEXT_BYTES:  # below, an unmeasured context is taken for larger
        assert said_to_fit == fits


def test_where_nvml_is_silent_cuda_answers(gpu):
    gpu.nvml = None
    budget = read_budget(CUDA)
    assert (budget.total_bytes, budget.source) == (8 * GIB, "cuda")
    # asking opened the context, whose size nobody can tell: it is ours all the same
    assert budget.free_bytes == 5 * GIB + context_module._UNMEASURED_CONTEXT_BYTES == 5 * GIB + context_bytes(CUDA)


def test_where_cuda_is_silent_too_the_host_answers_within_the_size_of_the_gpu(gpu, host):
    gpu.nvml = gpu.info = None
    host(host=Room(64 * GIB, 40 * GIB, "host"))
    budget = read_budget(CUDA)
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (8 * GIB, 8 * GIB, "host")
    host(host=Room(64 * GIB, 3 * GIB, "host"))
    assert read_budget(CUDA).free_bytes == 3 * GIB


def test_an_integrated_gpu_has_what_the_host_has_available(gpu, host):
    gpu.properties.is_integrated = 1
    host(host=Room(64 * GIB, 40 * GIB, "host"))
    budget = read_budget(CUDA)
    assert (budget.total_bytes, budget.free_bytes, budget.source) == (64 * GIB, 40 * GIB, "host")


def test_a_cap_set_on_the_allocator_is_kept(gpu):
    gpu.fraction = 0.25
    assert read_budget(CUDA).free_bytes == 2 * GIB
    gpu.reserved = gpu.allocated = GIB
    assert read_budget(CUDA).free_bytes == GIB
    assert read_budget(CUDA, already_held_bytes=GIB).free_bytes == 2 * GIB


def test_a_budget_above_what_the_gpu_has_free_warns_with_its_name(gpu):
    with pytest.warns(UserWarning, match=r"NVIDIA H200 \(cuda:0\) has 6\.0 GiB of 8\.0 GiB free \(nvml\)"):
        assert read_budget(CUDA, budget=7 * GIB).total_bytes == 8 * GIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there and answers")
def test_a_gpu_that_is_not_there_is_an_error_unless_the_budget_is_given():
    with pytest.raises(MemGuardError, match="cuda:0 was asked how much memory it has free"):
        read_budget(CUDA)
    assert read_budget(CUDA, budget=24 * GIB).total_bytes == 24 * GIB


@pytest.mark.parametrize("kind", ["hpu", "meta"])
def test_a_device_that_pytorch_cannot_ask_is_an_error_unless_the_budget_is_given(kind):
    with pytest.raises(MemGuardError, match=f"{kind} was asked how much memory it has free"):
        read_budget(torch.device(kind))
    assert read_budget(torch.device(kind), budget=GIB).device == kind


# ROCm, Apple, Intel


def test_rocm_is_asked_through_torch_and_never_through_nvml(monkeypatch):
    asked = []
    stand_in = types.SimpleNamespace(nvmlInit=lambda: asked.append("init"))
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (nvml_module.nvml_room(GpuFacts(8 * GIB, ("GPU-aaaa",))), asked) == (None, [])


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


# The context


def test_a_context_not_yet_up_is_opened_and_measured_by_what_it_takes(gpu):
    gpu.nvml = Room(8 * GIB, 3 * GIB, "nvml", used_bytes=5 * GIB)  # most of it somebody else's
    assert context_bytes(CUDA) == 300 * MIB
    assert gpu.context_is_up


def test_only_cuda_has_a_context_to_count():
    assert context_bytes(CPU) == context_bytes(torch.device("mps")) == context_bytes(torch.device("xpu")) == 0


def room(free: int, used: int | None = None) -> Room:
    return Room(80 * GIB, free, "nvml", used)


@pytest.mark.parametrize(
    ("before", "now", "answer"),
    [
        # 10 GiB reserved in each
        (room(50 * GIB), room(39 * GIB, 40 * GIB), (GIB, "nvml")),
        (None, room(39 * GIB, 11 * GIB), (GIB, "nvml, whole device")),
        (room(50 * GIB), room(60 * GIB, 11 * GIB), (GIB, "nvml, whole device")),  # others went meanwhile
        (room(50 * GIB), room(30 * GIB, 40 * GIB), (0, "context not seen")),  # others came meanwhile
        (None, room(39 * GIB, 40 * GIB), (0, "context not seen")),  # others are there
        (None, room(39 * GIB), (0, "context not seen")),  # an older driver counts its own share as used
        (room(50 * GIB), None, (0, "context not seen")),
    ],
)
def test_what_lies_outside_the_allocator_is_told_only_where_other_processes_cannot_be_meant(before, now, answer):
    assert outside_allocator_bytes(before, now, 10 * GIB) == answer


# Which NVML device is torch's


def properties(**known: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{"total_memory": 8 * GIB, "uuid": "aaaa", "is_integrated": 0} | known)


@pytest.mark.parametrize(
    ("visible", "nvml_index"),
    [(None, 1), ("3,2", 2), (" 3 , 2 ", 2), ("GPU-bbbb,GPU-aaaa", None), ("3", None), ("", None)],
)
def test_an_index_is_followed_through_cuda_visible_devices_as_far_as_it_goes(visible, nvml_index):
    assert gpu_facts(1, properties(), visible) == GpuFacts(8 * GIB, ("GPU-aaaa", "MIG-aaaa"), "", nvml_index)


def test_a_mig_slice_goes_by_its_own_name_and_never_by_that_of_the_whole_gpu():
    facts = gpu_facts(0, properties(pci_domain_id=0, pci_bus_id=59, pci_device_id=0), "MIG-cccc")
    assert facts == GpuFacts(8 * GIB, ("MIG-cccc",))


def test_the_pci_bus_id_is_spelled_as_nvml_spells_it():
    facts = gpu_facts(0, properties(pci_domain_id=1, pci_bus_id=59, pci_device_id=2), None)
    assert facts.pci_bus_id == "00000001:3B:02.0"


def test_a_torch_that_knows_only_the_size_leaves_the_index():
    assert gpu_facts(2, types.SimpleNamespace(total_memory=8 * GIB), None) == GpuFacts(8 * GIB, nvml_index=2)


# NVML itself: the unmodified nvidia-ml-py over a small library of ours


class Nvml:
    """A process in which ``libnvidia-ml.so.1`` is ours; it answers from a file that a test may change at any time."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state.txt"
        self.state.write_text("")
        environment = {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(self.state), "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "nvml/ask_nvml.py")],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *lines: str, **facts: object) -> Room | None:
        """What `nvml_room` says of a GPU with these facts on a machine with these devices and faults."""
        self.state.write_text("".join(f"{line}\n" for line in lines))
        print(json.dumps(asdict(GpuFacts(**facts))), file=self.process.stdin, flush=True)
        while not (answer := self.process.stdout.readline()).startswith(("{", "null")):
            assert answer, "the process ended"
        answer = json.loads(answer)
        return answer and Room(**answer)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=60)


def compiled(folder: Path, *flags: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the stand-in for NVML needs Linux and a C compiler (cc, gcc or clang)")
    source = Path(__file__).parent / "nvml/libnvidia-ml.c"
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", str(library), str(source)], check=True)
    return folder


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nvml]:
    process = Nvml(compiled(tmp_path_factory.mktemp("nvml")))
    yield process
    process.close()


@pytest.fixture(scope="module")
def old_nvml(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nvml]:
    process = Nvml(compiled(tmp_path_factory.mktemp("old_nvml"), "-DBEFORE_510"))
    yield process
    process.close()


def gpu_line(uuid: str, pci: str, total: int, reserved: int, used: int) -> str:
    return f"gpu {uuid} {pci} {total} {reserved} {used}"


A = gpu_line("GPU-aaaa", "00000000:3B:00.0", 8 * GIB, 256 * MIB, 2 * GIB)
B = gpu_line("GPU-bbbb", "00000000:AF:00.0", 8 * GIB, 256 * MIB, 5 * GIB)
SMALL = gpu_line("GPU-cccc", "00000000:D8:00.0", 4 * GIB, 0, GIB)
FREE_A, FREE_B = 8 * GIB - 256 * MIB - 2 * GIB, 8 * GIB - 256 * MIB - 5 * GIB
ROOM_A = Room(8 * GIB, FREE_A, "nvml", 2 * GIB)


def test_nvml_tells_the_drivers_own_share_from_what_processes_use(nvml):
    assert nvml.ask(A, total_bytes=8 * GIB, uuids=("GPU-aaaa",)) == ROOM_A


def test_an_old_driver_says_the_same_free_but_not_whose_the_rest_is(old_nvml):
    assert old_nvml.ask(A, total_bytes=8 * GIB, uuids=("GPU-aaaa",)) == Room(8 * GIB, FREE_A, "nvml", None)


@pytest.mark.parametrize("code", [2, 3, 13, 25])
def test_a_driver_that_refuses_the_second_version_is_asked_the_first(nvml, code):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-aaaa",)}
    assert nvml.ask(f"fail memory_v2 {code}", A, **facts) == Room(8 * GIB, FREE_A, "nvml", None)


FAULTS = {
    "NotSupported": 3,
    "NoPermission": 4,
    "Unknown": 999,
    "FunctionNotFound": 13,
    "Uninitialized": 1,
    "GpuIsLost": 15,
}


@pytest.mark.parametrize("code", FAULTS.values(), ids=FAULTS)
def test_where_nvml_will_not_tell_the_memory_it_says_nothing(nvml, code):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-aaaa",), "pci_bus_id": "00000000:3B:00.0", "nvml_index": 0}
    assert nvml.ask(f"fail memory_v2 {code}", f"fail memory {code}", A, **facts) is None


@pytest.mark.parametrize(
    "code", [9, 12, 4, 999, 18], ids=["DriverNotLoaded", "LibraryNotFound", "NoPermission", "Unknown", "Mismatch"]
)
def test_where_nvml_does_not_start_it_says_nothing_and_the_next_call_may_succeed(nvml, code):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-aaaa",)}
    assert nvml.ask(f"fail init {code}", A, **facts) is None
    assert nvml.ask(A, **facts) == ROOM_A


def test_a_shutdown_that_fails_does_not_lose_the_answer(nvml):
    assert nvml.ask("fail shutdown 999", A, total_bytes=8 * GIB, uuids=("GPU-aaaa",)) == ROOM_A


def test_a_library_that_cannot_be_loaded_says_nothing(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    process = Nvml(tmp_path)
    assert process.ask(A, total_bytes=8 * GIB, uuids=("GPU-aaaa",)) is None
    process.close()


def test_without_nvidia_ml_py_nvml_says_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_module.nvml_room(GpuFacts(8 * GIB, ("GPU-aaaa",))) is None


def test_a_gpu_is_found_by_its_name_in_whatever_order_nvml_lists_them(nvml):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-bbbb",), "nvml_index": 0}
    assert nvml.ask(A, B, SMALL, **facts).free_bytes == FREE_B
    assert nvml.ask(SMALL, B, A, **facts).free_bytes == FREE_B


def test_without_a_name_that_nvml_knows_the_pci_bus_id_decides(nvml):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-unknown",), "pci_bus_id": "00000000:AF:00.0", "nvml_index": 0}
    assert nvml.ask(A, B, **facts).free_bytes == FREE_B
    assert nvml.ask("fail by_uuid 13", A, B, **facts).free_bytes == FREE_B


def test_an_index_is_the_last_resort_and_believed_only_where_the_size_agrees(nvml):
    assert nvml.ask(SMALL, A, total_bytes=8 * GIB, nvml_index=1) == ROOM_A
    assert nvml.ask(SMALL, A, total_bytes=8 * GIB, nvml_index=0) is None
    assert nvml.ask(SMALL, A, total_bytes=8 * GIB, nvml_index=7) is None


def test_the_total_is_the_smaller_one_of_nvml_and_cuda(nvml):
    total = 8 * GIB - 100 * MIB
    assert nvml.ask(A, total_bytes=total, uuids=("GPU-aaaa",)) == Room(total, FREE_A, "nvml", 2 * GIB)


def test_a_mig_slice_is_asked_by_its_own_name(nvml):
    whole = gpu_line("GPU-aaaa", "00000000:3B:00.0", 40 * GIB, 0, 2 * GIB)
    slice_ = gpu_line("MIG-dddd", "none", 5 * GIB, 0, GIB)
    assert nvml.ask(whole, slice_, total_bytes=4 * GIB, uuids=("MIG-dddd",)) == Room(4 * GIB, 4 * GIB, "nvml", GIB)


def test_a_mig_slice_that_nvml_hides_is_not_mistaken_for_the_whole_gpu(nvml):
    whole = gpu_line("GPU-aaaa", "00000000:3B:00.0", 40 * GIB, 0, 2 * GIB)
    facts = {"uuids": ("GPU-aaaa", "MIG-aaaa"), "pci_bus_id": "00000000:3B:00.0", "nvml_index": 0}
    assert nvml.ask(whole, total_bytes=5 * GIB, **facts) is None


def test_each_call_reads_anew(nvml):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-aaaa",)}
    for used in (2 * GIB, 3 * GIB, GIB):
        line = gpu_line("GPU-aaaa", "00000000:3B:00.0", 8 * GIB, 0, used)
        assert nvml.ask(line, **facts) == Room(8 * GIB, 8 * GIB - used, "nvml", used)


# The meter on the CPU

METER = """
    import json, torch
    from lightning_memguard.core.device import meter as meter_module
    from lightning_memguard.core.device.meter import PeakMeter
    MIB = 1 << 20
    def touched(mib): return torch.ones(mib * MIB, dtype=torch.uint8)
    torch.set_num_threads(1)
    meter = PeakMeter(torch.device("cpu"))
"""
RSS_TOLERANCE = 6 * MIB
"""How far resident memory may stray from the tensors' bytes: the interpreter's pages, the kernel's own counters."""


def metered(program: str) -> list[object]:
    return in_a_process_of_its_own(textwrap.dedent(METER) + textwrap.dedent(program))


@linux_only
def test_a_peak_that_has_gone_by_is_measured():
    peak, source, parts = metered("""
        meter.start(already_held_bytes=0)
        tensor = touched(200)
        del tensor
        measured = meter.read({"parameters": 5})
        print(json.dumps([measured.peak_bytes, measured.source, measured.parts]))
    """)
    assert peak == pytest.approx(200 * MIB, abs=RSS_TOLERANCE)
    assert (source, parts) == ("peak resident memory (VmHWM)", {"parameters": 5})


@linux_only
def test_the_model_that_was_there_before_counts_and_every_epoch_is_measured_for_itself():
    peaks = metered("""
        model, peaks = touched(100), []
        meter.start(already_held_bytes=100 * MIB)
        for mib in (200, 300, 100):
            meter.restart()
            tensor = touched(mib)
            del tensor
            peaks.append(meter.read({}).peak_bytes)
            assert meter.read({}).peak_bytes >= peaks[-1]
        meter.close()
        print(json.dumps(peaks))
    """)
    assert peaks == [pytest.approx(mib * MIB, abs=RSS_TOLERANCE) for mib in (300, 400, 200)]


@linux_only
def test_memory_that_was_freed_before_and_kept_by_the_c_library_does_not_hide_a_peak():
    """Small tensors come and go, and the last one keeps the heap from shrinking by itself."""
    if os.confstr("CS_GNU_LIBC_VERSION") is None:
        pytest.skip("only glibc is asked to give freed memory back")
    (peak,) = metered("""
        past = [torch.ones(MIB // 16, dtype=torch.uint8) for _ in range(4800)]
        kept = past[-1]
        del past
        meter.start(already_held_bytes=0)
        tensor = touched(200)
        print(json.dumps([meter.read({}).peak_bytes]))
    """)
    assert peak == pytest.approx(200 * MIB, abs=RSS_TOLERANCE)


@linux_only
def test_where_the_peak_may_not_be_reset_resident_memory_is_sampled_and_the_source_says_so():
    peak, later, source, alive = metered("""
        import threading, time
        def refused(*_): raise PermissionError("clear_refs")
        meter_module._HighWaterGauge.__init__ = refused
        meter.start(already_held_bytes=10 * MIB)
        tensor = touched(200)
        while meter._gauge._peak_bytes < meter._gauge._ask():  # until the thread has looked
            time.sleep(0.001)
        del tensor
        measured = meter.read({})
        meter.restart()
        later = meter.read({})
        meter.close()
        alive = [thread.name for thread in threading.enumerate()]
        print(json.dumps([measured.peak_bytes, later.peak_bytes, measured.source, alive]))
    """)
    assert peak == pytest.approx(210 * MIB, abs=RSS_TOLERANCE)
    assert later == pytest.approx(10 * MIB, abs=RSS_TOLERANCE)
    assert source == "resident memory, sampled every 10 ms"
    assert alive == ["MainThread"]


def test_pages_of_mapped_files_are_not_the_trainings(tmp_path):
    def process(resident: int, files: int, peak: int) -> Path:
        status = f"VmHWM: {peak} kB\nVmRSS: {resident} kB\nRssFile: {files} kB\nThreads: 1\n"
        return make_files(tmp_path, status=status)

    gauge = meter_module._HighWaterGauge(held_bytes=50 * KIB, process=process(resident=1000, files=300, peak=5000))
    assert (tmp_path / "clear_refs").read_text() == "5"
    process(resident=1200, files=420, peak=1700)
    assert gauge.read().peak_bytes == (50 + 1700 - 1000 - 120) * KIB
    process(resident=800, files=100, peak=900)
    assert gauge.read().peak_bytes == 50 * KIB


def test_a_meter_that_loses_its_counter_says_unknown_and_lets_the_training_go_on(monkeypatch):
    meter = PeakMeter(CPU)
    assert meter.read({"buffers": 1}) == meter_module.Measured(0, "unknown", {"buffers": 1})
    meter.start(already_held_bytes=0)
    for name in ("read", "restart"):
        monkeypatch.setattr(type(meter._gauge), name, lambda self: 1 / 0)
    assert meter.read({}).source == "unknown"
    meter.restart()
    meter.close()
    assert meter.read({}).source == "unknown"


def test_a_closed_meter_can_start_anew():
    meter = PeakMeter(CPU)
    meter.start(already_held_bytes=7 * MIB)
    meter.close()
    meter.start(already_held_bytes=5 * GIB)
    assert meter.read({}).peak_bytes >= 5 * GIB
    meter.close()
    assert "memguard-peak-meter" not in [thread.name for thread in threading.enumerate()]


# The meter on other devices


def test_on_cuda_the_peak_is_what_was_reserved_and_the_context_beside_it(gpu):
    meter = PeakMeter(CUDA)
    gpu.open_context(CUDA)
    meter.start(already_held_bytes=0)
    gpu.reserve(GIB)
    gpu.peak_allocated = 900 * MIB
    measured = meter.read({"gradients": 3})
    assert (measured.peak_bytes, measured.source) == (GIB + 300 * MIB, "torch.cuda + nvml")
    assert (measured.peak_reserved_bytes, measured.peak_allocated_bytes) == (GIB, 900 * MIB)
    assert measured.parts == {"gradients": 3}


def test_on_cuda_libraries_that_load_later_are_seen_at_the_next_reading(gpu):
    meter = PeakMeter(CUDA)
    gpu.open_context(CUDA)
    meter.start(already_held_bytes=0)
    gpu.take(50 * MIB)
    assert meter.read({}).peak_bytes == 350 * MIB


def test_on_cuda_every_epoch_is_measured_for_itself(gpu):
    meter = PeakMeter(CUDA)
    gpu.open_context(CUDA)
    meter.start(already_held_bytes=0)
    gpu.peak_reserved = 2 * GIB
    assert meter.read({}).peak_reserved_bytes == 2 * GIB
    meter.restart()
    assert meter.read({}).peak_reserved_bytes == 0


def test_on_cuda_a_context_that_cannot_be_told_from_others_is_left_out_and_the_source_says_so(gpu):
    gpu.open_context(CUDA)
    gpu.take(4 * GIB)
    meter = PeakMeter(CUDA)
    meter.start(already_held_bytes=0)
    gpu.reserve(GIB)
    measured = meter.read({})
    assert (measured.peak_bytes, measured.source) == (GIB, "torch.cuda, context not seen")


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


# The allocator's own snapshot


@pytest.fixture
def told(monkeypatch) -> list[tuple]:
    """What torch is asked to do about its allocator's history."""
    asked: list[tuple] = []
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled, **_: asked.append(("record", enabled))
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: asked.append(("write", path)))
    return asked


def test_an_actual_snapshot_records_until_it_is_saved(told, tmp_path):
    recording = ActualSnapshot(torch.device("cuda"))
    assert told == [("record", "all")]
    recording.save(tmp_path / "step.pickle")
    assert told[1:] == [("write", str(tmp_path / "step.pickle")), ("record", None)]


def test_a_history_that_the_user_records_goes_on(told, monkeypatch, tmp_path):
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: True, raising=False)
    ActualSnapshot(torch.device("cuda")).save(tmp_path / "step.pickle")
    assert told == [("write", str(tmp_path / "step.pickle"))]


def test_canary_what_is_asked_of_the_allocators_history():
    """Private in torch 2.11 to 2.15."""
    given = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert next(iter(given)) == "enabled"
    assert {"stacks", "device"} <= set(given)
    assert next(iter(inspect.signature(torch.cuda.memory._dump_snapshot).parameters)) == "filename"
    assert hasattr(torch._C, "_cuda_isHistoryEnabled") or not torch.backends.cuda.is_built()


# A real GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu_is_found_and_its_reserved_memory_measured():
    answer = in_a_process_of_its_own("""
        import json, torch
        from lightning_memguard.core.device.budget import read_budget
        from lightning_memguard.core.device.context import context_bytes
        from lightning_memguard.core.device.meter import PeakMeter
        gpu = torch.device("cuda", 0)
        before = read_budget(gpu, margin=0)
        meter = PeakMeter(gpu)
        context = context_bytes(gpu)
        after = read_budget(gpu, margin=0)
        meter.start(already_held_bytes=0)
        tensor = torch.ones(1 << 30, dtype=torch.uint8, device=gpu)
        measured = meter.read({})
        later = read_budget(gpu, margin=0, already_held_bytes=1 << 30)
        figures = [before.free_bytes, after.free_bytes, later.free_bytes, context, measured.peak_bytes]
        print(json.dumps([[before.source, measured.source], figures]))
    """)
    (source, measured_by), (before, after, later, context, peak) = answer
    assert (source, measured_by) == ("nvml", "torch.cuda + nvml")
    assert 50 * MIB < context < 2 * GIB
    assert peak == pytest.approx(GIB + context, abs=256 * MIB)
    # the same to within what libraries took meanwhile, whether the context is up and the model there or not
    assert after == pytest.approx(before, abs=256 * MIB)
    assert later == pytest.approx(before, abs=256 * MIB)
