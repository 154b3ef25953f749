"""One rank of many, in one process: the other ranks do not exist, and no call waits for them.

torch's fake process group answers each collective at once and leaves its tensors as they are: what a rank allocates for
it is allocated all the same. Around it, four things are needed for a step that is captured. A `DeviceMesh` reads the
tensors it makes, so they are real ones. FSDP frees and allocates what it gathers by resizing storages, which no
operator does, so the recorder is notified. DTensor asks for shapes by running operators on tensors of the global shape,
which are not the step's. And FSDP1 hooks nodes of C++, which a walked backward pass cannot see.

The process group of a real run is put aside in a child, where it must not be used: the sockets and streams behind it
belong to the parent.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from lightning_memguard.core.foreign import added, nothing, patched, reason_of
from lightning_memguard.core.isolation.pool import in_child
from lightning_memguard.core.simulation.constants import known_value
from lightning_memguard.core.simulation.fake_cuda import FAKE_DEVICE, simulated_gpu
from lightning_memguard.core.simulation.quantized import DATA, set_data
from lightning_memguard.core.torch_port import FakeTensor, tree_map, unset_fake_temporarily
from lightning_memguard.errors import CannotTraceError

_sizes: list[int] = []  # of the groups that this process pretends to be in, innermost last
_set_aside: list[object] = []  # process groups of the parent: their destructors would reach the other ranks


def ranks_here() -> int:
    """How many ranks there are, where this process is made to be one of several; else 1."""
    return _sizes[-1] if _sizes else 1


# -- the group


@contextmanager
def one_rank_of(size: int) -> Iterator[None]:
    """Inside, this process is the first of several ranks, which has the largest shards (``torch.chunk``'s first).

    Raises:
        CannotTraceError: torch has no such group, or this process is of a real one.
    """
    try:
        _set_aside_real_group()
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        raise CannotTraceError(f"no step of one of {size} ranks can run here: {reason_of(error)}") from error
    with ExitStack() as exits:
        for patch in _patches():
            exits.enter_context(patch)
        with unset_fake_temporarily():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        exits.callback(_destroy)
        _sizes.append(size)
        exits.callback(_sizes.pop)
        yield


def become(rank: int) -> None:
    """Be another of the ranks, before anything has asked which one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    with unset_fake_temporarily():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks_here())


def _destroy() -> None:
    from torch.distributed.tensor import debug

    if dist.is_initialized():
        dist.destroy_process_group()
    forget = getattr(debug, "_clear_sharding_prop_cache", None)
    if forget:  # DTensor remembers groups by name, and the next one has others
        forget()


def _set_aside_real_group() -> None:
    """Forget the process groups of this process, which is a child: its parent goes on with them."""
    c10d: Any = dist.distributed_c10d
    if not dist.is_initialized():
        return
    if not in_child():
        raise CannotTraceError("this process talks to other ranks, and a step of one of them is captured in a child")
    for name in _STATE:
        value = getattr(c10d, name)
        _set_aside.append(value)
        setattr(c10d, name, type(value)())
    _set_aside.append(c10d._world)
    c10d._world = type(c10d._world)()
    c10d._unregister_all_process_groups()


_STATE = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_group_count", "_tags_to_pg", "_pg_to_tag")


def _patches() -> Iterator[AbstractContextManager[Any]]:
    importlib.import_module("torch.distributed.tensor")  # adds its type to lists that `faking` replaces for a while
    from torch.distributed import device_mesh

    # Random numbers are as on plain tensors.
    yield patched(importlib.import_module("torch.distributed.tensor._dispatch"), is_rng_supported_mesh=lambda *_: False)
    yield patched(importlib.import_module("torch.distributed.tensor._random"), _rng_tracker=None)
    for name in _READS_RANKS:
        method = vars(device_mesh.DeviceMesh).get(name)
        if method is not None:
            yield patched(device_mesh.DeviceMesh, **{name: _on_real_tensors(method)})
    yield patched(device_mesh, init_device_mesh=_on_real_tensors(device_mesh.init_device_mesh))
    yield patched(dist, init_device_mesh=device_mesh.init_device_mesh)
    new_group: Any = dist.new_group

    def like_the_first(
        ranks: object = None, timeout: object = None, _: object = None, *rest: object, **kwargs: object
    ) -> Any:
        kwargs.pop("backend", None)
        with unset_fake_temporarily():
            return new_group(ranks, timeout, None, *rest, **kwargs)

    for home in (dist, dist.distributed_c10d):
        yield patched(
            home, new_group=like_the_first, **{name: functools.partial(refuse_call, name) for name in OF_OBJECTS}
        )
    yield patched(dist.ProcessGroup, monitored_barrier=nothing)  # Lightning's, around ``prepare_data``
    accelerator, device = torch._C._get_accelerator, torch.device(FAKE_DEVICE.type)
    yield patched(torch._C, _get_accelerator=lambda *args: device if simulated_gpu() else accelerator(*args))
    # FSDP1 offloads a parameter by its ``data``.
    yield added(FakeTensor, data=property(DATA.__get__, set_data))
    fsdp2 = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    # The chunk of the first rank in place of each: a thousand views of each parameter would take most of the time.
    yield patched(fsdp2, _chunk_with_empty=lambda x, count, dim: [x.narrow(dim, 0, -(-x.size(dim) // count))] * count)
    propagation = importlib.import_module("torch.distributed.tensor._sharding_prop")
    yield added(propagation, **{_STRIDED: _if_strided(getattr(propagation, _STRIDED, nothing))})
    yield from _fsdp1()


_STRIDED = "_propagate_use_strided_shard_flag"  # since torch 2.13


def _if_strided(propagate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Skip what does nothing without a strided shard, but reads an optimizer's whole lists again for each parameter."""
    from torch.distributed.tensor.placement_types import _StridedShard

    asked: list[Any] = [None, False]

    def propagate_if_strided(strategy: Any, schema: Any) -> None:
        if schema is not asked[0]:
            asked[:] = schema, any(isinstance(p, _StridedShard) for spec in schema.args_spec for p in spec.placements)
        if asked[1]:
            propagate(strategy, schema)

    return propagate_if_strided


# Methods of DeviceMesh that make or read tensors of ranks.
_READS_RANKS = (
    *("__init__", "__getitem__", "_create_sub_mesh", "_create_flatten_mesh", "_flatten", "_unflatten", "from_group"),
    *("_get_all_submeshes", "_concatenate", "get_all_groups", "_compute_coordinate_on_dim"),
)
OF_OBJECTS = (
    *("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list"),
    "send_object_list",
)
"""Functions of torch.distributed whose results depend on the other ranks."""


def refuse_call(name: str, /, *_: object, **__: object) -> None:
    """Refuse a call of one of `OF_OBJECTS`."""
    raise CannotTraceError(f"the step calls torch.distributed.{name}, whose result only the other ranks know")


def _on_real_tensors(function: Any) -> Any:
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_on_real_tensors(function.__func__))

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        args, kwargs = tree_map(_real, (args, kwargs))  # `init_device_mesh` under a name that a file has imported
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def _real(value: object) -> object:
    known = known_value(value) if isinstance(value, FakeTensor) else None
    return value if known is None else known


# -- what the recorder cannot see


@contextmanager
def watched(
    note_resized: Callable[[torch.UntypedStorage], object], paused: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Tell a recorder of storages that are resized, and pause it while DTensor asks for shapes."""
    if not _sizes:
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    resize: Any = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, *args: object) -> Any:
        result = resize(storage, *args)
        note_resized(storage)
        return result

    ask: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def ask_aside(*args: object) -> Any:
        with paused():
            return ask(*args)

    with (
        patched(torch.UntypedStorage, resize_=resize_and_tell),
        patched(ShardingPropagator, _propagate_tensor_meta_non_cached=ask_aside),
    ):
        yield


@functools.cache
def _wrapper_types() -> tuple[type, ...]:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    return DTensor, AsyncCollectiveTensor


def is_wrapped(tensor: object) -> bool:
    """Whether a tensor is a DTensor, which holds this rank's part of it."""
    return "torch.distributed.tensor" in sys.modules and isinstance(tensor, _wrapper_types())


def any_wrapped(types: Sequence[type]) -> bool:
    """Whether one of the types of an operator's arguments is DTensor's: it calls the operator on its parts."""
    if not types or "torch.distributed.tensor" not in sys.modules:
        return False
    return any(issubclass(kind, _wrapper_types()) for kind in types)


def _fsdp1() -> Iterator[AbstractContextManager[Any]]:
    """Have FSDP1 hook its flat parameters instead of the nodes that accumulate their gradients (`_runtime_utils`).

    And name the device by its type: a build without CUDA knows no device by a number alone. And ask a storage for its
    size where it has no address.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _init_utils, _runtime_utils

    hook, make = _runtime_utils._post_backward_hook, FullyShardedDataParallel.__init__
    computed_on = _init_utils._get_compute_device

    def register(state: object, handle: Any) -> None:
        if not torch.is_grad_enabled() or not handle:
            return
        flat = handle.flat_param
        if hasattr(flat, "_post_backward_hook_state") or not flat.requires_grad:
            return
        registered = flat.register_post_accumulate_grad_hook(lambda gathered: hook(state, handle, gathered))
        flat._post_backward_hook_state = None, registered

    @functools.wraps(make)
    def make_on_device(self: Any, *args: Any, device_id: torch.device | int | None = None, **kwargs: Any) -> None:
        kwargs["device_id"] = torch.device("cuda", device_id) if type(device_id) is int else device_id
        make(self, *args, **kwargs)

    yield patched(
        _init_utils, _get_compute_device=lambda model, _, given, *rest: given or computed_on(model, _, given, *rest)
    )
    yield patched(_runtime_utils, _register_post_backward_hook=register)
    yield patched(_flat_param, _data_ptr_allocated=lambda tensor: tensor.untyped_storage().size() > 0)
    yield patched(FullyShardedDataParallel, __init__=make_on_device)
