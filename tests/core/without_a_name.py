"""Train without private names of torch, each in a child of its own: what becomes of the run, as lines of JSON.

    python without_a_name.py PATH ...    each a path of `lightning_memguard.core.foreign.table`; "" removes nothing
    python without_a_name.py --port NAME ...    each a function of `lightning_memguard.core.torch_port`, which raises

This process has torch and Lightning, never MemGuard; a child takes the name away, imports MemGuard and fits.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.utils.data import DataLoader

torch.set_num_threads(1)
QUIET = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Sharded(Small):
    def configure_model(self):
        torch.distributed.fsdp.fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


class Hook(pl.Callback):
    """Calls something before MemGuard's setup or after it, by its place among the callbacks."""

    def __init__(self, call):
        self.call = call

    def setup(self, trainer, pl_module, stage):
        self.call()


def fit(*callbacks: pl.Callback, compiled: bool = False, module: Any = None) -> list[str]:
    module = module or (torch.compile(Small()) if compiled else Small())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet = dict.fromkeys(QUIET, False)
        trainer = pl.Trainer(max_steps=2, accelerator="cpu", callbacks=[*callbacks], **quiet)
        trainer.fit(module, DataLoader(torch.randn(64, 8), batch_size=4))
    assert trainer.global_step == 2
    return [str(each.message) for each in caught if "MemGuard" in str(each.message)]


def home_of(path: str) -> tuple[Any, str]:
    home, _, name = path.rpartition(".")
    found: Any = torch
    at = "torch"
    for part in home.split(".")[1:]:
        at = f"{at}.{part}"
        found = getattr(found, part, None) or importlib.import_module(at)
    return found, name


def take_away(path: str):
    """Remove a name; the result puts it back. Operators are found by a function, in C++."""
    home, name = home_of(path)
    value = getattr(home, name) if hasattr(home, name) else importlib.import_module(path)
    if path.startswith(("torch.ops.aten.", "torch._VF.")):
        vars(home).pop(name, None)
        kind, find = type(home), type(home).__getattr__

        def find_others(self, each):
            if each == name:
                raise AttributeError(f"{path.rpartition('.')[0]} has no attribute {name!r}")
            return find(self, each)

        kind.__getattr__ = find_others
        return lambda: setattr(kind, "__getattr__", find)
    if isinstance(value, ModuleType):
        sys.modules[value.__name__] = None  # what imports it fails
    delattr(home, name)

    def put_back():
        setattr(home, name, value)
        if isinstance(value, ModuleType):
            sys.modules[value.__name__] = value

    return put_back


def outcome_of_port(name: str) -> tuple[str, str, list[float]]:
    """What becomes of a run in which one function of the port raises; and its weights."""
    from lightning_memguard import MemGuard
    from lightning_memguard.core import torch_port

    if name:
        function: Any = inspect.unwrap(vars(torch_port)[name])
        function.__code__ = moved.__code__.replace(co_name=name)
    torch.manual_seed(0)
    module, offload = Small(), "always" if "offload" in torch_port.PARTS.get(name, ()) else "if_needed"
    guard = MemGuard(budget="1GiB", min_steps_per_epoch=None, offload=offload)
    said = fit(*[guard] if name else [], module=module)
    return (*told(guard, said, f"torch_port.{name}"), module.layer.weight.flatten().tolist())


def moved(*_: object, **__: object) -> None:
    raise AttributeError("it has moved")


def outcome_of(path: str) -> tuple[str, str]:
    """The outcome of a run without a name, and the first sentence that names it."""
    if not path:
        return fitted(path)
    try:
        put_back = take_away(path)
    except (AttributeError, ImportError, KeyError, TypeError):
        return "cannot be removed", ""
    device, strategy = next((how for start, how in ESTIMATED.items() if path.startswith(start)), ("", ""))
    if device:
        return estimated(path, device, strategy, put_back)
    try:
        fit(compiled=path.startswith(COMPILED))
    except Exception:  # noqa: BLE001 - torch or Lightning cannot train without it: it is missing while MemGuard sets up
        put_back()
        return fitted(path, before=[Hook(lambda: take_away(path))], after=[Hook(put_back)])
    return fitted(path)


def fitted(path: str, before: Sequence[Hook] = (), after: Sequence[Hook] = ()) -> tuple[str, str]:
    from lightning_memguard import MemGuard

    guard = MemGuard(batch_size="largest", budget="1GiB", max_batch_size=16, min_steps_per_epoch=None)
    return told(guard, fit(*before, guard, *after, compiled=path.startswith(COMPILED)), path)


def told(guard: Any, said: list[str], path: str) -> tuple[str, str]:
    decision = guard.decision
    if decision is None:
        return "unguarded", "; ".join(said)
    texts = [*said, decision.reason, *(decision.footprint.notes if decision.footprint else ())]
    words = [text for text in texts if path and path.rpartition(".")[2] in text]
    if decision.outcome == "tuned" and words:
        return "tuned with less", words[0]
    return decision.outcome, (words or ["; ".join(texts)])[0]


def estimated(path: str, device: str, strategy: str, put_back: Callable[[], None]) -> tuple[str, str]:
    from lightning_memguard import MemGuardError, estimate

    def peak() -> tuple[int, tuple[str, ...]]:
        module, how = (Sharded(), pl.strategies.ModelParallelStrategy()) if strategy == "fsdp2" else (Small(), strategy)
        if strategy == "compiled":
            module.layer.compile()
            how = "auto"
        devices = 1 if how == "auto" else 2
        found = estimate(module, torch.randn(4, 8), device=device, strategy=how, devices=devices)
        return found.peak_reserved_bytes, found.notes

    try:
        without = peak()
    except MemGuardError as error:
        return "refused", str(error)
    told = " ".join(note for note in without[1] if path.rpartition(".")[2] in note)
    put_back()
    return ("estimated with less", told) if told else ("tuned" if without == peak() else "another peak", "")


# Followed by `estimate`, on a device and under a strategy: the start of a path -> which.
ESTIMATED = {
    "torch._C._distributed_c10d": ("H200", "ddp"),
    "torch.distributed.fsdp._fully_shard": ("H200", "fsdp2"),
    "torch.distributed.fsdp.FSDPModule": ("H200", "fsdp2"),
    "torch.distributed.tensor": ("H200", "fsdp2"),
    "torch.distributed": ("H200", "fsdp"),
    "torch.testing": ("H200", "fsdp"),
    "torch._C._get_accelerator": ("H200", "fsdp"),
    "torch.utils._mode_utils": ("H200", "auto"),
    "torch._C._ensureCUDA": ("H200", "auto"),
    "torch._C._autograd.SavedTensor": ("H200", "auto"),
    "torch._subclasses.fake_tensor.init_gpu_context": ("H200", "auto"),
}
COMPILED_FOR_A_GPU = (
    *("torch.cuda._", "torch._dynamo.device_interface", "torch._inductor.runtime.hints", "torch._inductor.scheduler"),
    *("torch._inductor.fx_passes", "torch.utils._triton", "torch.library.Library._destroy"),
)
ESTIMATED |= dict.fromkeys(COMPILED_FOR_A_GPU, ("H200", "compiled"))
COMPILED = (
    "torch._inductor",
    "torch._functorch.config",
    "torch._C._dynamo",
    "torch._dynamo.convert_frame",
    "torch._dynamo.reset",
)


def main(paths: list[str]) -> None:
    outcome = outcome_of
    if paths[0] == "--port":
        callback = importlib.import_module("lightning_memguard.training.run.callback")
        importlib.import_module(callback._ENGINE)  # once for all
        outcome: Any = outcome_of_port
        paths = ["", *paths[1:]]  # first without MemGuard
    for path in paths:
        ends, begins = os.pipe()
        child = os.fork()
        if child == 0:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            try:
                result = outcome(path)
            except BaseException:  # noqa: BLE001 - the test says what was raised
                result = ("raised", traceback.format_exc())
            with os.fdopen(begins, "w") as file:
                json.dump([path, *result], file)
            os._exit(0)
        os.close(begins)
        with os.fdopen(ends) as file:
            print(file.read(), flush=True)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
