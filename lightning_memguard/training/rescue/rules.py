"""How an operator of ATen carries samples from its inputs to its outputs; what has no rule here is refused.

A rule holds if the whole batch's result is what `Layout` says of the parts' results: their rows one after the other, or
their sum. The names are those of ATen's schemas, checked on torch 2.11 to 2.13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_memguard.core.kernels.arguments import operands
from lightning_memguard.core.simulation.fake import by_name
from lightning_memguard.training.rescue.sample_layout import CONSTANT, WHOLE, Kind, Layout, refuse

Rule = Callable[["OperatorCall"], "Layout | list[Layout]"]


@dataclass(frozen=True)
class Info:
    """Facts about an operator, from its schema.

    Attributes:
        func: its overload.
        namespace: such as ``"aten"``.
        name: without the underscore of the form that writes to its first argument.
        written: the names of the arguments that it writes to.
        draws: whether it may draw random numbers.
        pointwise: whether each element follows from those at the same place.
        empties: whether it allocates its result and writes nothing to it.
        is_composite: whether it is made of others, as which autograd sees it; in inference mode it comes as one.
    """

    func: Any
    namespace: str
    name: str
    written: tuple[str, ...]
    draws: bool
    pointwise: bool
    empties: bool
    is_composite: bool


@functools.cache
def info_of(func: Any) -> Info:
    """Return the facts about an operator."""
    name = func.overloadpacket.__name__
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    written = tuple(
        each.name
        for each in func._schema.arguments
        if (each.alias_info is not None and each.alias_info.is_write) or each.name in ("running_mean", "running_var")
    )
    draws = torch.Tag.nondeterministic_seeded in func.tags
    pointwise = (torch.Tag.pointwise in func.tags or name in _POINTWISE) and func.namespace == "aten"
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return Info(func, func.namespace, name, written, draws, pointwise, name in _EMPTY, is_composite)


def shape_of(tensor: torch.Tensor, layout: Layout) -> tuple[int | None, ...]:
    """A tensor's shape, without the dimension of its samples, and without those that repeat one row."""
    if layout.has_samples:
        return tuple(None if dim == layout.dim else size for dim, size in enumerate(tensor.shape))
    if 0 not in tensor.shape and tensor.layout == torch.strided:
        return tuple(size if stride else None for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tuple(tensor.shape)


@dataclass
class OperatorCall:
    """An operator, what it takes and returns.

    Attributes:
        makes: whether it makes rows for samples, as `torch.zeros` of their number does.
        arranged: the arrangement that a sort or a packing brings samples into.
    """

    info: Info
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    layouts: list[Layout]
    samples: int
    makes: bool = False
    arranged: int = 0
    outs: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kinds = {layout.kind for layout in self.layouts}
        self.is_tracked = bool(self.kinds - {"constant"})
        self.pending = any(layout.pending for layout in self.layouts)

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments, by their names in the schema."""
        return by_name(self.info.func, self.args, self.kwargs)

    def get(self, name: str) -> Any:
        """An argument; None if the schema has none of this name."""
        return self.arguments.get(name)

    def written(self) -> list[torch.Tensor]:
        """The tensors that are written to."""
        return [*operands([self.get(name) for name in self.info.written])]

    def of(self, value: object) -> Layout:
        """The layout of an argument."""
        for tensor, layout in zip(self.tensors, self.layouts, strict=True):
            if tensor is value:
                return layout
        return CONSTANT

    def numbers(self) -> tuple[Any, ...]:
        """Arguments that all parts must pass alike: all but tensors, and the sizes of tensors that hold samples."""
        sized = self.info.name in _SIZED and any(layout.has_samples for layout in self.layouts)
        sized |= self.info.name == "expand" and bool(self.outs) and 0 in self.outs[0].stride()
        sized |= self.makes  # the shapes of results are compared, too
        return tuple(_number(value, sized=sized) for value in (*self.args, *self.kwargs.values()))

    @property
    def first(self) -> tuple[torch.Tensor, Layout]:
        """The first tensor with samples, and how they lie."""
        return self.rows()[0]

    def rows(self) -> list[tuple[torch.Tensor, Layout]]:
        """The tensors with samples."""
        return [(t, o) for t, o in zip(self.tensors, self.layouts, strict=True) if o.has_samples]

    def others(self) -> list[torch.Tensor]:
        """The tensors without."""
        return [t for t, o in zip(self.tensors, self.layouts, strict=True) if not o.has_samples]

    def mixes_if(self, mixes: object) -> None:
        """Refuse it if it mixes samples."""
        if mixes:
            raise refuse(f"{self.info.name} mixes samples")

    def is_random(self) -> bool:
        """Whether this call draws."""
        name = self.info.name
        if name == "native_dropout":
            return self.get("train") is not False and self.get("p") > 0
        if "dot_product" in name:
            return bool(self.get("dropout_p"))
        if "dropout" in self.arguments:  # recurrent layers
            return bool(self.get("dropout")) and bool(self.get("train"))
        if name in ("mkldnn_rnn_layer", "rrelu_with_noise"):
            return bool(self.get("train") or self.get("training"))
        return True


def _number(value: object, *, sized: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, (list, tuple)):
        return tuple(_number(each, sized=sized) for each in value)
    if type(value) is float and value != value:  # noqa: PLR0124 - not a number, which is equal to nothing
        return "nan"
    return None if sized and type(value) is int else value


def layouts_of(call: OperatorCall) -> list[Layout]:
    """The layouts of what an operator returns, one for each tensor.

    Raises:
        Refused: it mixes samples, or that is unknown.
    """
    name, kinds = call.info.name, call.kinds
    if "packing" in kinds and name not in _PACKED:
        raise refuse(f"{name} takes how many samples a packed sequence has at each time")
    if kinds & {"sum", "max", "min"}:
        return _of_partial(call, kinds)
    if not kinds & {"rows", "order"}:
        return [WHOLE] * len(call.outs)
    if call.info.namespace not in ("aten", "prims", "prim"):
        raise refuse(f"it is unknown whether {call.info.namespace}::{call.info.name} mixes samples")
    if "order" in kinds and not _keeps_places(call):
        raise refuse(f"{name} takes places of samples within the batch as numbers")
    for tensor, layout in zip(call.tensors, call.layouts, strict=True):
        check_gradient(name, tensor, layout)
    if name in _PACKED:
        return _by_rule(call)
    if name in _ORDERED and "order" in (call.of(call.args[0]).kind, call.of(_source(call)).kind):
        return [_inverse(call)]
    arranged = _arrangement(call)
    return [replace(o, arranged=arranged) if o.has_samples else o for o in _by_rule(call)]


def check_gradient(name: str, tensor: torch.Tensor, layout: Layout) -> None:
    """Refuse to use a value of the whole batch for each sample if it has a gradient, which all parts would add to."""
    if layout.kind == "whole" and tensor.requires_grad and torch.is_grad_enabled():
        raise refuse(f"{name} uses a value of the whole batch for each sample, with its gradient")


def sorted_by(call: OperatorCall) -> torch.Tensor | None:
    """The numbers by which an operator brings samples into another order; None if it does not."""
    place = {"sort": 0, "argsort": 0, "_pack_padded_sequence": 1}.get(call.info.name)
    values: torch.Tensor | None = call.args[place] if place is not None else None
    return values if values is not None and values.dim() == 1 and call.of(values).kind == "rows" else None


def _arrangement(call: OperatorCall) -> int:
    """The order that an operator returns samples in: that of its arguments, or that of the places which it indexes."""
    indices, name = _indices(call), call.info.name
    order = next((o for o in map(call.of, indices) if o.kind == "order"), None)
    taken = map(call.of, call.tensors if order is None else [*indices, _source(call)])
    found = {layout.arranged for layout in taken if layout.has_samples}
    x = call.of(call.args[0])
    if len(found) > 1 or (order is not None and (name == "scatter" or x.arranged != order.into)):
        raise refuse(f"{name} combines samples in different orders")
    arranged = found.pop()
    if arranged and name != "masked_fill" and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        raise refuse(f"{name} takes some of the samples, in an order of their own")
    return x.arranged if order is not None and name == "index_put" else arranged


def _indices(call: OperatorCall) -> list[torch.Tensor]:
    named = (call.get(name) for name in ("indices", "index", "mask") if name in call.arguments)
    return [*operands(next(named, None))]


def _source(call: OperatorCall) -> Any:
    return call.get(next((name for name in ("values", "source") if name in call.arguments), "src"))


def _inverse(call: OperatorCall) -> Layout:
    """Places that are written to places: ``inverse[order] = torch.arange(n)``."""
    indices = _indices(call)
    x, src = call.of(call.args[0]), call.of(_source(call))
    at = call.of(indices[0]) if len(indices) == 1 else CONSTANT
    same = {each.place() for each in (x, at, src)} == {(0, 1, 1)} and not x.ragged
    same &= call.args[0].dim() == 1 and not call.get("accumulate") and not at.ragged
    if not same or not x.has_samples or not at.kind == src.kind == "order" or at.arranged != src.arranged:
        raise refuse(f"{call.info.name} takes places of samples within the batch as numbers")
    return Layout("order", arranged=at.into, into=src.into)


def _keeps_places(call: OperatorCall) -> bool:
    """Whether an operator moves places of samples, or indexes by them; for those of only some samples, fewer do."""
    name = call.info.name
    if any(o.ragged for o in call.layouts if o.kind == "order"):
        return name in _SOME_PLACES or (name in ("view", "_unsafe_view") and call.first[0].shape[1:].numel() <= 1)
    return name in _MOVES | _ORDERED | _LIKE | {"sort", "argsort"}


def _by_rule(call: OperatorCall) -> list[Layout]:
    rule = _RULES.get(call.info.name)
    if rule is not None:
        found = rule(call)
        return found if isinstance(found, list) else [found] * len(call.outs)
    if call.arguments.get("reduction", 0) != 0:
        raise refuse(f"{call.info.name} over the samples, inside of one function")
    if "reduction" in call.arguments or call.info.pointwise:
        return [pointwise(call)] * len(call.outs)
    raise refuse(f"it is unknown whether {call.info.name} mixes samples")


def _of_partial(call: OperatorCall, kinds: set[Kind]) -> list[Layout]:
    """Inside of one function, what is a part's contribution may be moved, and scaled if it is a sum."""
    name = call.info.name
    partial = next(layout for layout in call.layouts if layout.is_partial)
    linear = name in _LINEAR or (partial.kind == "sum" and _scales(call))
    if not linear or kinds - {partial.kind, "constant"}:
        raise refuse(f"{name} of a part's sum, inside of one function")
    return [partial] * len(call.outs)


def _scales(call: OperatorCall) -> bool:
    """Whether it is linear in sums: a sum of them, or their product with what is the same in each part."""
    name, partial = call.info.name, [layout.is_partial for layout in call.layouts]
    if name == "sum":
        return True
    if name in ("add", "sub"):
        return len(partial) == 2 and all(partial)
    if name in ("mul", "neg"):
        return sum(partial) == 1
    return name == "div" and partial[0] and not any(partial[1:])


def is_same_for_all(tensor: torch.Tensor, dim: int) -> bool:
    """Whether a tensor without samples has the same values for each of them, where others have one of their own."""
    if (-dim if dim < 0 else dim + 1) > tensor.dim():
        return True
    return tensor.shape[dim] == 1 or tensor.stride(dim) == 0


def fits_ragged(call: OperatorCall) -> bool:
    """Whether tensors have as many rows; a single one of a part would be repeated, and not that of the whole batch."""
    if not any(layout.ragged for layout in call.layouts) or call.info.name in _UNEQUAL:
        return True
    name, rows = call.info.name, call.rows()
    if name == "expand":
        (x, layout), sizes = rows[0], call.get("size")
        return sizes[layout.dim - x.dim()] in (-1, x.shape[layout.dim])
    if name not in ("index", "index_put"):
        return len({tensor.shape[layout.dim] for tensor, layout in rows}) == 1
    taken = [(t, o) for t, o in rows if t is not call.args[0]]
    return len({int(t.sum()) if t.dtype == torch.bool else t.shape[o.dim] for t, o in taken}) < 2


def pointwise(call: OperatorCall) -> Layout:
    """The layout of an element-wise operator's result."""
    rank = max(tensor.dim() for tensor in call.tensors)
    seen = {(layout.dim - tensor.dim(), layout.outer, layout.inner) for tensor, layout in call.rows()}
    if len(seen) != 1:
        raise refuse(f"{call.info.name} combines different samples")
    ((dim, outer, inner),) = seen
    if not all(is_same_for_all(tensor, dim) for tensor in call.others()):
        raise refuse(f"{call.info.name} combines samples with a row for each of them that is not of the batch")
    ragged = any(layout.ragged for _, layout in call.rows())
    return Layout(_kind(call), dim + rank, outer, inner, ragged)


def _kind(call: OperatorCall) -> Kind:
    return "order" if any(layout.kind == "order" for layout in call.layouts) else "rows"


# -- rules, by name

_RULES: dict[str, Rule] = {}


def _rule(names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def _dims(call: OperatorCall, *names: str) -> set[int]:
    """The dimensions that an argument names; all if it names none."""
    n = call.first[0].dim()
    given = next((call.get(name) for name in names if name in call.arguments), None)
    if given is None or given == []:
        return set(range(n))
    return {dim % n for dim in ([given] if isinstance(given, int) else given)}


@_rule("empty_like zeros_like ones_like full_like rand_like randn_like randint_like alias detach clone _to_copy "
       "lift_fresh contiguous native_dropout")  # fmt: skip
def _keep(call: OperatorCall) -> Layout:
    layout = call.first[1]
    return replace(layout, kind="rows", into=0) if call.info.name.endswith("_like") else layout


@_rule("new_empty new_zeros new_ones new_full new_empty_strided _linalg_check_errors")
def _new(_: OperatorCall) -> Layout:
    return CONSTANT


@_rule("view _unsafe_view reshape _reshape_alias")
def _view(call: OperatorCall) -> Layout:
    (x, layout), y = call.first, call.outs[0]
    samples = x.shape[layout.dim] // (layout.outer * layout.inner)
    left, before = math.prod(x.shape[: layout.dim]) * layout.outer, 1
    if samples == 0 and 0 in y.shape:
        return replace(layout, dim=y.shape.index(0))
    for dim, size in enumerate(y.shape) if samples else ():
        if left % before == 0 and size % (left // before * samples) == 0:
            outer = left // before
            return replace(layout, dim=dim, outer=outer, inner=size // (outer * samples))
        before *= size
    raise refuse("view cuts through the samples")


@_rule("t transpose permute numpy_T")
def _permute(call: OperatorCall) -> Layout:
    x, layout = call.first
    order = list(range(x.dim()))
    if call.info.name == "permute":
        order = [dim % x.dim() for dim in call.get("dims")]
    elif x.dim() > 1:
        a, b = (0, 1) if call.info.name == "t" else (call.get("dim0") % x.dim(), call.get("dim1") % x.dim())
        order[a], order[b] = order[b], order[a]
    return layout.at(order.index(layout.dim))


@_rule("expand")
def _expand(call: OperatorCall) -> Layout:
    x, layout = call.first
    return layout.at(layout.dim + call.outs[0].dim() - x.dim())


@_rule("as_strided")
def _as_strided(call: OperatorCall) -> Layout:
    """Other strides for dimensions of size one."""
    (x, layout), y = call.first, call.outs[0]
    strides = [a == b for a, b, size in zip(x.stride(), y.stride(), x.shape, strict=False) if size > 1]
    if x.shape != y.shape or x.storage_offset() != y.storage_offset() or not all(strides):
        raise refuse("as_strided may cut through the samples")
    return layout


@_rule("unsqueeze")
def _unsqueeze(call: OperatorCall) -> Layout:
    x, layout = call.first
    return layout.at(layout.dim + (call.get("dim") % (x.dim() + 1) <= layout.dim))


@_rule("squeeze")
def _squeeze(call: OperatorCall) -> Layout:
    x, layout = call.first
    dims = _dims(call, "dim")
    gone = [dim for dim in dims if x.shape[dim] == 1]
    if layout.dim in gone:
        raise refuse("squeeze removes the samples' dimension")
    return layout.at(layout.dim - sum(dim < layout.dim for dim in gone))


@_rule("select unbind")
def _select(call: OperatorCall) -> Layout | list[Layout]:
    x, layout = call.first
    dim = (call.get("dim") or 0) % x.dim()
    if dim == layout.dim:
        raise refuse(f"{call.info.name} takes single samples out of the batch")
    moved = layout.at(layout.dim - (dim < layout.dim))
    if layout.kind == "order":  # of `nonzero`
        columns = [moved, *[replace(moved, kind="rows")] * (x.shape[dim] - 1)]
        return columns if call.info.name == "unbind" else columns[call.get("index")]
    return moved


@_rule("slice narrow")
def _slice(call: OperatorCall) -> Layout:
    x, layout = call.first
    dim = (call.get("dim") or 0) % x.dim()
    if dim == layout.dim and layout.ragged and (call.get("start") or (call.get("end") or _ALL) < _ALL):
        raise refuse(f"{call.info.name} takes some of the samples")
    if dim != layout.dim or call.outs[0].shape == x.shape:
        return layout
    block = x.shape[dim] // layout.outer
    start, size = call.get("start") or 0, call.outs[0].shape[dim]
    if layout.outer == 1 or (call.get("step") or 1) != 1 or start % block or size % block:
        raise refuse(f"{call.info.name} takes some of the samples")
    return replace(layout, outer=size // block)


@_rule("split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unsafe_chunk")
def _split(call: OperatorCall) -> list[Layout]:
    x, layout = call.first
    dim = (call.get("dim") or 0) % x.dim()
    if dim != layout.dim:
        return [layout] * len(call.outs)
    block = x.shape[dim] // layout.outer
    if layout.outer == 1 or any(out.shape[dim] % block for out in call.outs):
        raise refuse(f"{call.info.name} takes some of the samples")
    return [replace(layout, outer=out.shape[dim] // block) for out in call.outs]


@_rule("cat stack")
def _cat(call: OperatorCall) -> Layout:
    x, layout = call.first
    places = {(t.dim(), o.place()) for t, o in call.rows()}
    if len(places) != 1:
        outer = {(t.dim(), replace(o, outer=1).place()) for t, o in call.rows()}
        if call.info.name == "stack" or len(outer) != 1 or (call.get("dim") or 0) % x.dim() != layout.dim:
            raise refuse(f"{call.info.name} combines different samples")
    ragged = any(o.ragged for _, o in call.rows())
    layout = replace(layout, ragged=ragged, kind=_kind(call))
    if call.info.name == "stack":
        dim = (call.get("dim") or 0) % (x.dim() + 1)
        moved = layout.at(layout.dim + (dim <= layout.dim))
    elif (call.get("dim") or 0) % x.dim() == layout.dim:
        if call.others() or ragged:
            raise refuse("cat puts rows of no sample next to samples")
        return replace(layout, outer=sum(o.outer for _, o in call.rows()))
    else:
        moved = layout
    if not all(is_same_for_all(tensor, layout.dim) for tensor in call.others() if tensor.numel()):
        raise refuse(f"{call.info.name} combines samples with a row for each of them that is not of the batch")
    return moved


@_rule("repeat")
def _repeat(call: OperatorCall) -> Layout:
    x, layout = call.first
    times = call.get("repeats")
    moved = layout.dim + len(times) - x.dim()
    if times[moved] != 1:
        if layout.outer != 1:
            raise refuse("repeat copies samples")
        return replace(layout, dim=moved, outer=times[moved])
    return layout.at(moved)


@_rule("constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
       "replication_pad3d")  # fmt: skip
def _pad(call: OperatorCall) -> Layout:
    (x, layout), pad = call.first, call.get("pad") or call.get("padding")
    padded = {x.dim() - 1 - place // 2 for place, size in enumerate(pad) if size}
    if layout.dim in padded:
        raise refuse(f"{call.info.name} adds rows of no sample")
    return layout


def _along(call: OperatorCall, dims: set[int]) -> Layout:
    """An operator that works along dimensions, for each index of the others."""
    _, layout = call.first
    call.mixes_if(layout.dim in dims or len({(t.dim(), o.place()) for t, o in call.rows()}) != 1)
    call.mixes_if(not all(is_same_for_all(tensor, layout.dim) for tensor in call.others() if tensor.dim()))
    return replace(layout, ragged=any(o.ragged for _, o in call.rows()))


@_rule("_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp topk kthvalue flip "
       "roll gather scatter scatter_add scatter_reduce glu cummax cummin index_fill mode _fft_r2c _fft_c2r "
       "_fft_c2c take_along_dim unfold diff")  # fmt: skip
def _along_dims(call: OperatorCall) -> Layout:
    return _along(call, _dims(call, "dim", "dims", "dimension"))


@_rule("sort argsort")
def _sort(call: OperatorCall) -> list[Layout]:
    """Values and their places; those of places are the places back."""
    x, layout = call.first
    if x.dim() > 1:
        return [_along(call, _dims(call, "dim"))] * len(call.outs)
    call.mixes_if(layout.place() != (0, 1, 1) or layout.ragged or call.info.written)
    call.mixes_if(layout.kind == "order" and call.get("descending"))
    arranged = layout.into if layout.kind == "order" else call.arranged
    found = [replace(layout, arranged=arranged), Layout("order", arranged=arranged, into=layout.arranged)]
    return found[-len(call.outs) :]


@_rule("_pack_padded_sequence")
def _pack(call: OperatorCall) -> list[Layout]:
    """Return the tokens of all samples, in an order of their own, and at each time how many samples have one."""
    x, lengths = map(call.of, call.args[:2])
    call.mixes_if(x.place() != (0 if call.args[2] else 1, 1, 1))
    call.mixes_if(lengths.place() != (0, 1, 1) or x.arranged != lengths.arranged)
    call.mixes_if(x.kind != "rows" or lengths.kind != "rows" or x.ragged or lengths.ragged)
    tokens = Layout("rows", ragged=True, arranged=call.arranged)
    return [tokens, replace(tokens, kind="packing", into=x.arranged)]


@_rule("_pad_packed_sequence lstm gru rnn_tanh rnn_relu")
def _packed(call: OperatorCall) -> list[Layout]:
    """Operators that return or take a row for each sample have them in the order of the packed ones."""
    tokens, sizes, name = call.of(call.args[0]), call.of(call.args[1]), call.info.name
    call.mixes_if((tokens.kind, tokens.dim, sizes.kind, tokens.arranged) != ("rows", 0, "packing", sizes.arranged))
    if name == "_pad_packed_sequence":
        return [Layout("rows", 0 if call.args[2] else 1, arranged=sizes.into), Layout("rows", arranged=sizes.into)]
    state = Layout("rows", 1, arranged=sizes.into)
    states = [*operands(call.args[2])]
    aligned = [call.of(each).waiting(False) == state for each in states]
    call.mixes_if(not all(same or is_same_for_all(each, 1) for same, each in zip(aligned, states, strict=True)))
    call.mixes_if(len(call.rows()) != 2 + sum(aligned))
    return [tokens, *[state] * (len(call.outs) - 1)]


@_rule("tril triu inverse linalg_inv_ex linalg_cholesky_ex linalg_solve_triangular _linalg_det _linalg_slogdet "
       "_linalg_solve_ex linalg_qr _linalg_svd _linalg_eigh linalg_lu_factor_ex cholesky_solve")  # fmt: skip
def _matrices(call: OperatorCall) -> list[Layout]:
    x, layout = call.first
    call.mixes_if(layout.dim >= x.dim() - 2 or any(o.place() != layout.place() for _, o in call.rows()))
    call.mixes_if(not all(tensor.dim() <= 2 or is_same_for_all(tensor, layout.dim) for tensor in call.others()))
    return [layout] * len(call.outs)


@_rule("diagonal")
def _diagonal(call: OperatorCall) -> Layout:
    x, layout = call.first
    dims = {call.get("dim1") % x.dim(), call.get("dim2") % x.dim()}
    call.mixes_if(layout.dim in dims)
    return layout.at(layout.dim - sum(dim < layout.dim for dim in dims))


_PARTIAL: dict[str, Kind] = {
    "sum": "sum", "nansum": "sum", "count_nonzero": "sum", "amax": "max", "max": "max", "amin": "min", "min": "min",
    "any": "max", "all": "min", "_is_any_true": "max", "_is_all_true": "min",
}  # fmt: skip


@_rule("sum nansum count_nonzero mean amax amin max min argmax argmin any all var std var_mean std_mean logsumexp "
       "linalg_vector_norm norm prod median nanmedian aminmax _is_all_true _is_any_true")  # fmt: skip
def _reduce(call: OperatorCall) -> list[Layout]:
    name = call.info.name
    if len(call.rows()) > 1 or len(call.tensors) > 1:
        return [pointwise(call)] * len(call.outs)  # max(a, b)
    x, layout = call.first
    dims = _dims(call, "dim") if "dim" in call.arguments else set(range(x.dim()))
    if layout.dim not in dims:
        moved = layout if call.get("keepdim") else layout.at(layout.dim - sum(dim < layout.dim for dim in dims))
        return [moved] * len(call.outs)
    if name in _PARTIAL and len(call.outs) == 1:
        return [Layout(_PARTIAL[name])]
    raise refuse(f"{name} over the samples, inside of one function or of a kind that does not follow from its parts")


@_rule("bincount")
def _bincount(call: OperatorCall) -> Layout:
    if call.get("minlength") != call.outs[0].numel():
        raise refuse("bincount has as many rows as the largest value of the part")
    return Layout("sum")


def _lies_as(call: OperatorCall, tensor: torch.Tensor, layout: Layout, dim: int) -> bool:
    """Whether a tensor has its samples in this dimension, counted from the end, or is the same for all of them."""
    own = call.of(tensor)
    if not own.has_samples:
        return is_same_for_all(tensor, dim)
    same = (own.place()[1:], own.ragged) == (layout.place()[1:], layout.ragged)
    return same and own.dim - tensor.dim() == dim


_PRODUCTS = {"mm": "mk,kn->mn", "addmm": "mk,kn->mn", "bmm": "bmk,bkn->bmn", "baddbmm": "bmk,bkn->bmn",
             "dot": "k,k->", "vdot": "k,k->", "mv": "mk,k->m", "addmv": "mk,k->m", "addbmm": "bmk,bkn->mn",
             "ger": "m,n->mn", "outer": "m,n->mn"}  # fmt: skip


@_rule(" ".join(_PRODUCTS))
def _product(call: OperatorCall) -> Layout:
    inputs, out = _PRODUCTS[call.info.name].split("->")
    added = call.args[0] if call.info.name.startswith(("add", "badd")) else None
    factors = call.args[1:3] if added is not None else call.args[:2]
    by: dict[str, list[Layout]] = {}
    for tensor, letters in zip(factors, inputs.split(","), strict=True):
        layout = call.of(tensor)
        if layout.has_samples:
            by.setdefault(letters[layout.dim], []).append(layout)
    call.mixes_if(len(by) != 1)
    ((letter, found),) = by.items()
    call.mixes_if(len({layout.place()[1:] for layout in found}) != 1)
    others = [(each, letters) for each, letters in zip(factors, inputs.split(","), strict=True) if letter in letters]
    for tensor, letters in others:
        call.mixes_if(not call.of(tensor).has_samples and not is_same_for_all(tensor, letters.index(letter)))
    if letter not in out:
        call.mixes_if(added is not None)
        return Layout("sum")
    layout = replace(found[0], dim=out.index(letter))
    call.mixes_if(added is not None and not _lies_as(call, added, layout, layout.dim - len(out)))
    return layout


_BATCHED = ("convolution _convolution mkldnn_convolution max_pool2d_with_indices max_pool3d_with_indices avg_pool2d "
            "avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d "
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
            "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
            "_upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa upsample_trilinear3d grid_sampler_2d "
            "grid_sampler_3d im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle "
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
            "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math _cdist_forward "
            "_euclidean_dist _thnn_fused_lstm_cell _thnn_fused_gru_cell cudnn_convolution cudnn_convolution_transpose "
            "affine_grid_generator")  # fmt: skip


@_rule(_BATCHED)
def _batched(call: OperatorCall) -> list[Layout]:
    """The first dimension is the batch's; attention's heads do not mix either, and are samples from torch 2.14 on."""
    x, layout = call.first
    dim = int("dot_product" in call.info.name and layout.dim == 1)
    call.mixes_if(any((o.dim, o.outer) != (dim, 1) for _, o in call.rows()) or call.of(call.tensors[0]).kind != "rows")
    call.mixes_if(len({t.shape[dim] for t, _ in call.rows()}) != 1)
    if "dot_product" in call.info.name or "dist" in call.info.name or "grid_sampler" in call.info.name:
        rows_to_table = "dist" in call.info.name and x.dim() == 2
        call.mixes_if(not rows_to_table and not all(is_same_for_all(each, dim - x.dim()) for each in call.others()))
        call.mixes_if(rows_to_table and len(call.rows()) > 1)
        return [layout if t.dim() > dim and t.shape[dim] == x.shape[dim] else CONSTANT for t in call.outs]
    call.mixes_if("convolution" in call.info.name and len(call.rows()) != 1)
    call.mixes_if(("shuffle" in call.info.name or "im2col" in call.info.name) and x.dim() < 4)
    call.mixes_if(not all(t.dim() and t.shape[0] == x.shape[0] for t in call.outs))
    return [layout] * len(call.outs)


@_rule("native_layer_norm _fused_rms_norm native_group_norm")
def _norm(call: OperatorCall) -> list[Layout]:
    x, layout = call.first
    shape = call.get("normalized_shape")
    apart = layout.place() == (0, 1, 1) if shape is None else layout.dim < x.dim() - len(shape)
    call.mixes_if(len(call.rows()) != 1 or not apart)
    return [layout] * len(call.outs)


@_rule("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update "
       "_batch_norm_no_update cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit_functional")  # fmt: skip
def _batch_norm(call: OperatorCall) -> list[Layout]:
    _, layout = call.first
    training = call.get("training") if "training" in call.arguments else call.get("train")
    training = call.info.name == "_batch_norm_with_update" if training is None else training
    call.mixes_if(len(call.rows()) != 1 or (layout.dim == 1 and not training))
    if training and layout.dim != 1:
        raise BatchNorm("batch norm in training mode normalizes by the statistics of all samples", layout)
    rest = [Layout("rows", 0, layout.outer, layout.inner) if t.numel() and training else CONSTANT for t in call.outs]
    return [layout, *rest[1:]]


class BatchNorm(Exception):  # noqa: N818 - see `Flow`
    """Batch norm in training mode, which a user may have asked to run by part."""

    def __init__(self, reason: str, layout: Layout) -> None:
        super().__init__(reason)
        self.layout = layout


@_rule("mkldnn_rnn_layer _cudnn_rnn")
def _rnn(call: OperatorCall) -> list[Layout]:
    x, layout = call.first
    call.mixes_if(any((o.dim - t.dim(), o.outer, o.inner) != (-2, 1, 1) for t, o in call.rows()) or layout.ragged)
    samples = x.shape[-2]
    return [Layout("rows", t.dim() - 2) if t.dim() > 1 and t.shape[-2] == samples else WHOLE for t in call.outs]


@_rule("embedding")
def _embedding(call: OperatorCall) -> Layout:
    call.mixes_if(call.of(call.get("weight")).has_samples)
    return call.of(call.get("indices"))


@_rule("nll_loss_forward nll_loss2d_forward")
def _nll(call: OperatorCall) -> list[Layout]:
    if call.get("reduction") != 0 or len(call.rows()) != 2 or len({o.place() for _, o in call.rows()}) != 1:
        raise refuse("the mean of nll_loss over the samples, inside of one function")
    call.mixes_if(call.first[1].dim != 0)
    return [call.first[1], WHOLE]


@_rule("_ctc_loss")
def _ctc(call: OperatorCall) -> list[Layout]:
    """Log probabilities are (time, batch, classes); targets (batch, length), or those of all samples in a row."""
    probabilities, targets = call.of(call.get("log_probs")), call.of(call.get("targets"))
    in_a_row = call.get("targets").dim() == 1 and targets.ragged
    call.mixes_if(probabilities.place() != (1, 1, 1) or targets.place() != (0, 1, 1) or not targets.has_samples)
    call.mixes_if(not all(isinstance(call.get(name), torch.Tensor) for name in ("input_lengths", "target_lengths")))
    lengths = [call.of(call.get(name)) for name in ("input_lengths", "target_lengths")]
    call.mixes_if(not (in_a_row or call.get("targets").dim() == 2) or any(o.place() != (0, 1, 1) for o in lengths))
    return [Layout("rows", 0)] * len(call.outs)


@_rule("nonzero")
def _nonzero(call: OperatorCall) -> Layout:
    """A column of places of samples, and others; see `_select`."""
    call.mixes_if(call.first[1] != Layout("rows", pending=call.pending))
    return Layout("order", ragged=True)


@_rule("index index_select masked_select")
def _index(call: OperatorCall) -> Layout:
    return _indexed(call)[0]


def _indexed(call: OperatorCall) -> tuple[Layout, int]:
    """The layout of the entries of the first tensor that are indexed, and their rank."""
    x = call.args[0]
    if "dim" in call.arguments:
        indices = [*[None] * (call.get("dim") % x.dim()), call.get("index")]
    else:
        indices = [call.args[1]] if call.info.name == "masked_select" else call.args[1]
    layout, at = call.of(x), [place for place, index in enumerate(indices) if index is not None]
    given = [(indices[place], call.of(indices[place])) for place in at]
    if any(index.dtype in (torch.bool, torch.uint8) for index, _ in given):
        return _masked(call, layout, at, given), x.dim() - given[0][0].dim() + 1
    grown = max(index.dim() for index, _ in given) - len(at)
    if layout.has_samples and layout.dim in at:
        return _own_rows(call, layout, at, given), x.dim() + grown
    if not layout.has_samples:
        return _table(call, at, given), x.dim() + grown
    call.mixes_if(any(o.has_samples for _, o in given) or at[-1] - at[0] + 1 != len(at))
    return layout if layout.dim < at[0] else layout.at(layout.dim + grown), x.dim() + grown


def _own_rows(call: OperatorCall, layout: Layout, at: list[int], given: list[tuple[torch.Tensor, Layout]]) -> Layout:
    """Each sample's own entries: ``x[arange(n), labels]``."""
    call.mixes_if(at != list(range(at[0], at[0] + len(at))))
    call.mixes_if(layout.place() != (at[0], 1, 1) or given[0][1].kind != "order")
    rank = max(index.dim() for index, _ in given)
    dims = {o.dim - index.dim() + rank for index, o in given if o.has_samples}
    same = all(is_same_for_all(index, next(iter(dims)) - rank) for index, o in given if not o.has_samples)
    call.mixes_if(len(dims) != 1 or not same or any(o.place()[1:] != (1, 1) for _, o in given if o.has_samples))
    call.mixes_if(any(o.kind == "order" for _, o in given[1:]))
    call.mixes_if(len({o.ragged for _, o in given if o.has_samples}) != 1)
    call.mixes_if(given[0][1].ragged and given[0][0].dim() != 1)
    return Layout("rows", dims.pop() + at[0], ragged=given[0][1].ragged)


def _table(call: OperatorCall, at: list[int], given: list[tuple[torch.Tensor, Layout]]) -> Layout:
    """A table, looked up for each sample."""
    rank = max(index.dim() for index, _ in given)
    places = {(o.dim - index.dim() + rank, o.outer, o.inner) for index, o in given if o.has_samples}
    call.mixes_if(len(places) != 1 or at[-1] - at[0] + 1 != len(at) or any(o.kind == "order" for _, o in given))
    ((dim, outer, inner),) = places
    call.mixes_if(not all(is_same_for_all(index, dim - rank) for index, o in given if not o.has_samples))
    return Layout("rows", dim + at[0], outer, inner, any(o.ragged for _, o in given))


def _masked(call: OperatorCall, layout: Layout, at: list[int], given: list[tuple[torch.Tensor, Layout]]) -> Layout:
    call.mixes_if(len(at) != 1)
    place, (mask, of_mask) = at[0], given[0]
    if not of_mask.has_samples:
        call.mixes_if(not layout.has_samples or of_mask.kind != "constant" or layout.dim >= place)
        return layout
    call.mixes_if((of_mask.dim, of_mask.outer) != (0, 1) or of_mask.kind != "rows")
    x = call.args[0]
    call.mixes_if(layout.has_samples and (layout.dim, layout.outer, layout.inner) != (place, 1, of_mask.inner))
    call.mixes_if(not layout.has_samples and not is_same_for_all(x, place))
    call.mixes_if(call.info.name == "masked_select" and x.dim() != mask.dim())
    return Layout("rows", place, 1, 1, ragged=True)


@_rule("index_put index_add index_copy")
def _index_put(call: OperatorCall) -> Layout:
    """The values written must be laid out as what the same index takes."""
    layout = call.of(call.args[0])
    call.mixes_if(not layout.has_samples)
    taken, rank = _indexed(call)
    call.mixes_if(not _lies_as(call, _source(call), taken, taken.dim - rank))
    return layout


# -- random numbers of the whole batch

Take = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Drawn:
    """How random numbers lie: by sample, in which order of dimensions in memory, and in which other sizes."""

    layout: Layout
    order: tuple[int, ...]
    shape: tuple[int | None, ...]


def drawn_like(call: OperatorCall, layout: Layout) -> Drawn:
    """How the numbers of a call lie that a part of several samples makes."""
    tensor = call.tensors[0] if call.tensors else None
    if tensor is None:
        return Drawn(layout, (), ())
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return Drawn(layout, tuple(order), shape_of(tensor, layout))


def draw_whole(call: OperatorCall, drawn: Drawn, total: int, take: Take) -> Any:
    """Draw the whole batch's numbers and take a part's from them; None if that is not how they are drawn."""
    name, layout = call.info.name, drawn.layout
    if not call.is_random() or layout.ragged or layout.arranged:
        return None
    if call.tensors and shape_of(call.tensors[0], layout) != drawn.shape:
        raise refuse(f"{name} draws in another way for a single sample")
    if name in _FILLS and call.info.written and len(call.tensors) == 1:
        return call.args[0].copy_(take(_drawn_like(call, drawn, total)))
    if name in ("rand_like", "randn_like", "randint_like") or (name == "bernoulli" and len(call.args) == 2):
        return take(_drawn_like(call, drawn, total)).clone()
    if name in ("rand", "randn", "randint") and not call.tensors:
        place = next(place for place, value in enumerate(call.args) if isinstance(value, (list, tuple)))
        sizes = list(call.args[place])
        sizes[layout.dim] = layout.outer * total * layout.inner
        return take(call.info.func(*call.args[:place], sizes, *call.args[place + 1 :], **call.kwargs)).clone()
    if name == "native_dropout":
        mask, p = take(_drawn_like(call, drawn, total)[1]), call.get("p")
        return call.args[0] * mask * (1 / (1 - p) if p < 1 else 0), mask.clone()
    return None


def _drawn_like(call: OperatorCall, drawn: Drawn, total: int) -> Any:
    """Run it on a tensor like a part's, of the whole batch's shape, with dimensions in the same order in memory."""
    tensor = call.args[0]
    shape = list(tensor.shape)
    shape[drawn.layout.dim] = drawn.layout.outer * total * drawn.layout.inner
    whole = torch.empty_permuted(shape, drawn.order, dtype=tensor.dtype, device=tensor.device)
    return call.info.func(whole.fill_(1), *call.args[1:], **call.kwargs)


VIEWS = {"view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "alias", "detach",
          "select", "slice", "split", "split_with_sizes", "unbind", "as_strided", "diagonal", "empty_like",
          "zeros_like", "ones_like", "rand_like", "randn_like", "new_empty", "new_zeros", "new_ones",
          "new_full"}  # fmt: skip
_FILLS = {"bernoulli", "uniform", "normal", "random", "exponential", "cauchy", "log_normal", "geometric"}
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like"}
_ALL = 2**63 - 1  # where a slice to the end ends
_MOVES = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "alias",
          "detach", "clone", "_to_copy", "repeat", "lift_fresh"}  # fmt: skip
_LINEAR = _MOVES - {"repeat"}
_ORDERED = {"index", "index_select", "index_put", "index_add", "scatter"}
_SOME_PLACES = {"index", "index_select", "index_put", "index_add", "select", "unbind", "squeeze", "alias", "detach"}
_PACKED = {"sort", "argsort", "_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu"}
_UNEQUAL = _PACKED | {"index_select", "index_add", "cat", "_ctc_loss"}
_SIZED = _MOVES | {"slice", "narrow", "split_with_sizes", "split", "unsafe_split", "new_zeros", "new_ones", "new_empty",
                   "new_full", "native_group_norm", "as_strided", "select_backward", "_reshape_alias"}  # fmt: skip
_POINTWISE = {"clone", "copy", "masked_fill", "uniform", "normal", "fill", "zero", "nan_to_num", "where", "rsub",
              "bernoulli", "random", "exponential", "polar", "complex", "real", "imag", "view_as_real",
              "view_as_complex", "log_sigmoid_forward", "isfinite", "gelu", "_prelu_kernel", "lerp", "heaviside",
              "xlogy"}  # fmt: skip
