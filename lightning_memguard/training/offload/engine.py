"""`Offload`: a step whose saved tensors are kept elsewhere until its backward pass asks for them.

The same operators run on the same tensors in the same order, so nothing has to be proven. The exceptions: writes that
autograd cannot see (``.data``, NumPy) between saving and reading, and code that asks whether a saved tensor *is* a
parameter.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import Self

from lightning_memguard.core.foreign import gaps
from lightning_memguard.training.offload import hooks
from lightning_memguard.training.offload.saved import Copy, Kept, Moved, contiguous, part_to_copy
from lightning_memguard.training.offload.tiers import File, Host, folder

Tier = Literal["host", "file"]


class Offload:
    """Keeps what autograd saves beyond some bytes in host memory, or in a file, while it is entered.

    Make one for a run, and enter it around each step that is to run so; the backward pass may come later. Of the
    module's parameters and buffers, weights cast by autocast, and tensors that are not plain and strided nothing
    moves. Nothing is raised and no tensor moves if that is impossible, which ``refused`` and ``trouble`` say.

    Args:
        module: holds the parameters and buffers.
        keep_bytes: bytes of saved storages that stay on the device.
        tier: where tensors go: ``"host"`` or ``"file"``; None for the host, or for a file if the device is the host,
            or has filled ``host_bytes``.
        host_bytes: what may be taken of the host's memory; None for half of what is available.

    Attributes:
        keep_bytes: as above; it may be changed.
        refused: why nothing moves; empty if something can.
        trouble: why tensors stayed on the device beyond ``keep_bytes``: a full disk, for example; else empty.
    """

    def __init__(
        self, module: nn.Module, keep_bytes: int = 0, *, tier: Tier | None = None, host_bytes: int | None = None
    ) -> None:
        self.module, self.keep_bytes = module, keep_bytes
        self._packer = _Packer(tier, host_bytes)
        self._entered: list[hooks.Pair | None] = []
        self.refused = gaps("offload")
        if not self.refused:
            self.refused = _refusal(module, tier)

    @property
    def moved_bytes(self) -> int:
        """Bytes that were moved in the step that was entered last."""
        return self._packer.moved_bytes

    @property
    def kept_bytes(self) -> int:
        """The most bytes that stayed on the device at a time, in the step that was entered last."""
        return self._packer.most_kept_bytes

    @property
    def trouble(self) -> str:
        """Why tensors stayed on the device beyond ``keep_bytes``, in the step that was entered last."""
        return self._packer.trouble

    def __enter__(self) -> Self:
        pair = None
        refused = gaps("offload") or _refusal(self.module, self._packer.tier)
        if not refused:
            pair = _untraced(self._packer.pack), _untraced(_unpack)
            refused = hooks.put_on(pair)
        self.refused = refused
        if refused:
            pair = None
        else:
            self._packer.begin(self.module, self.keep_bytes)
        self._entered.append(pair)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pair = self._entered.pop()
        if pair is not None:
            hooks.take_off(pair)
            self._packer.end()

    def close(self) -> None:
        """Release files and host memory, as soon as no backward pass needs them."""
        self._packer.tiers = {}


def offload_activations(module: nn.Module, keep_bytes: int = 0) -> Offload:
    """Keep the tensors that autograd saves in host memory, or in a temporary file if the module is on the CPU.

    The step is the same to the bit, and takes longer: each tensor is moved to the host and back. Make it once, and
    enter it around the forward pass of each step that would not fit.

    Args:
        module: the module that is trained; its parameters and buffers stay.
        keep_bytes: bytes of saved tensors that stay on the device.

    Returns:
        A context manager, which can be entered again. ``moved_bytes`` and ``kept_bytes`` are those of the last step,
        ``refused`` says why nothing can be moved, and `close` releases its memory.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> offload = offload_activations(model, keep_bytes=16384)
        >>> for _ in range(2):
        ...     with offload:
        ...         loss = model(torch.randn(32, 64)).square().mean()
        ...     loss.backward()
        >>> offload.kept_bytes, offload.moved_bytes
        (16384, 65536)
        >>> offload.close()
    """
    return Offload(module, keep_bytes)


class _Packer:
    """Decides about each saved tensor. It knows no module: autograd's graph holds it, and a module may hold a graph."""

    def __init__(self, tier: Tier | None, host_bytes: int | None) -> None:
        self.tier, self.host_bytes = tier, host_bytes
        self.lock = _LOCK
        self.tiers: dict[tuple[torch.device, bool, str], File | Host] = {}
        self.quota = _Quota()
        self.copies: dict[Any, weakref.ref[Copy]] = {}
        self.stay: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.is_on_host = False
        self.moved_bytes = self.most_kept_bytes = 0
        self.trouble = ""

    def begin(self, module: nn.Module, keep_bytes: int) -> None:
        self.stay = _storages_of(module)
        self.is_on_host = all(each.device.type == "cpu" for each in _tensors_of(module))
        self.quota.most_bytes = keep_bytes
        self.moved_bytes, self.most_kept_bytes, self.trouble = 0, self.quota.bytes, ""

    def end(self) -> None:
        with self.lock:
            self.copies.clear()
            self.stay = {}
            for tier in self.tiers.values():
                tier.land()

    def pack(self, tensor: Tensor) -> Kept | Moved:
        """Return what autograd holds in place of a tensor that it saves."""
        try:
            with self.lock:
                return self._packed(tensor)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step goes on with the tensor on the device
            self.trouble = self.trouble or f"{type(error).__name__}: {error}"
            return Kept(tensor, tensor.grad_fn)

    def _packed(self, tensor: Tensor) -> Kept | Moved:
        node = tensor.grad_fn
        if (node is None and tensor.requires_grad) or not _is_plain(tensor):
            return Kept(tensor, node)
        base, storage = tensor._base, tensor.untyped_storage()
        owner = tensor if base is None else base
        if self._stays(owner, storage) or self._is_kept(storage):
            return Kept(tensor, node)
        copy = self._copy(tensor, storage, owner)
        return Kept(tensor, node) if copy is None else Moved(tensor, copy, node)

    def _stays(self, owner: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is held anyway, moving or not: of parameters and buffers, or not on the device."""
        known = self.stay.get(storage._cdata)
        if known is not None and known() is storage:
            return True
        if type(owner) is nn.Parameter or (type(owner) is FakeTensor and getattr(owner, "_is_param", False)):
            return True  # of another module, or gathered by FSDP for a while
        if not self.is_on_host and owner.device.type == "cpu":
            return True
        return owner.requires_grad and _is_weight(owner.grad_fn)

    def _is_kept(self, storage: torch.UntypedStorage) -> bool:
        kept = self.quota.takes(storage)
        self.most_kept_bytes = max(self.most_kept_bytes, self.quota.bytes)
        return kept

    def _copy(self, tensor: Tensor, storage: torch.UntypedStorage, owner: Tensor) -> Copy | None:
        """Return the copy of what a tensor shows; None if it cannot be moved."""
        address, version, nbytes = storage._cdata, tensor._version, storage.nbytes()
        found = self._known(address, storage, owner, version)
        if found is not None:
            return found
        start, length, gathered = part_to_copy(tensor, nbytes)
        key: Any = address
        if length != nbytes:
            key = address, start, length, (tensor.shape, tensor.stride(), tensor.dtype) if gathered else None
            found = self._known(key, storage, owner, version)
            if found is not None:
                return found
        if tensor.device.type == "meta" or tensor._is_zerotensor():
            return None
        copy = Copy(tensor, storage, owner)
        copy.start, copy.nbytes, copy.gathered = start, length, gathered
        if gathered:
            storage, start = contiguous(tensor, storage).untyped_storage(), 0
        copy.place = self._moved(storage, start, length, tensor)
        self.copies[key] = weakref.ref(copy)
        self.moved_bytes += length
        return copy

    def _known(self, key: Any, storage: torch.UntypedStorage, owner: Tensor, version: int) -> Copy | None:
        reference = self.copies.get(key)
        copy = None if reference is None else reference()
        if copy is not None and copy.live() is storage and copy.is_of(storage, owner, version):
            return copy
        return None

    def _moved(self, storage: torch.UntypedStorage, start: int, nbytes: int, tensor: Tensor) -> Any:
        device, is_fake = tensor.device, type(tensor) is FakeTensor
        place = None
        if self.tier == "host" or (self.tier is None and device.type != "cpu"):
            place = self._tier("host", device, is_fake).write(storage, start, nbytes, device)
            if place is None and self.tier == "host":
                raise MemoryError("the host's memory is used up")
        if place is None:
            place = self._tier("file", device, is_fake).write(storage, start, nbytes, device)
        return place

    def _tier(self, kind: str, device: torch.device, is_fake: bool) -> File | Host:
        key = device, is_fake, kind
        if key not in self.tiers:
            made = Host(device, self.host_bytes, is_fake=is_fake) if kind == "host" else File(is_fake=is_fake)
            self.tiers[key] = made
        return self.tiers[key]


# A finalizer may run inside any call, and ask for it again. One for all: autograd's threads and the user's may unpack
# what one file or stream has brought back.
_LOCK = threading.RLock()


def _unpack(saved: Kept | Moved) -> Tensor:
    if type(saved) is Kept:
        return saved.restored()
    with _LOCK:
        return saved.restored()


def _untraced(function: Any) -> Any:
    """The function, which Dynamo is to leave alone: compiled autograd would trace it."""
    return torch.compiler.disable(function)


class _Quota:
    """Storages that stay on the device, while they live."""

    def __init__(self) -> None:
        self.most_bytes = self.bytes = 0
        self._kept: dict[int, _Entry] = {}

    def takes(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage stays: it does already, or there is room for it."""
        if storage._cdata in self._kept:
            return True
        nbytes = storage.nbytes()
        if self.bytes + nbytes > self.most_bytes:
            return not nbytes
        self._kept[storage._cdata] = _Entry(storage, nbytes, self)
        self.bytes += nbytes
        return True

    def forget(self, address: int) -> None:
        """Count a storage no longer: it is gone."""
        self.bytes -= self._kept.pop(address).nbytes


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A storage of a quota, which it leaves when it dies; neither keeps the other alive."""

    __slots__ = ("address", "nbytes", "quota")

    def __new__(cls, storage: torch.UntypedStorage, nbytes: int, quota: _Quota) -> Self:
        return super().__new__(cls, storage, _leave)

    def __init__(self, storage: torch.UntypedStorage, nbytes: int, quota: _Quota) -> None:
        super().__init__(storage, _leave)
        self.address, self.nbytes, self.quota = storage._cdata, nbytes, weakref.ref(quota)


def _leave(entry: _Entry) -> None:
    quota = entry.quota()
    if quota is not None:
        quota.forget(entry.address)


# -- what stays


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    if (kind is not Tensor and kind is not FakeTensor) or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_quantized or tensor.is_nested)


def _is_weight(node: Any) -> bool:
    """Whether a node casts a parameter, as autocast does, which holds the result for the whole forward pass."""
    if type(node).__name__ != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return isinstance(getattr(source, "variable", None), nn.Parameter)


def _tensors_of(module: nn.Module) -> Iterable[Tensor]:
    return (*module.parameters(), *module.buffers())


def _storages_of(module: nn.Module) -> dict[int, weakref.ref[torch.UntypedStorage]]:
    """The storages of parameters and buffers, by address."""
    found = {}
    for tensor in _tensors_of(module):
        if (type(tensor) is nn.Parameter or _is_plain(tensor)) and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[storage._cdata] = weakref.ref(storage)
    return found


def _refusal(module: nn.Module, tier: Tier | None) -> str:
    """Say why nothing of a module may move; empty if it may."""
    for name, parameter in module.named_parameters():
        for key, value in vars(parameter).items():
            if key == "main_grad" or (isinstance(value, Tensor) and type(parameter) is nn.Parameter):
                return f"parameter {name} has a tensor as its attribute {key}, which its backward pass may look for"
    tensors = _tensors_of(module)
    on_host = all(each.device.type == "cpu" and type(each) is not FakeTensor for each in tensors)
    if on_host and tier != "host":
        try:
            folder()
        except OSError as error:
            return f"there is no folder for a temporary file: {error}"
    return ""
