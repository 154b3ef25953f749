"""Each reduction over samples -> the whole batch's value, as an all-reduce over the parts would return it.

`Totals` knows the values. `Reductions` sees each function of torch above autograd: it writes means, variances, norms
and losses as sums and counts, and replaces a part's contribution by the whole batch's value once a function returns.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_memguard.core.foreign import patched
from lightning_memguard.core.kernels.arguments import operands
from lightning_memguard.training.rescue.cut import Entries
from lightning_memguard.training.rescue.elsewhere import Elsewhere
from lightning_memguard.training.rescue.flow import Entry, Flow, fits
from lightning_memguard.training.rescue.rules import check_gradient
from lightning_memguard.training.rescue.sample_layout import CONSTANT, WHOLE, Layout, Refused, Waits, refuse
from lightning_memguard.training.rescue.sizes import Size, as_shape, plain, sizes_in

_CLOSE = 1e-3  # relative, between two runs of a part
_HALF = 1e-4  # the precision of 16 bits
_ROUNDED = 256  # units in the last place, between a value computed in two parts of different sizes

Function = Callable[..., Any]
Args = tuple[Any, ...]
Named = dict[str, Any]
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class AllReduce(torch.autograd.Function):
    """The whole batch's value in place of a part's contribution, which keeps its gradient.

    The loss of each part is that of the whole batch, and its gradient is scaled by the part's share of the samples: so
    what does not depend on the batch counts once. What enters through a reduction is scaled back.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, whole: torch.Tensor, share: float, total: Total, tied: bool) -> Any:  # noqa: D102
        ctx.share, ctx.total, ctx.tied = share, total, tied
        ctx.mask = None if total.kind == "sum" else _reaches(own, whole, own.dtype)
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # noqa: D102
        ctx.total.has_gradient = True
        grad = grad / ctx.share
        return grad if ctx.mask is None else grad * ctx.mask, None, None, None, None


@dataclass
class Total:
    """One reduction of the step.

    Attributes:
        kind: how contributions are combined.
        value: their combination, so far.
        scale: the sum of their largest magnitudes.
        pending: some contribution was computed from a value that is not known yet.
        samples: how many have contributed.
        dtype: of the contributions.
        each: the contributions to a largest or smallest value.
        has_gradient: whether such a value was differentiated.
    """

    kind: str
    value: torch.Tensor
    scale: float
    pending: bool
    samples: int
    dtype: torch.dtype
    each: list[torch.Tensor] = field(default_factory=list)
    has_gradient: bool = False

    def add(self, own: torch.Tensor, pending: bool, samples: int) -> None:
        """A part contributes."""
        self.value = _COMBINE[self.kind](self.value, own)
        self.scale += _magnitude(own)
        self.pending |= pending
        self.samples += samples
        if self.kind != "sum":
            self.each.append(own)


class Totals:
    """The values of a step's reductions over the whole batch, as far as they are known.

    Attributes:
        known: the values, by their place among all reductions of the program.
        found: what the parts of this round have contributed.
    """

    def __init__(self) -> None:
        self.known: dict[int, torch.Tensor] = {}
        self.found: dict[int, Total] = {}

    def begin(self) -> None:
        """A round over all parts begins."""
        self.found = {}

    def add(self, place: int, kind: str, own: torch.Tensor, *, pending: bool, samples: int) -> None:
        """A part contributes to a reduction."""
        own = own.detach()  # in a type that sums of many do not round in
        wide = own.double() if own.is_floating_point() and own.device.type != "mps" else own.clone()
        if place in self.found:
            self.found[place].add(wide, pending, samples)
        else:
            self.found[place] = Total(kind, wide, _magnitude(wide), pending, samples, own.dtype, [wide])

    def learn(self, samples: int) -> bool:
        """A round is over; return whether everything is known.

        Raises:
            Refused: some part did not run a reduction that others did.
        """
        before = len(self.known)
        for place, total in self.found.items():
            if total.samples == samples and not total.pending:
                self.known.setdefault(place, total.value)
        if all(place in self.known for place in self.found):
            return True
        if len(self.known) == before:
            raise Refused("its reductions over samples depend on each other in a circle")
        return False

    def copy(self) -> dict[int, Total]:
        """Copy the findings so far, to go back to."""
        return {place: replace(total, each=[*total.each]) for place, total in self.found.items()}

    def ties(self) -> set[int]:
        """The places of largest (or smallest) values that two parts have, so that their gradient belongs to both."""
        of_values = {place: total.value for place, total in self.found.items() if total.kind != "sum"}
        return {place for place, value in of_values.items() if bool((self._reached(place, value) > 1).any())}

    def _reached(self, place: int, whole: torch.Tensor) -> torch.Tensor:
        """By how many parts each element of a largest (or smallest) value is reached."""
        total = self.found[place]
        return torch.stack([_reaches(own, whole, total.dtype) for own in total.each]).sum(0)

    def check(self) -> None:
        """Hold the last passes against the first.

        Raises:
            Refused: a part computed something else when it was run again.
        """
        for place, total in self.found.items():
            limit = _CLOSE * (1 + abs(total.scale)) if math.isfinite(total.scale) else math.inf
            known = self.known[place]
            same = total.kind != "sum" or torch.allclose(total.value, known, rtol=_CLOSE, atol=limit, equal_nan=True)
            shared = total.kind != "sum" and total.has_gradient and bool((self._reached(place, known) != 1).any())
            if not same or shared:
                raise Refused("a part of its batch computes something else when it is run again")


def _reaches(own: torch.Tensor, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Find the largest value of a part; in a part of another size, products are rounded in another way."""
    if not dtype.is_floating_point:
        return own == whole
    eps = torch.finfo(dtype).eps
    return torch.isclose(own.double(), whole.double(), rtol=_ROUNDED * eps if eps < _HALF else 2 * eps, atol=0)


def _magnitude(own: torch.Tensor) -> float:
    return float(own.abs().max()) if own.numel() and own.dtype != torch.bool else 1.0


class Lengths(Entries):
    """A whole number for each sample, in a list; `torch.as_tensor` may read it."""

    def __init__(self, values: list[int], layout: Layout) -> None:
        super().__init__(values)
        self.layout = layout

    def _refuse(self, *_: object, **__: object) -> Any:
        raise refuse("it reads entries of single samples from a list")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __mul__ = __rmul__ = __imul__ = __iadd__ = _refuse
    __setitem__ = __delitem__ = append = extend = insert = remove = clear = copy = sort = reverse = _refuse
    __hash__ = None  # type: ignore[assignment]


class Reductions(TorchFunctionMode):
    """Sees each call of a torch function while a part runs.

    Attributes:
        share: the part's share of the batch's samples.
        settles: how many reductions the pass has run.
        checkpoints: whether some function ran inside of an activation checkpoint.
    """

    def __init__(self, flow: Flow, totals: Totals) -> None:
        super().__init__()
        self.flow, self.totals = flow, totals
        self.settles, self.share = 0, 1.0
        self.place, self.script = 0, list[Entry]()
        self.outside = Elsewhere()
        self.checkpoints = False
        self.ties: set[int] = set()  # places of largest values that two parts share

    def begin(self) -> None:
        """A pass begins."""
        self.settles = self.place = 0
        self.outside.begin()
        self.share = self.flow.samples / self.flow.total

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Named | None = None) -> Any:
        kwargs, flow = kwargs or {}, self.flow
        if flow.quiet:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if flow.idle:
            return self._recomputed(func, args, kwargs)
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        layout = flow.known(x) if x is not None else None
        known = self._known(func, name, layout, args, kwargs)
        if known is not None:
            return known
        if name == "backward":
            raise refuse("backward inside of the step")
        if flow.extends and not self.checkpoints:
            self.checkpoints = _in_checkpoint()
        if flow.custom_returned is not None:  # backward, sums are the part's: gradients of weights add up by themselves
            sized = sizes_in(args) or sizes_in([*kwargs.values()])
            out = self._with_sizes(func, name, args, kwargs) if sized else _NO
            return func(*args, **kwargs) if out is _NO else out
        if name == "__deepcopy__":
            return self._silently(func, flow.layout(args[0]), *args)  # its storage's copy is no operator
        if name not in _LOOKS:
            self._begin_call(args, kwargs)
        out = self._rewritten(func, name, x, layout, args, kwargs)
        if out is _NO:
            out = func(*args, **kwargs)
            self._end_call(func, name, args, kwargs, out)
        return self._settled(out)

    def _begin_call(self, args: Args, kwargs: Named) -> None:
        """Note where a function takes tensors from; a part of one sample is told how its random numbers lie."""
        flow = self.flow
        if flow.is_single and self.place < len(self.script):
            flow.to_draw = iter(self.script[self.place].draws)
        flow.drawn = []
        for tensor in operands([args, kwargs]) if flow.extends or flow.is_single else ():
            if flow.known(tensor) is None and not flow.is_constant(tensor):
                with flow.silent():
                    self._outside(tensor)

    def _outside(self, tensor: torch.Tensor) -> None:
        self.outside.take(tensor, extends=self.flow.extends)
        if self.flow.is_single:
            self.flow.put(tensor, CONSTANT)

    def _end_call(self, func: object, name: str, args: Args, kwargs: Named, out: object) -> None:
        """Write down how samples lie in what a function returns; a part of one sample is told so.

        Which of several dimensions of size one is that of the samples cannot be seen; and C++ takes other ways through
        its operators where a size is one.
        """
        flow, outs = self.flow, [*operands(out)]
        if not outs:
            return
        if name in _BROADCASTS and not flow.is_single:
            self._broadcast(outs, [*operands([args, kwargs])])
        if flow.recomputes:
            return
        if func in _FROM_VALUES:
            if func is torch.tensor:  # which copies
                flow.mark_new(outs[0])
            if flow.extends or flow.is_single:
                with flow.silent():
                    self._outside(outs[0])
        place, self.place = self.place, self.place + 1
        numbers = tuple(each for each in (*args, *kwargs.values()) if isinstance(each, (int, float, str)))
        if flow.is_single:
            if place >= len(self.script) or not self.script[place].is_same(func, numbers, outs):
                raise refuse("a part of one sample runs something else than larger ones")
            self._told(self.script[place], outs, [*operands([args, kwargs])])
        elif flow.extends and place >= len(self.script):
            entry = Entry.of(func, numbers, outs, [flow.known(each) or CONSTANT for each in outs])
            self.script.append(replace(entry, draws=tuple(flow.drawn)))

    def _broadcast(self, outs: list[torch.Tensor], taken: list[torch.Tensor]) -> None:
        """Numbers alike for all samples, expanded to their shape, have a row for each of them."""
        flow = self.flow
        rows = [(t, o) for t in (*outs, *taken) if (o := flow.known(t)) is not None and o.kind == "rows"]
        for each in outs:
            layout = flow.known(each)
            if rows and layout is not None and layout.kind in ("constant", "whole"):
                tensor, like = rows[0]
                dim = like.dim - tensor.dim() + each.dim()
                if dim >= 0 and each.stride(dim) == 0 and each.shape[dim] == tensor.shape[like.dim]:
                    check_gradient("expand", each, layout)
                    flow.put(each, like.at(dim).waiting(like.pending or layout.pending))

    def _told(self, known: Entry, outs: list[torch.Tensor], taken: list[torch.Tensor]) -> None:
        pending = any(layout is not None and layout.pending for layout in map(self.flow.known, taken))
        self.flow.pending |= pending
        for each, layout in zip(outs, known.layouts, strict=True):
            if layout.has_samples and not layout.ragged and not fits(each, layout, 1):
                raise refuse("a function returns rows that do not belong to samples")
            self.flow.put(each, layout.waiting(pending))

    def _recomputed(self, func: Function, args: Args, kwargs: Named) -> Any:
        """Code of the user's that runs in the backward pass, in an activation checkpoint."""
        if sys._getframe(2).f_code.co_filename.endswith(_CHECKPOINT):  # it compares shapes by itself
            return func(*args, **kwargs)
        self.flow.idle = False
        try:
            return self.__torch_function__(func, (), args, kwargs)
        finally:
            self.flow.idle = True

    # -- sizes, and lists of numbers

    def _known(self, func: Function, name: str, layout: Layout | None, args: Args, kwargs: Named) -> Any:
        """Return the result that is known without an operator; None for another function."""
        if layout is None:
            if not (func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], Lengths)):
                return None
            return self._silently(func, args[0].layout, list.__getitem__(args[0], slice(None)), *args[1:], **kwargs)
        if name in ("__getitem__", "__setitem__") and layout.kind == "rows" and not sizes_in(args):
            self._check_slices(args[0], layout, args[1])
        if name == "tolist":
            known = self._listed(args[0], layout)
        elif layout.kind == "packing" and name == "__getitem__" and type(args[1]) is int and args[1] == 0:
            known = self._samples(Layout("rows", arranged=layout.into), 1)  # each has one token at least
        else:
            known = self._sized(func, name, layout, args, kwargs)
        if known is None:
            self._check(name, layout)
        return known

    def _listed(self, x: torch.Tensor, layout: Layout) -> Any:
        """Lengths as a list, which may be passed on, but not be read."""
        with self.flow.silent():
            is_number = (layout.kind, layout.ragged, *layout.place()) == ("rows", False, 0, 1, 1) and x.dim() == 1
            if not is_number or x.dtype != torch.int64:
                return None
            if layout.pending:
                raise Waits
            return Lengths(x.tolist(), layout)

    def _silently(self, func: Function, layout: Layout, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose result has a known layout."""
        with self.flow.silent():
            out = func(*args, **kwargs)
        self.flow.put(out, layout)
        return out

    def _sized(self, func: Function, name: str, layout: Layout, args: Args, kwargs: Named) -> Any:
        """The sizes of a tensor with samples; None for another function."""
        if func != _SHAPE and name not in ("size", "numel", "nelement"):
            if func == _DATA:
                out = func(*args)
                self.flow.put(out, layout)
                return out
            return None
        value = func(*args, **kwargs)
        if not layout.has_samples:
            return value
        if name in ("numel", "nelement"):
            return self._size(layout, value)
        if isinstance(value, int):
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return self._size(layout, value) if dim % self._rank(args[0]) == layout.dim else value
        return torch.Size([self._size(layout, size) if dim == layout.dim else size for dim, size in enumerate(value)])

    def _rank(self, tensor: torch.Tensor) -> int:
        with self.flow.silent():
            return tensor.dim()

    def _size(self, layout: Layout, part: int) -> int:
        flow = self.flow
        if not layout.ragged:
            return self._samples(layout, part // flow.samples)
        with flow.silent():
            count = torch.tensor(part, dtype=torch.int64)
            flow.put(count, Layout("max" if layout.kind == "packing" else "sum"))
        whole = self.settle(count)
        if flow.known(whole).pending:  # type: ignore[union-attr]
            raise Waits
        with flow.silent():  # all parts are padded to the longest sequence
            return int(whole) if layout.kind == "packing" else Size(int(whole), part)

    def _samples(self, layout: Layout, rows: int) -> Size:
        """The number of samples, with so many rows each."""
        size = Size(rows * self.flow.total, rows * self.flow.samples)
        size.arranged = layout.arranged
        return size

    def length(self, tensor: torch.Tensor | Entries) -> int:
        """The result of ``len`` for a tensor, or for a list that has an entry for each sample."""
        if isinstance(tensor, Entries):
            return self._samples(CONSTANT, list.__len__(tensor) // self.flow.samples)
        layout = self.flow.known(tensor)
        with self.flow.silent():
            size: int = tensor.__len__()
        if layout is None or self.flow.quiet or layout.dim != 0 or not layout.has_samples:
            return size
        return self._size(layout, size)

    def _count(self, x: torch.Tensor, dims: set[int] | None = None) -> Any:
        """Over how many elements of the whole batch a mean is taken."""
        layout = self.flow.layout(x)
        with self.flow.silent():
            shape = [*x.shape]
        own = math.prod(shape if dims is None else [shape[dim] for dim in dims])
        if not layout.ragged:
            return own * self.flow.total // self.flow.samples
        with self.flow.silent():
            count = torch.tensor(own, dtype=torch.float64, device=x.device)
            self.flow.put(count, Layout("sum"))
        return self.settle(count)

    # -- what is refused here, since no operator shows it

    def _check(self, name: str, layout: Layout) -> None:
        if name in _HOOKS:
            raise refuse(f"{name} changes what the backward pass does")
        if name in _OUTSIDE and layout.kind != "constant":
            if layout.kind != "whole":
                raise refuse(f"{name} reads values of single samples outside of PyTorch")
            if layout.pending:
                raise Waits

    # -- functions

    def _rewritten(
        self, func: Function, name: str, x: torch.Tensor | None, layout: Layout | None, args: Args, kwargs: Named
    ) -> Any:
        """A function over samples as one of sums; with sizes as the part has them; `_NO` for any other."""
        if sizes_in(args) or (kwargs and sizes_in([*kwargs.values()])):
            return self._with_sizes(func, name, args, kwargs)
        if func in _LOSSES and any(self.flow.kind(each) == "rows" for each in operands([args, kwargs])):
            return self._loss(func, name, args, kwargs)
        if name in _PACKED and len(args) > 1 and not kwargs and self.flow.kind(args[1]) == "packing":
            out = self.flow.run_as_one(_PACKED[name], func, args)
            self._end_call(func, name, args, kwargs, out)
            return out
        if x is None or layout is None or layout.kind != "rows":
            return _NO
        if name in _SPECIAL:
            return _SPECIAL[name](self, func, *args, **kwargs)
        return self._reduced(name, x, layout, args, kwargs) if name in _REWRITES else _NO

    def _check_slices(self, x: torch.Tensor, layout: Layout, index: object) -> None:
        """Refuse ``x[:4]`` in parts of four samples at most: it is all of a part, and not all of the batch."""
        with self.flow.silent():
            taken = _taken(index if isinstance(index, tuple) else (index,), x.dim(), layout.dim)
            part = x.shape[layout.dim]
        if isinstance(taken, slice) and taken != slice(None):
            whole = part * self.flow.total // self.flow.samples
            if layout.ragged or (_is_all(as_shape(taken), part) and not _is_all(taken, whole)):
                raise refuse("slice takes some of the samples")

    def _reduced(self, name: str, x: torch.Tensor, layout: Layout, args: Args, kwargs: Named) -> Any:
        rewrite, parameters = _REWRITES[name]
        given = dict(zip(parameters, args[1:], strict=False)) | kwargs
        if "axis" in given:
            given["dim"] = given.pop("axis")
        if isinstance(given.get("dim"), bool):
            given["unbiased"] = given.pop("dim")
        dim, rank = given.get("dim"), self._rank(x)
        if dim is None or dim in ((), []):
            dims = None
        else:
            dims = {each % rank for each in ([dim] if isinstance(dim, int) else dim)}
        if layout.dim not in (range(rank) if dims is None else dims):
            return _NO
        with self:
            return rewrite(self, x, dims, given)

    def _called(self, func: Function, args: Args, kwargs: Named) -> Any:
        """Call a function with other arguments than it was given."""
        out = func(*args, **kwargs)
        self._end_call(func, func.__name__, tuple(each for each in args if type(each) is not int), kwargs, out)
        return out

    def _with_sizes(self, func: Function, name: str, args: Args, kwargs: Named) -> Any:
        if name in _ARITHMETIC:
            return _NO
        if name == "arange":
            return self._arange(func, args, kwargs)
        sizes = next((value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))), None)
        own = sizes if sizes is not None else args[name in _METHODS :]
        self.flow.sized = self._made(name, own, args) if name in _MAKES else None
        try:
            filled = name in ("full", "new_full")  # with a number of the whole batch
            shaped = [
                plain(each) if filled and type(each) is Size else as_shape(each) for each in (*args, *kwargs.values())
            ]
            out = self._called(func, tuple(shaped[: len(args)]), dict(zip(kwargs, shaped[len(args) :], strict=True)))
        finally:
            self.flow.sized = None
        layouts = map(self.flow.known, operands(out)) if name in _MAKES and sizes_in(own) else ()
        if not all(layout is not None and layout.has_samples for layout in layouts):
            raise refuse(f"{name} depends on how many samples there are, or on their values")
        return out

    def _made(self, name: str, sizes: Sequence[Any], args: Args) -> Layout | None:
        """The layout of what a function makes that has a row for each sample; None if it has not, or two."""
        flow = self.flow
        places = [place for place, size in enumerate(sizes) if type(size) is Size]
        if len(places) != 1:
            return None
        size = sizes[places[0]]
        if size.part % flow.samples or size.part * flow.total != size * flow.samples:
            return None
        inner = size.part // flow.samples
        if name in ("repeat", "tile"):
            with flow.silent():
                place = places[0] - len(sizes) + args[0].dim()
                inner *= args[0].shape[place] if place >= 0 else 1
        return Layout("rows", places[0], 1, inner, arranged=size.arranged)

    def _arange(self, func: Function, args: Args, kwargs: Named) -> Any:
        size = args[0] if len(args) == 1 else args[1] if len(args) == 2 and args[0] == 0 else None
        if type(size) is not Size or size.part != self.flow.samples or size != self.flow.total:
            return _NO  # a constant of the whole batch's size
        self.flow.sized = Layout("order", arranged=size.arranged, into=size.arranged)
        try:
            return self._called(func, (size.part,), kwargs)
        finally:
            self.flow.sized = None

    def _one_hot(self, _: object, x: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        with self:
            count = num_classes if num_classes > 0 else int(x.max()) + 1
            return (x.unsqueeze(-1) == torch.arange(count, device=x.device)).to(torch.int64)

    def _opened(self, func: FunctionType, *args: Any, **kwargs: Any) -> Any:
        """Run a function that is written in Python as the functions that it calls."""
        closed = dict.fromkeys(("has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False)
        opened = FunctionType(func.__code__, {**func.__globals__, **closed}, func.__name__, func.__defaults__)
        with self:
            return opened(*args, **kwargs)

    def _instance_norm(self, func: Function, x: torch.Tensor, *args: object, **kwargs: object) -> Any:
        given = _INSTANCE_NORM.bind(x, *args, **kwargs).arguments
        if not given.get("use_input_stats", True) or given.get("running_mean") is not None:
            return _NO
        weight, bias = given.pop("weight", None), given.pop("bias", None)
        out = self._called(func, (), given)
        with self:
            shape = (-1, *[1] * (x.dim() - 2))
            out = out if weight is None else out * weight.view(shape)
            return out if bias is None else out + bias.view(shape)

    def _loss(self, func: FunctionType, name: str, args: Args, kwargs: Named) -> Any:
        """A loss function's mean or sum, from its losses of each element."""
        bound = _LOSSES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        reduction = given["reduction"]
        if given.get("size_average") is not None or given.get("reduce") is not None:
            raise refuse(f"{name} with size_average or reduce")
        if reduction == "none":
            return _NO
        if reduction == "mean" and given.get("weight") is not None and name in _WEIGHTED:
            raise refuse(f"the weighted mean of {name}")
        losses = self._called(func, (), {**given, "reduction": "none"})
        with self:
            if reduction == "sum":
                return losses.sum()
            if reduction == "batchmean":
                return losses.sum() / given["input"].size(0)
            if name == "ctc_loss":
                return (losses / given["target_lengths"].clamp(min=1).to(losses)).mean()
            return self._mean_loss(name, losses, given)

    def _mean_loss(self, name: str, losses: torch.Tensor, given: Named) -> torch.Tensor:
        target, weight = given.get("target"), given.get("weight")
        if name not in ("cross_entropy", "nll_loss") or target is None or target.is_floating_point():
            return losses.mean()
        counted: torch.Tensor = target != given["ignore_index"]
        if weight is not None:
            counted = weight[target.masked_fill(~counted, 0)] * counted
        return losses.sum() / counted.sum()

    # -- contributions

    def _settled(self, out: object) -> Any:
        kind = self.flow.kind
        if not any(kind(each) in _COMBINE for each in operands(out)):
            return out
        return tree_map(lambda each: self.settle(each) if kind(each) in _COMBINE else each, out)

    def settle(self, own: torch.Tensor) -> torch.Tensor:
        """The whole batch's value of a part's contribution.

        Raises:
            Refused: the backward pass would run it again, or its gradient belongs to two parts.
        """
        flow, totals, place = self.flow, self.totals, self.settles
        layout = flow.layout(own)
        self.settles += 1
        with flow.silent():
            if _in_checkpoint():
                raise refuse("a reduction over samples inside of an activation checkpoint")
            totals.add(place, layout.kind, own, pending=layout.pending, samples=flow.samples)
            if place not in totals.known:
                out = own.clone()
                flow.put(out, WHOLE.waiting(True))
                return out
            whole = totals.known[place].to(own.dtype)
            if own.requires_grad and torch.is_grad_enabled():
                out = AllReduce.apply(own, whole, self.share, totals.found[place], place in self.ties)  # type: ignore[no-untyped-call]
            else:
                out = whole.clone()
            flow.put(out, WHOLE.waiting(layout.pending))
            return out


# -- means, variances and norms, from sums


def _sum(x: torch.Tensor, dims: set[int] | None, *, keep: bool) -> torch.Tensor:
    wide: Any = {"dtype": torch.float32} if x.dtype in (torch.float16, torch.bfloat16) else {}
    return x.sum(**wide) if dims is None else x.sum(sorted(dims), keepdim=keep, **wide)


def _mean(run: Reductions, x: torch.Tensor, dims: set[int] | None, given: Named) -> Any:
    x = x if given.get("dtype") is None else x.to(given["dtype"])
    return (_sum(x, dims, keep=bool(given.get("keepdim"))) / run._count(x, dims)).to(x.dtype)


def _var(run: Reductions, x: torch.Tensor, dims: set[int] | None, given: Named) -> Any:
    correction = given.get("correction", 1)
    correction = int(given["unbiased"]) if given.get("unbiased") is not None else correction
    correction = 1 if correction is None else correction
    keep, count = bool(given.get("keepdim")), run._count(x, dims)
    centered = x - _mean(run, x, dims, {"keepdim": True}).detach()
    squares, rest = _sum(centered.square(), dims, keep=keep), _sum(centered, dims, keep=keep)
    return ((squares - rest.square() / count) / (count - correction)).to(x.dtype)


def _norm(_: Reductions, x: torch.Tensor, dims: set[int] | None, given: Named) -> Any:
    order = given.get("ord", given.get("p", 2))
    order = 2 if order in (None, "fro") else order
    if not isinstance(order, (int, float)) or order <= 0 or (dims is not None and len(dims) > 1 and order != 2):
        raise refuse(f"a norm of order {order} over the samples")
    keep = bool(given.get("keepdim"))
    if order == math.inf:
        return x.abs().amax(sorted(dims), keepdim=keep) if dims is not None else x.abs().amax()
    if order == 2:
        return _sum(x.square(), dims, keep=keep).sqrt().to(x.dtype)
    return _sum(x.abs().pow(order), dims, keep=keep).pow(1 / order).to(x.dtype)


def _logsumexp(_: Reductions, x: torch.Tensor, dims: set[int] | None, given: Named) -> Any:
    top = x.amax(sorted(dims or ()), keepdim=True).detach()
    total = (x - top).exp().sum(sorted(dims or ()), keepdim=True).log() + top
    return total if given.get("keepdim") else total.squeeze(tuple(dims or ()))


_NO = object()
_CHECKPOINT = "torch/utils/checkpoint.py"
_SHAPE, _DATA = torch.Tensor.shape.__get__, torch.Tensor.data.__get__  # type: ignore[attr-defined]
_INSTANCE_NORM = inspect.signature(F.instance_norm)

# How a function is written as sums, and the names of its arguments after the tensor.
_REWRITES: dict[str, tuple[Function, tuple[str, ...]]] = {
    "mean": (_mean, ("dim", "keepdim")),
    "var": (_var, ("dim", "unbiased", "keepdim")),
    "std": (lambda *call: _var(*call).sqrt(), ("dim", "unbiased", "keepdim")),
    "var_mean": (lambda *call: (_var(*call), _mean(*call)), ("dim", "unbiased", "keepdim")),
    "std_mean": (lambda *call: (_var(*call).sqrt(), _mean(*call)), ("dim", "unbiased", "keepdim")),
    "norm": (_norm, ("p", "dim", "keepdim")),
    "linalg_vector_norm": (_norm, ("ord", "dim", "keepdim")),
    "linalg_norm": (_norm, ("ord", "dim", "keepdim")),
    "logsumexp": (_logsumexp, ("dim", "keepdim")),
}
_SPECIAL: dict[str, Function] = {
    "one_hot": Reductions._one_hot, "instance_norm": Reductions._instance_norm, "normalize": Reductions._opened,
    "gaussian_nll_loss": Reductions._opened,
}  # fmt: skip
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_OUTSIDE = {"numpy", "tolist", "__array__", "data_ptr", "__dlpack__", "__cuda_array_interface__", "storage",
            "untyped_storage", "__reduce_ex__", "__contains__"}  # fmt: skip
_FROM_VALUES = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray, torch.frombuffer}
_BROADCASTS = {"broadcast_tensors", "expand_as", "broadcast_to"}
_LOOKS = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
          "type", "is_contiguous", "is_floating_point", "is_complex", "is_same_size", "get_device", "is_inference",
          "__hash__", "__format__", "__repr__", "__len__", "requires_grad_"}  # fmt: skip
_MAKES = {"zeros", "ones", "empty", "rand", "randn", "full", "randint", "new_zeros", "new_ones", "new_full",
          "new_empty", "expand", "repeat", "tile", "broadcast_to"}  # fmt: skip
_PACKED = {
    "lstm": torch.ops.aten.lstm.data, "gru": torch.ops.aten.gru.data, "rnn_tanh": torch.ops.aten.rnn_tanh.data,
    "rnn_relu": torch.ops.aten.rnn_relu.data, "_pad_packed_sequence": torch.ops.aten._pad_packed_sequence.default,
}  # fmt: skip
_METHODS = {"new_zeros", "new_ones", "new_full", "new_empty", "expand", "repeat", "tile"}
_WEIGHTED = {"mse_loss", "l1_loss", "huber_loss"}
_NUMBERS = """
    add sub mul div true_divide divide multiply subtract __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__
    __rtruediv__ __div__ __rdiv__ mul_ div_ add_ sub_ __itruediv__ __imul__ __iadd__ __isub__ __idiv__ floor_divide
    __floordiv__ __rfloordiv__ __mod__ remainder fmod pow __pow__ __rpow__ pow_ clamp clip clamp_min clamp_max clamp_
    clamp_min_ clamp_max_ maximum minimum __gt__ __lt__ __ge__ __le__ __eq__ __ne__ gt lt ge le eq ne tensor as_tensor
    scalar_tensor fill_ masked_fill masked_fill_ addcmul addcdiv lerp rsub"""
_ARITHMETIC = frozenset(_NUMBERS.split())
_LOSSES = {
    func: inspect.signature(func)
    for name, func in vars(F).items()
    if inspect.isfunction(func)
    and name.endswith(("loss", "entropy", "kl_div", "with_logits"))
    and name not in _SPECIAL
    and "reduction" in inspect.signature(func).parameters
}


def _in_checkpoint() -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_CHECKPOINT):
            return True
        frame = frame.f_back
    return False


def _taken(index: Args, rank: int, dim: int) -> Any:
    """Return the entries that an index takes along a dimension."""
    widths = [
        0 if each is None or each is ... or isinstance(each, bool)
        else each.dim() if isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8) else 1
        for each in index
    ]  # fmt: skip
    for each, width in zip(index, widths, strict=True):
        dim -= width if each is not ... else rank - sum(widths)
        if dim < 0:
            return each
    return None


def _is_all(taken: slice, size: int) -> bool:
    start, stop, step = taken.indices(size)
    return (start, stop, step) == (0, size, 1)


@contextmanager
def lengths(run: Reductions) -> Iterator[None]:
    """Have ``len`` of a tensor return what its shape does; Python makes a plain number of what ``__len__`` returns."""
    own, thread = len, threading.get_ident()

    @functools.wraps(own)
    def length(value: Any, /) -> int:
        if isinstance(value, (torch.Tensor, Entries)) and threading.get_ident() == thread:
            return run.length(value)
        return own(value)

    with patched(builtins, len=length):
        yield
