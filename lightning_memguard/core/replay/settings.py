"""The environment -> AllocatorSettings: how PyTorch's caching allocator is configured to hand out memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from lightning_memguard.errors import MemGuardError
from lightning_memguard.units import MIB

# c10/core/AllocatorConfig.h: kMinLargeAlloc, large_segment_size_; AllocatorConfig.cpp: kRoundUpPowerOfTwoIntervals
OWN_SEGMENT_FROM = 10 * MIB  # requests from here on reserve a segment of their own size
LARGE_SEGMENT = 20 * MIB  # what the large pool reserves below that, unless large_segment_size_mb says otherwise
ROUNDUP_INTERVALS = 16  # [1 MiB, 2 MiB), [2 MiB, 4 MiB), ... and all from 32 GiB on

UNLIMITED = 1 << 64

VARIABLE = "PYTORCH_ALLOC_CONF"  # torch 2.9 or newer; before, PYTORCH_CUDA_ALLOC_CONF

# Those to try, as they are written in the variable. Garbage collection needs a memory fraction below 1 besides.
SETTINGS = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8",
)
# Of these, those that neither take time nor need anything else.
NO_COST_SETTINGS = ("expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512")

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class AllocatorSettings:
    """How memory is handed out: PyTorch's settings, in bytes.

    Attributes:
        kind: ``"cuda"`` follows the rules of the caching allocator. ``"exact"`` neither rounds nor caches, so that
            reserved equals allocated, as on the CPU.
        capacity_bytes: device memory the process may reserve; None for no limit.
        expandable_segments: one growing segment for each pool and stream instead of many of fixed size.
        roundup_power2_divisions: into how many steps each power of two is divided when a request is rounded up; 16
            numbers for requests from 1 MiB, 2 MiB, 4 MiB, ... on, the first also for smaller ones; 0 and 1 mean no
            such rounding. This is how torch stores it.
        max_split_size_bytes: blocks of this size or more are never split; None for no such limit.
        max_non_split_rounding_bytes: how much larger than the request a block that may not be split can be; None for
            ``large_segment_size_bytes``.
        garbage_collection_threshold: share of the capacity above which cached segments are released early; 0 for
            never. PyTorch applies it only if a memory fraction below 1 is set, and so does the replay.
        per_process_memory_fraction: as set in ``torch.cuda.set_per_process_memory_fraction``. It only says whether
            PyTorch enforces a limit itself; the limit is ``capacity_bytes``.
        large_segment_size_bytes: what the large pool reserves for a request below 10 MiB, and the page size of its
            expandable segments.
        segments_descend: whether CUDA's driver puts new segments as on Linux, mostly below those before; else as on
            Windows, above them.
    """

    kind: Literal["cuda", "exact"] = "cuda"
    capacity_bytes: int | None = None
    expandable_segments: bool = False
    roundup_power2_divisions: tuple[int, ...] = (0,) * ROUNDUP_INTERVALS
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    large_segment_size_bytes: int = LARGE_SEGMENT
    segments_descend: bool = True

    @classmethod
    def for_device(cls, device_type: str, environ: Mapping[str, str]) -> AllocatorSettings:
        """The settings that PyTorch would use on a type of device, given the environment variables.

        Args:
            device_type: a torch device type, such as ``"cuda"`` or ``"cpu"``.
            environ: the environment variables, usually ``os.environ``.

        Raises:
            MemGuardError: PyTorch would refuse the variable, or it asks for an allocator that cannot be replayed.

        >>> AllocatorSettings.for_device("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}).max_split_size_bytes
        67108864
        """
        if device_type not in _CACHING_DEVICES:
            return cls(kind="exact")
        # The first variable that exists is read and no other, even if it is empty; the old names come before the
        # general one (c10/core/AllocatorConfig.cpp, AcceleratorAllocatorConfig::instance).
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if variable in environ:
                return _settings_from(variable, environ[variable])
        return cls()

    def with_setting(self, text: str) -> AllocatorSettings:
        """Return the settings with others in their place, which are written as in the variable.

        >>> AllocatorSettings(expandable_segments=True).with_setting("max_split_size_mb:64").text
        'expandable_segments:True,max_split_size_mb:64'
        """
        changed = _settings_from(VARIABLE, text)
        return replace(self, **{_REPLAYED[key]: getattr(changed, _REPLAYED[key]) for key in _keys(text)})

    @property
    def text(self) -> str:
        """The settings as written in the variable, without PyTorch's defaults."""
        return ",".join(f"{key}:{self._value(key)}" for key in _REPLAYED if self._value(key) != _DEFAULTS._value(key))

    def replaced_by(self, text: str) -> str:
        """Return the part of `text` that a setting written as in the variable would change."""
        return replace(_DEFAULTS, **{_REPLAYED[key]: getattr(self, _REPLAYED[key]) for key in _keys(text)}).text

    def collecting(self) -> AllocatorSettings:
        """Return the settings with a limit, if garbage is to be collected: PyTorch collects it only below one."""
        most = 0.999 if self.garbage_collection_threshold else 1.0
        return replace(self, per_process_memory_fraction=min(self.per_process_memory_fraction, most))

    def _value(self, key: str) -> str:
        value = getattr(self, _REPLAYED[key])
        if isinstance(value, tuple):
            sizes = ",".join(f"{1 << place}:{divisions}" for place, divisions in enumerate(value))
            return str(value[0]) if len({*value}) == 1 else f"[{sizes}]"
        return f"{value // MIB}" if key.endswith("_mb") and value else f"{value}"


# Reading the environment. c10/core/AllocatorConfig.cpp (AcceleratorAllocatorConfig::parseArgs) and
# c10/cuda/CUDAAllocatorConfig.cpp (CUDAAllocatorConfig::parseArgs) share one syntax, `key:value,key:[a:1,b:2]`, in
# which blanks mean nothing. A number ends where its digits end: PyTorch reads 128 from `128MB`.

# XPU's allocator (c10/xpu/XPUCachingAllocator.cpp) has the same pools, sizes and expandable segments.
_CACHING_DEVICES = ("cuda", "xpu")

_OPTION = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)(?:,|$)")
_WHOLE_NUMBER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


def _settings_from(variable: str, text: str) -> AllocatorSettings:
    """Read the options that decide how much memory is reserved; the last of equal keys counts.

    Any other key is ignored: PyTorch itself refuses an unknown key as soon as CUDA is used, so it belongs to something
    else (such as pinned memory) or to a newer PyTorch.
    """
    options = {option.key: option for option in _options(variable, text)}

    def read(key: str, how: Callable[[_Option], _Value], default: _Value) -> _Value:
        return how(options[key]) if key in options else default

    read("backend", _Option.check_backend, None)
    # Read first: it is the minimum of max_split_size_mb and max_non_split_rounding_mb.
    segment = read("large_segment_size_mb", lambda given: given.mebibytes(OWN_SEGMENT_FROM + MIB), LARGE_SEGMENT)
    return AllocatorSettings(
        large_segment_size_bytes=segment,
        max_split_size_bytes=read("max_split_size_mb", lambda given: given.mebibytes(segment), None),
        max_non_split_rounding_bytes=read("max_non_split_rounding_mb", lambda given: given.mebibytes(segment), None),
        roundup_power2_divisions=read("roundup_power2_divisions", _Option.divisions, (0,) * ROUNDUP_INTERVALS),
        garbage_collection_threshold=read(
            "garbage_collection_threshold", lambda given: given.share(with_ends=False), 0.0
        ),
        per_process_memory_fraction=read("per_process_memory_fraction", _Option.share, 1.0),
        expandable_segments=read("expandable_segments", _Option.flag, default=False),
    )


_REPLAYED = {
    "expandable_segments": "expandable_segments",
    "max_split_size_mb": "max_split_size_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
    "roundup_power2_divisions": "roundup_power2_divisions",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "large_segment_size_mb": "large_segment_size_bytes",
    "per_process_memory_fraction": "per_process_memory_fraction",
    "backend": "kind",
}
_DEFAULTS = AllocatorSettings()


def _keys(text: str) -> list[str]:
    return [option.key for option in _options("the setting", text) if option.key in _REPLAYED]


def check_replayed(text: str) -> None:
    """Refuse settings that a replay would ignore, such as misspelled ones."""
    for option in _options("the setting", text):
        if option.key not in _REPLAYED:
            raise MemGuardError(f"{option.key!r} is not a setting that is replayed; those are {', '.join(_REPLAYED)}.")


def _options(variable: str, text: str) -> Iterator[_Option]:
    at, text = 0, "".join(text.split())
    while at < len(text):
        option = _OPTION.match(text, at)
        if option is None:
            raise MemGuardError(f"{variable} is {text!r}; expected key:value,key:value, but found {text[at:]!r}.")
        yield _Option(variable, option[1], option[2])
        at = option.end()


def _leading_whole_number(text: str) -> int | None:
    number = _WHOLE_NUMBER.match(text)
    return int(number[0]) % UNLIMITED if number else None  # as std::stoull: -1 is the largest number


@dataclass(frozen=True)
class _Option:
    """One `key:value` of the environment variable, and its readings."""

    variable: str
    key: str
    value: str

    def flag(self) -> bool:
        if self.value not in ("True", "False"):
            raise self._refused("True or False")
        return self.value == "True"

    def mebibytes(self, at_least: int) -> int:
        number = _leading_whole_number(self.value)
        if number is None or number * MIB < at_least:
            raise self._refused(f"a whole number of MiB, at least {at_least // MIB}")
        return number * MIB

    def share(self, *, with_ends: bool = True) -> float:
        number = _NUMBER.match(self.value)
        share = float(number[0]) if number else -1.0
        if not 0.0 <= share <= 1.0 or (share in (0.0, 1.0) and not with_ends):
            raise self._refused("a number from 0 to 1" if with_ends else "a number between 0 and 1")
        return share

    def divisions(self) -> tuple[int, ...]:
        """One number for all sizes, or a list such as `[256:1,512:2,>:8]` (parseRoundUpPower2Divisions).

        That list gives 1 to requests from 256 MiB on, 2 from 512 MiB on, and 8 to all larger ones. Sizes below the
        first one listed take its number; sizes between two that are listed take 0.
        """
        if not self.value.startswith("["):
            return (self._power_of_two(self.value),) * ROUNDUP_INTERVALS
        divisions = [0] * ROUNDUP_INTERVALS
        last: int | None = None
        for pair in filter(None, self.value[1:-1].split(",")):
            size, _, number = pair.partition(":")
            value = self._power_of_two(number, or_zero=True)
            if size == ">":
                from_here = (last or 0) + 1
                divisions[from_here:] = [value] * (ROUNDUP_INTERVALS - from_here)
                continue
            interval = min(self._power_of_two(size).bit_length() - 1, ROUNDUP_INTERVALS - 1)
            if last is None:
                divisions[:interval] = [value] * interval
            divisions[interval] = value
            last = interval
        return tuple(divisions)

    def check_backend(self) -> None:
        if self.value in ("cudaMallocAsync", "hipMallocAsync"):
            raise MemGuardError(
                f"{self.variable} sets backend:{self.value}, where the CUDA driver decides what is reserved, by "
                "rules that cannot be replayed. Use backend:native to have memory predicted."
            )
        if self.value != "native":
            raise self._refused("native or cudaMallocAsync")

    def _power_of_two(self, text: str, or_zero: bool = False) -> int:
        number = _leading_whole_number(text)
        if number is None or number & (number - 1) or (number == 0 and not or_zero):
            raise self._refused("powers of two, as in 4 or [256:1,512:2,1024:4,>:8]")
        return number

    def _refused(self, expected: str) -> MemGuardError:
        return MemGuardError(f"{self.variable} sets {self.key}:{self.value}; expected {expected}.")
