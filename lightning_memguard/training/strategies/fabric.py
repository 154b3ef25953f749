"""A plain module on one of several ranks, set up as Fabric sets it up: FSDP, FSDP2, tensor parallelism and DDP.

Fabric's own strategy wraps the copy, as the first rank of a process group whose other ranks do not exist; but for DDP,
which is counted by rule.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from lightning_memguard.core.capture.capture import quiet
from lightning_memguard.core.capture.program import LoopProgram, device_to_run_on
from lightning_memguard.core.capture.recorder import Recorder
from lightning_memguard.errors import MemGuardError
from lightning_memguard.training.facts import lightning_port as lightning
from lightning_memguard.training.facts.lightning_types import is_a, wraps_in_ddp
from lightning_memguard.training.strategies import ddp
from lightning_memguard.training.strategies.sharded import CAPTURED, Layout, refuse_sharded

if TYPE_CHECKING:
    from lightning_memguard.core.torch_port import FakeTensorMode

_PACKAGES = ("lightning.fabric", "lightning_fabric")
_NAMES = ("ddp", "fsdp")
# What Fabric's connector takes (`_check_and_init_precision`); DDP takes all.
_PRECISIONS = {
    "FSDPStrategy": ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"),
    "ModelParallelStrategy": ("32-true", "bf16-mixed", "bf16-true", "16-true"),
}


def is_fabrics(strategy: object) -> bool:
    """Whether a strategy is Fabric's, of either package."""
    return bool(_package_of(strategy))


def strategy_of(strategy: object) -> Any:
    """Fabric's strategy for a plain module: the one that is given, or the one of this name.

    Raises:
        MemGuardError: a plain module cannot be planned for under it.
    """
    if isinstance(strategy, str):
        name = "ddp" if strategy == "auto" else strategy
        strategies = importlib.import_module(f"{_package()}.strategies")
        if name.startswith(_NAMES) and name in strategies.STRATEGY_REGISTRY:
            with quiet():
                return strategies.STRATEGY_REGISTRY.get(name)
    elif is_fabrics(strategy) and (is_a(strategy, *CAPTURED) or wraps_in_ddp(strategy)):
        return strategy
    given = repr(strategy) if isinstance(strategy, str) else f"{type(strategy).__module__}.{type(strategy).__name__}"
    raise MemGuardError(
        f"strategy={given} is not for a plain module: give 'ddp', 'fsdp', or the DDPStrategy, FSDPStrategy or "
        f"ModelParallelStrategy of {_package()}.strategies; or a LightningModule, for those of a Trainer."
    )


def _package_of(strategy: object) -> str:
    names = [f"{cls.__module__}." for cls in type(strategy).__mro__ if cls.__name__ == "Strategy"]
    return next((package for package in _PACKAGES for name in names if name.startswith(f"{package}.")), "")


def _package() -> str:
    """The package that is in use, else the one that is installed with ours."""
    return next((package for package in _PACKAGES if package in sys.modules), _PACKAGES[-1])


@dataclass(frozen=True)
class FabricProgram(LoopProgram):
    """A plain module in PyTorch's loop, as ``Fabric.setup`` leaves it.

    Attributes: those of `LoopProgram`, and
        strategy: Fabric's; only copies of it run.
        devices: ranks on each node.
        nodes: how many nodes.
    """

    strategy: Any = None
    devices: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, known in _PRECISIONS.items():
            if is_a(self.strategy, kind) and self.precision not in known:
                raise MemGuardError(f"precision={self.precision!r} is not one of {kind}'s: {', '.join(known)}.")

    @override
    def with_bucket_views(self) -> FabricProgram | None:
        return ddp.with_bucket_views(self)

    @property
    def _layout(self) -> Layout | None:
        return Layout.of(self.strategy, self.devices, self.nodes)

    @property
    def _least_steps(self) -> int:
        return ddp.steps_until_steady(self.strategy)

    def _group(self) -> contextlib.AbstractContextManager[None]:
        return self._layout.one_rank() if self._layout else contextlib.nullcontext()

    def _place_of_copy(self, *, fake: bool) -> torch.device:
        on_host = self._layout is not None and self._layout.begins_on_host
        return torch.device("cpu") if on_host else super()._place_of_copy(fake=fake)

    def _autocast(self, *, fake: bool) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002 - Fabric's module does
        return contextlib.nullcontext()

    def _module_copy(self, mode: FakeTensorMode | None) -> nn.Module:
        refuse_sharded(self.model)
        original = module_copy = super()._module_copy(mode)
        device, layout, own = device_to_run_on(self, fake=mode is not None), self._layout, copy.copy(self.strategy)
        with quiet():
            own.precision = self._precision_on(device)
            if layout is not None:
                own.num_nodes = self.nodes
                if is_a(own, "FSDPStrategy"):
                    lightning.change_fsdp_arguments(own, layout.arguments)
                layout.place(own, device)
                own.setup_environment()
                module_copy = own.setup_module(module_copy)
        return lightning.fabric_module(_package_of(own), module_copy, own, original)  # type: ignore[no-any-return]

    def _precision_on(self, device: torch.device) -> Any:
        """The plugin that Fabric's connector makes for the strategy."""
        plugins = importlib.import_module(f"{_package_of(self.strategy)}.plugins")
        name = self.precision
        if is_a(self.strategy, "FSDPStrategy"):
            return plugins.FSDPPrecision(name)
        if name.endswith("-mixed"):
            return plugins.MixedPrecision(name, device.type)
        kinds = {"32-true": plugins.Precision, "64-true": plugins.DoublePrecision}
        return kinds[name]() if name in kinds else plugins.HalfPrecision(name)

    def _begin(self, recorder: Recorder, module_copy: Any) -> None:
        if wraps_in_ddp(self.strategy):
            ddp.attach_to_plain(self.strategy, lightning.inside_fabric_module(module_copy), recorder)
