"""`Offload`: a step whose saved tensors are kept elsewhere until its backward pass asks for them.

The same operators run on the same tensors in the same order, so nothing has to be proven. The exceptions: writes that
autograd cannot see (``.data``, NumPy) between saving and reading, and code that asks whether a saved tensor *is* a
parameter.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import gaps, reason_of
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.torch_port import FakeTensor
from lightning_memguard.training.offload import hooks
from lightning_memguard.training.offload.saved import Copy, Kept, Layout, Moved, is_small, layout_of
from lightning_memguard.training.offload.tiers import File, Host, Place, folder, laid_over

Tier = Literal["host", "file"]


class Offload:
    """Keeps what autograd saves beyond some bytes in host memory, or in a file, while it is entered.

    Make one for a run, and enter it around each step that is to run so; the backward pass may come later. The
    module's parameters and buffers stay, as do weights that autocast casts and tensors that are not plain and
    strided. If something is impossible, nothing is raised, tensors stay, and ``refused`` or ``trouble`` says why.

    Args:
        module: holds the parameters and buffers.
        keep_bytes: bytes of saved storages that stay on the device.
        tier: where tensors go: ``"host"`` or ``"file"``; None for the host, or for a file if the device is the host,
            or has filled ``host_bytes``.
        host_bytes: what may be taken of the host's memory; None for half of what is available.

    Attributes:
        keep_bytes: as above; it may be changed.
        refused: why nothing moves; empty if something can.
    """

    def __init__(
        self, module: nn.Module, keep_bytes: int = 0, *, tier: Tier | None = None, host_bytes: int | None = None
    ) -> None:
        self.__setstate__((module, keep_bytes, tier, host_bytes))
        self.refused = self._gaps or self._packer.survey(module)

    def __getstate__(self) -> tuple[nn.Module, int, Tier | None, int | None]:
        return self.module, self.keep_bytes, self._packer.tier, self._packer.host_bytes

    def __setstate__(self, state: tuple[nn.Module, int, Tier | None, int | None]) -> None:
        """Begin anew: a module may hold this, and be copied or sent to another process."""
        self.module, self.keep_bytes, tier, host_bytes = state
        self._packer = _Packer(tier, host_bytes)
        # Compiled autograd would trace them, and Dynamo what a compiled function calls.
        self._pair = torch.compiler.disable(self._packer.pack), torch.compiler.disable(_unpack)
        self._entered: list[bool] = []
        self._gaps: str = gaps("offload")
        self.refused = self._gaps

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
        """Why tensors stayed beyond ``keep_bytes`` in the step that was entered last: a full disk, for example."""
        return self._packer.trouble

    def __enter__(self) -> Self:
        try:
            _ask_first()
            self.refused = self._gaps or self._packer.survey(self.module) or hooks.put_on(self._pair)
        except Exception as error:  # noqa: BLE001 - a torch that has moved a name: the step goes on
            self.refused = reason_of(error)
        self._entered.append(not self.refused)
        if not self.refused:
            self._packer.begin(self.keep_bytes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered.pop():
            hooks.take_off(self._pair)
            with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
                self._packer.end()

    def close(self) -> None:
        """Release files and host memory, as soon as no backward pass needs them."""
        self._packer.hosts, self._packer.files = {}, {}


@functools.cache
def _ask_first() -> None:
    """Ask once outside of a step what is asked of each tensor inside, where nothing may raise."""
    result = torch.ones(1, device="cpu", requires_grad=True).exp()
    for ask in (port.version_of, port.base_of, port.is_view, port.has_no_memory, port.negated):
        ask(result)
    port.sequence_number(result.grad_fn)


def offload_activations(module: nn.Module, keep_bytes: int = 0) -> Offload:
    """Keep the tensors that autograd saves in host memory, or in a temporary file if the module is on the CPU.

    The step is the same to the bit, and takes longer: each tensor is moved to the host and back. Make it once, and
    enter it around the forward pass of each step that would not fit.

    Args:
        module: the module that is trained; its parameters and buffers stay.
        keep_bytes: bytes of saved tensors that stay on the device.

    Returns:
        A context manager, which can be entered again. ``moved_bytes`` and ``kept_bytes`` are those of the last step,
        ``refused`` says why nothing can be moved, and ``close()`` releases its memory.

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


# A finalizer may run inside any call, and ask for it again. One for all: threads may unpack what one file holds.
_LOCK = threading.RLock()


def _unpack(saved: Kept | Moved) -> Tensor:
    with _LOCK:
        return saved.restored()


class _Packer:
    """Decides about each saved tensor. It knows no module: autograd's graph holds it, and a module may hold a graph."""

    def __init__(self, tier: Tier | None, host_bytes: int | None) -> None:
        self.tier, self.host_bytes = tier, host_bytes
        self.hosts: dict[tuple[torch.device, bool], Host] = {}  # by device, and whether it is simulated
        self.files: dict[tuple[torch.device, bool], File] = {}
        self.copies: dict[object, weakref.ref[Copy]] = {}  # by address, and layout of a small view
        self.stay: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address
        self.kept: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address
        self.gone: deque[tuple[int, int]] = deque()  # of these, by other threads and finalizers
        self.nothing: dict[torch.device, Tensor] = {}  # without memory
        self.is_on_host = False
        self.keep_bytes = self.moved_bytes = self.kept_bytes = self.most_kept_bytes = 0
        self.trouble = ""

    def survey(self, module: nn.Module) -> str:
        """Note the storages of parameters and buffers; the result says why nothing may move."""
        self.stay, self.is_on_host, is_fake = {}, True, False
        for tensor in (*module.parameters(), *module.buffers()):
            kind = type(tensor)
            self.is_on_host &= tensor.device.type == "cpu"
            is_fake |= kind is FakeTensor
            if kind in _PLAIN and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self.stay[port.storage_id(storage)] = weakref.ref(storage)
            for name, value in tensor.__dict__.items():
                if name == "main_grad" or (isinstance(value, Tensor) and kind in _PLAIN and name not in _OF_FAKES):
                    return f"a parameter has a tensor as its attribute {name}, which a backward pass may ask for"
        if self.is_on_host and self.tier != "host" and not (is_fake or in_child()):
            try:
                folder()
            except OSError as error:
                return f"there is no folder for a temporary file: {error}"
        return ""

    def begin(self, keep_bytes: int) -> None:
        self._forget()
        self.keep_bytes, self.moved_bytes, self.most_kept_bytes, self.trouble = keep_bytes, 0, self.kept_bytes, ""

    def end(self) -> None:
        with _LOCK:
            self.copies, self.stay, self.nothing = {}, {}, {}
            for host in self.hosts.values():
                host.land()

    def pack(self, tensor: Tensor) -> Kept | Moved:
        """Return what autograd holds in place of a tensor that it saves."""
        try:
            with _LOCK:
                return self._packed(tensor)
        except Exception:  # noqa: BLE001 - a tensor of a kind that has no memory of its own, as inside vmap
            return Kept(tensor, tensor.grad_fn)

    def _packed(self, tensor: Tensor) -> Kept | Moved:
        node, kind = tensor.grad_fn, type(tensor)
        if (kind is not Tensor and kind is not FakeTensor) or tensor.layout is not torch.strided:
            return Kept(tensor, node)
        if node is None and tensor.requires_grad:
            return Kept(tensor)
        if self.gone:
            self._forget()
        base, storage = port.base_of(tensor), tensor.untyped_storage()
        owner = tensor if base is None else base
        if port.storage_id(storage) in self.kept or self._stays(owner, storage) or self._fits(storage):
            return Kept(tensor, node)
        copy = self._copy(tensor, storage, owner)
        return Kept(tensor, node) if copy is None else Moved(tensor, copy, node)

    def _stays(self, owner: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is held anyway, moving or not: of parameters and buffers, or not on the device."""
        known, kind = self.stay.get(port.storage_id(storage)), type(owner)
        if known is not None and known() is storage:
            return True
        if kind is nn.Parameter or (kind is FakeTensor and getattr(owner, "_is_param", False)):
            return True  # of another module, or gathered by FSDP for a while
        if not self.is_on_host and owner.device.type == "cpu":
            return True
        # A cast parameter: whoever casts it, as autocast does, holds the result.
        if type(owner.grad_fn) is not _CAST:
            return False
        (source, _), *_ = getattr(owner.grad_fn, "next_functions", ((None, 0),))
        return isinstance(getattr(source, "variable", None), nn.Parameter)

    def _fits(self, storage: torch.UntypedStorage) -> bool:
        if self.kept_bytes + storage.nbytes() > self.keep_bytes:
            return not storage.nbytes()
        self._keep(storage)
        return True

    def _keep(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that stays, as long as it lives."""
        address, nbytes, gone = port.storage_id(storage), storage.nbytes(), self.gone
        self.kept[address] = weakref.ref(storage, lambda _: gone.append((address, nbytes)))
        self.kept_bytes += nbytes
        self.most_kept_bytes = max(self.most_kept_bytes, self.kept_bytes)

    def _forget(self) -> None:
        """Count what is gone no longer, before another storage may be found at its address."""
        while self.gone:
            address, nbytes = self.gone.popleft()
            del self.kept[address]
            self.kept_bytes -= nbytes

    def _copy(self, tensor: Tensor, storage: torch.UntypedStorage, owner: Tensor) -> Copy | None:
        """Return the copy of what a tensor shows; None if it cannot be moved."""
        key: object = port.storage_id(storage)
        found, layout = self._known(key, tensor, storage, owner), None
        if found is None and is_small(tensor, storage.nbytes()):
            layout = layout_of(tensor)
            key = port.storage_id(storage), *layout
            found = self._known(key, tensor, storage, owner)
        device = tensor.device
        if found is not None:
            return found
        if tensor.is_quantized or tensor.is_nested or port.has_no_memory(tensor) or device.type == "meta":
            return None
        if device not in self.nothing:
            self.nothing[device] = torch.empty(0, device=device)
        copy = Copy(tensor, storage, owner, layout, self.nothing[device])
        try:
            copy.place = self._moved(_content(storage, device, layout), device, is_fake=type(tensor) is FakeTensor)
        except Exception as error:  # noqa: BLE001 - a full disk, no memory, or a device that cannot: the step goes on
            self.trouble = self.trouble or f"{type(error).__name__}: {error}"
            self._keep(storage)
            return None
        self.copies[key] = weakref.ref(copy)
        self.moved_bytes += copy.place.nbytes
        return copy

    def _known(self, key: object, tensor: Tensor, storage: torch.UntypedStorage, owner: Tensor) -> Copy | None:
        reference = self.copies.get(key)
        copy = None if reference is None else reference()
        return copy if copy is not None and copy.is_of(storage, owner, port.version_of(tensor)) else None

    def _moved(self, content: torch.UntypedStorage, device: torch.device, *, is_fake: bool) -> Place:
        key, place = (device, is_fake), None
        if self.tier == "host" or (self.tier is None and device.type != "cpu"):
            if key not in self.hosts:
                self.hosts[key] = Host(device, self.host_bytes, is_fake=is_fake)
            place = self.hosts[key].write(content, device)
            if place is None and self.tier == "host":
                raise MemoryError("what may be taken of the host's memory is used up")
        if place is None:
            if key not in self.files:
                self.files[key] = File(is_fake=is_fake)
            place = self.files[key].write(content, device)
        return place


_PLAIN = (Tensor, nn.Parameter, FakeTensor)
_OF_FAKES = frozenset(("constant", "real_tensor"))  # torch's own attributes of a FakeTensor
_CAST = type(torch.ones(1, requires_grad=True).to(torch.float64).grad_fn)


def _content(storage: torch.UntypedStorage, device: torch.device, layout: Layout | None) -> torch.UntypedStorage:
    """Tensor to be copied: a whole storage, or the elements of a small view in order."""
    if layout is None:
        return storage
    dtype, shape, stride, offset = layout
    view = laid_over(storage, device, dtype, offset, shape, stride)
    return view.clone(memory_format=torch.contiguous_format).untyped_storage()
