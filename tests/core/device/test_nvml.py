"""The NVML device that is torch's, and the memory that NVML reports for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from lightning_memguard.core.device.host import MemoryInfo
from lightning_memguard.core.device.nvml import GpuFacts, gpu_facts, nvml_memory
from lightning_memguard.units import GIB, MIB

REPOSITORY = Path(__file__).parents[3]


def properties(**known: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{"total_memory": 8 * GIB, "uuid": "aaaa", "is_integrated": 0} | known)


@pytest.mark.parametrize(
    ("visible", "nvml_index"),
    [(None, 1), ("3,2", 2), (" 3 , 2 ", 2), ("GPU-bbbb,GPU-aaaa", None), ("3", None), ("", None)],
)
def test_an_index_is_followed_through_cuda_visible_devices_as_far_as_it_goes(visible, nvml_index):
    assert gpu_facts(1, properties(), visible) == GpuFacts(8 * GIB, ("GPU-aaaa", "MIG-aaaa"), "", nvml_index)


def test_a_mig_slice_is_found_by_its_own_name_and_never_by_that_of_the_whole_gpu():
    facts = gpu_facts(0, properties(pci_domain_id=0, pci_bus_id=59, pci_device_id=0), "MIG-cccc")
    assert facts == GpuFacts(8 * GIB, ("MIG-cccc",))


def test_the_pci_bus_id_is_spelled_as_nvml_spells_it():
    facts = gpu_facts(0, properties(pci_domain_id=1, pci_bus_id=59, pci_device_id=2), None)
    assert facts.pci_bus_id == "00000001:3B:02.0"


def test_a_torch_that_knows_only_the_size_leaves_the_index():
    assert gpu_facts(2, types.SimpleNamespace(total_memory=8 * GIB), None) == GpuFacts(8 * GIB, nvml_index=2)


def test_rocm_is_asked_through_torch_and_never_through_nvml(monkeypatch):
    asked = []
    stand_in = types.SimpleNamespace(nvmlInit=lambda: asked.append("init"))
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (nvml_memory(GpuFacts(8 * GIB, ("GPU-aaaa",))), asked) == (None, [])


# NVML itself: the unmodified nvidia-ml-py over a small library of ours


class Nvml:
    """A process in which ``libnvidia-ml.so.1`` is ours; it answers from a file that a test can change at any time."""

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

    def ask(self, *lines: str, **facts: object) -> MemoryInfo | None:
        """Ask `nvml_memory` for a GPU with these facts on a machine with these devices and faults."""
        self.state.write_text("".join(f"{line}\n" for line in lines))
        print(json.dumps(asdict(GpuFacts(**facts))), file=self.process.stdin, flush=True)
        while not (answer := self.process.stdout.readline()).startswith(("{", "null")):
            assert answer, "the process ended"
        answer = json.loads(answer)
        return answer and MemoryInfo(**answer)

    def close(self) -> None:
        self.process.kill()  # the end of its input may be held open by a process that was forked meanwhile
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


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
ROOM_A = MemoryInfo(8 * GIB, FREE_A, "nvml", 2 * GIB)


def test_nvml_separates_the_drivers_own_share_from_what_processes_use(nvml):
    assert nvml.ask(A, total_bytes=8 * GIB, uuids=("GPU-aaaa",)) == ROOM_A


def test_an_old_driver_reports_the_same_free_but_not_whose_the_rest_is(old_nvml):
    assert old_nvml.ask(A, total_bytes=8 * GIB, uuids=("GPU-aaaa",)) == MemoryInfo(8 * GIB, FREE_A, "nvml", None)


@pytest.mark.parametrize("code", [2, 3, 13, 25])
def test_a_driver_that_refuses_the_second_version_is_asked_the_first(nvml, code):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-aaaa",)}
    assert nvml.ask(f"fail memory_v2 {code}", A, **facts) == MemoryInfo(8 * GIB, FREE_A, "nvml", None)


FAULTS = {
    "NotSupported": 3,
    "NoPermission": 4,
    "Unknown": 999,
    "FunctionNotFound": 13,
    "Uninitialized": 1,
    "GpuIsLost": 15,
}


@pytest.mark.parametrize("code", FAULTS.values(), ids=FAULTS)
def test_where_nvml_does_not_report_the_memory_the_answer_is_none(nvml, code):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-aaaa",), "pci_bus_id": "00000000:3B:00.0", "nvml_index": 0}
    assert nvml.ask(f"fail memory_v2 {code}", f"fail memory {code}", A, **facts) is None


@pytest.mark.parametrize(
    "code", [9, 12, 4, 999, 18], ids=["DriverNotLoaded", "LibraryNotFound", "NoPermission", "Unknown", "Mismatch"]
)
def test_where_nvml_does_not_start_the_answer_is_none_and_the_next_call_may_succeed(nvml, code):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-aaaa",)}
    assert nvml.ask(f"fail init {code}", A, **facts) is None
    assert nvml.ask(A, **facts) == ROOM_A


def test_a_shutdown_that_fails_does_not_lose_the_answer(nvml):
    assert nvml.ask("fail shutdown 999", A, total_bytes=8 * GIB, uuids=("GPU-aaaa",)) == ROOM_A


def test_a_library_that_cannot_be_loaded_gives_none(tmp_path):
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    process = Nvml(tmp_path)
    assert process.ask(A, total_bytes=8 * GIB, uuids=("GPU-aaaa",)) is None
    process.close()


def test_without_nvidia_ml_py_the_answer_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_memory(GpuFacts(8 * GIB, ("GPU-aaaa",))) is None


def test_a_gpu_is_found_by_its_name_in_any_order_nvml_lists_them(nvml):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-bbbb",), "nvml_index": 0}
    assert nvml.ask(A, B, SMALL, **facts).free_bytes == FREE_B
    assert nvml.ask(SMALL, B, A, **facts).free_bytes == FREE_B


def test_without_a_name_that_nvml_knows_the_pci_bus_id_decides(nvml):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-unknown",), "pci_bus_id": "00000000:AF:00.0", "nvml_index": 0}
    assert nvml.ask(A, B, **facts).free_bytes == FREE_B
    assert nvml.ask("fail by_uuid 13", A, B, **facts).free_bytes == FREE_B


def test_an_index_is_the_last_resort_and_used_only_where_the_size_agrees(nvml):
    assert nvml.ask(SMALL, A, total_bytes=8 * GIB, nvml_index=1) == ROOM_A
    assert nvml.ask(SMALL, A, total_bytes=8 * GIB, nvml_index=0) is None
    assert nvml.ask(SMALL, A, total_bytes=8 * GIB, nvml_index=7) is None


def test_the_total_is_the_smaller_one_of_nvml_and_cuda(nvml):
    total = 8 * GIB - 100 * MIB
    assert nvml.ask(A, total_bytes=total, uuids=("GPU-aaaa",)) == MemoryInfo(total, FREE_A, "nvml", 2 * GIB)


def test_a_mig_slice_is_asked_by_its_own_name(nvml):
    whole = gpu_line("GPU-aaaa", "00000000:3B:00.0", 40 * GIB, 0, 2 * GIB)
    slice_ = gpu_line("MIG-dddd", "none", 5 * GIB, 0, GIB)
    assert nvml.ask(whole, slice_, total_bytes=4 * GIB, uuids=("MIG-dddd",)) == MemoryInfo(
        4 * GIB, 4 * GIB, "nvml", GIB
    )


def test_a_mig_slice_that_nvml_hides_is_not_mistaken_for_the_whole_gpu(nvml):
    whole = gpu_line("GPU-aaaa", "00000000:3B:00.0", 40 * GIB, 0, 2 * GIB)
    facts = {"uuids": ("GPU-aaaa", "MIG-aaaa"), "pci_bus_id": "00000000:3B:00.0", "nvml_index": 0}
    assert nvml.ask(whole, total_bytes=5 * GIB, **facts) is None


def test_each_call_reads_again(nvml):
    facts = {"total_bytes": 8 * GIB, "uuids": ("GPU-aaaa",)}
    for used in (2 * GIB, 3 * GIB, GIB):
        line = gpu_line("GPU-aaaa", "00000000:3B:00.0", 8 * GIB, 0, used)
        assert nvml.ask(line, **facts) == MemoryInfo(8 * GIB, 8 * GIB - used, "nvml", used)


@pytest.mark.parametrize(
    ("processes", "answer"),
    [
        (("process 4242 3000", "process 0 518"), 518),
        (("process 0 518", *(f"process {pid} 99" for pid in range(4000, 4020))), 518),
        (("process 4242 3000",), None),  # a container that sees others' numbers
        ((), None),  # a container that sees none
        (("process 0 -1", "process 4242 -1"), None),  # WSL and WDDM: not available
        (("fail processes 3", "process 0 518"), None),
        (("fail processes 13", "process 0 518"), None),  # an older driver
    ],
)
def test_what_the_process_itself_takes_is_known_where_nvml_names_it(nvml, processes, answer):
    memory = nvml.ask(B, A, *processes, total_bytes=8 * GIB, uuids=("GPU-aaaa",))
    assert memory == replace(ROOM_A, own_bytes=answer)
