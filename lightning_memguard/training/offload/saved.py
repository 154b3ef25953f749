"""Saved tensors as autograd holds them in place of the tensors: one that stays, and one that was moved.

Both compare versions as autograd itself would, and raise its words: with hooks on, it no longer does
(torch/csrc/autograd/saved_variable.cpp). Checked on torch 2.13.
"""

from __future__ import annotations

import re
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from lightning_memguard.core import torch_port as port
from lightning_memguard.training.offload.tiers import Place, laid_over

_ALIGNED_BYTES = 512  # blocks of the CUDA allocator begin there, and kernels choose their loads by it


class Kept:
    """A saved tensor that stays on the device."""

    __slots__ = ("origin", "tensor", "version")

    def __init__(self, tensor: Tensor, node: Any = None) -> None:
        self.version: int = port.version_of(tensor)
        if node is None:  # a leaf, held itself as autograd does: its data may be replaced
            self.tensor, self.origin = tensor, None
        else:  # maybe the node's own result, which refers to it: a cycle through C++, which Python cannot collect
            self.tensor, self.origin = tensor.detach(), _origin(tensor, node)

    def restored(self) -> Tensor:
        """Return the tensor."""
        found = self.tensor
        if port.version_of(found) != self.version:
            raise _modified(found.dtype, found.device, found.shape, (port.version_of(found), self.version), self.origin)
        return found


class Copy:
    """The copy of a storage at one version, or of the elements that one small view has of it.

    Attributes:
        owner: whose version counter counts the writes into it.
        live: a storage with these bytes that some tensor still holds: the original, or one that was brought back.
        begins: the byte of the original with which ``live`` begins.
        layout: dtype, shape, stride and offset of the view.
    """

    __slots__ = ("__weakref__", "begins", "device", "layout", "live", "nbytes", "owner", "place", "version", "witness")

    def __init__(
        self, tensor: Tensor, storage: torch.UntypedStorage, owner: Tensor, layout: Layout | None, nothing: Tensor
    ) -> None:
        self.device, self.version, self.owner, self.layout = (
            tensor.device,
            port.version_of(tensor),
            weakref.ref(owner),
            layout,
        )
        self.live, self.begins, self.nbytes = weakref.ref(storage), 0, storage.nbytes()
        self.witness = tensor.detach()  # shares the version counter, and from the next line on no memory
        self.witness.data = nothing
        self.place: Place | None = None

    def is_of(self, storage: torch.UntypedStorage, owner: Tensor, version: int) -> bool:
        """Whether it holds what a tensor shows now."""
        is_same = self.version == version and self.live() is storage and self.owner() is owner
        return is_same and port.version_of(self.witness) == version

    def storage(self) -> torch.UntypedStorage:
        """Return a storage with the bytes, of which ``begins`` says where it begins."""
        storage = self.live()
        if storage is None or (not self.begins and storage.nbytes() < self.nbytes):  # freed, perhaps in place
            storage = self._brought_back()
            self.live = weakref.ref(storage)
        return storage

    def _brought_back(self) -> torch.UntypedStorage:
        assert self.place is not None
        buffer = torch.empty(self.place.nbytes, dtype=torch.uint8, device=self.device)
        self.place.tier.read(self.place, buffer)
        if self.layout is None:
            return buffer.untyped_storage()
        dtype, shape, stride, offset = self.layout
        start = offset * dtype.itemsize
        self.begins = start - start % _ALIGNED_BYTES
        offset -= self.begins // dtype.itemsize
        self.nbytes = (offset + _span(shape, stride)) * dtype.itemsize
        whole = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        laid_over(whole, self.device, dtype, offset, shape, stride).copy_(buffer.view(dtype).view(shape))
        return whole


class Moved:
    """A view of a storage that was moved: strides, alignment, dtype and bits come back as they were."""

    __slots__ = ("copy", "is_conj", "is_neg", "layout", "origin")

    def __init__(self, tensor: Tensor, copy: Copy, node: Any) -> None:
        self.copy, self.layout = copy, layout_of(tensor)
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()
        self.origin = None if node is None else _origin(tensor, node)

    def restored(self) -> Tensor:
        """Return the tensor, which shares its version counter with the original."""
        copy, (dtype, shape, stride, offset) = self.copy, self.layout
        now = port.version_of(copy.witness)
        if now != copy.version:
            raise _modified(dtype, copy.device, shape, (now, copy.version), self.origin)
        storage = copy.storage()
        found = laid_over(storage, copy.device, dtype, offset - copy.begins // dtype.itemsize, shape, stride)
        if self.is_conj:
            found = torch.conj(found)
        if self.is_neg:
            found = port.negated(found)
        tensor = copy.witness.detach()
        tensor.data = found
        return tensor


# -- layouts

Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
_SMALL_PART = 4


def layout_of(tensor: Tensor) -> Layout:
    """Return dtype, shape, stride and offset."""
    return tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())


def is_small(tensor: Tensor, whole_bytes: int) -> bool:
    """Whether a view has so little of its storage that its elements are copied, and not what other views need, too."""
    if tensor.nbytes * _SMALL_PART >= whole_bytes or not tensor.numel():
        return False
    reach = 0  # elements that lie over each other cannot be copied back
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and step <= reach:
            return False
        reach += step * (size - 1)
    return True


def _span(shape: torch.Size, stride: tuple[int, ...]) -> int:
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1


# -- a saved tensor that was written to


# A tensor, the name and number of the node that made it, which of its results it is, and whether it is a view.
_Origin = tuple[weakref.ref[Tensor], str, int, int, bool]


def _origin(tensor: Tensor, node: Any) -> _Origin:
    return weakref.ref(tensor), node.name(), port.sequence_number(node), tensor.output_nr, port.is_view(tensor)


def _source(origin: _Origin) -> tuple[str, int]:
    """The node that autograd names, and which of its results the tensor is to it."""
    original, name, number, place, is_view = origin[0](), *origin[1:]
    asking: Any = port.running_node()
    if asking is not None and port.sequence_number(asking) == number:
        return asking.name(), place  # which saved its own result
    if original is not None and original.grad_fn is not None:
        return original.grad_fn.name(), 0  # the last one to write
    # A view whose base was written to is given another node when it is asked for.
    return "AsStridedBackward0" if is_view and name != "ConjBackward0" else name, 0


def _modified(
    dtype: torch.dtype, device: torch.device, shape: torch.Size, versions: tuple[int, int], origin: _Origin | None
) -> RuntimeError:
    """The error of `SavedVariable::unpack`, in the words of the torch that is installed."""
    kind = torch.empty(0, dtype=dtype, device=device).type()
    name = kind.rpartition(".")[2].removesuffix("Tensor")
    if name not in _TRANSLATED or device.type not in ("cpu", "cuda"):
        kind = f"{device.type.upper()}{name}Type"
    text, which = _words(), ""
    if origin is not None:
        source, place = _source(origin)
        source = source if "ExpBackward0" in text else re.sub(r"Backward\d*$", "", source)
        which = f", which is output {place} of {source},"
    text = text.replace("torch.FloatTensor [1]", f"{kind} {list(shape)}")
    text = re.sub(r", which is output 0 of \w+,", lambda _: which, text)
    now, then = versions
    return RuntimeError(text.replace("version 1; expected version 0", f"version {now}; expected version {then}"))


# torch/csrc/Exceptions.cpp, `processErrorMsg`.
_TRANSLATED = frozenset(("Byte", "Char", "Double", "Float", "Int", "Long", "Short", "Half"))


def _words() -> str:
    """Return what autograd says of a result of ``exp`` that was written to; in a thread without modes and hooks."""
    said: list[str] = []

    def provoke() -> None:
        result = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True).exp()
        node: Any = result.grad_fn
        result.add_(1)
        try:
            said.append(str(port.saved_by(node, "result")))
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=provoke)
    thread.start()
    thread.join()
    return said[0]
