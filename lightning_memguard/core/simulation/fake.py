"""A module's fake copy: the same module on tensors that have a shape, a dtype and a device, but no memory."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.batch.nesting import is_dense
from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.objects import closed_over
from lightning_memguard.core.simulation import quantized
from lightning_memguard.core.simulation.constants import KnownFakeMode
from lightning_memguard.core.torch_port import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    unset_fake_temporarily,
)

Function = Callable[..., Any]  # one of torch

_MOST_READ = 64  # elements of a trained parameter whose values the step may read


class _FakeCopy(TorchFunctionMode):
    """Mode in which ``copy.deepcopy`` makes fake copies of tensors.

    Tensors with a storage in ``moving`` are copied to ``device``. Tensors that share a storage have copies that do.
    Values of those in ``trained`` are not kept.
    """

    def __init__(
        self, mode: FakeTensorMode, device: torch.device, moving: Counter[int], trained: Collection[int]
    ) -> None:
        super().__init__()
        self.mode, self.device, self.moving, self.trained = mode, device, moving, trained
        self.bases: dict[tuple[int, torch.dtype], Tensor] = {}

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func is Tensor.clone:  # how a Parameter is deep-copied
            return self._fake(args[0])
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._fake(tensor).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))

    def _fake(self, tensor: Tensor) -> Tensor:
        fake = self.without_memory(tensor)
        is_trained = tensor.requires_grad or storage_address(tensor) in self.trained
        if isinstance(self.mode, KnownFakeMode) and not is_trained:
            self.mode.set_value(fake, tensor)
        return fake

    def without_memory(self, tensor: Tensor) -> Tensor:
        """Make a fake copy of a tensor, or of those within a wrapper."""
        inside = _inside(tensor)
        if inside:
            wrapper: Any = tensor
            fakes = {name: self.without_memory(each) for name, each in inside.items()}
            with self.mode:
                return type(wrapper).__tensor_unflatten__(  # type: ignore[no-any-return]
                    fakes, wrapper.__tensor_flatten__()[1], tensor.shape, tensor.stride()
                )
        address = storage_address(tensor)
        device = self.device if address in self.moving or tensor.is_meta else tensor.device
        if tensor.layout is not torch.strided or tensor.is_quantized or address == -1:
            return self.mode.from_tensor(tensor, static_shapes=True)
        key = address, tensor.dtype
        with self.mode, torch.no_grad():
            if device != tensor.device and self.moving[address] == 1:  # moved without what else its storage holds
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if key not in self.bases:
                length = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.bases[key] = torch.empty(length, dtype=tensor.dtype, device=device)
            return self.bases[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def fake_copy(
    module: nn.Module, mode: FakeTensorMode, device: torch.device, instead: Mapping[int, object] | None = None
) -> nn.Module:
    """Copy a module without its memory: parameters and buffers become fake tensors on ``device``.

    Datasets, loaders and arrays in the module's attributes are shared, not copied; so is what cannot be copied.

    Args:
        module: any module; it is not changed.
        mode: the fake tensors' mode.
        device: the device of the copy's parameters and buffers.
        instead: by ``id``, what the copy holds in place of an object that the module holds.

    Returns:
        The copy. Nothing done to its tensors, lists or counters reaches the module.
    """
    owned = [*module.parameters(), *module.buffers(), *quantized.held_by(module)]
    moving = Counter(storage_address(tensor) for each in owned for tensor in _unwrapped(each))
    known = (p for p in module.parameters() if p.requires_grad and not is_lazy(p))
    trained = {storage_address(p) for p in known if p.numel() > _MOST_READ}
    # With the mode on, a real Parameter's `.data` would already be fake, with another storage.
    with unset_fake_temporarily(), _FakeCopy(mode, device, moving, trained) as copying:
        special = quantized.fakes_of(module, copying.without_memory, mode, device)
        module_copy = _deep_copy(module, {**_lazy_copies(module, mode, device), **special, **(instead or {})})
        for mine, theirs in zip(module.parameters(), module_copy.parameters(), strict=True):
            copy_attributes(mine, theirs)
    quantized.share_states(module_copy)
    return module_copy


def _inside(tensor: object) -> dict[str, Tensor]:
    """The tensors that a wrapper holds, by attribute: it has no memory of its own, as a quantized weight of torchao."""
    names = tensor.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(tensor) else ()
    return {name: getattr(tensor, name) for name in names}


def _unwrapped(tensor: Tensor) -> Iterator[Tensor]:
    inside = _inside(tensor)
    for each in inside.values():
        yield from _unwrapped(each)
    if not inside:
        yield tensor


def _lazy_copies(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> dict[int, Tensor]:
    """Fake copies of what has no shape yet, by ``id``."""
    with mode:
        lazy = filter(is_lazy, (*module.parameters(), *module.buffers()))
        return {id(each): lazy_fake(type(each), each.requires_grad, device, each.dtype) for each in lazy}


def lazy_fake(kind: type, requires_grad: Any = None, device: Any = None, dtype: Any = None, **_: Any) -> Tensor:
    """Make a fake tensor whose shape a first batch will give; ``kind`` is torch's class of such tensors."""
    requires_grad = issubclass(kind, nn.Parameter) if requires_grad is None else requires_grad
    fake = torch.empty(0, device=device, dtype=dtype, requires_grad=requires_grad)
    fake.__class__ = type(kind.__name__, (kind, FakeTensor), {"cls_to_become": FakeTensor})
    return fake


def storage_address(tensor: Tensor) -> int:
    """Identifies the storage of a strided tensor while it lives; -1 for a lazy tensor before its first batch."""
    return -1 if is_lazy(tensor) else port.storage_id(tensor.untyped_storage())


def copy_attributes(parameter: Tensor, parameter_copy: Tensor) -> None:
    """Copy what users set on parameters, such as ``no_decay``: a deep copy of a Parameter drops it."""
    for name, value in vars(parameter).items():
        vars(parameter_copy).setdefault(name, copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value)


def copy_hooks(parameter: Tensor, other: Tensor, change: Function = lambda hook: hook) -> None:
    """Register the hooks of a parameter on another one."""
    if other.requires_grad:
        for hook in (port.grad_hooks(parameter) or {}).values():
            other.register_hook(change(hook))
        for hook in port.hooks_after_accumulation(parameter):
            other.register_post_accumulate_grad_hook(change(hook))


def real_copy(module: nn.Module, instead: Mapping[int, object] | None = None) -> nn.Module:
    """Deep-copy a module, but share its datasets and what cannot be copied (locks, files, generators)."""
    with _RealCopy():
        return _deep_copy(module, instead)


def shared_copy(module: nn.Module) -> nn.Module:
    """Copy a module's structure, and share its tensors: for a process whose memory is a copy as a whole."""
    with _SharedTensors():
        return _deep_copy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


class _SharedTensors(TorchFunctionMode):
    """Mode in which ``copy.deepcopy`` keeps each tensor."""

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


class _RealCopy(TorchFunctionMode):
    """Mode in which ``copy.deepcopy`` also lets a Parameter share its storage with tensors made of its ``data``.

    A tensor that was computed, such as a weight of ``weight_norm``, is copied without its graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[tuple[int, torch.dtype], Tensor] = {}

    def __torch_function__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        is_deep = func is torch.Tensor.__deepcopy__
        if not (is_deep or func is Tensor.clone) or type(args[0]) is not Tensor or not is_dense(args[0]):
            return func(*args, **(kwargs or {}))
        tensor, key = args[0], (storage_address(args[0]), args[0].dtype)
        out: Any
        if key in self.copies:
            out = self.copies[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        else:
            source = tensor if tensor.is_leaf or not is_deep else tensor.detach()
            out = func(source, *args[1:], **(kwargs or {}))
            if out.untyped_storage().nbytes() == tensor.untyped_storage().nbytes() and out.stride() == tensor.stride():
                self.copies[key] = out.detach()
        if is_deep:
            args[1][id(tensor)] = out.requires_grad_(tensor.requires_grad)
        return out


def _deep_copy(module: nn.Module, instead: Mapping[int, object] | None) -> nn.Module:
    compilers = filter(None, map(port.compiler_of_module, module.modules()))  # they do not refer to the module
    shared = (*_data_attributes(module), *compilers)
    memo = {**{id(value): value for value in shared}, **_scripted_copies(module), **(instead or {})}
    copied = dict(memo)
    try:
        module_copy = copy.deepcopy(module, copied)
    except Exception:  # noqa: BLE001 - a deep copy can fail in any way; find what cannot be copied, and share it
        for child in reversed(list(module.modules())):  # innermost first, so that only what fails is shared
            values = (value for name, value in vars(child).items() if name not in _OWN_DICTS)
            memo |= {id(value): value for value in values if not _can_be_copied(value, memo)}
        blanks = {child: object.__new__(type(child)) for child in module.modules() if _asks_to_be_made(child)}
        memo |= {id(child): blank for child, blank in blanks.items()}
        for child, blank in blanks.items():
            blank.__setstate__(copy.deepcopy(vars(child), memo))
        module_copy, copied = copy.deepcopy(module, memo), memo
    _share_what_is_not_saved(module, module_copy)
    _rebind_functions(module, module_copy, {key: each for key, each in copied.items() if key not in (instead or {})})
    return module_copy


def _share_what_is_not_saved(module: nn.Module, module_copy: nn.Module) -> None:
    """Give a copy the attributes that a ``__getstate__`` leaves out, such as an open file: the step may use them."""
    copies = dict(module_copy.named_modules())
    for name, child in module.named_modules():
        if name in copies:
            theirs = copies[name].__dict__
            theirs.update({**nn.Module.__getstate__(child), **theirs})


def _scripted_copies(module: nn.Module) -> dict[int, nn.Module]:
    """Copy the scripted modules within a module by ``id``; parameters of their own deep copy are not leaves."""
    copies: dict[int, nn.Module] = {}
    for child in module.modules():
        if isinstance(child, torch.jit.ScriptModule) and id(child) not in copies:
            with torch.no_grad(), _Clones():  # type: ignore[no-untyped-call]
                child_copy = copy.deepcopy(child)
            for mine, theirs in zip(child.parameters(), child_copy.parameters(), strict=True):
                theirs.requires_grad_(mine.requires_grad)
            copies |= {id(mine): theirs for mine, theirs in zip(child.modules(), child_copy.modules(), strict=True)}
    return copies


class _Clones(TorchDispatchMode):
    """Mode in which C++ clones tensors as Python would: by the function mode that is on."""

    def __torch_dispatch__(
        self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        return args[0].clone() if func is _aten.clone.default else func(*args, **(kwargs or {}))


def _rebind_functions(module: nn.Module, module_copy: nn.Module, copied: Mapping[int, Any]) -> None:
    """Rebind functions that a module keeps as attributes or hooks to the copy: a deep copy shares them.

    They are compiled methods, as ``Trainer.fit(torch.compile(module))`` sets them, and closures over a module, or over
    what it holds; ``copied`` has those copies by ``id``.
    """
    theirs = dict(module_copy.named_modules(remove_duplicate=False))
    copies = {**copied, **{id(mine): theirs[path] for path, mine in module.named_modules() if path in theirs}}
    _rebind_hooks(module, copies)
    for child in module.modules():
        own = vars(copies.get(id(child), child))
        for name, value in vars(child).items():
            if not isinstance(value, types.FunctionType) or own.get(name) is not value:
                continue
            function: Any = port.as_written(value)
            rebound = _rebound(function, copies)
            if rebound is not function:
                own[name] = _compiled_like(rebound, value)
            elif any(_rebound(each, copies) is not each for _, each in closed_over(function)):
                own[name] = _compiled_like(_with_modules(function, copies), value)
        if id(child) in copies:
            port.copy_compiled_call(child, copies[id(child)], _compiled_like)


def _rebind_hooks(module: nn.Module, copies: dict[int, Any]) -> None:
    """Rebind the hooks of modules; those of parameters, which a deep copy drops, are registered on the copies."""
    for child in module.modules():
        own = vars(copies.get(id(child), child))
        for name in _HOOKS:
            for key, hook in own[name].items():
                own[name][key] = _rebound_hook(hook, copies)
    for parameter in module.parameters():
        theirs = copies.get(id(parameter), parameter)
        if theirs is not parameter:
            copy_hooks(parameter, theirs, functools.partial(_rebound_hook, copies=copies))


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _rebound_hook(hook: Any, copies: dict[int, Any]) -> Any:
    if isinstance(hook, functools.partial):
        keywords = {name: _rebound(value, copies) for name, value in hook.keywords.items()}
        arguments = (_rebound(value, copies) for value in hook.args)
        return functools.partial(_rebound_hook(hook.func, copies), *arguments, **keywords)
    if isinstance(hook, types.FunctionType):
        closed = (value for _, value in closed_over(hook))
        held = (*closed, *(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values())
        return _with_modules(hook, copies) if any(_rebound(each, copies) is not each for each in held) else hook
    return _rebound(hook, copies)


def _rebound(value: Any, copies: dict[int, Any]) -> Any:
    """Return the copy of a module, a method bound to the copy of its module, or any other value as it is.

    A module with some of the copied ones in it, as a loss that holds the network, is copied around their copies.
    """
    if isinstance(value, nn.Module) and any(id(each) in copies for each in value.modules()):
        if id(value) not in copies:
            copies[id(value)] = _deep_copy(value, copies)
        return copies[id(value)]
    if id(getattr(value, "__self__", None)) in copies:
        return types.MethodType(value.__func__, copies[id(value.__self__)])
    return copies.get(id(value), value)


def _compiled_like(function: Function, other: Any) -> Function:
    """Compile a function (or disable its compilation) as another one is."""
    compiler = port.compiler_of(other)
    return function if compiler is None else compiler(function)


def _with_modules(function: Any, copies: dict[int, Any]) -> types.FunctionType:
    """Return the function as a closure over the copies of its modules, which also are its defaults."""
    rebound = ((name, value, _rebound(value, copies)) for name, value in closed_over(function))
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: types.CellType(theirs) for name, value, theirs in rebound if theirs is not value}
    defaults = function.__defaults__ and tuple(_rebound(each, copies) for each in function.__defaults__)
    closure = tuple(cells.values())
    own = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, closure)
    named = function.__kwdefaults__
    own.__kwdefaults__ = named and {name: _rebound(each, copies) for name, each in named.items()}
    return own


_OWN_DICTS = ("_parameters", "_buffers", "_modules")  # never shared with the user's module


def _data_attributes(module: nn.Module) -> Iterator[object]:
    for child in module.modules():
        for value in vars(child).values():
            items = value.values() if isinstance(value, dict) else value
            for item in items if isinstance(value, (list, tuple, dict)) else [value]:
                if isinstance(item, (Dataset, DataLoader, np.ndarray)):
                    yield item


@contextmanager
def pyro_params_of(module_copy: nn.Module, module: nn.Module) -> Iterator[None]:
    """Put a copy's parameters into Pyro's store, where modules look theirs up by name, while the context is open."""
    pyro: Any = sys.modules.get("pyro")
    if pyro is None or not hasattr(pyro, "get_param_store"):
        yield
        return
    copies = {id(p): other for p, other in zip(module.parameters(), module_copy.parameters(), strict=False)}
    store = pyro.get_param_store()
    state = store.get_state()
    with store.scope({**state, "params": {name: copies.get(id(p), p) for name, p in state["params"].items()}}):
        yield


def _asks_to_be_made(module: nn.Module) -> bool:
    """Whether the class's ``__new__`` has arguments, which a deep copy does not pass: `EMA` of ema-pytorch."""
    new = type(module).__new__
    parameters = () if new is object.__new__ else list(inspect.signature(new).parameters.values())[1:]
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _can_be_copied(value: object, memo: dict[int, object]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # noqa: BLE001 - any error counts
        return False
    return True


# -- random numbers and threads of the process


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's random generators afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - users draw from the global one
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - as above


def drawn_so_far() -> tuple[object, ...]:
    """Return a value that differs once Python or NumPy have drawn a random number."""
    return random.getstate(), repr(np.random.get_state())  # noqa: NPY002 - as above


def seed_all(seed: int) -> None:
    """Seed the generators that `isolated_rng` restores."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as above
    torch.default_generator.manual_seed(seed)  # the CPU's alone: a child must not ask CUDA


_training_threads = 0


def run_on_one_thread() -> None:
    """Run the operators of this process on one thread; predictions still count the training's threads."""
    global _training_threads  # noqa: PLW0603
    _training_threads = training_threads()
    torch.set_num_threads(1)


def training_threads() -> int:
    """The intra-op threads of the training."""
    return _training_threads or torch.get_num_threads()
