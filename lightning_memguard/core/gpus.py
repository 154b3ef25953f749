"""The catalogue of GPUs to plan for: what a GPU that is not present would report.

Changes when NVIDIA sells a new one, or when a figure in ``gpus.csv`` proves wrong.
"""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files

from lightning_memguard.core.range import Range
from lightning_memguard.core.trace.scratch import CudaTarget
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, MIB, format_bytes, parse_bytes

# CUDA's context and the libraries that load later are outside the allocator. At the end of a training they take the
# multiprocessors times these MiB, by compute capability: at least, most likely, at most. The figures in MiB: Tesla T4
# 140.9 (59 runs of fitcheck, equal with CUDA 12.8 and 13.0); H100 641 without cuBLAS, 751 to 771 with it (17 trainings
# of benchmarks/recordings/h100.json.gz, torch 2.11 for CUDA 13.0). And what PyTorch's messages of too little memory
# leave to the process (its own less allocated less cached), for one process without NCCL, CUDA 11.8 to 13: T4 100 to
# 151, RTX 2080 Ti 197; A100 409 to 512; A10 224, RTX 3080 257; L4 235, RTX 6000 Ada 429, RTX 4090 473 to 504, L40 507;
# H100 749; RTX 5090 595 to 619. By multiprocessor: 2.5 to 3.8, 3.8 to 4.7, 3.1 to 3.8, 3.0 to 4.1, 5.7, 3.5 to 3.6.
# Programs that ran on both took 300 to 360 more on an H100 than on an L40S.
_PER_MULTIPROCESSOR = {
    (7, 5): (2.4, 3.5, 4.0),
    (8, 0): (3.7, 4.3, 4.9),
    (8, 6): (3.0, 3.4, 4.1),
    (8, 9): (2.9, 3.6, 4.2),
    (9, 0): (3.8, 5.7, 6.6),
    (12, 0): (3.3, 3.6, 4.0),
}
_OF_OTHERS = (2.4, 3.7, 6.6)
_SMALL_BYTES = 107_000_000  # the least measured on a small card


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver and PyTorch report it.

    Attributes:
        name: as NVML and PyTorch report it. If two sizes have one name, the rarer or larger has its size added.
        memory_bytes: CUDA's total, with ECC as shipped, of which its context and libraries take a part. NVML and
            nvidia-smi report 0.4 to 4 % more, which the driver keeps.
        compute_capability: such as ``(9, 0)``.
        multiprocessors: ``multiProcessorCount`` of the device's properties.
        aliases: other names of this GPU.
        bandwidth: of its memory, in bytes a second.
        link: to another GPU of the same server, in bytes a second in one direction.
        tflops: peak of products in float32 without TF32, in float16 and in float64, in 10^12 FLOPs a second.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    aliases: tuple[str, ...] = ()
    bandwidth: float | None = None
    link: float | None = None
    tflops: tuple[float | None, float | None, float | None] = (None, None, None)

    def peak_flops(self, dtype_name: str) -> float | None:
        """Peak of matrix products in FLOPs a second: dense, summed in float32 or wider, at the nominal boost clock.

        Args:
            dtype_name: ``"float32"``, ``"tf32"``, ``"float16"``, ``"bfloat16"`` or ``"float64"``.

        Returns:
            The peak; None if it is not known or the GPU has no such products. Before Ampere, bfloat16 is computed in
            float32; from Ampere on it is as fast as float16, and TF32 half as fast, as in NVIDIA's data sheets.
        """
        single, half, double = self.tflops
        ampere = self.compute_capability >= (8, 0)
        tflops = {
            "float32": single,
            "tf32": half / 2 if ampere and half else None,
            "float16": half,
            "bfloat16": half if ampere else single,
            "float64": double,
        }.get(dtype_name)
        return tflops and tflops * 1e12

    @property
    def context_bytes(self) -> Range[int]:
        """Bytes of CUDA's context and libraries at the end of a training."""
        each = _PER_MULTIPROCESSOR.get(self.compute_capability, _OF_OTHERS)
        least, likely, most = (int(mib * self.multiprocessors * MIB) for mib in each)
        return Range(least, max(likely, _SMALL_BYTES), max(most, 2 * _SMALL_BYTES))

    @property
    def capacity_bytes(self) -> int:
        """Bytes that one process may reserve there."""
        return self.memory_bytes - self.context_bytes.likely

    @property
    def kernel_target(self) -> CudaTarget:
        """Properties of this GPU that a kernel's scratch memory depends on."""
        return CudaTarget(self.compute_capability, self.multiprocessors)


@functools.cache
def catalogue() -> tuple[Gpu, ...]:
    """Every GPU that `find` knows, from ``gpus.csv``, which also says where each figure comes from."""
    text = files("lightning_memguard.core").joinpath("gpus.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if line and not line.startswith("#"))
    return tuple(map(_gpu, rows))


def _gpu(row: dict[str, str]) -> Gpu:
    major, minor = row["compute_capability"].split(".")
    speeds = ("gb_s", "link_gb_s", "fp32_tflops", "fp16_tflops", "fp64_tflops")
    bandwidth, link, single, half, double = (float(row[column]) if row[column] else None for column in speeds)
    return Gpu(
        row["name"],
        parse_bytes(row["memory"]),
        (int(major), int(minor)),
        int(row["multiprocessors"]),
        tuple(filter(None, row["aliases"].split(";"))),
        bandwidth and bandwidth * 1e9,
        link and link * 1e9,
        (single, half, double),
    )


def find(name: str) -> Gpu:
    """Find a GPU of the catalogue.

    Case, spaces, hyphens and underscores do not matter; "NVIDIA", "GeForce", "Tesla", "Quadro", "RTX" and "GTX" may
    be left out, if the rest fits one architecture only. A size in GB chooses among the GPUs that fit a name:
    ``"A100 80GB"``. Without a size it is the one that has none in its name: ``"RTX 3060"`` has 12 GB; else the
    smallest, since a plan for it also fits the others: ``"A100"`` has 40 GB, ``"V100"`` 16.

    Args:
        name: such as ``"NVIDIA H200"``, ``"rtx 4090"`` or ``"v100-32gb"``.

    Returns:
        The entry; its ``name`` and ``memory_bytes`` show which size was chosen.

    Raises:
        MemGuardError: no GPU fits the name, or GPUs of several architectures do.

    Example:
        >>> find("rtx 4090 laptop").name
        'NVIDIA GeForce RTX 4090 Laptop GPU'
        >>> find("a100").name, find("a100 80gb").name
        ('NVIDIA A100-SXM4-40GB', 'NVIDIA A100-SXM4-80GB')
    """
    if not isinstance(name, str):
        raise MemGuardError(f"{name!r} is not a string; pass a GPU's name, such as 'H200', 'RTX 4090' or 'A100 80GB'.")
    if not _words(name):
        raise MemGuardError(f"{name!r} does not name a GPU; pass one such as 'H200', 'RTX 4090' or 'A100 80GB'.")
    reported = next((gpu for gpu in catalogue() if gpu.name.lower() == " ".join(name.lower().split())), None)
    if reported is not None:
        return reported
    fitting = _fitting(name)
    if not fitting:
        raise MemGuardError(_unknown(name))
    if len({gpu.compute_capability for gpu in fitting}) > 1:
        raise MemGuardError(f"{name!r} may be {_listed(fitting)}. Write the full name of one.")
    return min(fitting, key=lambda gpu: (_is_sized(gpu), round(gpu.memory_bytes / GIB)))


# -- names

_BRANDS = re.compile(r"nvidia|geforce|tesla|generation|edition|gpu")
_SIZE = re.compile(r"\b(\d+) ?(?:gib|gb|g)\b")
_SERIES = ("quadro", "rtx", "gtx")  # prefixes that are often left out
_BUILD = re.compile(r"pcie|sxm\d?|nvl|hbm3e?|active|ada|blackwell")  # suffixes that are often left out


def is_named(gpu: Gpu, name: str) -> bool:
    """Whether a device's own name, as torch reports it, is that of a GPU."""
    try:
        return find(name) == gpu
    except MemGuardError:  # the name is of several, or unknown
        return gpu.name == name


def _words(name: str) -> list[str]:
    """The words that distinguish GPUs: "NVIDIA A100-SXM4-40GB" is ["a100", "sxm4", "40gb"]."""
    spaced = re.sub(r"[^a-z0-9]+", " ", _BRANDS.sub(" ", name.lower()))
    return _SIZE.sub(r"\1gb", spaced).split()


def _short_forms(label: str) -> set[str]:
    """A name with and without each part that people leave out, each as one word."""
    words = _words(label)
    any_sxm = [re.sub(r"^sxm\d$", "sxm", word) for word in words]
    bare = [word for word in words if not _BUILD.fullmatch(word)]
    forms = set()
    for kept in (words, any_sxm, bare):
        for rest in (kept, _unsized(kept)):
            start = next(at for at, word in enumerate(rest) if word not in _SERIES)
            forms |= {"".join(rest[at:]) for at in range(start + 1)}
    return forms


def _unsized(words: list[str]) -> list[str]:
    return [word for word in words if not _SIZE.fullmatch(word)]


def _is_sized(gpu: Gpu) -> bool:
    """Whether all its names have a size in them."""
    return all(_words(label) != _unsized(_words(label)) for label in (gpu.name, *gpu.aliases))


@functools.cache
def _by_form() -> dict[str, list[Gpu]]:
    found: dict[str, list[Gpu]] = {}
    for gpu in catalogue():
        for form in {form for label in (gpu.name, *gpu.aliases) for form in _short_forms(label)}:
            found.setdefault(form, []).append(gpu)
    return found


def _fitting(name: str) -> list[Gpu]:
    """GPUs that fit a name; if there are none and it has a size, those of that size that fit the rest of it."""
    words = _words(name)
    unsized = _unsized(words)
    fitting = _by_form().get("".join(words), [])
    if fitting or len(unsized) != len(words) - 1:
        return fitting
    (size,) = set(words) - set(unsized)
    sold_bytes = int(size.removesuffix("gb")) * GIB  # ECC and the driver take up to 9 % of it
    return [g for g in _by_form().get("".join(unsized), []) if 0.9 * sold_bytes <= g.memory_bytes <= sold_bytes]


def _unknown(name: str) -> str:
    near = get_close_matches("".join(_words(name)), _by_form(), n=8, cutoff=0.6)
    gpus = list(dict.fromkeys(gpu for form in near for gpu in _by_form()[form]))[:4]
    found = f"Similar names: {_listed(gpus)}" if gpus else "No name in it is similar"
    return (
        f"The catalogue has no GPU called {name!r}. {found}. "
        f"Write it as nvidia-smi prints it, or plan for one with the same memory and architecture."
    )


def _listed(gpus: list[Gpu]) -> str:
    return ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus)
