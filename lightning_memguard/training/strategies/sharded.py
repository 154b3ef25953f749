"""A training that shards, on one of its ranks: FSDP, FSDP2 and tensor parallelism as Lightning sets them up.

The shadow Trainer is given a copy of the user's own strategy, as the first rank of a process group whose other ranks do
not exist (`lightning_memguard.core.simulation.one_rank`): what it wraps, gathers and reduces is seen like all else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import nothing
from lightning_memguard.core.simulation.one_rank import one_rank_of
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import is_a
from lightning_memguard.training.strategies import deepspeed

if TYPE_CHECKING:
    from pytorch_lightning import Trainer
    from pytorch_lightning.plugins import Precision
    from pytorch_lightning.strategies import ParallelStrategy, Strategy

    _Strategy = ParallelStrategy
else:
    _Strategy = object

CAPTURED = ("FSDPStrategy", "ModelParallelStrategy")


@dataclass(frozen=True)
class Layout:
    """The ranks of a training that shards, of which one is captured.

    Attributes:
        strategy: the user's; only copies of it run.
        devices: ranks on each node.
        nodes: how many nodes.
    """

    strategy: Strategy
    devices: int
    nodes: int = 1

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.devices * self.nodes

    @classmethod
    def of(cls, strategy: Any, devices: int = 0, nodes: int = 0) -> Layout | None:
        """The ranks of a strategy that can be captured, else None; 0 is as many as the strategy has."""
        if not is_a(strategy, *CAPTURED, "DeepSpeedStrategy"):
            return None
        return cls(strategy, devices or max(1, strategy.num_processes), nodes or max(1, strategy.num_nodes))

    @property
    def begins_on_host(self) -> bool:
        """Whether the parameters stay on the host until they are sharded, as FSDP offloads or DeepSpeed moves them."""
        if self.is_deepspeed:
            return True
        return bool(getattr(getattr(self.strategy, "cpu_offload", None), "offload_params", False))

    @property
    def saves_shards(self) -> bool:
        """Whether each rank writes its own part of a checkpoint, without gathering it on the host."""
        return self.is_deepspeed or lightning.saves_shards(self.strategy)

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed's engine runs the module."""
        return is_a(self.strategy, "DeepSpeedStrategy")

    @property
    def whole(self) -> Layout:
        """Return the layout of the ranks, each with all parameters between two steps if DeepSpeed would divide them."""
        return replace(self, strategy=deepspeed.with_whole_parameters(self.strategy)) if self.is_deepspeed else self

    def refuse_divided(self, module: nn.Module) -> None:
        """Refuse a module that an earlier run has divided among its ranks.

        Raises:
            CannotTraceError: it is.
        """
        refuse_sharded(module)
        if self.is_deepspeed:
            deepspeed.refuse_partitioned(module)

    @contextlib.contextmanager
    def one_rank(self) -> Iterator[None]:
        """Make this process the first of the ranks, also to Lightning, while the context is open."""
        from lightning_utilities.core.rank_zero import rank_zero_only

        before = vars(rank_zero_only).get("rank")
        engine = deepspeed.deepspeed_on_fakes(self.ranks) if self.is_deepspeed else contextlib.nullcontext()
        with one_rank_of(self.ranks), engine:
            try:
                yield
            finally:
                vars(rank_zero_only).pop("rank", None) if before is None else vars(rank_zero_only).update(rank=before)

    def strategy_for(
        self, trainer: Trainer, device: torch.device, precision: Precision, start: Callable[[nn.Module], None]
    ) -> Strategy:
        """A copy of the strategy to run a copy of the module with.

        Args:
            trainer: the shadow Trainer, made for one device.
            device: where the copy runs.
            precision: the plugin to run with.
            start: called with the module as it is trained, before it has optimizers.
        """
        mixins = (OneRankStrategyMixin, *((deepspeed.ZeroMixin,) if self.is_deepspeed else ()))
        kind: Any = type(type(self.strategy).__name__, (*mixins, type(self.strategy)), {})
        own = kind.__new__(kind)
        vars(own).update(vars(self.strategy))
        kwargs = self.arguments(getattr(own, "kwargs", {}))
        vars(own).update(kwargs=kwargs, num_nodes=self.nodes, start=start, **lightning.as_before_setup(own))
        self.place(own, device, trainer.strategy.accelerator)
        own.precision_plugin = precision
        if self.is_deepspeed:
            own.prepare()
        return own  # type: ignore[no-any-return]

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the strategy passes to FSDP, without objects of a real group of processes.

        Raises:
            CannotTraceError: it was given such a group, which cannot be made again.
        """
        kwargs = dict(given)
        if "process_group" in kwargs:
            raise CannotTraceError(f"{type(self.strategy).__name__} was given process groups of its own")
        mesh = kwargs.get("device_mesh")
        if mesh is not None and not isinstance(mesh, tuple):
            kwargs["device_mesh"] = tuple(mesh.shape)  # made again by `setup_environment`
        return kwargs

    def place(self, own: Any, device: torch.device, accelerator: object = None) -> None:
        """Put a copy of the strategy on its rank and device."""
        own.parallel_devices, own.cluster_environment = [device] * self.devices, _Environment(self)
        own.accelerator = _AnyDevice(accelerator)


def communicators(strategy: Any) -> int:
    """How many groups of several ranks a rank talks to: all of them, and those of its row and column in a mesh."""
    if is_a(strategy, "ModelParallelStrategy"):
        return 1 + lightning.mesh_dimensions(strategy)
    return 3 if is_a(strategy, "FSDPStrategy") and "HYBRID" in strategy.sharding_strategy.name else 1


def refuse_sharded(module: nn.Module) -> None:
    """A module of an earlier run may be sharded already, over the ranks of that run.

    Raises:
        CannotTraceError: it is.
    """
    for each in module.modules():
        own = port.parameters_of(each).values()
        if is_a(each, "FullyShardedDataParallel", "FSDPModule") or any(is_a(one, "DTensor") for one in own):
            raise CannotTraceError("its parameters are sharded already, as an earlier run has left them")


class _AnyDevice:
    """An accelerator that does not touch the device."""

    def __init__(self, original: object) -> None:
        self.original = original

    setup_device = setup = teardown = staticmethod(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)


class _Environment:
    """A cluster of which this process is the first."""

    creates_processes_externally = True
    main_address, main_port = "localhost", 0

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def world_size(self) -> int:
        return self.layout.ranks

    def global_rank(self) -> int:
        return 0

    local_rank = node_rank = global_rank
    set_world_size = set_global_rank = teardown = validate_settings = staticmethod(nothing)


class OneRankStrategyMixin(lightning.TellsWrapped, _Strategy):
    """The user's strategy on the first of its ranks: it makes of the copy what it makes of the module."""

    def barrier(self, *_: object, **__: object) -> None:
        pass

    def broadcast(self, obj: object, *_: object, **__: object) -> Any:
        return obj

    def reduce_boolean_decision(self, decision: bool, *_: object, **__: object) -> bool:
        return decision

    def model_to_device(self) -> None:
        super().model_to_device()  # type: ignore[safe-super]
        if not is_a(self, "FSDPStrategy"):
            self.start(self.model)  # from here on storages are recorded

    def teardown(self) -> None:
        pass  # moves the model to the CPU
