"""Memory that a host, a control group and the limits of a process leave."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_memguard.core.device.host import MemoryInfo, cgroup_memory, rlimit_memory
from lightning_memguard.units import KIB

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
    assert cgroup_memory(root) == MemoryInfo(1000, 600, "cgroup")


@pytest.mark.parametrize(
    ("mounts", "own", "top", "group"),
    [(V2, "0::/a/b/c\n", "", v2), (V1, "4:memory:/a/b/c\n", "memory/", v1)],
    ids=["v2", "v1"],
)
@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
def test_the_tightest_group_on_the_way_up_binds(tmp_path, mounts, own, top, group, tightest):
    groups = {f"{top}{path}": group(1000 if path == tightest else 5000, 100) for path in ("a", "a/b", "a/b/c")}
    assert cgroup_memory(make_groups(tmp_path, mounts, own, groups)) == MemoryInfo(1000, 900, "cgroup")


def test_a_loose_group_that_is_nearly_full_binds_before_a_tight_one_that_is_empty(tmp_path):
    root = make_groups(tmp_path, V2, "0::/a/b\n", {"a": v2(5000, 4900), "a/b": v2(1000, 0)})
    assert cgroup_memory(root) == MemoryInfo(5000, 100, "cgroup")


def test_a_container_with_a_namespace_of_its_own_sees_its_group_as_the_top(tmp_path):
    root = make_groups(tmp_path, V2, "0::/\n", {"": v2(1000, 100)})
    assert cgroup_memory(root) == MemoryInfo(1000, 900, "cgroup")


def test_a_container_without_one_finds_its_group_where_it_is_mounted(tmp_path):
    mounts = "35 31 0:32 /docker/f00 /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
    root = make_groups(tmp_path, mounts, "4:memory:/docker/f00\n", {"memory": v1(1000, 100)})
    assert cgroup_memory(root) == MemoryInfo(1000, 900, "cgroup")


def test_a_group_outside_what_is_mounted_leaves_the_mounted_one(tmp_path):
    root = make_groups(tmp_path, V2, "0::/../elsewhere\n", {"": v2(1000, 100)})
    make_files(tmp_path / "sys/fs/elsewhere", **v2(10, 0))
    assert cgroup_memory(root) == MemoryInfo(1000, 900, "cgroup")


def test_of_both_versions_side_by_side_the_one_with_the_memory_counts(tmp_path):
    unified = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
    own = "9:name=systemd:/\n4:cpu,memory:/job\n0::/job\n"
    root = make_groups(tmp_path, V1 + unified, own, {"memory/job": v1(1000, 100), "unified/job": {"cgroup.procs": 1}})
    assert cgroup_memory(root) == MemoryInfo(1000, 900, "cgroup")


def test_a_group_is_slowed_to_a_crawl_above_memory_high_so_that_is_its_limit(tmp_path):
    root = make_groups(tmp_path, V2, "0::/job\n", {"job": v2("max", 100) | {"memory.high": 800}})
    assert cgroup_memory(root) == MemoryInfo(800, 700, "cgroup")


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(tmp_path):
    assert cgroup_memory(make_groups(tmp_path, V2, "0::/job\n", {"job": v2(100, 150)})) == MemoryInfo(100, 0, "cgroup")


@pytest.mark.parametrize(
    ("mounts", "own", "groups"),
    [
        (V2, "0::/job\n", {"job": v2("max", 100)}),
        (V1, "4:memory:/job\n", {"memory/job": v1(9223372036854771712, 100)}),
        (V2, "0::/job\n", {}),
        (CPU_V1, "5:cpu:/job\n", {"cpu/job": v1(1000, 100)}),
    ],
    ids=["v2 with max", "v1 with a huge number", "no files", "no memory controller"],
)
def test_without_a_limit_control_groups_give_none(tmp_path, mounts, own, groups):
    assert cgroup_memory(make_groups(tmp_path, mounts, own, groups)) is None


# The process's own limits


@pytest.mark.parametrize(
    ("limits", "memory"),
    [
        ({"RLIMIT_AS": 1000 * KIB}, MemoryInfo(1000 * KIB, 400 * KIB, "rlimit")),
        ({"RLIMIT_DATA": 500 * KIB}, MemoryInfo(500 * KIB, 300 * KIB, "rlimit")),
        ({"RLIMIT_AS": 1000 * KIB, "RLIMIT_DATA": 500 * KIB}, MemoryInfo(500 * KIB, 300 * KIB, "rlimit")),
        ({"RLIMIT_AS": 100 * KIB}, MemoryInfo(100 * KIB, 0, "rlimit")),
        ({}, None),
    ],
)
def test_a_limit_leaves_what_the_process_does_not_take_yet(tmp_path, monkeypatch, limits, memory):
    resource = pytest.importorskip("resource", reason="Windows has no resource limits")
    soft = {getattr(resource, name): nbytes for name, nbytes in limits.items()}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft.get(kind, resource.RLIM_INFINITY), 0))
    make_files(tmp_path, status="Name:\tpython\nVmSize:\t     600 kB\nVmData:\t     200 kB\nThreads:\t4\n")
    assert rlimit_memory(tmp_path) == memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")
def test_a_real_address_space_limit_binds_and_what_it_leaves_is_what_can_really_be_taken(run_program):
    answer = run_program("""
        import json, resource, torch
        from pathlib import Path
        from lightning_memguard.core.device.budget import read_budget
        from lightning_memguard.core.device.host import status_bytes
        limit = status_bytes(Path("/proc/self"))["VmSize"] + (512 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        budget = read_budget(torch.device("cpu"))
        torch.empty(budget.free_bytes - (100 << 20), dtype=torch.uint8)
        try:
            torch.empty(budget.free_bytes + (100 << 20), dtype=torch.uint8)
        except RuntimeError as error:
            refused = "allocate memory" in str(error)
        print(json.dumps([budget.source, budget.total_bytes == limit, refused]))
    """)
    assert answer == ["rlimit", True, True]
