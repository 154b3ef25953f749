"""The catalogue of GPUs to plan for: what a GPU that is not present would report.

Changes when NVIDIA sells a new one, or when a figure below proves wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from lightning_memguard.core.trace.scratch import CudaTarget
from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import GIB, MIB, format_bytes


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver and PyTorch report it.

    Attributes:
        name: as NVML and PyTorch report it. Where two sizes have one name, the rarer or larger has its size added.
        memory_bytes: the total that NVML reports, with ECC as shipped. From driver 510 on that includes the driver's
            own share: CUDA has 0.5 to 4.5 % less, before its context.
        compute_capability: such as ``(9, 0)``.
        multiprocessors: ``multiProcessorCount`` of the device's properties.
        aliases: other names of this GPU.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    aliases: tuple[str, ...] = ()

    @property
    def kernel_target(self) -> CudaTarget:
        """What a kernel's scratch memory depends on."""
        return CudaTarget(self.compute_capability, self.multiprocessors)


# "nvidia-smi logs" are totals that nvidia-smi printed in logs, issues and notes of public repositories; where drivers
# differ, those of the newer ones. "nominal" marks an entry found in none: the smallest likely total. "SMs" are
# multiprocessors: as PyTorch printed them, or the CUDA cores that NVIDIA publishes, divided by those of each.
CATALOGUE: tuple[Gpu, ...] = (
    # -- data center, Pascal and Volta (2016)
    # source: nvidia-smi logs; SMs: PyTorch's device properties in logs (P100, V100), published CUDA cores by 128 (P4,
    # P40).
    Gpu("Tesla P100-PCIE-12GB", 12288 * MIB, (6, 0), 56),
    Gpu("Tesla P100-PCIE-16GB", 16384 * MIB, (6, 0), 56),
    Gpu("Tesla P100-SXM2-16GB", 16384 * MIB, (6, 0), 56),
    Gpu("Tesla P40", 23040 * MIB, (6, 1), 30),  # ECC on, as shipped; 24576 with it off
    Gpu("Tesla P4", 7680 * MIB, (6, 1), 20),  # ECC on, as shipped; 8192 with it off
    Gpu("Tesla V100-SXM2-16GB", 16384 * MIB, (7, 0), 80),
    Gpu("Tesla V100-PCIE-16GB", 16384 * MIB, (7, 0), 80),
    Gpu("Tesla V100-SXM2-32GB", 32768 * MIB, (7, 0), 80),
    Gpu("Tesla V100-PCIE-32GB", 32768 * MIB, (7, 0), 80),
    Gpu("Tesla V100-SXM3-32GB", 32768 * MIB, (7, 0), 80),
    Gpu("Tesla V100S-PCIE-32GB", 32768 * MIB, (7, 0), 80),
    # -- data center, Turing and Ampere
    # source: nvidia-smi logs, ECC on; SMs: device properties in logs (A10G, A40, A100), published CUDA cores by 64
    # (T4, A30) or 128.
    Gpu("Tesla T4", 15360 * MIB, (7, 5), 40),
    Gpu("NVIDIA T4G", 15360 * MIB, (7, 5), 40),
    Gpu("NVIDIA A2", 15356 * MIB, (8, 6), 10),
    Gpu("NVIDIA A10", 23028 * MIB, (8, 6), 72),
    Gpu("NVIDIA A10G", 23028 * MIB, (8, 6), 80),
    Gpu("NVIDIA A16", 15356 * MIB, (8, 6), 10),  # one of the four on a board
    Gpu("NVIDIA A30", 24576 * MIB, (8, 0), 56),
    Gpu("NVIDIA A40", 46068 * MIB, (8, 6), 84),  # ECC on, as shipped; 49140 with it off
    Gpu("NVIDIA A100-SXM4-40GB", 40960 * MIB, (8, 0), 108),
    Gpu("NVIDIA A100-PCIE-40GB", 40960 * MIB, (8, 0), 108),
    Gpu("NVIDIA A100-SXM4-80GB", 81920 * MIB, (8, 0), 108),
    Gpu("NVIDIA A100 80GB PCIe", 81920 * MIB, (8, 0), 108),
    # nominal: no nvidia-smi output found; what older drivers report for the A100 40GB
    Gpu("NVIDIA A800 40GB Active", 40536 * MIB, (8, 0), 108),
    Gpu("NVIDIA A800-SXM4-80GB", 81920 * MIB, (8, 0), 108),
    Gpu("NVIDIA A800 80GB PCIe", 81920 * MIB, (8, 0), 108),
    # -- data center, Ada and Hopper
    # source: nvidia-smi logs, ECC on; SMs: device properties in logs (L40S, H20, H100, GH200), published CUDA cores
    # by 128 (L4, L20, L40).
    Gpu("NVIDIA L4", 23034 * MIB, (8, 9), 58),
    Gpu("NVIDIA L20", 46068 * MIB, (8, 9), 92),
    Gpu("NVIDIA L40", 46068 * MIB, (8, 9), 142),
    Gpu("NVIDIA L40S", 46068 * MIB, (8, 9), 142),
    Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB, (9, 0), 132, ("H100 SXM5",)),
    Gpu("NVIDIA H100 PCIe", 81559 * MIB, (9, 0), 114),
    Gpu("NVIDIA H100 NVL", 95830 * MIB, (9, 0), 132),
    Gpu("NVIDIA H800", 81559 * MIB, (9, 0), 132, ("H800 SXM5",)),
    Gpu("NVIDIA H800 PCIe", 81559 * MIB, (9, 0), 114),
    Gpu("NVIDIA H20", 97871 * MIB, (9, 0), 78),
    Gpu("NVIDIA H20-3e", 143771 * MIB, (9, 0), 78),
    Gpu("NVIDIA H200", 143771 * MIB, (9, 0), 132, ("H200 SXM5",)),
    Gpu("NVIDIA H200 NVL", 143771 * MIB, (9, 0), 132),
    Gpu("NVIDIA GH200 480GB", 97871 * MIB, (9, 0), 132),  # 480 and 120 are the CPU's memory
    Gpu("NVIDIA GH200 120GB", 97871 * MIB, (9, 0), 132),
    Gpu("NVIDIA GH200 144G HBM3e", 146831 * MIB, (9, 0), 132),
    # -- data center, Blackwell
    # source: nvidia-smi logs, ECC on; SMs: device properties in logs (B200, GB200), write-ups of public benchmarks
    # (B300, GB300).
    Gpu("NVIDIA B200", 183359 * MIB, (10, 0), 148, ("B200 SXM6",)),
    Gpu("NVIDIA GB200", 189471 * MIB, (10, 0), 152),
    Gpu("NVIDIA B300 SXM6 AC", 275040 * MIB, (10, 3), 148, ("B300 SXM6",)),
    Gpu("NVIDIA GB300", 284208 * MIB, (10, 3), 152),
    # -- workstation, Volta and Turing
    # source: nvidia-smi logs, ECC off; SMs: published CUDA cores by 64, device properties in logs (RTX 8000).
    Gpu("Quadro GV100", 32768 * MIB, (7, 0), 80),
    Gpu("Quadro RTX 4000", 8192 * MIB, (7, 5), 36),
    Gpu("Quadro RTX 5000", 16384 * MIB, (7, 5), 48),
    Gpu("Quadro RTX 6000", 24576 * MIB, (7, 5), 72),
    Gpu("Quadro RTX 8000", 49152 * MIB, (7, 5), 72),
    # -- workstation, Ampere and Ada
    # source: nvidia-smi logs, ECC off unless said; SMs: published CUDA cores by 128, device properties in logs
    # (A6000).
    Gpu("NVIDIA RTX A2000", 6138 * MIB, (8, 6), 26),
    Gpu("NVIDIA RTX A2000 12GB", 12282 * MIB, (8, 6), 26),
    Gpu("NVIDIA RTX A4000", 16376 * MIB, (8, 6), 48),
    Gpu("NVIDIA RTX A4500", 20470 * MIB, (8, 6), 56),
    Gpu("NVIDIA RTX A5000", 24564 * MIB, (8, 6), 64),
    Gpu("NVIDIA RTX A5500", 24564 * MIB, (8, 6), 80),
    Gpu("NVIDIA RTX A6000", 49140 * MIB, (8, 6), 84),
    Gpu("NVIDIA RTX 2000 Ada Generation", 16380 * MIB, (8, 9), 22),
    Gpu("NVIDIA RTX 4000 SFF Ada Generation", 20475 * MIB, (8, 9), 48),
    Gpu("NVIDIA RTX 4000 Ada Generation", 20475 * MIB, (8, 9), 48),
    Gpu("NVIDIA RTX 4500 Ada Generation", 24570 * MIB, (8, 9), 60),
    Gpu("NVIDIA RTX 5000 Ada Generation", 32760 * MIB, (8, 9), 100),
    Gpu("NVIDIA RTX 5880 Ada Generation", 46068 * MIB, (8, 9), 110),  # with ECC on; 49140 with it off
    Gpu("NVIDIA RTX 6000 Ada Generation", 49140 * MIB, (8, 9), 142),
    # -- workstation, Blackwell
    # source: nvidia-smi logs; SMs: published CUDA cores by 128, device properties in logs (PRO 5000, PRO 6000).
    Gpu("NVIDIA RTX PRO 4000 Blackwell", 24467 * MIB, (12, 0), 70),
    Gpu("NVIDIA RTX PRO 4500 Blackwell", 32623 * MIB, (12, 0), 82),
    Gpu("NVIDIA RTX PRO 5000 Blackwell", 48935 * MIB, (12, 0), 110),
    Gpu("NVIDIA RTX PRO 5000 72GB Blackwell", 73415 * MIB, (12, 0), 110),
    Gpu("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887 * MIB, (12, 0), 188, ("RTX PRO 6000 Blackwell",)),
    Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        97887 * MIB,
        (12, 0),
        188,
        ("RTX PRO 6000 Blackwell Max-Q",),
    ),
    Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887 * MIB, (12, 0), 188),
    # -- GeForce and TITAN, Pascal and Volta
    # source: nvidia-smi logs; SMs: published CUDA cores by 128, for TITAN V by 64.
    Gpu("NVIDIA GeForce GTX 1060 6GB", 6144 * MIB, (6, 1), 10),
    Gpu("NVIDIA GeForce GTX 1070", 8192 * MIB, (6, 1), 15),
    Gpu("NVIDIA GeForce GTX 1070 Ti", 8192 * MIB, (6, 1), 19),
    Gpu("NVIDIA GeForce GTX 1080", 8192 * MIB, (6, 1), 20),
    Gpu("NVIDIA GeForce GTX 1080 Ti", 11264 * MIB, (6, 1), 28),
    Gpu("NVIDIA TITAN X (Pascal)", 12288 * MIB, (6, 1), 28),
    Gpu("NVIDIA TITAN Xp", 12288 * MIB, (6, 1), 30),
    Gpu("NVIDIA TITAN V", 12288 * MIB, (7, 0), 80),
    # -- GeForce and TITAN, Turing
    # source: nvidia-smi logs; SMs: published CUDA cores by 64.
    Gpu("NVIDIA GeForce GTX 1660", 6144 * MIB, (7, 5), 22),
    Gpu("NVIDIA GeForce GTX 1660 SUPER", 6144 * MIB, (7, 5), 22),
    Gpu("NVIDIA GeForce GTX 1660 Ti", 6144 * MIB, (7, 5), 24),
    Gpu("NVIDIA GeForce RTX 2060", 6144 * MIB, (7, 5), 30),
    Gpu("NVIDIA GeForce RTX 2060 12GB", 12288 * MIB, (7, 5), 34),
    Gpu("NVIDIA GeForce RTX 2060 SUPER", 8192 * MIB, (7, 5), 34),
    Gpu("NVIDIA GeForce RTX 2070", 8192 * MIB, (7, 5), 36),
    Gpu("NVIDIA GeForce RTX 2070 SUPER", 8192 * MIB, (7, 5), 40),
    Gpu("NVIDIA GeForce RTX 2080", 8192 * MIB, (7, 5), 46),
    Gpu("NVIDIA GeForce RTX 2080 SUPER", 8192 * MIB, (7, 5), 48),
    Gpu("NVIDIA GeForce RTX 2080 Ti", 11264 * MIB, (7, 5), 68),
    Gpu("NVIDIA TITAN RTX", 24576 * MIB, (7, 5), 72),
    # -- GeForce, Ampere
    # source: nvidia-smi logs (laptops: names are cut short there; identified by power limits); SMs: published CUDA
    # cores by 128, device properties in logs (3090).
    Gpu("NVIDIA GeForce RTX 3050", 6144 * MIB, (8, 6), 18),
    Gpu("NVIDIA GeForce RTX 3050 8GB", 8192 * MIB, (8, 6), 20),
    # the total in the measurements published with xMem (Middleware 2025), CUDA's by its size: nvidia-smi reports 12288
    Gpu("NVIDIA GeForce RTX 3060", 12_622_168_064, (8, 6), 28),
    Gpu("NVIDIA GeForce RTX 3060 8GB", 8192 * MIB, (8, 6), 28),
    Gpu("NVIDIA GeForce RTX 3060 Ti", 8192 * MIB, (8, 6), 38),
    Gpu("NVIDIA GeForce RTX 3070", 8192 * MIB, (8, 6), 46),
    Gpu("NVIDIA GeForce RTX 3070 Ti", 8192 * MIB, (8, 6), 48),
    Gpu("NVIDIA GeForce RTX 3080", 10240 * MIB, (8, 6), 68),
    Gpu("NVIDIA GeForce RTX 3080 12GB", 12288 * MIB, (8, 6), 70),
    Gpu("NVIDIA GeForce RTX 3080 Ti", 12288 * MIB, (8, 6), 80),
    Gpu("NVIDIA GeForce RTX 3090", 24576 * MIB, (8, 6), 82),
    Gpu("NVIDIA GeForce RTX 3090 Ti", 24564 * MIB, (8, 6), 84),
    Gpu("NVIDIA GeForce RTX 3060 Laptop GPU", 6144 * MIB, (8, 6), 30),
    Gpu("NVIDIA GeForce RTX 3070 Laptop GPU", 8192 * MIB, (8, 6), 40),
    Gpu("NVIDIA GeForce RTX 3070 Ti Laptop GPU", 8192 * MIB, (8, 6), 46),
    Gpu("NVIDIA GeForce RTX 3080 Laptop GPU", 8192 * MIB, (8, 6), 48),
    Gpu("NVIDIA GeForce RTX 3080 Laptop GPU 16GB", 16384 * MIB, (8, 6), 48),
    Gpu("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16384 * MIB, (8, 6), 58),
    # -- GeForce, Ada
    # source: nvidia-smi logs; SMs: published CUDA cores by 128.
    # the total in the measurements published with xMem (Middleware 2025), CUDA's by its size: nvidia-smi reports 8188
    Gpu("NVIDIA GeForce RTX 4060", 8_318_222_336, (8, 9), 24),
    Gpu("NVIDIA GeForce RTX 4060 Ti", 8188 * MIB, (8, 9), 34),
    Gpu("NVIDIA GeForce RTX 4060 Ti 16GB", 16380 * MIB, (8, 9), 34),
    Gpu("NVIDIA GeForce RTX 4070", 12282 * MIB, (8, 9), 46),
    Gpu("NVIDIA GeForce RTX 4070 SUPER", 12282 * MIB, (8, 9), 56),
    Gpu("NVIDIA GeForce RTX 4070 Ti", 12282 * MIB, (8, 9), 60),
    Gpu("NVIDIA GeForce RTX 4070 Ti SUPER", 16376 * MIB, (8, 9), 66),
    Gpu("NVIDIA GeForce RTX 4080", 16376 * MIB, (8, 9), 76),
    Gpu("NVIDIA GeForce RTX 4080 SUPER", 16376 * MIB, (8, 9), 80),
    Gpu("NVIDIA GeForce RTX 4090 D", 24564 * MIB, (8, 9), 114),
    Gpu("NVIDIA GeForce RTX 4090", 24564 * MIB, (8, 9), 128),
    Gpu("NVIDIA GeForce RTX 4050 Laptop GPU", 6141 * MIB, (8, 9), 20),
    Gpu("NVIDIA GeForce RTX 4060 Laptop GPU", 8188 * MIB, (8, 9), 24),
    Gpu("NVIDIA GeForce RTX 4070 Laptop GPU", 8188 * MIB, (8, 9), 36),
    Gpu("NVIDIA GeForce RTX 4080 Laptop GPU", 12282 * MIB, (8, 9), 58),
    Gpu("NVIDIA GeForce RTX 4090 Laptop GPU", 16376 * MIB, (8, 9), 76),
    # -- GeForce, Blackwell
    # source: nvidia-smi logs; SMs: published CUDA cores by 128, device properties in logs (5070 Ti, 5090).
    Gpu("NVIDIA GeForce RTX 5050", 8151 * MIB, (12, 0), 20),
    Gpu("NVIDIA GeForce RTX 5060", 8151 * MIB, (12, 0), 30),
    Gpu("NVIDIA GeForce RTX 5060 Ti", 8151 * MIB, (12, 0), 36),
    Gpu("NVIDIA GeForce RTX 5060 Ti 16GB", 16311 * MIB, (12, 0), 36),
    Gpu("NVIDIA GeForce RTX 5070", 12227 * MIB, (12, 0), 48),
    Gpu("NVIDIA GeForce RTX 5070 Ti", 16303 * MIB, (12, 0), 70),
    Gpu("NVIDIA GeForce RTX 5080", 16303 * MIB, (12, 0), 84),
    Gpu("NVIDIA GeForce RTX 5090 D v2", 24455 * MIB, (12, 0), 170),
    Gpu("NVIDIA GeForce RTX 5090 D", 32607 * MIB, (12, 0), 170),
    Gpu("NVIDIA GeForce RTX 5090", 32607 * MIB, (12, 0), 170),
    Gpu("NVIDIA GeForce RTX 5050 Laptop GPU", 8151 * MIB, (12, 0), 20),
    Gpu("NVIDIA GeForce RTX 5060 Laptop GPU", 8151 * MIB, (12, 0), 26),
    Gpu("NVIDIA GeForce RTX 5070 Laptop GPU", 8151 * MIB, (12, 0), 36),
    Gpu("NVIDIA GeForce RTX 5070 Ti Laptop GPU", 12227 * MIB, (12, 0), 46),
    Gpu("NVIDIA GeForce RTX 5080 Laptop GPU", 16303 * MIB, (12, 0), 60),
    Gpu("NVIDIA GeForce RTX 5090 Laptop GPU", 24463 * MIB, (12, 0), 82),
)
"""Every GPU that `find` knows; of entries that fit a short name equally well, the first one wins."""


def find(name: str) -> Gpu:
    """Find a GPU of the catalogue.

    Case, spaces, hyphens and underscores do not matter; "NVIDIA", "GeForce", "Tesla", "Quadro", "RTX" and "GTX" may
    be left out, if the rest fits one architecture only. A size in GB chooses among the GPUs that fit a name:
    ``"A100 80GB"``. Without a size it is the smallest, since a plan for it also fits the others: ``"A100"`` has 40 GB,
    ``"V100"`` 16, ``"RTX 3060"`` 8. A name exactly as nvidia-smi prints it is that entry: ``"NVIDIA GeForce RTX 3060"``
    is the common one with 12 GB.

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
    reported = _BY_NAME.get(" ".join(name.lower().split()))
    if reported is not None:
        return reported
    fitting = _fitting(name)
    if not fitting:
        raise MemGuardError(_unknown(name))
    if len({gpu.compute_capability for gpu in fitting}) > 1:
        raise MemGuardError(f"{name!r} may be {_listed(fitting)}. Write the full name of one.")
    return min(fitting, key=lambda gpu: gpu.memory_bytes)


# -- names

_BRANDS = re.compile(r"nvidia|geforce|tesla|generation|edition|gpu")
_SIZE = re.compile(r"\b(\d+) ?(?:gib|gb|g)\b")
_SERIES = ("quadro", "rtx", "gtx")  # prefixes that are often left out
_BUILD = re.compile(r"pcie|sxm\d?|nvl|hbm3e?|active|ada|blackwell")  # suffixes that are often left out


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


_BY_NAME = {gpu.name.lower(): gpu for gpu in CATALOGUE}


def _by_form() -> dict[str, list[Gpu]]:
    found: dict[str, list[Gpu]] = {}
    for gpu in CATALOGUE:
        for form in {form for label in (gpu.name, *gpu.aliases) for form in _short_forms(label)}:
            found.setdefault(form, []).append(gpu)
    return found


_BY_FORM = _by_form()


def _fitting(name: str) -> list[Gpu]:
    """GPUs that fit a name; if there are none and it has a size, those of that size that fit the rest of it."""
    words = _words(name)
    unsized = _unsized(words)
    fitting = _BY_FORM.get("".join(words), [])
    if fitting or len(unsized) != len(words) - 1:
        return fitting
    (size,) = set(words) - set(unsized)
    return [gpu for gpu in _BY_FORM.get("".join(unsized), []) if _is_sold_as(gpu, int(size.removesuffix("gb")))]


def _is_sold_as(gpu: Gpu, gigabytes: int) -> bool:
    """Whether this memory is sold as so many GB: ECC and the driver's firmware take up to 7 % of it."""
    return 0.92 * gigabytes * GIB <= gpu.memory_bytes <= gigabytes * GIB


def _unknown(name: str) -> str:
    near = get_close_matches("".join(_words(name)), _BY_FORM, n=8, cutoff=0.6)
    gpus = list(dict.fromkeys(gpu for form in near for gpu in _BY_FORM[form]))[:4]
    found = f"Similar names: {_listed(gpus)}" if gpus else "No name in it is similar"
    return (
        f"The catalogue has no GPU called {name!r}. {found}. "
        f"Write it as nvidia-smi prints it, or plan for one with the same memory and architecture."
    )


def _listed(gpus: list[Gpu]) -> str:
    return ", ".join(f"{gpu.name} ({format_bytes(gpu.memory_bytes)})" for gpu in gpus)
