"""Running a step on fake tensors: what torch does otherwise there, or asks of values that fake tensors lack.

`faking` patches torch's classes for the whole process while it is on, and no other thread may use torch meanwhile.
"""

from __future__ import annotations

import dis
import functools
import logging
import operator
import statistics
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import added, patched
from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.kernels.attention import SEEDS_ON_DEVICE
from lightning_memguard.core.simulation import constants, quantized
from lightning_memguard.core.simulation.constants import KnownFakeMode, known_value
from lightning_memguard.core.simulation.fake import Function, copy_attributes, copy_hooks, lazy_fake
from lightning_memguard.core.torch_port import (
    DisableTorchFunctionSubclass,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    unset_fake_temporarily,
)
from lightning_memguard.errors import CannotTraceError


class ValueNeededError(CannotTraceError):
    """The step depends on a value, and a fake tensor has none."""


def _float_operator(operation: Callable[..., float]) -> Callable[..., Any]:
    def apply(*operands: Any) -> Any:
        if isinstance(operands[-1], Tensor):
            return NotImplemented  # a tensor does it itself
        return UnknownFloat(operation(*map(float, operands)))

    return apply


class UnknownFloat(float):
    """The result of ``.item()`` for a float that is unknown: it can be logged and printed, not compared or counted."""

    def _refuse(self, *_: object) -> bool:
        valid = _valid_answer()
        if valid is not None:
            return valid
        raise ValueNeededError("The step compares the value of a tensor (`.item()`), which only a real run can give.")

    def __int__(self) -> int:
        raise ValueNeededError("The step counts by the value of a tensor (`.item()`), which only a real run can give.")

    def __round__(self, digits: object = None) -> Any:
        return UnknownFloat(1.0) if digits is not None else int(self)

    __trunc__ = __floor__ = __ceil__ = __int__
    __neg__, __abs__ = _float_operator(operator.neg), _float_operator(abs)
    __add__ = __radd__ = _float_operator(operator.add)
    __mul__ = __rmul__ = _float_operator(operator.mul)
    __sub__, __rsub__ = _float_operator(operator.sub), _float_operator(lambda self, other: other - self)
    __truediv__, __rtruediv__ = _float_operator(operator.truediv), _float_operator(lambda self, other: other / self)
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = float.__hash__


def _valid_answer() -> bool | None:
    """Return the answer to a condition on values with which a step goes on: else the training would raise, too."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("lightning_memguard."):
        frame = frame.f_back
    answer = _ANSWERS.get(frame.f_code.co_name, _answer_that_goes_on(frame.f_code, frame.f_lasti))
    if answer is not None:
        constants.note_check()
    return answer


# torchmetrics on the CPU asks whether all are probabilities already; logits take one tensor more.
_ANSWERS = {"normalize_logits_if_needed": False}


@functools.cache
def _answer_that_goes_on(code: types.CodeType, offset: int) -> bool | None:
    """The answer with which an ``if`` at a place in bytecode does not raise; None if it does more than raise."""
    here, *others = (each for each in dis.get_instructions(code) if each.offset >= offset)
    jump, *then = [each for each in (here, *others) if each is not here or "JUMP" in each.opname] or [here]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_FALSE", "IF_TRUE")):
        return None
    block = [each for each in then if each.offset < jump.argval]
    raises = bool(block) and block[-1].opname == "RAISE_VARARGS" and not any(_leaves(each, jump) for each in block)
    return jump.opname.endswith("IF_TRUE") if raises else None


def _leaves(each: dis.Instruction, jump: dis.Instruction) -> bool:
    """Whether an instruction leaves the block that ``jump`` jumps over; an ``if`` within a message does not."""
    if each.opcode in _JUMPS:
        return not jump.offset < each.argval < jump.argval
    return "RETURN" in each.opname or "YIELD" in each.opname


_JUMPS = {*dis.hasjrel, *dis.hasjabs}


@contextmanager
def faking(mode: FakeTensorMode) -> Iterator[None]:
    """Run what is inside on fake tensors, compiled modules eagerly.

    Patches ``nn.Module._apply``, torch's class ``FakeTensor`` and lists of types for ``foreach``, the ``max`` of
    Adafactor, ``trunc_normal_``, lazy parameters, ``pad_packed_sequence`` and the making of subclasses for all threads
    of the process.
    """
    with ExitStack() as exits:
        logger = logging.getLogger(FakeTensorMode.__module__)  # of operators that raise, which the error says too
        exits.enter_context(patched(logger, disabled=True))
        exits.enter_context(torch.compiler.set_stance("force_eager"))
        exits.enter_context(port.applied_by(_moving))
        exits.enter_context(quantized.simulated())
        exits.enter_context(port.fakes_known_as(_Unknown))
        exits.enter_context(port.adafactor_with(_larger))
        # `pad_packed_sequence` calls it.
        exits.enter_context(patched(port.recurrent_functions(), _pad_packed_sequence=_padded))
        exits.enter_context(port.truncated_draw_by(functools.partial(_truncating, mode)))
        for kind in (nn.UninitializedParameter, nn.UninitializedBuffer):
            exits.enter_context(patched(kind, __new__=staticmethod(lazy_fake)))
        exits.enter_context(patched(Tensor, as_subclass=_seen_as_fake(Tensor.as_subclass)))
        exits.enter_context(port.subclasses_made_by(_making_fake))
        exits.enter_context(port.foreach_on_fakes())
        exits.enter_context(mode)
        yield


class _Subclassed:
    """Goes between a tensor subclass and `FakeTensor`, which would keep the results of operators from being of it."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, *called: Any, **kwargs: Any) -> Any:
        return Tensor.__torch_function__.__func__(cls, *called, **kwargs)  # type: ignore[attr-defined]


@functools.cache
def _fake_subclass(kind: type[Tensor]) -> type[Tensor]:
    """The class of fake tensors that are of a tensor subclass as well; torch would make them real."""
    if kind is Tensor or issubclass(kind, FakeTensor):
        return FakeTensor if kind is Tensor else kind
    return type(kind.__name__, (kind, _Subclassed, FakeTensor), {"__module__": kind.__module__})


def _can_be_fake(tensor: object, kind: type[Tensor]) -> bool:
    dispatches = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)
    return isinstance(tensor, FakeTensor) and not dispatches


def _seen_as_fake(as_subclass: Function) -> Function:
    """Make ``Tensor.as_subclass`` keep fake tensors fake."""

    def seen_as(self: Tensor, cls: type[Tensor]) -> Tensor:
        if not _can_be_fake(self, cls):
            return as_subclass(self, cls)  # type: ignore[no-any-return]
        with DisableTorchFunctionSubclass():
            alias: Tensor = _aten.alias.default(self)
        alias.__class__ = _fake_subclass(cls)
        return alias

    return seen_as


def _making_fake(make_subclass: Function) -> Function:
    """Make ``Tensor._make_subclass`` keep fake tensors fake."""

    def make(cls: type[Tensor], data: Tensor, require_grad: bool = False, **more: Any) -> Tensor:
        if not _can_be_fake(data, cls):
            return make_subclass(cls, data, require_grad, **more)  # type: ignore[no-any-return]
        with DisableTorchFunctionSubclass():
            alias = data.detach()
        alias.__class__ = _fake_subclass(cls)
        return alias.requires_grad_(require_grad)

    return make


def _larger(first: float, second: float) -> float:
    """``max`` for Adafactor, which scales its update by a norm that fake tensors lack; no block depends on it."""
    return first if isinstance(second, UnknownFloat) else max(first, second)


def _truncating(mode: FakeTensorMode, draw: Function) -> Function:
    """`nn.init.trunc_normal_`, which since torch 2.13 asks after each draw whether any number is outside the bounds.

    The answer is yes as often as that many draws would leave one there; from the second on, draws allocate the same.
    """

    def truncated(tensor: Tensor, mean: float, std: float, a: float, b: float, *rest: Any, **kwargs: Any) -> Tensor:
        inside = statistics.NormalDist(mean, std)
        outside = 1 - inside.cdf(b) + inside.cdf(a)
        answers = [False, *(tensor.numel() * outside**drawn > 0.5 for drawn in (2, 1))]
        with added(mode, answers=answers):
            return draw(tensor, mean, std, a, b, *rest, **kwargs)  # type: ignore[no-any-return]

    return truncated


class _UnknownOnly(type):
    def __instancecheck__(cls, instance: object) -> bool:
        if not isinstance(instance, FakeTensor):
            return False
        return instance.is_floating_point() or instance.is_complex() or known_value(instance) is None

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, FakeTensor)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is FakeTensor

    def __hash__(cls) -> int:
        return hash(FakeTensor)


class _Unknown(metaclass=_UnknownOnly):
    """Class that libraries see as ``torch._subclasses.FakeTensor``: fake tensors with unknown values.

    With a mask whose values are known, transformers takes the way that it takes in the training. Torch's own uses of
    this name are of tensors with floats, or in tracers. Checked on transformers 5.23.
    """


def _moving(original: Function) -> Function:
    """Make ``module.to(...)`` work on fake parameters: torch swaps them in place, which weak references forbid."""
    # Parameters may be tied. The old ones are held, so that their ids stay unique.
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        parameters, buffers = port.parameters_of(self), port.buffers_of(self)
        own = [*parameters.values(), *buffers.values()]
        if not any(isinstance(tensor, FakeTensor) for tensor in own):
            return original(self, fn, recurse)  # type: ignore[no-any-return]
        if recurse:
            for child in self.children():
                port.apply_to(child, fn)
        for name, parameter in parameters.items():
            if parameter is not None:
                parameters[name] = move(parameter, fn)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = fn(buffer)
        return self

    def move(parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
        with torch.no_grad():
            result = fn(parameter)
        if result is parameter or (result.device == parameter.device and result.dtype == parameter.dtype):
            return _in_order_of(result, parameter)
        if id(parameter) not in moved:
            moved[id(parameter)] = parameter, nn.Parameter(result, parameter.requires_grad)
            copy_attributes(parameter, moved[id(parameter)][1])
            copy_hooks(parameter, moved[id(parameter)][1])
        return moved[id(parameter)][1]

    return apply


def _in_order_of(result: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """The very parameter, in the memory format of what it was moved to."""
    if not isinstance(parameter, UninitializedParameter) and result.stride() != parameter.stride():
        parameter.data = result
    return parameter


def call(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call a torch function for a step that may run on fake tensors.

    This differs from torch in: 1. A deep copy of a fake tensor makes no real storage. 2. A float that is read (usually
    to be logged) is an `UnknownFloat`; ``float(tensor)`` must return a plain float, so comparing that one goes
    unnoticed. 3. Arguments that distributions validate are valid, as is what the step refuses by ``if ...: raise``.
    4. Known values are read as NumPy arrays.
    """
    if args and isinstance(args[0], FakeTensor):
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        if func in _READS_FLOAT and args[0].is_floating_point() and known_value(args[0]) is None:
            return UnknownFloat(1.0) if func is torch.Tensor.item else 1.0
        if func in _ASKS_WHETHER and known_value(args[0]) is None:
            valid = _valid_answer() if func is torch.Tensor.__bool__ else True
            answer = func(*args, **kwargs) if valid is None or func is _IS_ALL_TRUE else None
            return answer if valid is None else valid
        if func in _COMPARES and any(known_value(each) is None for each in args[:2] if isinstance(each, Tensor)):
            valid = _valid_answer()
            return func(*args, **kwargs) if valid is None else valid
        if func in _READS_ARRAY:
            value = known_value(args[0])
            if value is None:
                raise ValueNeededError("NumPy needs the values of a tensor, which only a real run can give.")
            return func(value, *args[1:], **kwargs)
    return func(*args, **kwargs)


_IS_ALL_TRUE = port.is_all_true()
_ASKS_WHETHER = (torch.Tensor.__bool__, _IS_ALL_TRUE)
_COMPARES = (torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose)
_READS_FLOAT = (torch.Tensor.item, torch.Tensor.__float__)
_READS_ARRAY = (torch.Tensor.numpy, torch.Tensor.__array__)


def _padded(data: Tensor, sizes: Tensor, batch_first: bool, padding: float, length: int) -> tuple[Tensor, Tensor]:
    """``_pad_packed_sequence`` in Python, after ATen/native/PackedSequence.cpp, which writes into memory."""
    rows: list[int] = sizes.tolist()
    output = data.new_full((length, rows[0], *data.shape[1:]), padding)
    start = offset = 0
    for step, row in enumerate(rows, start=1):
        if step == len(rows) or rows[step] != row:
            count = (step - start) * row
            output[start:step, :row].copy_(data[offset : offset + count].view(step - start, row, *data.shape[1:]))
            start, offset = step, offset + count
    with unset_fake_temporarily():
        lengths = (sizes.unsqueeze(1) > torch.arange(rows[0])).sum(0)
    return (output.transpose(0, 1) if batch_first else output), lengths


# Operators that write into their first argument and return it, with nothing else to do for a fake tensor. Torch's fake
# dispatch takes some 0.1 ms for that; an optimizer step does little else.
_WRITES_FIRST = frozenset(
    getattr(getattr(_aten, name), overload)
    for name in ("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_", "sqrt_", "zero_", "fill_")
    for overload in getattr(_aten, name).overloads()
    if overload not in ("out", "t")  # "t" writes lists, not tensors
)


def known_result(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The result of an operator that is known without running it, else None."""
    if func not in _WRITES_FIRST or type(args[0]) is not FakeTensor:
        return None
    mode = args[0].fake_mode
    return args[0] if not isinstance(mode, KnownFakeMode) or mode.note_write(func, args, kwargs) else None


def laid_out(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator whose fake kernel gives it other strides than the real one; None for others.

    Batch norms give theirs in the order that `suggest_memory_format` says, torch's fake kernels in that of the input
    (aten/src/ATen/native/Normalization.cpp). On CUDA the gradient of a frozen one is contiguous, as that of `glu` is,
    and volumes that are resized linearly keep channels last (seen in 2.11 to 2.15). Zeros that autograd makes of no
    tangent have no memory, and the operators that read them see one number (aten/src/ATen/ZeroTensorFallback.cpp), on
    real tensors as well. The efficient attention's random seeds are on the host in some versions.
    """
    if func is _ZEROS_OF_NO_TANGENT:
        return torch.zeros((), dtype=kwargs.get("dtype"), device=kwargs.get("device")).expand(args[0])
    if func is _EFFICIENT_ATTENTION:
        out = func(*args, **kwargs)
        dropout = by_name(func, args, kwargs)["dropout_p"]
        return out if SEEDS_ON_DEVICE and not dropout else (*out[:2], *(each.to("cpu") for each in out[2:]))
    if func in _ON_CUDA and args[0].device.type == "cuda":
        return _ON_CUDA[func](*args)
    if func in _RESIZED_VOLUMES and args[0].device.type == "cuda":
        out, order = func(*args, **kwargs), port.suggested_format(args[0])
        return torch.empty(out.shape, dtype=out.dtype, device=out.device, memory_format=order)
    place = _BATCH_NORMS.get(func)
    if place is None or type(args[place]) is not FakeTensor:
        return None
    first, *others = func(*args, **kwargs)
    order = port.suggested_format(args[place])
    if func is _BATCH_NORM_BACKWARD and args[place].device.type == "cuda" and not args[7]:  # not training
        order = torch.contiguous_format
    if first is not None and not first.is_contiguous(memory_format=order):
        first = torch.empty(first.shape, dtype=first.dtype, device=first.device, memory_format=order)
    if (
        place == 0
        and args[0].device.type == "cpu"
        and any(each is not None and each.dtype != args[0].dtype for each in args[1:5])
    ):
        others = [
            torch.empty(each.shape, dtype=torch.float32, device=each.device) for each in others
        ]  # mixed precision
    return first, *others


# Products without a fake kernel for ``out``.
FILLS_OUT = frozenset({_aten._scaled_mm.out, _aten._scaled_mm_v2.out, _aten.bmm.dtype_out})
_EFFICIENT_ATTENTION = _aten._scaled_dot_product_efficient_attention.default
_ON_CUDA: dict[OpOverload, Callable[..., Any]] = {  # LossCTC.cu: cuDNN takes targets without padding, if at all
    _aten.glu_backward.default: lambda _, x, *__: x.new_empty(x.shape),
    _aten._use_cudnn_ctc_loss.default: lambda *_: False,
    _aten._use_miopen_ctc_loss.default: lambda *_: False,
    _aten._ctc_loss_backward.default: lambda _, log_probs, *__: log_probs.new_empty(log_probs.shape),
    _aten._ctc_loss.default: lambda log_probs, _, __, lengths, *___: (
        log_probs.new_empty(log_probs.shape[1:2]),
        log_probs.new_empty((log_probs.shape[1], log_probs.shape[0], 2 * max(lengths, default=0) + 1)),
    ),
}
_RESIZED_VOLUMES = (_aten.upsample_trilinear3d.default, _aten.upsample_trilinear3d_backward.default)
_BATCH_NORM_BACKWARD = _aten.native_batch_norm_backward.default
_ZEROS_OF_NO_TANGENT = _aten._efficientzerotensor.default
_BATCH_NORMS = {  # with the place of the input
    _aten.native_batch_norm.default: 0,
    _aten.cudnn_batch_norm.default: 0,
    _BATCH_NORM_BACKWARD: 1,
}


def only_writes(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an operator returns nothing and has no fake kernel in torch, which would ask for a device."""
    return func in _ONLY_WRITES and bool(args[0]) and isinstance(args[0][0], FakeTensor)


_ONLY_WRITES = frozenset(
    getattr(packet, overload)
    for packet in (_aten._fused_sgd_, _aten._fused_adagrad_)
    for overload in {"default", "tensor_lr"}.intersection(packet.overloads())
)


# -- operators of others than torch

# Namespaces of operators that allocate what their rules say, or nothing; torchvision's are fused loops.
_KNOWN_NAMESPACES = frozenset(
    {
        *("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "mkldnn", "mkl", "quantized", "rngprims"),
        *("inductor", "fsdp", "symm_mem", "sparse", "torchvision"),
    }
)


def is_custom(func: object) -> bool:
    """Whether an operator comes from neither torch nor torchvision."""
    return isinstance(func, OpOverload) and func.namespace not in _KNOWN_NAMESPACES


class NoAddressError(CannotTraceError):
    """A kernel in C asked where a fake tensor is."""


def without_addresses() -> AbstractContextManager[object]:
    """Refuse the address of a fake tensor while the context is open: it is 0, and a kernel in C would write to it."""

    def refuse(_: FakeTensor) -> int:
        raise NoAddressError("A kernel in C asks for memory, which fake tensors lack.")

    return patched(FakeTensor, data_ptr=refuse)


def unseen(func: OpOverload) -> str:
    """Return the note that memory inside an operator is not predicted."""
    return f"what {func.name()} allocates inside is not seen: it is not implemented in Python"


# -- the arguments of an operator


@functools.cache
def _defaults(operator: OpOverload) -> dict[str, Any]:
    """The names of all arguments in order, with their defaults; None if there is none."""
    return {argument.name: argument.default_value for argument in port.schema_of(operator).arguments}


def by_name(operator: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """An operator's arguments by name, in the order of its schema, defaults filled in."""
    defaults = _defaults(operator)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
