"""torch.compile for a simulated GPU: what Dynamo and Inductor ask of CUDA and of Triton, answered without either.

Nothing of it depends on a GPU, a build with CUDA, or Triton: kernels are written, never built. What is changed for that
in torch's compiler is not put back everywhere (it caches answers), so all of it happens in a child.
`tests/core/simulation/test_compiled.py` has canary tests for the private names.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import added, nothing, patched
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.simulation import sdpa
from lightning_memguard.core.torch_port import FakeTensorMode
from lightning_memguard.core.trace.scratch import CudaTarget
from lightning_memguard.errors import CannotTraceError


@contextmanager
def compiling_for(gpu: Gpu) -> Iterator[None]:
    """Let torch compile for a GPU, inside `simulated_cuda`.

    Raises:
        CannotTraceError: this process is not a child.
    """
    if not in_child():
        raise CannotTraceError("torch.compile is followed for a GPU in a child process only")
    hints: Any = importlib.import_module("torch._inductor.runtime.hints")
    hints.DeviceProperties.create.__func__.cache_clear()  # of another GPU
    inductor: Any = importlib.import_module("torch._inductor.config")
    with ExitStack() as exits:
        for home, name, instead in (*_of_cuda(), *_of_triton(), *_of_kernels(), *_as_traced()):
            exits.enter_context((added if home is torch._C else patched)(home, **{name: instead}))
        exits.enter_context(inductor.patch(shape_padding=False))  # it is timed on the device
        exits.enter_context(_attention_of(gpu))
        yield


def timing_bytes(target: object) -> int:
    """Return what the first step takes to time its kernels: a buffer as large as the GPU's cache (`benchmark_gpu`)."""
    return _CACHE_MIB.get(target.compute_capability, 6) << 20 if isinstance(target, CudaTarget) else 0


def ways_to_run(source: str) -> int:
    """How many ways to run a kernel are timed, of which only those that write each element have several.

    `pointwise` in torch/_inductor/runtime/triton_heuristics.py.
    """
    head = re.search(r"@triton_heuristics\.pointwise\(\s*size_hints=(\{[^}]*\})", source)
    if head is None or "'autotune_pointwise': False" in source:
        return 1
    sizes = ast.literal_eval(head[1])
    if len(sizes) == _IMAGE_DIMS:
        return 1 if "TileHint.SQUARE" in source else 6
    return 2 if len(sizes) == 1 and math.prod(sizes.values()) > _LEAST_TIMED else 1


_IMAGE_DIMS, _LEAST_TIMED = 2, 128


def changed_arguments(source: str) -> tuple[set[int], bool]:
    """Places of the arguments that a kernel changes, and whether copies of them may not raise the peak."""
    names = re.search(r"'mutated_arg_names': \[([^\]]*)\]", source)
    line = re.search(r"^def \w+\(([^)]*)\)", source, re.MULTILINE)
    changed = set(re.findall(r"\w+", names[1])) if names else set()
    arguments = [part.split(":")[0].strip() for part in line[1].split(",")] if line else []
    return {place for place, name in enumerate(arguments) if name in changed}, "'optimize_mem': False" not in source


_CACHE_MIB = {(8, 0): 40, (8, 9): 96, (9, 0): 50, (10, 0): 126, (12, 0): 128}  # L2, of the largest GPU

_Patch = tuple[Any, str, Any]


def _zero() -> Callable[..., int]:
    """A function that returns 0: another one each time, since Dynamo has a table of them."""
    return lambda *_, **__: 0


def _of_cuda() -> Iterator[_Patch]:
    """The device, as `simulated_cuda` has it, in the place where the compiler asks for it."""
    cuda, interfaces = torch.cuda, importlib.import_module("torch._dynamo.device_interface")
    yield cuda, "get_rng_state", lambda *_: torch.get_rng_state()
    for name in ("set_rng_state", "_lazy_init", "_exchange_device", "_maybe_exchange_device"):
        yield cuda, name, _zero()
    yield torch._C, "_cuda_getCurrentRawStream", _zero()
    for name in _SIMULATED:
        yield interfaces.CudaInterface, name, staticmethod(getattr(cuda, name))
    for name in ("get_raw_stream", "exchange_device", "maybe_exchange_device"):
        yield interfaces.CudaInterface, name, staticmethod(_zero())
    yield interfaces, "caching_worker_current_devices", {"cuda": 0}
    yield interfaces, "caching_worker_device_properties", {"cuda": [cuda.get_device_properties(0)]}
    yield FakeTensorMode, "avoid_device_init", True
    # Operators that draw again for a checkpoint share their generator's state there, which takes no tensor.
    drawn = importlib.import_module("torch._functorch.partitioners")
    yield drawn, "functionalize_rng_ops", lambda _, forward, backward, *__: (forward, backward)


_SIMULATED = (
    *("current_device", "set_device", "device_count", "get_device_properties", "memory_allocated", "is_bf16_supported"),
    *("current_stream", "stream", "set_stream", "synchronize"),
)


def _of_triton() -> Iterator[_Patch]:
    """Triton, of which nothing runs."""
    triton = importlib.import_module("torch.utils._triton")
    yield triton, "triton_hash_with_backend", lambda: ""
    yield triton, "triton_backend", nothing
    yield importlib.import_module("torch._inductor.scheduler"), "has_triton", lambda *_, **__: True
    interfaces = importlib.import_module("torch._dynamo.device_interface")
    yield interfaces.CudaInterface, "raise_if_triton_unavailable", staticmethod(nothing)


def _of_kernels() -> Iterator[_Patch]:
    """Functions in whose place `simulated_cuda` has its own, which Dynamo would trace."""
    for home, name in ((torch, "batch_norm"), (torch.nn.functional, "scaled_dot_product_attention")):
        yield home, name, getattr(home, name).__wrapped__
    recurrent = port.recurrent_functions()
    for name in port.RECURRENT:  # Dynamo leaves these layers as they are
        yield recurrent, name, torch.compiler.disable(getattr(recurrent, name))


@contextmanager
def _attention_of(gpu: Gpu) -> Iterator[None]:
    """Choose a GPU's kernel for attention where autograd takes the function apart, below Dynamo."""

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return sdpa.attend(sdpa.Attention(*args, **kwargs, capability=gpu.compute_capability))

    library = Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", attend, "AutogradCUDA")
        yield
    finally:
        library._destroy()


def _as_traced() -> Iterator[_Patch]:
    """Patch what runs operators for their values while it compiles: on the CPU."""
    folder = importlib.import_module("torch._inductor.fx_passes.joint_graph").UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduced(self: object, node: Any) -> Any:
        given, device = dict(node.kwargs), node.kwargs.get("device")
        if node.op != "call_function" or not isinstance(device, torch.device) or device.type != "cuda":
            return deduce(self, node)
        node.kwargs = {**given, "device": torch.device("cpu")}
        try:
            return deduce(self, node)
        finally:
            node.kwargs = given

    yield folder, "_deduce_value", deduced
