"""The memory of DistributedDataParallel: its buckets and broadcasts, and when each is allocated and freed.

Nothing wraps the shadow Trainer's copy of the module, so what the wrapper would allocate is allocated here, at the same
moments: torch/nn/parallel/distributed.py, reducer.cpp and comm.cpp in torch/csrc/distributed/c10d; measured on torch
2.13 with two gloo processes (`tests/training/adapter/test_ddp.py`). Not counted: what NCCL and gloo take outside of
torch's allocator; a few hundred bytes that live while ranks compare shapes and bucket indices; and when a stream of
NCCL's lets go of a tensor.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.torch_port import AnyBatchNorm, tree_flatten, tree_unflatten
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import wraps_in_ddp
from lightning_memguard.units import MIB

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule
    from pytorch_lightning.strategies import DDPStrategy

P = TypeVar("P")

_FIRST_BUCKET_BYTES = 1 * MIB  # dist._DEFAULT_FIRST_BUCKET_BYTES
_BUCKET_BYTES = 25 * MIB  # torch/nn/parallel/distributed.py, _DEFAULT_BUCKET_CAP_MB
_BROADCAST_BYTES = 250 * MIB  # DistributedDataParallel.broadcast_bucket_size
_BROADCASTS_IN_FLIGHT = 2  # broadcast_coalesced in comm.cpp
_SIDE_STREAM = 1  # DDPStrategy._setup_model builds the wrapper on a CUDA stream of its own

# Communication hooks that send a copy of each bucket, of two bytes an element.
_COMPRESSED = ("fp16_compress_hook", "bf16_compress_hook", "fp16_compress_wrapper", "bf16_compress_wrapper")
_UNCOMPRESSED = ("allreduce_hook", "noop_hook")
_SWITCHES = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "batched_grad_copy")
_NOT_COUNTED = ("mixed_precision", "delay_all_reduce_named_params")


def with_bucket_views(program: P) -> P | None:
    """A program whose gradients are views of their buckets under DDP; None if they are, or if it has another strategy.

    Its strategy is a shallow copy, to read from.
    """
    own: Any = program
    if not wraps_in_ddp(own.strategy) or Arguments.of(own.strategy).gradient_as_bucket_view:
        return None
    other = lightning.with_ddp_arguments(own.strategy, gradient_as_bucket_view=True)
    return replace(own, strategy=other)  # type: ignore[no-any-return]


def steps_until_steady(strategy: object) -> int:
    """After how many steps their memory no longer changes: a static graph rebuilds its buckets in its third."""
    return 3 if wraps_in_ddp(strategy) and Arguments.of(strategy).static_graph else 2


def attach(strategy: object, module_copy: nn.Module, recorder: Recorder, *, is_fit: bool = True) -> None:
    """Wrap a copy so that it allocates as under DistributedDataParallel; nothing for any other strategy.

    Call it when DDP would wrap the module: once the copy is on its device and recorded, before it has optimizers.

    Args:
        strategy: the user's Lightning strategy; its settings are read, nothing is changed.
        module_copy: the LightningModule that will run; its ``training_step`` and ``manual_backward`` are wrapped.
        recorder: records the copy.
        is_fit: False for a validation, test or prediction: Lightning then only broadcasts parameters and buffers.
    """
    if not wraps_in_ddp(strategy):
        return
    if not is_fit:
        _broadcast(_states_of(module_copy, buffers=True), recorder)
        return
    wrapper = _wrapper_of(strategy, module_copy, recorder)
    if wrapper is None:
        return
    _wrap_training_step(module_copy, wrapper)
    _wrap_manual_backward(module_copy, wrapper)
    if lightning.syncs_batch_norm(strategy):
        _exchange_statistics(module_copy, wrapper.arguments.ranks, recorder)


def attach_to_plain(strategy: Any, module_copy: nn.Module, recorder: Recorder) -> None:
    """Wrap a plain module as Fabric's DDPStrategy does; each forward pass is followed by a backward pass."""
    wrapper = _wrapper_of(strategy, module_copy, recorder)
    if wrapper is not None:
        module_copy.register_forward_pre_hook(lambda *_: wrapper.before_forward())
        module_copy.register_forward_hook(lambda _, __, output: wrapper.after_forward(output, syncs=True))


def _wrapper_of(strategy: DDPStrategy, module_copy: nn.Module, recorder: Recorder) -> _Wrapper | None:
    if not any(parameter.requires_grad for parameter in module_copy.parameters()):
        return None  # DDP refuses such a module
    arguments = Arguments.of(strategy)
    for note in arguments.notes(module_copy):
        recorder.assume(note)
    return _Wrapper(arguments, module_copy, recorder)


def _exchange_statistics(module_copy: nn.Module, ranks: int, recorder: Recorder) -> None:
    """Count the bytes that SyncBatchNorm takes on top of the batch norm it replaces; both keep the same for backward.

    Mean, inverse deviation and count of each channel are joined, and gathered from all ranks (``SyncBatchNorm.forward``
    in torch/nn/modules/_functions.py, torch 2.13).
    """

    def gather(module: nn.Module, _: object, output: torch.Tensor) -> None:
        if module.training and isinstance(module, AnyBatchNorm):
            joined = 2 * module.num_features + 1
            taken = [output.new_empty(joined * count, dtype=torch.float32) for count in (1, ranks)]
            recorder.label(taken, "communication")

    for module in module_copy.modules():
        if isinstance(module, AnyBatchNorm):
            module.register_forward_hook(gather)


@dataclass(frozen=True)
class Arguments:
    """Arguments of DistributedDataParallel that decide what it allocates.

    Attributes:
        bucket_bytes: sizes at which the buckets are full, in the order they are ready, the last one for all further.
        bucket_bytes_are_listed: whether the user gave them as a list.
        find_unused_parameters, gradient_as_bucket_view, static_graph: see DDP.
        batched_grad_copy: copy the gradients of a bucket together once all are there.
        sync_buffers: broadcast buffers before each forward pass.
        init_sync: broadcast parameters and buffers when the wrapper is built.
        init_sync_buffers: buffers too.
        ranks: how many processes train together.
        hook: the name of the communication hook or of the wrapper around it; empty without one.
        ignored: arguments given that are not counted.
    """

    bucket_bytes: tuple[int, ...] = (_FIRST_BUCKET_BYTES, _BUCKET_BYTES)
    bucket_bytes_are_listed: bool = False
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    batched_grad_copy: bool = False
    sync_buffers: bool = True
    init_sync: bool = True
    init_sync_buffers: bool = True
    ranks: int = 1
    hook: str = ""
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, strategy: DDPStrategy) -> Arguments:
        """Read them off a DDPStrategy, Lightning's or Fabric's."""
        given = lightning.ddp_arguments(strategy)
        cap_mb, caps_mb = given.get("bucket_cap_mb"), given.get("bucket_cap_mb_list") or ()
        sizes = [int(mb * MIB) for mb in caps_mb or ([] if cap_mb is None else [cap_mb])]
        broadcast = given.get("broadcast_buffers")
        forward_sync = given.get("forward_sync_buffers")
        old = True if broadcast is None else bool(broadcast)
        hook = lightning.ddp_hook(strategy)
        return cls(
            bucket_bytes=tuple(sizes) or (_FIRST_BUCKET_BYTES, _BUCKET_BYTES),
            bucket_bytes_are_listed=bool(caps_mb),
            **{name: bool(given.get(name, False)) for name in _SWITCHES},
            sync_buffers=old if forward_sync is None else bool(forward_sync),
            init_sync=bool(given.get("init_sync", True)),
            init_sync_buffers=old if forward_sync is None else True,
            ranks=max(1, strategy.num_processes * strategy.num_nodes),
            hook=getattr(hook, "__name__", type(hook).__name__) if hook else "",
            ignored=tuple(name for name in _NOT_COUNTED if given.get(name) is not None),
        )

    @property
    def finds_unused(self) -> bool:
        """Whether each backward pass finds the parameters it leaves out; then the buckets are never rebuilt."""
        return self.find_unused_parameters and not self.static_graph

    def notes(self, module_copy: nn.Module) -> Iterator[str]:
        """Yield notes on what a prediction for this module has to leave out."""
        for name in self.ignored:
            yield f"DistributedDataParallel({name}=...) was not counted"
        counted = self.hook in ("", *_COMPRESSED, *_UNCOMPRESSED)
        if not counted and next(iter(module_copy.parameters())).device.type == "cuda":
            yield f"what the communication hook {self.hook} takes was not counted"


def later_buckets(
    arguments: Arguments, parameters: Sequence[torch.Tensor], sparse: Sequence[bool], ready: Sequence[int]
) -> list[list[int]]:
    """The buckets that DDP goes on with, once it knows in which order gradients are ready."""
    return port.ddp_buckets([parameters[index] for index in ready], arguments.bucket_bytes, sparse, ready)


class _Wrapper:
    """State and steps of DistributedDataParallel and its reducer, under their names."""

    def __init__(self, arguments: Arguments, module_copy: nn.Module, recorder: Recorder) -> None:
        self.arguments = arguments
        self.module_copy = weakref.ref(module_copy)
        self.recorder = recorder
        self.parameters, self.sparse = _reduced_parameters(module_copy)
        self.buckets: list[list[int]] = []
        self.views: dict[int, torch.Tensor] = {}  # by parameter: where its gradient goes
        self.bucket_of: dict[int, int] = {}
        self.pending: list[int] = []
        self.ready_order: list[int] = []
        self.rebuilt = False
        self.backward_passes = 0
        self.expects_gradients = False
        self.delayed = False  # a static graph reduces its first gradients only once all are there
        self.syncs_buffers = arguments.sync_buffers
        on_gpu = self.parameters[0].device.type == "cuda"
        with recorder.on_stream(_SIDE_STREAM) if on_gpu else contextlib.nullcontext():
            if arguments.init_sync:
                _broadcast(_states_of(module_copy, buffers=arguments.init_sync_buffers), recorder)
            # a single bucket if it will be rebuilt; else in the order in which they are reduced. Parameters that will
            # have a sparse gradient have none in memory
            are_kept = arguments.bucket_bytes_are_listed or arguments.finds_unused
            limits = arguments.bucket_bytes if are_kept else (sys.maxsize,)
            self._make_buckets(port.ddp_buckets(self.parameters, limits, self.sparse)[::-1])
            # of the parameters that had a gradient: one on the host and one on the device
            needed = arguments.find_unused_parameters or arguments.static_graph
            devices = (torch.device("cpu"), self.parameters[0].device) if needed else ()
            self.used_maps = [torch.empty(len(self.parameters), dtype=torch.int32, device=each) for each in devices]
            recorder.label(self.used_maps, "communication")
        for index, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(functools.partial(_gradient_ready, weakref.ref(self), index))

    # -- when the wrapper is built

    def _make_buckets(self, buckets: list[list[int]]) -> None:
        """One flat tensor for each bucket, and a view into it for each of its parameters."""
        self.views.clear()  # the old buckets go before the new ones come
        self.buckets = buckets
        for number, bucket in enumerate(buckets):
            self.bucket_of |= dict.fromkeys(bucket, number)
            if any(self.sparse[index] for index in bucket):
                continue
            members = [self.parameters[index] for index in bucket]
            flat = torch.empty(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
            self.recorder.label([flat], "communication")  # also if the gradients are views into it
            offset = 0
            for index, parameter in zip(bucket, members, strict=True):
                self.views[index] = _view(flat, offset, parameter)
                offset += parameter.numel()
                if self.arguments.gradient_as_bucket_view:
                    self._copy_in(index)
        self._expect_all()

    # -- before and after each forward pass

    def before_forward(self) -> None:
        self.rebuild()
        module_copy = self.module_copy()
        if self.syncs_buffers and module_copy is not None:
            _broadcast(_states_of(module_copy, parameters=False, buffers=True), self.recorder)

    def rebuild(self) -> None:
        """Rebuild the buckets, once, in the order in which the first gradients were ready."""
        if self.rebuilt or not self.ready_order or self.arguments.finds_unused:
            return
        self.rebuilt = True
        order = [*dict.fromkeys((*self.ready_order, *range(len(self.parameters))))]
        self._make_buckets(later_buckets(self.arguments, self.parameters, self.sparse, order))

    def after_forward(self, output: object, *, syncs: bool) -> object:
        self.expects_gradients = self.syncs_buffers = False
        if syncs:
            self.prepare_for_backward()
        if self.arguments.finds_unused or (self.arguments.static_graph and not self.delayed):
            return _through_sink(self, output)
        return output

    def prepare_for_backward(self) -> None:
        self.expects_gradients = True
        self.syncs_buffers = self.arguments.sync_buffers
        self._expect_all()

    def _expect_all(self) -> None:
        self.pending = [len(bucket) for bucket in self.buckets]

    # -- as gradients become ready

    def gradient_ready(self, index: int) -> None:
        """The reducer's hook on a parameter, run when its gradient has been accumulated."""
        if not self.expects_gradients or (self.arguments.static_graph and not self.backward_passes):
            return
        if not self.rebuilt:
            self.ready_order.append(index)
        self._mark_ready(index)

    def backward_begins(self) -> None:
        """The first node of a static graph's first backward pass: everything is reduced when that pass has ended."""
        if self.arguments.static_graph and not self.delayed:
            self.delayed = True
            port.after_backward(self._reduce_all)

    def after_manual_backward(self) -> None:
        """A static graph's first backward pass inside the step, before any sink (`DDPStrategy.post_backward`)."""
        if self.arguments.static_graph and not self.backward_passes:
            self._reduce_all()

    def _reduce_all(self) -> None:
        self.backward_passes += 1
        self._expect_all()
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._mark_ready(index)

    def _mark_ready(self, index: int) -> None:
        bucket = self.bucket_of[index]
        self.pending[bucket] -= 1
        done = self.buckets[bucket] if not self.pending[bucket] else []
        for ready in done if self.arguments.batched_grad_copy else [index]:
            if self.parameters[ready].grad is not None:
                self._copy_in(ready)
        if done:
            self._send(bucket)

    def _copy_in(self, index: int) -> None:
        parameter, view = self.parameters[index], self.views.get(index)
        if view is None or parameter.grad is None:
            return
        if parameter.grad is not view:
            with torch.no_grad():
                torch.mul(parameter.grad, 1.0, out=view)  # as the reducer does, with one over the ranks for 1
        if self.arguments.gradient_as_bucket_view:
            parameter.grad = view

    def _send(self, bucket: int) -> None:
        """A hook that compresses takes a smaller copy of the bucket. Lightning registers hooks on CUDA only."""
        members = [self.parameters[index] for index in self.buckets[bucket]]
        nbytes = sum(p.numel() * p.element_size() for p in members)
        if self.arguments.hook in _COMPRESSED and members[0].device.type == "cuda":
            nbytes = sum(p.numel() for p in members) * 2
            self.recorder.label([torch.empty(nbytes, dtype=torch.uint8, device=members[0].device)], "communication")
        self.recorder.note_sent(2 * nbytes)  # an all-reduce is a reduce-scatter and an all-gather


def _broadcast(tensors: list[torch.Tensor], recorder: Recorder) -> None:
    """Flatten tensors into a few large ones, two of which are in flight at once."""
    in_flight: deque[torch.Tensor] = deque()
    for group in port.ddp_buckets(tensors, [_BROADCAST_BYTES]) if tensors else []:
        if len(in_flight) == _BROADCASTS_IN_FLIGHT:
            in_flight.popleft()
        members = [tensors[index] for index in group]
        if len(members) > 1 or not members[0].is_contiguous():  # one alone is sent as it is
            in_flight.append(members[0].new_empty(sum(tensor.numel() for tensor in members)))
            recorder.label(in_flight, "communication")


def _gradient_ready(wrapper: weakref.ref[_Wrapper], index: int, _: torch.Tensor) -> None:
    alive = wrapper()
    if alive is not None:
        alive.gradient_ready(index)


# -- what runs inside the wrapper


def _wrap_training_step(module_copy: nn.Module, wrapper: _Wrapper) -> None:
    module, step = cast("LightningModule", module_copy), cast("Any", module_copy.training_step)

    @functools.wraps(step)
    def inside(*args: object, **kwargs: object) -> object:
        wrapper.before_forward()
        output = step(*args, **kwargs)
        # all but the last micro-batch before a step leave their gradients on their rank
        accumulates = lightning.accumulates(module.trainer)
        return wrapper.after_forward(output, syncs=module.automatic_optimization and not accumulates)

    module_copy.training_step = inside  # type: ignore[assignment]


def _wrap_manual_backward(module_copy: nn.Module, wrapper: _Wrapper) -> None:
    """Wrap ``manual_backward``: under manual optimization each call reduces gradients (`DDPStrategy.pre_backward`)."""
    backward = cast("Any", module_copy.manual_backward)

    @functools.wraps(backward)
    def inside(*args: object, **kwargs: object) -> None:
        wrapper.rebuild()
        wrapper.prepare_for_backward()
        backward(*args, **kwargs)
        wrapper.after_manual_backward()

    module_copy.manual_backward = inside  # type: ignore[assignment]


class _Sink(torch.autograd.Function):
    """`_DDPSink`: copies what the step returns, and knows when the backward pass begins."""

    @staticmethod
    def forward(ctx: Any, wrapper: Callable[[], _Wrapper | None], *outputs: object) -> object:
        ctx.set_materialize_grads(False)
        ctx.wrapper = wrapper
        return tuple(output.clone() if isinstance(output, torch.Tensor) else output for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> object:
        wrapper = ctx.wrapper()
        if wrapper is not None:
            wrapper.backward_begins()
        return (None, *grads)


def _through_sink(wrapper: _Wrapper, output: object) -> object:
    leaves, spec = tree_flatten(output)
    copies = _Sink.apply(weakref.ref(wrapper), *leaves)  # type: ignore[no-untyped-call]
    keeps = [isinstance(leaf, torch.Tensor) and leaf.grad_fn is None for leaf in leaves]
    return tree_unflatten([one if keep else two for keep, one, two in zip(keeps, leaves, copies, strict=True)], spec)


# -- the module, as DDP reads it


def _ignored_by(module_copy: nn.Module) -> frozenset[str]:
    return frozenset(getattr(module_copy, "_ddp_params_and_buffers_to_ignore", ()))  # checked on torch 2.13


def _states_of(module_copy: nn.Module, *, parameters: bool = True, buffers: bool) -> list[torch.Tensor]:
    """Return the tensors that the ranks broadcast to agree on."""
    ignored = _ignored_by(module_copy)
    named: list[tuple[str, torch.Tensor]] = [*module_copy.named_parameters()] if parameters else []
    named += module_copy.named_buffers() if buffers else []
    return [tensor for name, tensor in named if name not in ignored]


def _reduced_parameters(module_copy: nn.Module) -> tuple[list[nn.Parameter], list[bool]]:
    """Parameters that need a gradient, each once, and which of them will have a sparse one."""
    ignored = _ignored_by(module_copy)
    found: dict[nn.Parameter, bool] = {}
    for path, module in module_copy.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and f"{path}.{name}" not in ignored:
                embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
                found.setdefault(parameter, embeds and bool(module.sparse))
    return list(found), list(found.values())


def _view(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A part of a bucket, with the parameter's strides if that is dense: then a tensor like it has its strides."""
    if torch.empty_like(parameter, device="meta").stride() == parameter.stride():
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)
