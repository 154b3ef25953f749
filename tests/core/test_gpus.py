"""GPUs by the names people give them, and what each is taken to have."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memguard.core import gpus
from lightning_memguard.core.gpus import Gpu, catalogue, find
from lightning_memguard.core.trace.scratch import CudaTarget
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, MIB, parse_bytes

CATALOGUE = catalogue()


def normal(name: str) -> str:
    """The rest of a name if neither case nor punctuation nor the maker's brands count."""
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


# The catalogue


@pytest.mark.parametrize("page", ["README.md", "docs/planning.md", "CHANGELOG.md"])
def test_pages_say_how_many_there_are(page: str) -> None:
    assert f"{len(CATALOGUE)} GPUs" in (Path(__file__).parents[2] / page).read_text(encoding="utf-8")


def test_no_two_entries_share_a_name():
    names = [normal(label) for gpu in CATALOGUE for label in (gpu.name, *gpu.aliases)]
    assert sorted(names) == sorted(set(names))


def test_an_entry_is_found_by_its_own_name_and_its_aliases():
    for gpu in CATALOGUE:
        for asked in (gpu.name, f"  {gpu.name.upper()} ", *gpu.aliases):
            assert find(asked) is gpu, asked


def test_the_brand_may_be_left_out():
    for gpu in CATALOGUE:
        found = find(re.sub(r"nvidia|geforce|tesla", "", gpu.name.lower()).replace("-", "_"))
        assert found is gpu, gpu.name


def test_memory_is_within_what_is_sold():
    for gpu in CATALOGUE:
        assert type(gpu.memory_bytes) is int, gpu.name
        assert 2 * GIB <= gpu.memory_bytes <= 400 * GIB, gpu.name


CPU_MEMORY = {"NVIDIA GH200 480GB", "NVIDIA GH200 120GB"}
SIZED = [
    (gpu, int(size[1]))
    for gpu in CATALOGUE
    if gpu.name not in CPU_MEMORY and (size := re.search(r"\b(\d+)GB?\b", gpu.name))
]


def test_memory_is_a_little_less_than_the_size_in_the_name():
    for gpu, gigabytes in SIZED:
        assert 0.85 * gigabytes * GIB <= gpu.memory_bytes <= gigabytes * GIB, gpu.name


def test_sizes_in_names_are_looked_at():
    assert ("Tesla V100-SXM2-32GB", 32) in {(gpu.name, gigabytes) for gpu, gigabytes in SIZED}
    assert len(SIZED) > 20


MULTIPROCESSORS = {  # the most that a GPU of each architecture has
    (6, 0): 60, (6, 1): 30, (7, 0): 84, (7, 5): 72, (8, 0): 128, (8, 6): 84, (8, 9): 144, (9, 0): 144,
    (10, 0): 160, (10, 3): 160, (12, 0): 192,
}  # fmt: skip


def test_the_gpu_is_one_that_was_built():
    for gpu in CATALOGUE:
        assert 0 < gpu.multiprocessors <= MULTIPROCESSORS[gpu.compute_capability], gpu.name


def test_what_scratch_depends_on_comes_with_it():
    assert find("H200").kernel_target == CudaTarget((9, 0), 132)


@pytest.mark.parametrize(
    ("name", "memory_bytes"),
    [
        ("NVIDIA GeForce RTX 3060", 12_622_168_064),
        ("NVIDIA GeForce RTX 4060", 8_318_222_336),
        ("NVIDIA H200", 143156 * MIB),
        ("NVIDIA H100 80GB HBM3", 81082 * MIB),
        ("NVIDIA A100-SXM4-80GB", int(79.14 * GIB)),
        ("NVIDIA L40S", int(44.42 * GIB)),
        ("NVIDIA GeForce RTX 3090", 24259 * MIB),
        ("NVIDIA GeForce RTX 4090", int(23.52 * GIB)),
        ("Tesla T4", int(14.56 * GIB)),
    ],
)
def test_totals_are_those_that_cuda_reported(name, memory_bytes):
    assert find(name).memory_bytes == memory_bytes


def test_every_total_is_cudas_with_a_source_and_below_that_of_nvidia_smi():
    text = (Path(gpus.__file__).parent / "gpus.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#")))
    names = {row["name"] for row in rows}
    for row in rows:
        assert 0.95 < parse_bytes(row["memory"]) / parse_bytes(row["nvidia_smi"]) < 1, row["name"]
        source = row["source"]
        assert source in ("properties", "xMem") or "#" in source or source.removeprefix("like ") in names, row["name"]


# Speed

CORES = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}  # for float32, of a multiprocessor; else 128
TERA = 1e12


@pytest.mark.parametrize(
    ("name", "gigabytes", "link", "single", "half"),
    [
        ("A100 80GB", 2039, 300, 19.5, 312),
        ("H100 SXM", 3352, 450, 66.9, 989.4),
        ("B200", 7700, 900, 75, 2250),
        ("V100", 900, 150, 15.7, 125),
        ("T4", 320, 16, 8.1, 65),
        ("L40S", 864, 32, 91.6, 362),
        ("RTX 3090", 936.2, 56.25, 35.58, 71.16),  # GeForce: half of the rate with sums in float16
        ("RTX 4090", 1008, 32, 82.58, 165.2),
        ("RTX 4060", 272, 16, 15.11, 30.23),  # eight lanes
        ("RTX PRO 6000", 1792, 64, 126, 503.8),
        ("GTX 1080 Ti", 484.4, 16, 11.34, 11.34),  # no tensor cores
    ],
)
def test_speeds_are_those_that_nvidia_publishes(name, gigabytes, link, single, half):
    gpu = find(name)
    assert (gpu.bandwidth, gpu.link) == (gigabytes * 1e9, link * 1e9)
    assert gpu.peak_flops("float32") == pytest.approx(single * TERA)
    assert gpu.peak_flops("float16") == pytest.approx(half * TERA)


def test_every_gpu_has_its_speeds_and_they_agree_with_its_multiprocessors():
    for gpu in CATALOGUE:
        single, half, double = (gpu.peak_flops(name) for name in ("float32", "float16", "float64"))
        clock = single / gpu.multiprocessors / CORES.get(gpu.compute_capability, 128) / 2
        assert 1.0e9 < clock < 3.1e9, gpu.name
        assert 150e9 < gpu.bandwidth < 10e12, gpu.name
        assert double is None or double <= single, gpu.name
        assert gpu.compute_capability < (7, 0) or "GTX 16" in gpu.name or half >= 1.9 * single, gpu.name
        assert gpu.link is None or 16e9 <= gpu.link <= gpu.bandwidth, gpu.name
    assert {gpu.name.split()[1] for gpu in CATALOGUE if gpu.link is None} == {"GH200", "GV100"}


def test_tf32_and_bfloat16_follow_from_float16_from_ampere_on():
    peaks = {name: find("A100").peak_flops(name) for name in ("tf32", "bfloat16", "float64")}
    assert peaks == {"tf32": 156 * TERA, "bfloat16": 312 * TERA, "float64": 19.5 * TERA}
    volta = find("V100")
    assert (volta.peak_flops("tf32"), volta.peak_flops("bfloat16")) == (None, volta.peak_flops("float32"))


def test_what_is_not_known_of_a_speed_is_none():
    unknown = Gpu("mine", GIB, (9, 0), 132)
    assert (unknown.bandwidth, unknown.link) == (None, None)
    assert [unknown.peak_flops(name) for name in ("float32", "tf32", "bfloat16")] == [None] * 3
    assert find("H100").peak_flops("float8") is None


# Names as people write them


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", "NVIDIA H100 PCIe"),
        ("H100 SXM", "NVIDIA H100 80GB HBM3"),
        ("h100-nvl", "NVIDIA H100 NVL"),
        ("h200", "NVIDIA H200"),
        ("L40S", "NVIDIA L40S"),
        ("T4", "Tesla T4"),
        ("nvidia tesla t4", "Tesla T4"),
        ("A10", "NVIDIA A10"),
        ("a10g", "NVIDIA A10G"),
        ("b300", "NVIDIA B300 SXM6 AC"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("geforce_rtx_4090", "NVIDIA GeForce RTX 4090"),
        ("rtx 4090 laptop", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        ("rtx 4090d", "NVIDIA GeForce RTX 4090 D"),
        ("RTX 3060 Ti", "NVIDIA GeForce RTX 3060 Ti"),
        ("4070 ti super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("RTX A6000", "NVIDIA RTX A6000"),
        ("a6000", "NVIDIA RTX A6000"),
        ("6000 ada", "NVIDIA RTX 6000 Ada Generation"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("quadro rtx 6000", "Quadro RTX 6000"),
        ("rtx 8000", "Quadro RTX 8000"),
        ("rtx pro 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("RTX PRO 6000 Blackwell Server", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("GH200 480GB", "NVIDIA GH200 480GB"),
        # of several sizes, the smallest: a plan made for it fits the larger ones too
        ("a100", "NVIDIA A100-SXM4-40GB"),
        ("A100 SXM", "NVIDIA A100-SXM4-40GB"),
        ("A100 PCIe", "NVIDIA A100-PCIE-40GB"),
        ("v100", "Tesla V100-SXM2-16GB"),
        ("a800", "NVIDIA A800 40GB Active"),
        ("p100", "Tesla P100-PCIE-12GB"),
        ("gh200", "NVIDIA GH200 480GB"),
        # a card that carries the name, before one with a size in its name
        ("rtx 3060", "NVIDIA GeForce RTX 3060"),
        ("RTX-3060 8GB", "NVIDIA GeForce RTX 3060 8GB"),
        ("rtx 3080", "NVIDIA GeForce RTX 3080"),
        ("4060 ti", "NVIDIA GeForce RTX 4060 Ti"),
        # a size chooses
        ("A100-40GB", "NVIDIA A100-SXM4-40GB"),
        ("a100 80gb", "NVIDIA A100-SXM4-80GB"),
        ("a100 pcie 80 GB", "NVIDIA A100 80GB PCIe"),
        ("v100-32gb", "Tesla V100-SXM2-32GB"),
        ("rtx 3060 12gb", "NVIDIA GeForce RTX 3060"),
        ("4060 Ti 16GiB", "NVIDIA GeForce RTX 4060 Ti 16GB"),
        ("3080 laptop 16gb", "NVIDIA GeForce RTX 3080 Laptop GPU 16GB"),
        ("gh200 144g", "NVIDIA GH200 144G HBM3e"),
        ("L4-24GB", "NVIDIA L4"),
        ("b200 192gb", "NVIDIA B200"),
        ("H100 80GB PCIe", "NVIDIA H100 PCIe"),
        ("rtx 6000 48gb", "NVIDIA RTX 6000 Ada Generation"),
    ],
)
def test_a_short_name_is_understood(asked, name):
    assert find(asked).name == name


# Names that name none


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("RTX 4095", "NVIDIA GeForce RTX 4090 (23.5 GiB)"),
        ("H201", "NVIDIA H200 (139.8 GiB)"),
        ("a100 60gb", "NVIDIA A100-SXM4-40GB (39.5 GiB)"),
        ("rtx 4090 48gb", "NVIDIA GeForce RTX 4090 (23.5 GiB)"),
    ],
)
def test_an_unknown_name_lists_similar_ones(asked, near):
    with pytest.raises(MemGuardError, match=re.escape(near)) as error:
        find(asked)
    assert str(error.value).startswith(f"The catalogue has no GPU called {asked!r}. Similar names: ")
    assert "nvidia-smi" in str(error.value)


def test_few_similar_names_are_listed_and_each_once():
    with pytest.raises(MemGuardError) as error:
        find("RTX 4061")
    listed = re.findall(r"(?:Similar names: |, )([^(,]+) \(", str(error.value))
    assert 1 <= len(listed) <= 4
    assert len(set(listed)) == len(listed)


NO_SUCH = (
    "The catalogue has no GPU called 'banana'. No name in it is similar. "
    "Write it as nvidia-smi prints it, or plan for one with the same memory and architecture."
)
SEVERAL = (
    "'rtx 6000' may be Quadro RTX 6000 (23.3 GiB), NVIDIA RTX 6000 Ada Generation (47.5 GiB). "
    "Write the full name of one."
)


@pytest.mark.parametrize(("asked", "message"), [("banana", NO_SUCH), ("rtx 6000", SEVERAL)])
def test_the_whole_message_for_a_name_of_none_or_of_several_generations(asked, message):
    with pytest.raises(MemGuardError, match=f"^{re.escape(message)}$"):
        find(asked)


@pytest.mark.parametrize("asked", ["", "   ", "--", "NVIDIA", "NVIDIA GeForce"])
def test_nothing_asked_is_nothing_found(asked):
    with pytest.raises(MemGuardError, match=r"does not name a GPU; pass one such as 'H200'") as error:
        find(asked)
    assert repr(asked) in str(error.value)


@pytest.mark.parametrize("asked", [None, 4090, b"H200", ["H200"], Gpu("NVIDIA H200", GIB, (9, 0), 132)])
def test_only_a_string_is_a_name(asked):
    with pytest.raises(MemGuardError, match="is not a string; pass a GPU's name"):
        find(asked)


# Where it runs


def test_looking_a_gpu_up_needs_neither_torch_nor_lightning():
    code = (
        "import sys; from lightning_memguard.core.gpus import find; find('H200'); "
        "print(sorted({'torch', 'lightning', 'pytorch_lightning', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
