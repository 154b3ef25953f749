"""The backward pass, walked in Python, for devices that autograd's engine cannot run on.

The engine asks each device for its context, so it cannot run on fake tensors of a simulated CUDA. Its order is
reproduced here from torch/csrc/autograd/engine.cpp, input_buffer.cpp and functions/accumulate_grad.cpp: which node is
next, when a gradient is added in place, moved or copied, when saved tensors are freed. On fake CPU tensors both can
run: `tests/core/simulation/test_backward.py` compares their event lists, with canary tests for torch's private names.
`walking` patches torch: no other thread may use torch meanwhile.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import aten, nothing, patched
from lightning_memguard.core.kernels.layout import is_non_overlapping_and_dense
from lightning_memguard.core.simulation import plain
from lightning_memguard.core.torch_port import OpOverload

_LATEST = (1 << 64) - 1  # AccumulateGrad's sequence number: it runs before everything else


class _Node(Protocol):
    """Attributes of a node in autograd's graph that the walk reads."""

    next_functions: _NextFunctions
    metadata: dict[str, Any]  # lives as long as the node itself, unlike the node's Python object

    def __call__(self, *grads: Tensor | None) -> object: ...
    def _sequence_nr(self) -> int: ...
    def name(self) -> str: ...


_NextFunctions = tuple[tuple[_Node | None, int], ...]
_Edge = tuple[_Node, int]  # a receiver of a gradient, and which of its inputs
_Grads = list[Tensor | None]


NUMBER = "memguard number"  # in a node's metadata: the placeholder for a number that it saved, which no hooks are given

_walks: list[int] = []  # the running walks, innermost last: a reentrant checkpoint starts one inside another


def graph_task() -> int:
    """The number of the running backward pass, walked or run by the engine; -1 outside of one."""
    return _walks[-1] if _walks else port.running_task()


@contextmanager
def walking(enter: Callable[[dict[str, Any]], None] | None = None, *, as_plain: bool = True) -> Iterator[None]:
    """Walk every backward pass of the process in Python while the context is open.

    Forward passes must run inside too: the tensors they save are held in handles that the walk can empty. Patches
    ``Variable._execution_engine`` and functions that register hooks: not thread-safe.

    Args:
        enter: called with each node's ``metadata`` before the node runs.
        as_plain: do what the engine and its formulas do on plain tensors: add a second gradient to the first in place,
            and what `lightning_memguard.core.simulation.plain` lists. False to do what they do on fake tensors.
    """
    walker = _Walker(enter, as_plain=as_plain)
    with (
        port.running_backward_by(walker, graph_task),
        walker.hooks_seen(),
        walker.saved.hooked(),
    ):
        yield


# -- saved tensors


def hooks_of_saved_tensors() -> tuple[Callable[[Tensor], object], Callable[[Any], Any]] | None:
    """Return the hooks that are on in this thread, without those of a walk itself; None if there are none."""
    top = port.saved_hooks()
    if top is not None and isinstance(top[0], _Hooks):
        return top[0].pack, top[0].unpack
    return None if top is None or isinstance(getattr(top[0], "__self__", None), _SavedHandles) else top


class _Hooks:
    """Saved-tensor hooks of the user or of a checkpoint: autograd keeps this object in their place.

    A checkpoint's hooks hold its inputs, so they must be dropped with the last tensor that they packed.
    """

    def __init__(self, saved: _SavedHandles, pack: Callable[[Tensor], object], unpack: Callable[[Any], object]) -> None:
        self.saved, self.pack, self.unpack = saved, pack, unpack
        self.users = 1  # the region that they are set for, and every tensor packed there

    def __call__(self, tensor: Tensor) -> _Handle:
        self.users += 1
        number = _saver(tensor)  # before the hook can make nodes of its own
        return self.saved.handle(self.pack(tensor), self, number)

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            del self.pack, self.unpack


class _Handle:
    """Handle that autograd keeps instead of a saved tensor; emptied when its node has run."""

    __slots__ = ("__weakref__", "content", "hooks", "number")

    def __init__(self, content: object, hooks: _Hooks | None, number: int) -> None:
        self.content: Any = content
        self.hooks = hooks  # None: the content is the tensor
        self.number = number  # a node frees its tensors in the order in which they were saved

    def empty(self) -> None:
        self.content = None
        if self.hooks is not None:
            self.hooks.leave()
            self.hooks = None


class _SavedHandles:
    """The handles of all saved tensors, by the node that saved them."""

    def __init__(self) -> None:
        # By sequence number: usually the node that saves is the last one made.
        self.handles: dict[int, list[weakref.ref[_Handle]]] = defaultdict(list)
        self.count = 0
        self.made_by_node = True

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Save all tensors in handles, packed by hooks of the user or of a checkpoint if there are any."""
        push, pop = port.putting_of_saved_hooks()
        inside: list[_Hooks] = []

        def push_users(pack: Callable[[Tensor], object], unpack: Callable[[Any], Tensor]) -> None:
            inside.append(_Hooks(self, pack, unpack))
            push(inside[-1], self._unpack)

        def pop_users() -> None:
            pop()
            inside.pop().leave()

        with (
            torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack),
            port.saved_hooks_put_by(push_users, pop_users),
            port.checkpoints_saving_by(self._of_no_node),
            port.saved_hooks_forbidden_by(nothing, nothing),  # torch.func refuses hooks, which do no harm
        ):
            yield

    def _pack(self, tensor: Tensor) -> _Handle:
        # A node's own result comes with its history, and the node would keep itself alive. A parameter is saved itself,
        # as autograd does: DeepSpeed frees its memory in between, by ``parameter.data = ...``.
        content = tensor
        if tensor.requires_grad and not isinstance(tensor, torch.nn.Parameter):
            # Inside a transform of ``torch.func``, from its own graph and not from those around it.
            inside = port.is_transformed(tensor)
            content = tensor.data if inside else tensor.detach()
        return self.handle(content, None, _saver(tensor))

    def handle(self, content: object, hooks: _Hooks | None, number: int) -> _Handle:
        self.count += 1
        handle = _Handle(content, hooks, self.count)
        if self.made_by_node:
            self.handles[number].append(weakref.ref(handle))
        return handle

    def _of_no_node(self, tensor: Tensor, *, is_output: bool) -> Any:
        """A checkpoint keeps what it is given by itself (``save_inputs``, torch 2.13): no node frees it."""
        with patched(self, made_by_node=False):
            return port.make_saved(tensor, is_output=is_output)

    def _unpack(self, handle: _Handle) -> Any:
        if handle.content is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have "
                "already been freed). Specify retain_graph=True if you need to."
            )
        return handle.content if handle.hooks is None else handle.hooks.unpack(handle.content)

    def release(self, node: _Node, before: int) -> None:
        """Free what a node has saved. ``before``: the sequence number of the graph's next older node."""
        sequence_nr = port.sequence_number(node)
        if port.is_of_function(node):
            port.clear_saved(node)
        # CopySlices wraps the node of an in-place operator on a view, which was made just before it.
        first = before + 1 if node.name().endswith("CopySlices") else sequence_nr
        # The only way to handles of inputs that in-place operators copy.
        handles = {handle for handle in port.saved_handles(node) if isinstance(handle, _Handle)}
        for number in range(first, sequence_nr + 1):
            handles |= self.taken_out(number)
        for handle in sorted(handles, key=lambda handle: handle.number):
            handle.empty()
        node.metadata.pop(NUMBER, None)

    def taken_out(self, sequence_nr: int) -> set[_Handle]:
        """Return the handles of what the node of this number has saved, and forget them."""
        return {handle for ref in self.handles.pop(sequence_nr, ()) if (handle := ref()) is not None}


def _saver(tensor: Tensor) -> int:
    """The number of the node that saves a tensor: the last one made.

    For an in-place operator on a view that is CopySlices, after which the view's own node is made again.
    """
    latest = port.next_sequence_number() - 1
    node: Any = tensor.grad_fn if tensor.requires_grad and port.is_view(tensor) else None
    while node is not None and latest - _NODES_OF_VIEWS <= (number := port.sequence_number(node)) <= latest:
        if node.name().endswith("CopySlices"):
            return int(number)
        node = node.next_functions[0][0] if node.next_functions else None
    return latest


_NODES_OF_VIEWS = 8  # nodes that a chain of views may have; an older CopySlices is of another operator


def is_walked() -> bool:
    """Whether backward passes are walked here, in place of autograd's engine."""
    return isinstance(port.engine(), _Walker)


def release_saved(node: Any) -> None:
    """Free what a ``torch.autograd.Function`` has saved while it still runs, as a compiled backward pass does."""
    walker = port.engine()
    if isinstance(walker, _Walker):
        for handle in walker.saved.taken_out(port.sequence_number(node)):
            handle.empty()


class _Ready:
    """A node that is ready; the latest goes first.

    Ties are broken as in libstdc++'s ``std::priority_queue``: `heapq`, too, lets the hole at the top fall to a leaf, at
    a tie to the right, and puts the last entry in from there.
    """

    def __init__(self, node: _Node) -> None:
        self.node, self.number = node, port.sequence_number(node)

    def __lt__(self, other: _Ready) -> bool:
        return self.number > other.number


# -- the walk


class _Root:
    """Starts a backward pass from several tensors at once, as the engine's GraphRoot."""

    def __init__(self, edges: Sequence[_Edge], grads: Sequence[Tensor | None]) -> None:
        self.next_functions, self.grads = tuple(edges), tuple(grads)
        self.metadata: dict[str, Any] = {}
        self._input_metadata: tuple[Any, ...] = ()

    def __call__(self, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        return self.grads

    def _sequence_nr(self) -> int:
        return 0

    def name(self) -> str:
        return "GraphRoot"


class _Walker:
    """Replaces ``torch.autograd.Variable._execution_engine``."""

    def __init__(self, enter: Callable[[dict[str, Any]], None] | None, *, as_plain: bool) -> None:
        self.enter, self.as_plain = enter, as_plain
        self.saved = _SavedHandles()
        self.started = 0
        self.callbacks: list[Callable[[], None]] = []
        self.retaining: list[weakref.ref[Tensor]] = []  # an in-place operator gives them another node

    # -- the engine's own interface

    def run_backward(
        self,
        tensors: Sequence[Tensor | GradientEdge],
        grad_tensors: Sequence[Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor | GradientEdge] = (),
        allow_unreachable: bool = True,
        accumulate_grad: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Walk the graph, in place of `torch.autograd.graph._engine_run_backward`."""
        edges = [_edge(tensor) for tensor in tensors]
        grads = [_valid(grad, *edge) for grad, edge in zip(grad_tensors, edges, strict=True)]
        wanted = [_edge(tensor, edges) for tensor in inputs]
        if accumulate_grad:
            for tensor in inputs:
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.retain_grad()
        self._place_retained()
        walk = _Walk(self, keep_graph, [None if accumulate_grad else edge for edge in wanted])
        self.started += 1
        _walks.append(self.started)
        outer_callbacks, self.callbacks = self.callbacks, []
        try:
            with torch.set_grad_enabled(create_graph):
                walk.run(edges, grads, wanted)
            while self.callbacks:
                self.callbacks.pop(0)()
        finally:
            _walks.pop()
            self.callbacks = outer_callbacks
        if not allow_unreachable and any(grad is None for grad in walk.captured):
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
        return () if accumulate_grad else tuple(walk.captured)

    def _place_retained(self) -> None:
        """Note at the nodes which tensors keep their gradients."""
        self.retaining = [reference for reference in self.retaining if reference() is not None]
        for reference in self.retaining:
            tensor = reference()
            if tensor is not None and tensor.grad_fn is not None:
                _metadata(tensor).setdefault(_RETAINED, {})[tensor.output_nr] = reference

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def is_checkpoint_valid(self) -> bool:
        """Whether reentrant checkpointing may run: always."""
        return True

    # -- hooks, which the engine keeps out of reach for Python

    @contextmanager
    def hooks_seen(self) -> Iterator[None]:
        """Note hooks while they are registered."""
        register_hook, retain_grad = torch.Tensor.register_hook, torch.Tensor.retain_grad
        materialize = FunctionCtx.set_materialize_grads

        def hook_tensor(tensor: Tensor, hook: _Hook) -> RemovableHandle:
            handle: RemovableHandle = register_hook(tensor, hook)  # type: ignore[no-untyped-call]
            if tensor.grad_fn is not None:
                _metadata(tensor).setdefault(_TENSOR_HOOKS, {})[tensor.output_nr] = port.grad_hooks(tensor)
            return handle

        def retain(tensor: Tensor) -> None:
            already = tensor.retains_grad
            retain_grad(tensor)
            if tensor.grad_fn is not None and not already:
                self.retaining.append(weakref.ref(tensor))

        def set_materialize(ctx: FunctionCtx, value: bool) -> None:
            materialize(ctx, value)
            ctx.memguard_materializes = value  # type: ignore[attr-defined]

        def hook_node(key: str) -> Callable[[_Node, _Hook], RemovableHandle]:
            def register(node: _Node, hook: _Hook) -> RemovableHandle:
                hooks = node.metadata.setdefault(key, OrderedDict())  # a plain dict takes no weak references
                handle = RemovableHandle(hooks)
                hooks[handle.id] = hook
                return handle

            return register

        with (
            patched(torch.Tensor, register_hook=hook_tensor, retain_grad=retain),
            patched(FunctionCtx, set_materialize_grads=set_materialize),
            patched(BackwardCFunction, register_hook=hook_node(_POST_HOOKS), register_prehook=hook_node(_PRE_HOOKS)),
        ):
            yield


_Hook = Callable[..., object]
_TENSOR_HOOKS, _RETAINED, _PRE_HOOKS, _POST_HOOKS = (f"memguard {kind}" for kind in ("tensor", "retain", "pre", "post"))


class _Walk:
    """One backward pass."""

    def __init__(self, walker: _Walker, keep_graph: bool, wanted: Sequence[_Edge | None]) -> None:
        self.walker, self.keep_graph = walker, keep_graph
        self.captured: _Grads = [None] * len(wanted)
        self.captures: dict[_Node, list[tuple[int, int]]] = defaultdict(list)  # node -> places of input and capture
        for place, edge in enumerate(wanted):
            if edge is not None:
                self.captures[edge[0]].append((edge[1], place))
        self.needed: set[_Node] | None = None  # nodes that lead to what is wanted; None: all
        self.edges: dict[_Node, _NextFunctions] = {}  # also keeps each node's Python object, and so its identity
        self.waiting: dict[_Node, int] = {}
        self.buffers: dict[_Node, _Grads] = {}
        self.queue: list[_Ready] = []  # a heap
        self.older: dict[_Node, int] = {}  # by node, the sequence number of the next older one

    def run(self, edges: Sequence[_Edge], grads: Sequence[Tensor | None], wanted: Sequence[_Edge]) -> None:
        root = edges[0][0] if len(edges) == 1 else cast(_Node, _Root(edges, grads))
        order = self._explore(root)
        numbers = sorted((port.sequence_number(node), place) for place, node in enumerate(order))
        self.older = {order[place]: older for (_, place), (older, _) in zip(numbers, [(-1, 0), *numbers], strict=False)}
        if wanted:
            self._find_needed(order, {node for node, _ in wanted})
        self.buffers[root] = [None] * len(port.expected_grads(root))
        if len(edges) == 1:
            self.buffers[root][edges[0][1]] = grads[0]
        heappush(self.queue, _Ready(root))
        while self.queue:
            self._evaluate(heappop(self.queue).node)

    def _explore(self, root: _Node) -> list[_Node]:
        """Find all nodes and count what each waits for (`Engine::compute_dependencies`)."""
        order, stack = [], [root]
        self.edges[root] = root.next_functions
        while stack:
            node = stack.pop()
            order.append(node)
            for following, _ in self.edges[node]:
                if following is not None:
                    self.waiting[following] = self.waiting.get(following, 0) + 1
                    if following not in self.edges:
                        self.edges[following] = following.next_functions
                        stack.append(following)
        return order

    def _find_needed(self, order: list[_Node], wanted: set[_Node]) -> None:
        """Nodes on a path to a wanted one (`GraphTask::init_to_execute`)."""
        followers: dict[_Node, list[_Node]] = defaultdict(list)
        for node in order:
            for following, _ in self.edges[node]:
                if following is not None:
                    followers[following].append(node)
        self.needed = wanted - self.captures.keys()
        stack = [node for node in wanted if node in self.edges]
        while stack:
            for parent in followers[stack.pop()]:
                if parent not in self.needed:
                    self.needed.add(parent)
                    stack.append(parent)

    def _evaluate(self, node: _Node) -> None:
        """`Engine::evaluate_function`."""
        grads = self.buffers.pop(node)
        metadata = node.metadata
        needed = self.needed is None or node in self.needed
        if not needed:
            _run_input_hooks(node, metadata, grads)
        for place, capture in self.captures.get(node, ()):
            self.captured[capture] = grads[place]
        if not needed:
            return
        _run_input_hooks(node, metadata, grads)  # a node that runs is captured without its hooks
        if self.walker.enter is not None:
            self.walker.enter(metadata)
        for hook in tuple(metadata.get(_PRE_HOOKS, {}).values()):
            changed = hook(tuple(grads))
            grads = grads if changed is None else list(changed)
        _running.append((node.name(), self._wanted_of(node), self.keep_graph))
        try:
            outputs = self._call(node, grads)
        finally:
            _running.pop()
        for hook in tuple(metadata.get(_POST_HOOKS, {}).values()):
            changed = hook(tuple(outputs), tuple(grads))
            if changed is not None:
                outputs = list(changed) if isinstance(changed, tuple) else [changed]
        _drop_in_order(grads)
        if not self.keep_graph:
            self.walker.saved.release(node, self.older[node])
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            for place in range(len(outputs)):  # by place: a name of its own would keep the last alive
                if outputs[place] is not None:
                    torch.isnan(outputs[place]).any()  # for the memory it takes: nothing fake has a value
        self._distribute(node, outputs)

    def _wanted_of(self, node: _Node) -> tuple[bool, ...]:
        """Say which results of a node are waited for (`task_should_compute_output`)."""
        followers = (following for following, _ in self.edges[node])
        return tuple(self.needed is None or each in self.needed or each in self.captures for each in followers)

    def _call(self, node: _Node, grads: _Grads) -> list[Any]:
        """`call_function`: run the node and give its results the shapes that their receivers expect."""
        leaf = _leaf_of(node)
        if leaf is not None:
            _accumulate_grad(leaf, grads)
            return []
        outputs: Any = (
            _python_outputs(node, grads)
            if port.is_of_function(node)
            else _outputs_of_plain_tensors(node, grads)
            if self.walker.as_plain
            else node(*grads)
        )
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]  # no second name for the results
        for at in range(len(outputs)):
            outputs[at] = outputs[at] if _running[-1][1][at] else None
        for at, (following, place) in enumerate(self.edges[node][: len(outputs)]):
            if following is not None and outputs[at] is not None:
                outputs[at] = _valid(outputs[at], following, place)
        return outputs  # type: ignore[no-any-return]

    def _distribute(self, node: _Node, outputs: _Grads) -> None:
        """Pass each result to its receiver, and queue the receivers that are complete."""
        summed: _Grads = []  # what was added to another gradient lives until all are passed on
        outputs.reverse()
        for following, place in self.edges[node]:
            received = [outputs.pop() if outputs else None]
            if following is None:
                continue
            self.waiting[following] -= 1
            if not (self.needed is None or following in self.needed or following in self.captures):
                continue
            buffer = self.buffers.get(following)
            if buffer is None:
                buffer = self.buffers[following] = [None] * len(port.expected_grads(following))
            if received[0] is not None and buffer[place] is None:
                buffer[place] = received.pop()
            elif received[0] is not None:
                self._add(buffer, place, received[0])
                summed += received
            if not self.waiting[following]:
                heappush(self.queue, _Ready(following))
        _drop_in_order(summed)

    def _add(self, buffer: list[Any], place: int, new: Tensor) -> None:
        """`InputBuffer::add` and `accumulate`."""
        old = buffer[place]
        references = sys.getrefcount(old)
        if self.walker.as_plain and not torch.is_grad_enabled() and _is_ours_alone(old, references, held=3):
            old.add_(new)
        else:
            buffer[place] = old + new


def _metadata(tensor: Tensor) -> dict[str, Any]:
    return tensor.grad_fn.metadata  # type: ignore[union-attr, return-value]


def _drop_in_order(tensors: _Grads) -> None:
    """Drop the first one first, as a C++ vector does; a Python list starts at its end."""
    tensors.reverse()
    while tensors:
        tensors.pop()


def _edge(tensor: Tensor | GradientEdge, roots: Iterable[_Edge] = ()) -> _Edge:
    """`gradient_edge` (torch/csrc/autograd/variable.cpp).

    A view, by which Python finds the node of a leaf, has none where the leaf's transform is over: the graph below
    ``roots`` is searched.
    """
    if isinstance(tensor, Tensor) and tensor.is_leaf and port.has_ended(tensor):
        leaf = next((node for node in _nodes_below(roots) if _leaf_of(node) is tensor), None)
        return leaf or cast(_Node, _Root((), ())), 0
    edge = get_gradient_edge(tensor) if isinstance(tensor, Tensor) else tensor
    return cast(_Node, edge.node), edge.output_nr


def _nodes_below(edges: Iterable[_Edge]) -> Iterator[_Node]:
    seen, stack = set(), [node for node, _ in edges]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in node.next_functions if following is not None]


def _leaf_of(node: _Node) -> Tensor | None:
    """The leaf whose gradient a node accumulates; None for other nodes."""
    return getattr(node, "variable", None) if port.sequence_number(node) == _LATEST else None


def _valid(grad: Tensor | None, node: _Node, place: int) -> Tensor | None:
    """`validate_outputs`: reduce a gradient that was broadcast, and give it its receiver's dtype."""
    if grad is None:
        return None
    expected = port.expected_grads(node)[place]
    shape = tuple(expected.shape)
    if grad.shape != shape:
        grad = grad.sum_to_size(shape)
    if expected.dtype is not None and grad.dtype != expected.dtype:
        grad = grad.to(expected.dtype)
    return grad


def _run_input_hooks(node: _Node, metadata: dict[str, Any], grads: list[Any]) -> None:
    leaf = _leaf_of(node)
    hooks = metadata.get(_TENSOR_HOOKS, {}) if leaf is None else {0: port.grad_hooks(leaf)}
    for place, own in hooks.items():
        for hook in tuple((own or {}).values()):
            changed = hook(grads[place])
            if changed is not None:
                grads[place] = changed
    for place, reference in metadata.get(_RETAINED, {}).items():
        tensor = reference()
        if tensor is not None and tensor.grad_fn is node and grads[place] is not None:
            kept = tensor.grad
            tensor.grad = grads[place].clone() if kept is None else kept + grads[place]


# Nodes, which of their results are wanted, and whether the graph is kept; innermost last.
_running: list[tuple[str, tuple[bool, ...], bool]] = []
_MASKED = {
    "ConvolutionBackward0": aten.convolution_backward.default,
    "NativeBatchNormBackward0": aten.native_batch_norm_backward.default,
    "NativeGroupNormBackward0": aten.native_group_norm_backward.default,
    "NativeLayerNormBackward0": aten.native_layer_norm_backward.default,
}


def masked(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an operator, whose mask leaves out gradients that ``autograd.grad`` is not asked for.

    A formula asks the engine which ones those are; without an engine it computes all of them.
    """
    name, wanted, _ = _running[-1] if _running else ("", (), False)
    if _MASKED.get(name) is not func or all(wanted):
        return args
    return *args[:-1], [given and want for given, want in zip(args[-1], wanted, strict=True)]


def frees_saved(name: str) -> bool:
    """Whether a node of this name runs whose saved tensors are freed once it has run."""
    return bool(_running) and _running[-1][0] == name and not _running[-1][2]


_in_place: list[dict[OpOverload, OpOverload]] = []  # of the formula that runs, innermost last


def in_place(func: OpOverload) -> OpOverload | None:
    """Return the in-place operator that the running formula of autograd calls on plain tensors instead; or None."""
    return _in_place[-1].get(func) if _in_place and not torch.is_grad_enabled() else None


def _outputs_of_plain_tensors(node: Any, grads: _Grads) -> Any:
    """Run one of autograd's own nodes as for plain tensors."""
    wanted = _running[-1][1]
    if not all(wanted) and node.name() in plain.BY_RESULT and grads[0] is not None:
        formulas = zip(plain.BY_RESULT[node.name()], wanted, strict=True)
        return [formula(node, grads[0]) if want else None for formula, want in formulas]
    own = plain.formula(node)
    if own is not None and grads[0] is not None and not any(other for other, _ in node.next_functions[1:]):
        return own(node, *grads)
    _in_place.append(plain.in_place(node))
    try:
        return node(*grads)
    finally:
        _in_place.pop()


def _python_outputs(node: Any, grads: _Grads) -> _Grads:
    """`PyNode::apply` (torch/csrc/autograd/python_function.cpp): a ``torch.autograd.Function``."""
    if getattr(node, "memguard_materializes", True):
        for place, expected in enumerate(port.expected_grads(node)):
            if grads[place] is None:
                grads[place] = torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
    outputs = node.apply(*grads)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if len(outputs) == len(node.next_functions):
        return list(outputs)
    # One result for each argument of forward(), but one edge for each that is a tensor: those with an edge that leads
    # somewhere are those that need a gradient, in order.
    needed = iter([output for output, need in zip(outputs, node.needs_input_grad, strict=False) if need])
    return [next(needed, None) if following is not None else None for following, _ in node.next_functions]


def _accumulate_grad(variable: Tensor, grads: list[Any]) -> None:
    """`AccumulateGrad::apply` and `accumulateGrad` (torch/csrc/autograd/functions/accumulate_grad.{h,cpp})."""
    if grads[0] is None or not variable.requires_grad:
        return
    new = grads.pop()
    references = sys.getrefcount(new)
    if variable.grad is not None:
        if torch.is_grad_enabled():
            variable.grad = variable.grad + new
        else:
            variable.grad += new
    elif new.layout is not torch.strided:
        variable.grad = new.detach() if not torch.is_grad_enabled() else new.clone()
    elif not torch.is_grad_enabled() and _is_unshared(new, references, held=2) and _is_laid_out_as(new, variable):
        variable.grad = new.detach()
    elif is_non_overlapping_and_dense(variable):  # `clone_obey_contract`
        variable.grad = new.new_empty_strided(variable.shape, variable.stride(), dtype=variable.dtype).copy_(new)
    else:
        variable.grad = new.clone(memory_format=torch.contiguous_format)
    for hook in port.hooks_after_accumulation(variable):
        hook(variable)


def _is_unshared(tensor: Tensor, references: int, held: int) -> bool:
    """Whether only the walk holds the tensor: ``held`` names in Python, and one reference from its object."""
    return references <= held and port.tensor_users(tensor) == 1


# A storage counts its tensor and its own Python object, which `untyped_storage()` makes.
_ONE_TENSOR = 2


def _is_ours_alone(tensor: Tensor, references: int, held: int) -> bool:
    """`can_accumulate_inplace`: nothing else holds the tensor or its storage, and it is dense."""
    if not _is_unshared(tensor, references, held) or tensor.layout is not torch.strided:
        return False
    count = port.storage_users(tensor.untyped_storage())
    return count <= _ONE_TENSOR and is_non_overlapping_and_dense(tensor)


def _is_laid_out_as(grad: Tensor, variable: Tensor) -> bool:
    """`obeys_layout_contract` (torch/csrc/autograd/utils/grad_layout_contract.h)."""
    if not is_non_overlapping_and_dense(variable):
        return grad.is_contiguous()
    return all(
        mine == theirs if size != 1 else mine != 0
        for size, mine, theirs in zip(grad.shape, grad.stride(), variable.stride(), strict=True)
    )
