"""Torch's private names, by what they mean: the file that reads them, so that the engine reads functions.

A release of torch may move any of them. What fails then is one function here and its test, which says in plain torch
what the function returns (`tests/core/test_torch_port.py`). The first line of each docstring completes "which MemGuard
needs to", in the words that a run gets (`foreign.reason_of`). What a newer torch has under another path is looked up as
``find("torch._new or torch._old")``. Checked on torch 2.11 to `foreign.NEWEST_TESTED`.

What patches all of one part of torch stays in its own file: Inductor in `core/simulation/compiled.py` and
`compiled_cuda.py`, and process groups, FSDP and DTensor in `core/simulation/one_rank.py`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd import Variable
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from lightning_memguard.core.foreign import added, find, nothing, patched

__all__ = ["AnyBatchNorm", "DisableTorchFunction", "DisableTorchFunctionSubclass", "OpOverload", "TorchDispatchMode"]
__all__ += ["DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode"]
__all__ += ["is_traceable_wrapper_subclass", "no_dispatch", "unset_fake_temporarily"]
__all__ += ["tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

Function = Callable[..., Any]
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

# -- tensors and storages


def storage_id(storage: torch.UntypedStorage) -> int:
    """Identify a storage while it lives; unlike an address, fake ones have it too."""
    return storage._cdata  # type: ignore[no-any-return]


def storage_users(storage: torch.UntypedStorage) -> int:
    """Count the tensors of a storage, and the storage's own Python object."""
    return torch._C._storage_Use_Count(storage._cdata)


def tensor_users(tensor: Tensor) -> int:
    """Count the references to a tensor in C++, one of which is its Python object's."""
    return tensor._use_count()  # type: ignore[attr-defined, no-any-return]


def version_of(tensor: Tensor) -> int:
    """Count the writes into a tensor's memory."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Find the tensor that a view is of."""
    return tensor._base


def is_view(tensor: Tensor) -> bool:
    """Know whether a tensor is a view."""
    return tensor._is_view()


def has_no_memory(tensor: Tensor) -> bool:
    """Know the zeros that autograd makes without memory."""
    return tensor._is_zerotensor()


def negated(tensor: Tensor) -> Tensor:
    """Mark a tensor as negated, without writing."""
    return torch._neg_view(tensor)


def suggested_format(tensor: Tensor) -> torch.memory_format:
    """Know in which memory format a batch norm returns its result."""
    return torch._prims_common.suggest_memory_format(tensor)


def is_all_true() -> Function:
    """Recognize the question whether all of a mask is true."""
    return find("torch._is_all_true")  # type: ignore[no-any-return]


# -- the graph of autograd


def sequence_number(node: Any) -> int:
    """Know in which order the nodes of autograd's graph were made; an AccumulateGrad is later than all."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def next_sequence_number() -> int:
    """Know the number of the node that autograd makes next in this thread."""
    return torch._C._autograd._get_sequence_nr()


def expected_grads(node: Any) -> tuple[Any, ...]:
    """Know shape, dtype and device of each gradient that a node receives."""
    found = node._input_metadata
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def saved_by(node: Any, name: str) -> Any:
    """Read what a node has saved under a name of its formula; integers may count from the end."""
    saved = getattr(node, f"_saved_{name}")
    return saved - (1 << 64) if type(saved) is int and saved >= 1 << 63 else saved


@functools.cache
def _saved_names(node_type: type) -> tuple[str, ...]:
    """List the names of the tensors that nodes of a type save."""
    return tuple(name for name in dir(node_type) if name.startswith("_raw_saved_"))


def saved_handles(node: Any) -> Iterator[object]:
    """Read what the hooks on saved tensors returned for those of a node, unpacked by none."""
    data: Any = torch._C._autograd.SavedTensor.data  # type: ignore[attr-defined]
    for name in _saved_names(node.__class__):
        saved = getattr(node, name)
        for each in saved if isinstance(saved, (list, tuple)) else (saved,):
            yield data.__get__(each)


def is_of_function(node: Any) -> bool:
    """Recognize the nodes of a ``torch.autograd.Function``."""
    return isinstance(node, torch._C._FunctionBase)


def clear_saved(node: Any) -> None:
    """Free what a ``torch.autograd.Function`` has saved, unless the running backward pass keeps its graph."""
    node.maybe_clear_saved_tensors()


def grad_hooks(tensor: Tensor) -> Any:
    """Find the hooks on the gradient of a tensor, which may be None."""
    return tensor._backward_hooks


def hooks_after_accumulation(leaf: Tensor) -> tuple[Function, ...]:
    """Find the hooks that run once a leaf has its gradient."""
    return tuple((getattr(leaf, "_post_accumulate_grad_hooks", None) or {}).values())


def running_node() -> Any:
    """Find the node of autograd that runs now."""
    return torch._C._current_autograd_node()


def engine() -> Any:
    """Find what runs a backward pass."""
    return Variable._execution_engine


_engine_task = torch._C._current_graph_task_id


def running_task() -> int:
    """Know the number of the backward pass that autograd's engine runs, or -1."""
    return _engine_task()


@contextlib.contextmanager
def running_backward_by(other: object, running: Callable[[], int]) -> Iterator[None]:
    """Run backward passes in another engine, whose running pass has the number that ``running`` returns."""
    with patched(Variable, _execution_engine=other), patched(torch._C, _current_graph_task_id=running):
        yield


def is_transformed(tensor: Tensor) -> bool:
    """Know whether a tensor is differentiated by a transform of ``torch.func``."""
    return torch._C._functorch.is_gradtrackingtensor(tensor)


def has_ended(tensor: Tensor) -> bool:
    """Know whether the transform of ``torch.func`` that differentiates a tensor is over."""
    return torch._C._functorch.is_dead_tensor_wrapper(tensor)  # type: ignore[attr-defined, no-any-return]


def has_tangents() -> bool:
    """Know whether forward-mode differentiation is on."""
    return torch.autograd.forward_ad._current_level >= 0


# -- hooks on saved tensors


def saved_hooks() -> Any:
    """Find the innermost hooks on saved tensors, as a pair; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def putting_of_saved_hooks() -> tuple[Function, Function]:
    """Return what puts a pair of hooks on saved tensors, and what takes the innermost off."""
    autograd = torch._C._autograd
    return autograd._push_saved_tensors_default_hooks, autograd._pop_saved_tensors_default_hooks


def forbidding_of_saved_hooks() -> tuple[Function, Function]:
    """Return what forbids hooks on saved tensors, by a message, and what allows them again."""
    autograd = torch._C._autograd
    return autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable


def saved_hooks_forbidden_by(disable: Function, enable: Function) -> AbstractContextManager[None]:
    """Ask others than autograd where hooks on saved tensors are forbidden."""
    return patched(torch._C._autograd, _saved_tensors_hooks_disable=disable, _saved_tensors_hooks_enable=enable)


def saved_hooks_put_by(push: Function, pop: Function) -> AbstractContextManager[None]:
    """Ask others than autograd where hooks on saved tensors are put on and taken off."""
    replaced: dict[str, object] = {
        "_push_saved_tensors_default_hooks": push,
        "_pop_saved_tensors_default_hooks": pop,
    }
    return patched(torch._C._autograd, **replaced)


def make_saved(tensor: Tensor, *, is_output: bool) -> Any:
    """Save a tensor as a node would; for checkpoints since torch 2.13."""
    return torch._C._autograd._make_saved_tensor(tensor, is_output=is_output)


def checkpoints_saving_by(make: Function) -> AbstractContextManager[None]:
    """Save what a checkpoint is given in another way than by `make_saved`."""
    return added(torch.utils.checkpoint, _make_saved_tensor=make)


# -- operators


def schema_of(operator: OpOverload) -> Any:
    """Read an operator's arguments and results, and which of them it writes into."""
    return operator._schema


def eager_kernel(operator: Any) -> Function:
    """Run an operator that calls others, such as ``out_dtype`` and ``cond``, as plain tensors do."""
    return operator.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]  # type: ignore[no-any-return]


def packet_name(operator: OpOverload) -> str:
    """Read an operator's name without its overload."""
    return operator.overloadpacket._qualified_op_name  # type: ignore[no-any-return]


@functools.cache
def decomposes(operator: OpOverload, device_type: str) -> bool:
    """Know whether an operator's kernel calls other operators, as ``conv2d`` calls ``convolution``.

    True for a kernel in C++, which is what really runs; ``operator.decompose`` differs for some, such as ``gru``.
    """
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, operator.name()
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, device_type.upper())


def decomposed(operator: OpOverload) -> Function:
    """Run the operators that an operator's kernel calls, by that kernel."""
    return functools.partial(operator._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def kernel_of_any_device(operator: OpOverload) -> Function:
    """Run the kernel that an operator has for all devices."""
    return functools.partial(operator._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)


def python_kernel(operator: OpOverload, device_type: str) -> Function | None:
    """Find the Python function that is an operator's kernel; None for others."""
    definition = torch._library.custom_ops.OPDEFS.get(operator.name())
    if definition is not None:
        kernels: dict[str | None, Function] = definition._backend_fns
        return kernels.get(device_type) or kernels.get(None)
    for key in (device_type.upper(), "CompositeExplicitAutograd"):
        parsed = torch._C._parse_dispatch_key(key)
        if parsed is not None and operator.name().replace("::", "/") + f"/{key}" in torch.library._impls:
            return functools.partial(operator._op_dk, parsed)
        if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
            return None
    return None


def below_autograd() -> AbstractContextManager[Any]:
    """Call the kernels of operators, without their gradients."""
    return torch._C._AutoDispatchBelowAutograd()


def own_function(name: str) -> Function | None:
    """Recognize a function of torch whatever a user has put in its place."""
    of_nn = torch._C._nn.scaled_dot_product_attention if name == "scaled_dot_product_attention" else None
    return of_nn or getattr(torch._C._VariableFunctions, name, None)


def recurrent_functions() -> Any:
    """Replace functions that recurrent modules call."""
    return find("torch._VF")


def recurrent_function(name: str) -> Function:
    """Recognize a function that recurrent modules call, one of `RECURRENT`."""
    return find(f"torch._VF.{name}")  # type: ignore[no-any-return]


RECURRENT = ("gru", "lstm", "rnn_tanh", "rnn_relu")


def attention_order() -> list[int]:
    """Know in which order ``scaled_dot_product_attention`` tries its backends."""
    return torch._C._get_sdp_priority_order()


def flexible_attention() -> dict[Any, tuple[Function, Function]]:
    """Give FlexAttention and its backward pass rules under a mode: for each what makes its results, and its formula."""
    of: Any = importlib.import_module("torch._higher_order_ops.flex_attention")
    made: Any = find("torch._higher_order_ops.utils.registered_hop_fake_fns")
    return {each: (made[each], eager_kernel(each)) for each in (of.flex_attention, of.flex_attention_backward)}


def multiplies_bfloat16() -> bool:
    """Know whether this processor multiplies bfloat16."""
    return torch.cpu._is_avx512_bf16_supported()


# -- fake tensors


def subclasses_made_by(instead: Callable[[Function], Function]) -> AbstractContextManager[None]:
    """Make tensors of a subclass, with the memory of another tensor, by a function that is given torch's own."""
    return patched(Tensor, _make_subclass=staticmethod(instead(Tensor._make_subclass)))


def without_address(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> FakeTensor:
    """Make a fake tensor of a tensor on the meta device, as `FakeTensor` does but for its attributes."""
    fake: Any = Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device)
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    return fake  # type: ignore[no-any-return]


def fakes_known_as(kind: type) -> AbstractContextManager[None]:
    """Show libraries that ask for fake tensors another class."""
    return patched(torch._subclasses, FakeTensor=kind)


@contextlib.contextmanager
def foreach_on_fakes() -> Iterator[None]:
    """Let optimizers take their ``foreach`` way on fake tensors."""
    with ExitStack() as exits:
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            home: Any = importlib.import_module(name)
            types = [*home._foreach_supported_types, FakeTensor]
            exits.enter_context(patched(home, _foreach_supported_types=types))
        yield


def adafactor_with(larger: Function) -> AbstractContextManager[None]:
    """Compare two norms for Adafactor."""
    return added(find("torch.optim._adafactor"), max=larger)


def truncated_draw_by(instead: Callable[[Function], Function]) -> AbstractContextManager[None]:
    """Draw the numbers of ``nn.init.trunc_normal_`` by a function that is given torch's own."""
    return patched(nn.init, _no_grad_trunc_normal_=instead(nn.init._no_grad_trunc_normal_))


def gpus_not_initialized() -> AbstractContextManager[None]:
    """Keep fake tensors from initializing the GPU that they are on."""
    return patched(importlib.import_module("torch._subclasses.fake_tensor"), init_gpu_context=nothing)


@contextlib.contextmanager
def real_kernels_run_by(instead: Callable[[Function], Function]) -> Iterator[None]:
    """Run operators without a fake kernel by a function that is given torch's own, which runs them on zeros."""
    first, second = (importlib.import_module(f"torch._subclasses.{name}") for name in ("fake_tensor", "fake_impls"))
    new = {"run_fallback_kernel": instead(first.run_fallback_kernel)}
    with patched(first, **new), patched(second, **new):
        yield


def count_devices_again() -> None:
    """Tell torch that there is a guard for the devices of CUDA."""
    torch._C._ensureCUDADeviceGuardSet()


@contextlib.contextmanager
def gpu_answers(memory: Function) -> Iterator[None]:
    """Answer what Python asks of a GPU, in place of its driver; ``memory`` returns the bytes that are free, and all."""
    every = dict.fromkeys(("current", "peak", "allocated", "freed"), 0)
    statistics: dict[str, Any] = {
        **dict.fromkeys(_COUNTED, 0),
        **dict.fromkeys(_MEASURED, dict.fromkeys(("all", "small_pool", "large_pool"), every)),
        **dict.fromkeys(("oversize_allocations", "oversize_segments"), every),
    }
    names = {
        "nothing": """cuda_clearCublasWorkspaces cuda_emptyCache cuda_ipc_collect cuda_record_memory_history
            cuda_record_memory_history_legacy cuda_resetAccumulatedHostMemoryStats cuda_resetAccumulatedMemoryStats
            cuda_resetPeakHostMemoryStats cuda_resetPeakMemoryStats cuda_setDevice cuda_setMemoryFraction
            cuda_setStream cuda_set_sync_debug_mode cuda_sleep cuda_synchronize accelerator_emptyCache
            accelerator_emptyHostCache accelerator_resetAccumulatedStats accelerator_resetPeakStats
            accelerator_setDeviceIndex accelerator_setStream accelerator_synchronizeDevice""",
        "stream": "cuda_getCurrentStream cuda_getDefaultStream",
        "zero": """cuda_exchangeDevice cuda_getCurrentBlasHandle cuda_getCurrentRawStream cuda_getDevice
            cuda_maybeExchangeDevice accelerator_exchangeDevice accelerator_getDeviceIndex
            accelerator_maybeExchangeDevice""",
        "no": "cuda_canDeviceAccessPeer cuda_isCurrentStreamCapturing",
        "statistics": "cuda_memoryStats accelerator_getDeviceStats",
        "none": "cuda_hostMemoryStats",
        "yes": "accelerator_isAllocatorInitialized",
        "whole": "cuda_getMemoryFraction",
        "memory": "accelerator_getMemoryInfo",
    }
    answers: dict[str, Function] = {
        "nothing": nothing,
        "stream": lambda *_: (0, 0, 1),  # its number, and those of the device and of CUDA
        "zero": lambda *_: 0,
        "no": lambda *_: False,
        "statistics": lambda *_: statistics,
        "none": lambda *_: {},
        "yes": lambda *_: True,
        "whole": lambda *_: 1.0,
        "memory": memory,
    }
    with ExitStack() as exits:
        for kind, named in names.items():
            for name in named.split():
                # Each is an object of its own: Dynamo has a table of them.
                exits.enter_context(added(torch._C, **{f"_{name}": functools.partial(answers[kind])}))
        zero, no = answers["zero"], answers["no"]
        exits.enter_context(patched(torch.cuda, _exchange_device=functools.partial(zero)))
        exits.enter_context(patched(torch.cuda, _maybe_exchange_device=functools.partial(zero)))
        exits.enter_context(patched(torch.cuda, _initialized=True, _is_in_bad_fork=functools.partial(no)))
        yield


_COUNTED = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
_MEASURED = (
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
)


def gpu_initialized_by(instead: Function) -> AbstractContextManager[None]:
    """Do what begins with a GPU in another way."""
    return patched(torch.cuda, _lazy_init=instead)


def raw_streams_added() -> AbstractContextManager[None]:
    """Have the function by which libraries ask for a stream of CUDA, in a build without CUDA too."""
    has_own = hasattr(torch._C, "_cuda_getCurrentRawStream")
    return contextlib.nullcontext() if has_own else added(torch._C, _cuda_getCurrentRawStream=nothing)


# -- modules


def parameters_of(module: nn.Module) -> MutableMapping[str, nn.Parameter | None]:
    """Replace a module's own parameters."""
    return module._parameters


def has_state_dict_hooks(module: nn.Module) -> bool:
    """Know whether hooks change what a module saves."""
    return bool(module._state_dict_hooks or module._state_dict_pre_hooks)


def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Replace a module's own buffers."""
    return module._buffers


def apply_to(module: nn.Module, function: Callable[[Tensor], Tensor]) -> object:
    """Replace a module's tensors by what a function returns, as ``module.to`` does."""
    return module._apply(function)


def applied_by(instead: Callable[[Function], Function]) -> AbstractContextManager[None]:
    """Do `apply_to` by a function that is given torch's own, in modules that do it in no way of their own."""
    return patched(nn.Module, _apply=instead(nn.Module._apply))


def copy_compiled_call(module: nn.Module, copied: nn.Module, like: Callable[[Function, Any], Function]) -> None:
    """Compile the call of a copied module as ``module.compile()`` did the module's own, which a deep copy drops."""
    if module._compiled_call_impl is not None:
        vars(copied)["_compiled_call_impl"] = like(copied._call_impl, module._compiled_call_impl)


def as_written(function: Any) -> Any:
    """Find the function that was compiled."""
    return torch._dynamo.eval_frame.innermost_fn(function)


def compiler_of(function: Any) -> Function | None:
    """Find what compiled a function, or disabled its compilation; None if nothing did."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    is_made = "self" in cells and hasattr(function, "_torchdynamo_orig_callable")
    how = cells["self"].cell_contents if is_made else None
    return how if isinstance(how, torch._dynamo.eval_frame._TorchDynamoContext) else None


def compiler_of_module(module: nn.Module) -> object | None:
    """Find what compiles a module that ``torch.compile`` has wrapped; None for others."""
    return module.dynamo_ctx if isinstance(module, torch._dynamo.OptimizedModule) else None


@contextlib.contextmanager
def telling_of_compiled_calls(tell: Callable[[], object]) -> Iterator[None]:
    """Know that compiled code is called."""
    frames: Any = torch._dynamo.eval_frame
    original = frames._callback_from_stance

    def callback_of(callback: object) -> object:
        if callable(callback):
            tell()
        return original(callback)

    with patched(frames, _callback_from_stance=callback_of):
        yield


# -- gradients across ranks and scales


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended."""
    Variable._execution_engine.queue_callback(callback)


def ddp_buckets(
    tensors: Sequence[Tensor], limits: Sequence[int], sparse: Sequence[bool] = (), order: Sequence[int] = ()
) -> list[list[int]]:
    """Sort gradients into the buckets of DistributedDataParallel."""
    # Not every torch is built with it.
    from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

    buckets, _ = _compute_bucket_assignment_by_size(list(tensors), list(limits), list(sparse), list(order))
    return [list(bucket) for bucket in buckets]


def nodes_all_run() -> AbstractContextManager[None]:
    """Answer that each node of a graph will run."""
    return patched(torch._C, _will_engine_execute_node=lambda _: True)


def steps_unscaled(scaler: Any) -> None:
    """Step without asking the device whether a gradient overflowed."""
    scaler._maybe_opt_step  # noqa: B018 - it must be there
    scaler._maybe_opt_step = lambda optimizer, _, *args, **kwargs: optimizer.step(*args, **kwargs)


# -- profilers and allocators


def is_profiling() -> bool:
    """Know whether a profiler is on."""
    return torch._C._autograd._profiler_enabled()


def count_blocks(*, operators: bool = True) -> None:
    """Count the blocks of the CPU's allocator from now on; ``operators=False``: with nothing done by operator."""
    profiler, autograd = torch._C._profiler, cast("Any", torch._C._autograd)
    options = False, True, False, False, False, profiler._ExperimentalConfig()  # with memory
    autograd._enable_profiler_legacy(profiler.ProfilerConfig(profiler.ProfilerState.CPU, *options))
    if not operators:
        autograd._enable_record_function(False)


def counted_blocks(*, operators: bool = True) -> list[int]:
    """Return the bytes of each block that was allocated, and less than zero of each that was freed."""
    autograd = cast("Any", torch._C._autograd)
    if not operators:
        autograd._enable_record_function(True)
    threads = autograd._disable_profiler_legacy(autograd._ProfilerDisableOptions(True, True))
    return [event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"]


def profilers_begin_by() -> tuple[tuple[Any, str], ...]:
    """Know what users' profilers call to begin."""
    profiler, legacy = torch.autograd.profiler, importlib.import_module("torch.autograd.profiler_legacy")
    return (profiler, "_prepare_profiler"), (profiler, "_enable_profiler"), (legacy, "_enable_profiler_legacy")


def has_primary_context(index: int) -> bool:
    """Know whether this process has a context on a device of CUDA; a torch in use that cannot tell likely has one."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return ask is None or bool(ask(index))


def is_recording() -> bool:
    """Know whether the history of CUDA's allocator is recorded."""
    ask = getattr(torch._C, "_cuda_isHistoryEnabled", None)  # in builds with CUDA
    return ask is not None and bool(ask())


def record_history(device: torch.device, enabled: Literal["all"] | None = "all") -> None:
    """Record the history of CUDA's allocator, or end it (None)."""
    stacks: dict[str, Any] = {} if enabled is None else {"stacks": "python"}
    torch.cuda.memory._record_memory_history(enabled, device=device, **stacks)


def allocator_state(device: torch.device) -> Any:
    """Read what CUDA's allocator holds, and its history."""
    return torch.cuda.memory._snapshot(device)


def write_allocator_state(path: str) -> None:
    """Write `allocator_state` to a file."""
    torch.cuda.memory._dump_snapshot(path)


_PACKING = ("version_of", "base_of", "is_view", "has_no_memory", "sequence_number", "saved_hooks")
PARTS = {
    "make_saved": (),  # checkpoints of torch 2.13 and newer call it, others need not
    "flexible_attention": ("compile",),
    **dict.fromkeys(("own_function", "attention_order", "count_devices_again"), ("cuda",)),
    **dict.fromkeys(("saved_handles", "clear_saved"), ("every run", "cuda")),
    **dict.fromkeys((*_PACKING, "putting_of_saved_hooks", "forbidding_of_saved_hooks"), ("every run", "offload")),
    **dict.fromkeys(("running_node", "negated"), ("offload",)),
    **dict.fromkeys(("ddp_buckets", "nodes_all_run"), ("strategies",)),
    **dict.fromkeys(("record_history", "allocator_state", "write_allocator_state"), ("recording",)),
}
"""The runs that need a function, if not every one."""
