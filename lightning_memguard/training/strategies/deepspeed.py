"""DeepSpeed's own engine on one of its ranks: its partitions, buckets and gathered parameters come from its own code.

The shadow Trainer runs a copy of Lightning's DeepSpeedStrategy, as of any that shards (`.sharded`), and that makes
DeepSpeed's engine and ZeRO optimizer on fake tensors. This differs from a run in: 1. DeepSpeed's globals are set aside.
2. Kernels are not built. 3. No gradient overflows. 4. Offload to NVMe is offload to the CPU. 5. Any optimizer may be
offloaded. Private names of DeepSpeed were checked on 0.19.8 (`benchmarks/deepspeed_truth.py` compares with real steps).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.core.foreign import call_around, nothing, patched
from lightning_memguard.core.simulation import one_rank
from lightning_memguard.core.simulation.constants import known_value
from lightning_memguard.core.torch_port import FakeTensor, tree_leaves
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.facts import lightning_port as lightning

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DeepSpeedStrategy as _Strategy
    from torch.optim import Optimizer
else:
    _Strategy = object

INSTALL = (
    "MemGuard runs DeepSpeed's own engine to predict its memory; DeepSpeed is not installed: pip install deepspeed"
)
_PARTS = {
    **dict.fromkeys(("bit16_groups_flat", "fp16_partitioned_groups_flat"), "parameters"),
    **dict.fromkeys(("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"), "optimizer_state"),
    **dict.fromkeys(("grad_partitions_flat_buffer", "averaged_gradients"), "gradients"),
    "temp_grad_buffer_for_gpu_offload": "communication",
}
_ALIGNMENT = 2  # ``nccl_start_alignment_factor`` of stages 1 and 2, in elements for each rank


def is_installed() -> bool:
    """Whether DeepSpeed can be imported."""
    return importlib.util.find_spec("deepspeed") is not None


def load() -> None:
    """Import DeepSpeed, whose logger would write to the output of a program that plans."""
    with contextlib.redirect_stdout(sys.stderr):
        importlib.import_module("deepspeed")


def refuse_partitioned(module: nn.Module) -> None:
    """A module of an earlier run, or made inside ``deepspeed.zero.Init``, has only this rank's partitions.

    Raises:
        CannotTraceError: it is such a module.
    """
    if any(hasattr(parameter, "ds_tensor") for parameter in module.parameters()):
        raise CannotTraceError("its parameters are partitioned already, as an earlier run has left them")


# -- around the engine


@contextlib.contextmanager
def deepspeed_on_fakes(ranks: int) -> Iterator[None]:
    """Let DeepSpeed run on fake tensors, on one of several ranks.

    Raises:
        CannotTraceError: DeepSpeed is not installed.
    """
    if not is_installed():
        raise CannotTraceError(INSTALL)
    logger, groups = _part("utils.logging").logger, _part("utils.groups")
    made: dict[str, Any] = {  # process groups, several of them, or facts about one
        name: {} if isinstance(value, dict) else None
        for name, value in vars(groups).items()
        if name.startswith("_") and name.isupper() and "UNSUPPORTED" not in name
    }
    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    environment, level = {name: os.environ[name] for name in here if name in os.environ}, logger.level
    with (
        patched(_part("comm.comm"), cdb=None),
        patched(_part("comm.torch"), build_shm_op=nothing),
        patched(_part("accelerator.real_accelerator"), ds_accelerator=None),
        patched(groups, mesh_device=None, **made),
        patched(_part("utils.nvtx"), enable_nvtx=False),
        port.nodes_all_run(),  # it knows of no walked backward pass
        port.applied_by(lambda _: _apply_in_place),
        patched(nn.functional, linear=nn.functional.linear),  # ZeRO 3 leaves its own there
        patched(FakeTensor, **{name: _without_overflow(name) for name in _READS}),
        without_kernels(),
    ):
        os.environ.update(here)
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
            for name in here:
                del os.environ[name]
            os.environ.update(environment)


def _part(name: str) -> Any:
    load()
    return importlib.import_module(f"deepspeed.{name}")


_READS = ("item", "__bool__", "__float__")


def _apply_in_place(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``Module.to`` on fake tensors: the optimizer has the parameters already, so these stay the same objects."""
    for each in module.modules() if recurse else (module,):
        for parameter in each.parameters(recurse=False):
            parameter.data = fn(parameter.data)
        buffers = port.buffers_of(each)
        buffers.update({name: fn(buffer) for name, buffer in buffers.items() if buffer is not None})
    return module


def _without_overflow(name: str) -> Any:
    """A method that reads a value: DeepSpeed's own code reads 0, for a step without overflow is not skipped."""
    read = getattr(Tensor, name)

    def answer(tensor: FakeTensor) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if not asks.startswith("deepspeed.") or known_value(tensor) is not None:
            return read(tensor)
        return False if name == "__bool__" else 0.0 if tensor.is_floating_point() else 0

    return answer


class _Kernels:
    """Compiled functions, none of which is called for its result."""

    def __getattr__(self, name: str) -> Any:
        return nothing


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let DeepSpeed's optimizers do all but compute: their kernels need a GPU, or are compiled on first use."""
    builder = types.SimpleNamespace(load=_Kernels)
    accelerator = types.SimpleNamespace(IntTensor=torch.tensor)
    replaced = {"FusedAdamBuilder": lambda: builder, "CPUAdamBuilder": lambda: builder}
    with ExitStack() as exits:
        for name in ("fused_adam", "cpu_adam"):  # of DeepSpeed 0.16 to 0.19
            module = sys.modules.get(f"deepspeed.ops.adam.{name}")
            for attribute, value in (*replaced.items(), ("get_accelerator", lambda: accelerator)):
                if hasattr(module, attribute) and (name, attribute) != ("cpu_adam", "get_accelerator"):
                    exits.enter_context(patched(module, **{attribute: value}))
        yield


# -- the strategy


class ZeroMixin(lightning.TellsOptimizer, _Strategy):
    """Lightning's DeepSpeedStrategy on the rank that holds most."""

    _initializes = False

    def prepare(self) -> None:
        """Let the copy write its own configuration once more: the user's may have been completed for another run."""
        config = copy.deepcopy(self.config) or {}
        if lightning.completes_again(self):
            for name in ("gradient_accumulation_steps", "gradient_clipping", "fp16", "bf16"):
                config.pop(name, None)
        config.pop("train_batch_size", None)  # the ranks planned for may be others
        zero = config.get("zero_optimization") or {}
        for name in ("offload_optimizer", "offload_param"):
            if (zero.get(name) or {}).get("device") == "nvme":
                zero[name] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False
        self.config = config

    def setup_environment(self) -> None:
        """Choose DeepSpeed's accelerator; the process group is there."""
        name = "CUDA" if self.root_device.type == "cuda" else "CPU"
        kind = getattr(_part(f"accelerator.{name.lower()}_accelerator"), f"{name}_Accelerator")
        _part("accelerator").set_accelerator(kind())
        self.set_world_ranks()
        self._join()

    def _join(self) -> None:
        _part("comm.comm").cdb = None
        _part("comm").init_distributed("fake", dist_init_required=False)

    @property
    def root_device(self) -> torch.device:
        """The rank's device; the engine reads its index, which a CPU does not have."""
        device = super().root_device
        return torch.device(device.type, device.index or 0) if self._initializes else device

    def init_deepspeed(self) -> None:
        """Make the engine."""
        with patched(self, _initializes=True):
            super().init_deepspeed()

    def optimizer_made(self, optimizer: Any) -> None:
        """Become the rank that holds most."""
        rank = 0 if self.zero_stage_3 else fullest_rank(optimizer, one_rank.ranks_here())
        if rank:
            one_rank.become(rank)
            self._join()


def with_whole_parameters(strategy: Any) -> Any:
    """A copy of the strategy whose stage of ZeRO leaves parameters whole."""
    own = copy.copy(strategy)
    own.config = copy.deepcopy(strategy.config)
    if own.zero_stage_3:
        own.config["zero_optimization"] = {"stage": 2}
    return own


def fullest_rank(optimizer: Optimizer, ranks: int) -> int:
    """The rank whose partitions touch parameters of most elements: it keeps the gradients of all of these."""

    def elements(rank: int) -> int:
        total = 0
        for group in optimizer.param_groups:
            sizes = [parameter.numel() for parameter in group["params"] if parameter.requires_grad]
            size = -(-sum(sizes) // (_ALIGNMENT * ranks)) * _ALIGNMENT
            offset = 0
            for count in sizes:
                if offset < (rank + 1) * size and offset + count > rank * size:
                    total += count
                offset += count
        return total

    return max(range(ranks), key=elements)


def step_partitions(optimizer: Any) -> None:
    """Step each of a ZeRO optimizer's partitions, without a backward pass before it."""
    parts = getattr(optimizer, "single_partition_of_fp32_groups", ()) or optimizer.fp32_partitioned_groups_flat
    for place, part in enumerate(parts):
        part.grad = torch.zeros_like(part)
        optimizer._optimizer_step(place)
        part.grad = None


def label(model: Any, recorder: Recorder) -> None:
    """Label what DeepSpeed's engine has allocated, and what it will."""
    optimizer = model.optimizer
    recorder.label([p.ds_tensor for p in model.module.parameters() if hasattr(p, "ds_tensor")], "parameters")
    for name, part in _PARTS.items():
        recorder.label(tree_leaves(getattr(optimizer, name, ())), part)

    def label_buckets(*_: object) -> None:
        buckets = getattr(optimizer, "ipg_buckets", {}).values()
        recorder.label(tree_leaves([bucket.buffer for bucket in buckets]), "communication")

    def label_flat(part: str, tensor: Tensor, *_: object) -> None:
        if tensor.dim() == 1:
            recorder.label([tensor], part)

    label_buckets()
    call_around(optimizer, "setup_buckets", after=label_buckets)
    offload = getattr(optimizer, "parameter_offload", optimizer)
    if hasattr(offload, "get_param_coordinator"):
        call_around(
            offload.get_param_coordinator(),
            "fetch_sub_module",
            after=lambda module, *_: recorder.label([p.data for p in module.parameters(recurse=False)], "gathered"),
        )
    for name, part in (("all_gather_into_tensor", "gathered"), ("all_reduce", "communication")):
        call_around(_part("comm.comm").cdb, name, before=functools.partial(label_flat, part))
