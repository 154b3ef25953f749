"""The memory of DeepSpeed's ZeRO: its partitions, buckets and gathered parameters, and when each comes and goes.

DeepSpeed is not needed: what it would allocate is allocated here on the shadow Trainer's copy of the module, at the
same moments. Read in DeepSpeed 0.19.8 (``deepspeed/runtime/zero/``: ``stage_1_and_2.py``, ``stage3.py``,
``partitioned_param_coordinator.py``, ``partition_parameters.py``), and compared with it on CPU tensors under a fake
process group (`benchmarks/deepspeed_truth.py`). Not proven: its CUDA streams and its offload, which need a GPU. Not
counted: NVMe offload's buffers, ZeRO++ (quantized or secondary partitions), MiCS, ZenFlow and Muon. Private names of
Lightning's DeepSpeedStrategy and of its precision plugin are read here, checked on 2.5.0 to 2.6.6.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.facts.lightning_types import is_a, lightning_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule
    from pytorch_lightning.plugins import Precision

_GATHER_STREAM, _REDUCE_STREAM = 2, 3  # CUDA streams of their own where communication overlaps
_ALIGNMENT = 2  # ``nccl_start_alignment_factor`` of stages 1 and 2, in elements for each rank
# ``DeepSpeedZeroConfig`` in config.py; all in elements. Lightning's own defaults are in DeepSpeedStrategy's config.
_BUCKET, _PREFETCH, _PERSISTENT, _LIVE = 500_000_000, 50_000_000, 100_000, 1_000_000_000
_DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Those settings of DeepSpeed that decide what it allocates.

    Attributes:
        stage: of ZeRO: 1 divides the optimizer's states, 2 also gradients, 3 also parameters.
        ranks: how many processes train together.
        dtype: that of the parameters that the step runs with; the optimizer's copy is always float32.
        overlap: whether communication runs on streams of its own; stages 1 and 2 then have two buckets.
        contiguous: whether gradients are copied into a bucket as they come.
        bucket: elements that are reduced at a time.
        offloads_optimizer: whether the optimizer's copy, states and step are off the device.
        offloads_parameters: whether the partitions of parameters are.
        prefetch: elements that are gathered ahead of their use.
        persistent: parameters of up to so many elements are gathered after each step, and kept.
        persistent_in_all: elements of all that are kept.
        live: gathered elements beyond which nothing is prefetched.
        reuse: parameters used again within so many elements are kept.
        sub_group: elements of a partition that the optimizer steps at a time.
    """

    stage: int
    ranks: int
    dtype: torch.dtype = torch.float32
    overlap: bool = False
    contiguous: bool = True
    bucket: int = _BUCKET
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    prefetch: int = _PREFETCH
    persistent: int = _PERSISTENT
    persistent_in_all: int = 1 << 62
    live: int = _LIVE
    reuse: int = _LIVE
    sub_group: int = _LIVE

    @classmethod
    def of(cls, strategy: object, precision: str, ranks: int) -> Settings | None:
        """The settings of Lightning's DeepSpeedStrategy; None for any other, and without ZeRO."""
        if not is_a(strategy, "DeepSpeedStrategy"):
            return None
        zero = (strategy.config or {}).get("zero_optimization") or {}  # type: ignore[attr-defined]
        stage = int(zero.get("stage", 0))
        if not stage:
            return None

        def number(name: str, default: int) -> int:
            return int(float(zero.get(f"stage3_{name}", zero.get(name, default))))

        def offloads(name: str) -> bool:
            return bool((zero.get(name) or {}).get("device", "none") != "none")

        overlap = zero.get("overlap_comm")
        offloads_optimizer = offloads("offload_optimizer")
        return cls(
            stage,
            ranks,
            _DTYPES[precision.partition("-")[0]],
            overlap=stage == 3 if overlap is None else bool(overlap),
            contiguous=bool(zero.get("contiguous_gradients", True)) or (offloads_optimizer and stage < 3),
            bucket=number("reduce_bucket_size", _BUCKET),
            offloads_optimizer=offloads_optimizer,
            offloads_parameters=stage == 3 and offloads("offload_param"),
            prefetch=number("prefetch_bucket_size", _PREFETCH),
            persistent=number("param_persistence_threshold", _PERSISTENT),
            persistent_in_all=number("model_persistence_threshold", 1 << 62),
            live=number("max_live_parameters", _LIVE),
            reuse=number("max_reuse_distance", _LIVE),
            sub_group=number("sub_group_size", _LIVE),
        )


def without_library(kind: Any, given: dict[str, Any]) -> Any:
    """A DeepSpeedStrategy to read settings from, where the library may be missing, with Lightning's own defaults."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    arguments = {each.name: each.default for each in parameters if each.default is not each.empty} | given
    own = kind.__new__(kind)
    named = inspect.signature(kind._create_default_config).parameters
    settings = {name: value for name, value in arguments.items() if name in named or name in _OF_ZERO}
    own.config = own._create_default_config(**settings)
    return own


# What `DeepSpeedStrategy.__init__` passes to ``_create_default_config`` as ``zero_kwargs``.
_OF_ZERO = (
    *("stage", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter", "sub_group_size"),
    *("allgather_bucket_size", "reduce_bucket_size"),
)


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let DeepSpeed's optimizers do all but compute: their kernels need a GPU, or are compiled on first use."""

    def nothing(*_: object, **__: object) -> None:
        pass

    loaded = types.SimpleNamespace(multi_tensor_adam=nothing, create_adam=nothing, destroy_adam=nothing)
    builder = types.SimpleNamespace(load=lambda: loaded)
    accelerator = types.SimpleNamespace(IntTensor=torch.tensor)
    replaced = {"FusedAdamBuilder": lambda: builder, "CPUAdamBuilder": lambda: builder}
    with contextlib.ExitStack() as exits:
        for name in ("fused_adam", "cpu_adam"):  # of DeepSpeed 0.16 to 0.19
            module = sys.modules.get(f"deepspeed.ops.adam.{name}")
            for attribute, value in (*replaced.items(), ("get_accelerator", lambda: accelerator)):
                if hasattr(module, attribute) and (name, attribute) != ("cpu_adam", "get_accelerator"):
                    exits.enter_context(mock.patch.object(module, attribute, value))
        yield


def refuse_partitioned(module: nn.Module) -> None:
    """A module of an earlier run, or made inside ``deepspeed.zero.Init``, has only this rank's partitions.

    Raises:
        CannotTraceError: it is such a module.
    """
    if any(hasattr(parameter, "ds_tensor") for parameter in module.parameters()):
        raise CannotTraceError("its parameters are partitioned already, as an earlier run has left them")


def engine_for(
    strategy: object, precision: str, ranks: int, module_copy: nn.Module, recorder: Recorder
) -> Engine | None:
    """What does to a copy, before it is recorded, what DeepSpeed would; None for any other strategy."""
    settings = Settings.of(strategy, precision, ranks)
    if settings is None or not any(True for _ in module_copy.parameters()):
        return None
    return (_Stage3 if settings.stage == 3 else _Stages1And2)(settings, module_copy, recorder)


class Engine:
    """DeepSpeed's engine and ZeRO optimizer for one copy of a module."""

    def __init__(self, settings: Settings, module_copy: nn.Module, recorder: Recorder) -> None:
        self.settings, self.module_copy, self.recorder = settings, module_copy, recorder
        self.parameters = [p for p in module_copy.parameters() if p.requires_grad]
        self.device = next(module_copy.parameters()).device
        self.optimizer_device = self._device(settings.offloads_optimizer)
        self.in_bucket: list[nn.Parameter] = []
        self.elements = self.rank = 0
        self.steps_now = True  # whether this backward pass is the last before a step

    def _device(self, offloaded: bool) -> torch.device:
        """Where it is; on the CPU, what is offloaded is on the meta device, as it is nothing that a rank shares."""
        return torch.device("meta" if self.device.type == "cpu" else "cpu") if offloaded else self.device

    def on_stream(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        """What is allocated inside is another stream's, where communication has its own."""
        on_gpu = self.settings.overlap and self.device.type == "cuda"
        return self.recorder.on_stream(stream) if on_gpu else contextlib.nullcontext()

    def empty(self, count: int, part: str, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a flat tensor."""
        made = torch.empty(count, dtype=dtype or self.settings.dtype, device=self.device)
        self.recorder.label([made], part)
        return made

    # -- called by the shadow Trainer

    def before_recording(self, *, trains: bool) -> None:
        """Called before the copy is recorded."""

    def evaluate(self, hook: str) -> None:
        """Called when the copy is recorded, to be evaluated by this hook."""

    def take_over(self, optimizers: list[Optimizer]) -> None:
        """Called when the optimizers are there: they step partitions from now on."""
        if len(optimizers) != 1:
            raise CannotTraceError(f"DeepSpeed trains with one optimizer; this module has {len(optimizers)}.")
        if not self.parameters:
            raise CannotTraceError("DeepSpeed needs a parameter that requires a gradient.")
        optimizer = optimizers[0]
        with torch.no_grad():
            self.partition(optimizer.param_groups)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        self._wrap_step("training_step")
        step = optimizer.step

        @functools.wraps(step)
        def stepping(closure: Callable[[], Any] | None = None, **_: object) -> Any:
            result = closure() if closure is not None else None
            with torch.no_grad():
                self.step(optimizer, cast("Callable[[], Any]", step))
            return result

        optimizer.step = stepping  # type: ignore[method-assign]

    def _wrap_step(self, hook: str) -> None:
        module: Any = self.module_copy
        step = getattr(module, hook)

        @functools.wraps(step)
        def inside(*args: object, **kwargs: object) -> object:
            self.before_forward()
            output = step(*args, **kwargs)
            if hook == "training_step":
                self.steps_now = not (module.automatic_optimization and module.trainer.fit_loop._should_accumulate())
            return self.after_forward(output)

        setattr(module, hook, inside)

    def before_forward(self) -> None:
        """The training step begins."""

    def after_forward(self, output: object) -> object:
        """The training step ends; what it returns may be passed on as another tensor."""
        return output

    def after_backward(self) -> None:
        """A backward pass has ended."""
        with torch.no_grad():
            self.reduce()
            self.collect()

    # -- what the stages differ in

    def partition(self, groups: list[dict[str, Any]]) -> None:
        """Divide the parameters of the optimizer's groups, and put this rank's partitions in their place."""
        raise NotImplementedError

    def gradient_ready(self, parameter: Tensor) -> None:
        """A hook: the gradient of a parameter is there."""
        raise NotImplementedError

    def reduce(self) -> None:
        """Reduce the gradients in the bucket."""
        raise NotImplementedError

    def collect(self) -> None:
        """All gradients of a backward pass are reduced."""

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        """Step the partitions, each by the optimizer's own ``step``."""
        raise NotImplementedError

    # -- what they share

    def _norm(self, gradients: Iterable[Tensor]) -> None:
        for gradient in gradients:
            torch.linalg.vector_norm(gradient.to(torch.float64))  # ``get_norm_dtype``

    def _step_one(
        self, optimizer: Optimizer, step: Callable[[], Any], partition: Tensor, group: int, *, last: bool
    ) -> None:
        """Step one partition alone; callers after a step are called once, after the last."""
        groups = optimizer.param_groups
        chosen = {**groups[group], "params": [partition]}
        quiet: Any = (
            contextlib.nullcontext() if last else mock.patch.object(optimizer, "_optimizer_step_post_hooks", {})
        )
        with mock.patch.object(optimizer, "param_groups", [chosen]), quiet:
            step()


# -- stages 1 and 2


@dataclass
class _Group:
    """A group of the optimizer: its parameters in one flat tensor, and the partition that this rank steps."""

    parameters: list[nn.Parameter]
    offsets: list[int]
    partition: Tensor
    gradients: list[Tensor] = field(default_factory=list)

    def ranks_of(self, index: int) -> range:
        """The ranks whose partitions a parameter is in."""
        first, count, size = self.offsets[index], self.parameters[index].numel(), self.partition.numel()
        return range(first // size, (first + max(count, 1) - 1) // size + 1)


class _Stages1And2(Engine):
    """``DeepSpeedZeroOptimizer`` of stage_1_and_2.py: parameters stay whole."""

    def partition(self, groups: list[dict[str, Any]]) -> None:
        settings = self.settings
        flats = [self._flatten(group["params"]) for group in groups]
        self.rank = max(range(settings.ranks), key=lambda each: self._elements_of(flats, each))
        self.groups = []
        for group, (parameters, offsets, flat) in zip(groups, flats, strict=True):
            size = flat.numel() // settings.ranks
            partition = flat[:size].clone().to(self.optimizer_device, torch.float32)
            self.recorder.label([partition], "optimizer_state")
            partition.requires_grad_(True)
            group["params"] = [partition]
            self.groups.append(_Group(parameters, offsets, partition))
        self.place = {p: (group, at) for group in self.groups for at, p in enumerate(group.parameters)}
        self.buffers: list[Tensor] = []
        self.collected: Tensor | None = None
        self.collected_elements = 0
        if settings.offloads_optimizer:  # ``temp_grad_buffer_for_gpu_offload``
            self.offload_buffer = self.empty(max(p.numel() for p in self.place), "communication")

    def _flatten(self, given: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[int], Tensor]:
        parameters = [p for p in given if p.requires_grad]
        count = sum(p.numel() for p in parameters)
        padding = -count % (_ALIGNMENT * self.settings.ranks)
        pads = [torch.zeros(padding, dtype=self.settings.dtype, device=self.device)] if padding else []
        flat = torch.cat([*(p.detach().reshape(-1) for p in parameters), *pads])
        self.recorder.label([flat], "parameters")
        offsets, offset = [], 0
        for parameter in parameters:
            offsets.append(offset)
            parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        return parameters, offsets, flat

    def _elements_of(self, flats: list[tuple[list[nn.Parameter], list[int], Tensor]], rank: int) -> int:
        """The elements of all parameters that a rank's partitions touch."""
        total = 0
        for parameters, offsets, flat in flats:
            size = flat.numel() // self.settings.ranks
            low, high = rank * size, (rank + 1) * size
            each = zip(parameters, offsets, strict=True)
            total += sum(p.numel() for p, at in each if at < high and at + p.numel() > low)
        return total

    def _is_mine(self, parameter: nn.Parameter) -> bool:
        group, at = self.place[parameter]
        return self.rank in group.ranks_of(at)

    def gradient_ready(self, parameter: Tensor) -> None:
        settings = self.settings
        if settings.contiguous and not self.buffers:  # ``setup_buckets``
            count = 2 if settings.overlap else 1
            self.buffers = [self.empty(settings.bucket, "communication") for _ in range(count)]
        if settings.stage == 2 or (settings.overlap and self.steps_now):
            self._fill_bucket(parameter)

    def _fill_bucket(self, parameter: Tensor) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``."""
        settings, gradient, count = self.settings, parameter.grad, parameter.numel()
        if gradient is None:
            return
        if self.elements + count > settings.bucket:
            self.reduce()
            self.buffers.reverse()
        if settings.contiguous and count <= settings.bucket:
            with torch.no_grad():
                copied = self.buffers[0][self.elements : self.elements + count]
                copied.copy_(gradient.reshape(-1))
            parameter.grad = copied.view(parameter.shape)
        self.in_bucket.append(cast("nn.Parameter", parameter))
        self.elements += count

    def reduce(self) -> None:
        """``reduce_ipg_grads``: a copy of all gradients in the bucket is reduced."""
        if not self.in_bucket:
            return
        with self.on_stream(_REDUCE_STREAM):
            if self._is_copied():
                self.empty(self.elements, "communication")
            for parameter in self.in_bucket:
                if not self._is_mine(parameter):
                    if self.settings.stage == 2:
                        parameter.grad = None
                elif self.settings.offloads_optimizer:
                    self._offload(parameter)
                elif self.settings.contiguous:
                    self._keep(parameter)
        self.in_bucket, self.elements = [], 0

    def _is_copied(self) -> bool:
        """Whether there are several slices to reduce: parameters next to each other in one rank's are one."""
        if not self.settings.contiguous:
            return len(self.in_bucket) > 1
        slices = [rank for p in self.in_bucket for rank in self.place[p][0].ranks_of(self.place[p][1])]
        return len({*slices}) > 1

    def _keep(self, parameter: nn.Parameter) -> None:
        """``copy_grads_in_partition``: the bucket will be written again."""
        if self.collected is None:
            count = sum(p.numel() for p in self.place if self._is_mine(p))
            self.collected, self.collected_elements = self.empty(count, "gradients"), 0
        start, self.collected_elements = self.collected_elements, self.collected_elements + parameter.numel()
        kept = self.collected[start : self.collected_elements]
        if parameter.grad is not None:
            kept.copy_(parameter.grad.reshape(-1))
        parameter.grad = kept.view(parameter.shape)

    def _offload(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and self.steps_now:
            self._norm([parameter.grad])
            parameter.grad.to(torch.float32)
        parameter.grad = None

    def collect(self) -> None:
        """``independent_gradient_partition_epilogue``."""
        if self.settings.stage == 1 and not self.steps_now:
            return
        if not self.settings.overlap and self.settings.stage == 1:
            for parameter in self.place:  # ``reduce_gradients``
                self._fill_bucket(parameter)
            self.reduce()
        for group in () if self.settings.offloads_optimizer else self.groups:
            mine = [p for p in group.parameters if self._is_mine(p)]
            found = [p.grad.detach() if p.grad is not None else torch.zeros_like(p) for p in mine]
            if group.gradients:
                for old, new in zip(group.gradients, found, strict=True):
                    old.add_(new)
            else:
                group.gradients = found
                self.recorder.label(found, "gradients")
            del found
        self.collected, self.buffers = None, []
        for parameter in self.place:
            parameter.grad = None

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        if self.settings.offloads_optimizer:
            return _call_after(optimizer)
        self._norm(gradient for group in self.groups for gradient in group.gradients)
        for place, group in enumerate(self.groups):
            flat = group.gradients[0].reshape(-1)
            if len(group.gradients) != 1 or flat.numel() != group.partition.numel():
                flat = self.empty(group.partition.numel(), "gradients")
            group.partition.grad = flat.to(torch.float32)
            self.recorder.label([group.partition.grad], "gradients")
            del flat
            group.gradients = []
            self._step_one(optimizer, step, group.partition, place, last=group is self.groups[-1])
            group.partition.grad = None
        return None


def _call_after(optimizer: Optimizer) -> None:
    """The step itself runs off the device."""
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


# -- stage 3


@dataclass(eq=False)
class _Shard:
    """One parameter: its partition on this rank, and whether it is gathered."""

    parameter: nn.Parameter
    size: int  # of its partition
    nbytes: int
    persistent: bool = False
    gathered: bool = False
    users: set[nn.Module] = field(default_factory=set)
    fetched_for: int = -1  # the last use that it was fetched for

    @property
    def count(self) -> int:
        return self.parameter.numel()


@dataclass(eq=False)
class _Gathering:
    """``AllGatherCoalescedHandle``: a flat tensor of several parameters, until the last of them was waited for."""

    shards: list[_Shard]
    flat: Tensor | None
    done: bool = False


class _Stage3(Engine):
    """``DeepSpeedZeroOptimizer_Stage3`` and ``PartitionedParameterCoordinator``."""

    def __init__(self, settings: Settings, module_copy: nn.Module, recorder: Recorder) -> None:
        super().__init__(settings, module_copy, recorder)
        kept, self.shards = 0, dict[nn.Parameter, _Shard]()
        for parameter in module_copy.parameters():
            count = parameter.numel()
            shard = _Shard(parameter, -(-count // settings.ranks), count * parameter.element_size())
            if count <= settings.persistent and kept + count <= settings.persistent_in_all:
                shard.persistent = True
                kept += count
            self.shards[parameter] = shard
        self.in_flight: dict[_Shard, _Gathering] = {}
        self.order: list[nn.Module] = []  # of the modules as they are fetched, both ways
        self.queue: deque[tuple[_Shard, int]] = deque()
        self.state = "off"  # then "recording", then "complete"
        self.fetches = self.available = 0

    # -- the states

    def before_recording(self, *, trains: bool) -> None:
        """Under ``configure_model``, parameters are never whole: Lightning calls it inside ``deepspeed.zero.Init``."""
        base, kind = lightning_of(self.module_copy).LightningModule, cast("Any", type(self.module_copy))
        if not trains or kind.configure_model is not base.configure_model:
            for shard in self.shards.values():
                shard.parameter.untyped_storage().resize_(0)

    def evaluate(self, hook: str) -> None:
        """Parameters are gathered as in training; what else training keeps is counted there."""
        if not self.settings.offloads_parameters:
            self._frozen.extend(self.empty(shard.size, "parameters") for shard in self.shards.values())
        self._follow_modules()
        self._wrap_step(hook)

    def partition(self, groups: list[dict[str, Any]]) -> None:
        settings, trained = self.settings, {p for group in groups for p in group["params"] if p.requires_grad}
        parts: list[Tensor] = []
        for shard in self.shards.values():
            if not settings.offloads_parameters:
                part = self.empty(shard.size, "parameters")
                (parts if shard.parameter in trained else self._frozen).append(part)
            self._free(shard)
        parts.clear()  # ``defragment`` moves them through the host
        self.sub_groups: list[tuple[int, list[_Shard], Tensor]] = []
        self.flats: list[Tensor] = []
        for place, group in enumerate(groups):
            for members in self._sub_groups([self.shards[p] for p in group["params"] if p.requires_grad]):
                size = sum(shard.size for shard in members)
                flat = torch.empty(size, dtype=settings.dtype, device=self._device(settings.offloads_parameters))
                self.recorder.label([flat], "parameters")
                self.flats.append(flat)
                converted = flat.to(self.optimizer_device, torch.float32)
                partition = converted.clone()  # of float32 parameters too
                del converted
                self.recorder.label([partition], "optimizer_state")
                self.sub_groups.append((place, members, partition.detach().requires_grad_(True)))
            group["params"] = [partition for at, _, partition in self.sub_groups if at == place]
        largest = max(partition.numel() for _, _, partition in self.sub_groups)
        if not settings.offloads_optimizer:
            self.empty(largest, "gradients", torch.float32)  # ``initialize_optimizer_states``
        if settings.contiguous:
            self.bucket = self.empty(settings.bucket, "communication")
        count = sum(shard.size for _, members, _ in self.sub_groups for shard in members)
        self.reduced = torch.zeros(count, dtype=settings.dtype, device=self.optimizer_device)
        self.recorder.label([self.reduced], "gradients")
        self._follow_modules()

    @functools.cached_property
    def _frozen(self) -> list[Tensor]:
        return []

    def _sub_groups(self, shards: list[_Shard]) -> list[list[_Shard]]:
        if self.settings.sub_group >= sum(shard.size for shard in shards):
            return [shards]
        found: list[list[_Shard]] = [[]]
        for shard in shards:
            if sum(each.size for each in found[-1]) >= self.settings.sub_group:
                found.append([])
            found[-1].append(shard)
        return found

    def gradient_ready(self, parameter: Tensor) -> None:
        settings, count = self.settings, parameter.numel()
        if parameter.grad is None:
            return
        if self.elements + count > settings.bucket and self.elements:
            self.reduce()
        if settings.contiguous and self.elements + count <= settings.bucket:
            with torch.no_grad():
                copied = self.bucket[self.elements : self.elements + count].view(parameter.shape)
                copied.copy_(parameter.grad)
            parameter.grad = copied
        self.in_bucket.append(cast("nn.Parameter", parameter))
        self.elements += count

    def reduce(self) -> None:
        """``reduce_scatter_coalesced``: the gradients are laid out by rank in a new tensor, reduced into the buffer."""
        if not self.in_bucket:
            return
        ranks = self.settings.ranks
        with self.on_stream(_REDUCE_STREAM):
            padded = sum(self.shards[p].size for p in self.in_bucket) * ranks
            if len(self.in_bucket) > 1 or self.in_bucket[0].numel() % ranks:
                self.empty(padded, "communication")
            for parameter in self.in_bucket:
                parameter.grad = None
        self.in_bucket, self.elements = [], 0

    def step(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        for shard in [*self.in_flight]:
            self._wait(shard)
        for shard in self.shards.values():
            shard.users.clear()
            self._release(shard)
        if self.settings.dtype == torch.float16:
            torch.isinf(self.reduced).any()
            torch.isnan(self.reduced).any()
        if self.settings.offloads_optimizer:
            _call_after(optimizer)
        else:
            self._step_here(optimizer, step)
        for shard in self.shards.values():
            if shard.persistent:
                self._allocate(shard, shard.size * self.settings.ranks * self.reduced.element_size())

    def _step_here(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        self._norm(self.reduced[: shard.size] for _, members, _ in self.sub_groups for shard in members)
        for place, members, partition in self.sub_groups:
            flat = self.empty(partition.numel(), "gradients") if len(members) > 1 else self.reduced
            partition.grad = flat[: partition.numel()].to(torch.float32)
            self.recorder.label([partition.grad], "gradients")
            del flat
            self._step_one(optimizer, step, partition, place, last=partition is self.sub_groups[-1][2])
            partition.grad = None

    # -- gathering

    def _allocate(self, shard: _Shard, nbytes: int) -> None:
        shard.parameter.untyped_storage().resize_(nbytes)
        self.recorder.label([shard.parameter], "gathered")
        shard.gathered = True

    def _free(self, shard: _Shard) -> None:
        shard.parameter.untyped_storage().resize_(0)
        self.recorder.label([shard.parameter], "gathered")
        shard.gathered = False

    def _gather(self, shards: Iterable[_Shard]) -> None:
        absent = [shard for shard in shards if not shard.gathered and shard not in self.in_flight]
        if not absent:
            return
        self.available += sum(shard.count for shard in absent)
        sizes = [shard.size * self.settings.ranks for shard in absent]
        with self.on_stream(_GATHER_STREAM):
            flat = None
            if len(absent) > 1:
                flat = self.empty(sum(sizes), "gathered")
            else:
                self._allocate(absent[0], sizes[0] * absent[0].parameter.element_size())
            if self.settings.offloads_parameters:
                self.empty(max(shard.size for shard in absent), "communication")
        gathering = _Gathering(absent, flat, done=flat is None)
        self.in_flight |= dict.fromkeys(absent, gathering)

    def _wait(self, shard: _Shard) -> None:
        gathering = self.in_flight.pop(shard, None)
        if gathering is not None and not gathering.done:
            with self.on_stream(_GATHER_STREAM):
                for each in gathering.shards:
                    self._allocate(each, each.nbytes)
            gathering.done = True

    def _release(self, shard: _Shard) -> None:
        if shard.gathered and shard not in self.in_flight and not shard.users:
            self._free(shard)
            self.available -= shard.count

    def _own(self, module: nn.Module) -> list[_Shard]:
        return [self.shards[parameter] for parameter in module.parameters(recurse=False)]

    def fetch(self, module: nn.Module) -> None:
        """``fetch_sub_module``: gather what a module needs now, then some of what comes next."""
        if self.state == "complete" and (self.fetches >= len(self.order) or self.order[self.fetches] is not module):
            self.state, self.order = "off", []
        if self.state == "recording":
            self.order.append(module)
        own = self._own(module)
        self._gather(own)
        for shard in own:
            shard.users.add(module)
            self._wait(shard)
        if self.state == "complete":
            self._prefetch(own)
        self.fetches += 1

    def _prefetch(self, own: list[_Shard]) -> None:
        waiting = {shard for shard in own if shard.fetched_for < self.fetches}
        passed: set[_Shard] = set()
        while self.queue and len(passed) < len(waiting):
            shard, used_at = self.queue.popleft()
            shard.fetched_for = used_at
            passed.add(shard)
        most = min(self.settings.live - self.available, self.settings.prefetch)
        ahead: dict[_Shard, None] = {}
        count = 0
        while self.queue and count < most:
            shard, used_at = self.queue.popleft()
            shard.fetched_for = max(shard.fetched_for, used_at)
            if not shard.gathered and shard not in self.in_flight and shard not in ahead:
                ahead[shard] = None
                count += shard.count
        self._gather(ahead)

    def release(self, module: nn.Module) -> None:
        """``release_sub_module``."""
        own = self._own(module)
        kept: set[_Shard] = set()
        if self.state == "complete":
            kept = {shard for shard in own if shard.persistent or shard.fetched_for > self.fetches}
            traversed = 0
            for later in self.order[self.fetches :]:
                if traversed >= self.settings.reuse:
                    break
                for shard in self._own(later):
                    kept.add(shard)
                    traversed += shard.count
        for shard in own:
            shard.users.discard(module)
            if shard not in kept:
                self._release(shard)

    def _reset(self) -> None:
        """``reset_step``: a training step begins; from the second one on, the order of modules is known."""
        for shard in [*self.in_flight]:
            self._wait(shard)
            self._release(shard)
        if self.state == "recording":
            self.state = "complete"
        elif self.state == "off":
            self.state = "recording"
        uses = [(shard, at) for at, module in enumerate(self.order) for shard in self._own(module)]
        self.queue = deque(uses if self.state == "complete" else ())
        for shard in self.shards.values():
            shard.fetched_for = -1
        self.fetches = self.available = 0

    # -- the module's hooks

    def _follow_modules(self) -> None:
        for module in self.module_copy.modules():
            module.register_forward_pre_hook(self._before_module)
            module.register_forward_hook(self._after_module)

    def before_forward(self) -> None:
        self._reset()
        self.fetch(self.module_copy)

    def after_forward(self, output: object) -> object:
        return self._after_module(self.module_copy, None, output)

    def _before_module(self, module: nn.Module, inputs: tuple[object, ...]) -> object:
        self.fetch(module)
        branch = _Branch(lambda: self.release(module))
        return tree_map(branch.end, inputs)

    def _after_module(self, module: nn.Module, _: object, output: object) -> object:
        self.release(module)
        return tree_map(lambda each: _begin(each, lambda: self.fetch(module)), output)


class _Branch:
    """Calls a function when the gradients of all inputs of a module are there."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.left = call, 0

    def end(self, value: object) -> object:
        if not (isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()):
            return value
        self.left += 1
        return _Mark.apply(value, self._one_less)  # type: ignore[no-untyped-call]

    def _one_less(self) -> None:
        self.left -= 1
        if not self.left:
            self.call()


def _begin(value: object, call: Callable[[], None]) -> object:
    if not (isinstance(value, Tensor) and value.requires_grad):
        return value
    return _Mark.apply(value, call)  # type: ignore[no-untyped-call]


class _Mark(torch.autograd.Function):
    """Passes a tensor on, and calls a function in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.no_grad():
            ctx.call()
        return (*gradients, None)


# -- precision


def precision_of(module: LightningModule, precision: str) -> Precision:
    """What DeepSpeedPrecision does to module and batch, without DeepSpeed: there is no autocast."""
    base = lightning_of(module).plugins.Precision
    plugin: Precision = type("ZeroPrecision", (_ZeroPrecision, base), {})(precision)
    return plugin


class _ZeroPrecision:
    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.dtype = _DTYPES[precision.partition("-")[0]]

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Under "-true" Lightning converts buffers too; else the engine converts parameters alone."""
        if "true" in self.precision:
            return module.to(self.dtype)
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.dtype)
        return module

    def convert_input(self, data: Any) -> Any:
        """Lightning converts the floating-point tensors of a batch."""

        def convert(value: object) -> object:
            return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return tree_map(convert, data)

    def clip_gradients(self, *_: object, **__: object) -> None:
        """DeepSpeed scales its partitions in place."""
