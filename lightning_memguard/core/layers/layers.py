"""The table by layer: what each module holds, gives back, keeps for the backward pass and computes.

The reason to change is what people ask of such a table. It comes from one forward pass of a fake copy: bytes from what
autograd saves, FLOPs from torch's own counter. Checked on torch 2.11 and 2.13.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_memguard.core.capture.backward import graph_task
from lightning_memguard.core.capture.batch import Batches, batch_bytes, batches_from_one, map_tensors, tensors_in
from lightning_memguard.core.capture.fake import fake_copy, faking, isolated_rng, real_copy
from lightning_memguard.core.capture.fake_cuda import FAKE_DEVICE, FakeCudaMode, pretended_cuda
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.decision.decision import check_count
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.errors import CannotTraceError, MemGuardError


@dataclass(frozen=True)
class Weight:
    """One parameter of a model.

    Attributes:
        name: its path in the model; a parameter that several modules hold goes by the first.
        elements: how many numbers it has.
        nbytes: how many bytes they take.
        trainable: whether it gets a gradient.
    """

    name: str
    elements: int
    nbytes: int
    trainable: bool


@dataclass(frozen=True)
class Layer:
    """One module of a model, without what its children do: each byte and each FLOP stands in one row.

    Attributes:
        name: the module's path; empty for the model itself, where whatever runs outside of any child is counted too.
        type: the class of the module.
        output_shape: shape of the first tensor that its first call gave back; None where it gave none.
        output_elements: numbers in all tensors that it gave back, over all calls.
        output_bytes: bytes of those tensors, each as if it had a storage of its own.
        calls: how often it ran; 0 for a module that never did.
        weights: the parameters it holds itself.
        activation_bytes: bytes it keeps for the backward pass: storages that autograd saved here first. Parameters,
            buffers and the batch stand there anyway and are left out.
        flops: floating point operations of its products (matrices, convolutions, attention), forward.
        shared_with: the row that counts this module, where the model reaches it by several paths; else empty.
        is_leaf: whether it has no children.
    """

    name: str
    type: str
    output_shape: tuple[int, ...] | None = None
    output_elements: int = 0
    output_bytes: int = 0
    calls: int = 0
    weights: tuple[Weight, ...] = ()
    activation_bytes: int = 0
    flops: int = 0
    shared_with: str = ""
    is_leaf: bool = True

    @property
    def parameters(self) -> int:
        """Number of parameters it holds itself, trainable or not."""
        return sum(weight.elements for weight in self.weights)

    @property
    def trainable_parameters(self) -> int:
        """Those of them that get a gradient."""
        return sum(weight.elements for weight in self.weights if weight.trainable)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def multiply_adds(self) -> int:
        """Multiplications that are added to a sum: half the FLOPs. Biases, norms and poolings are none."""
        return self.flops // 2

    @property
    def depth(self) -> int:
        """How deep it is nested: 0 for the model itself."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class LayerTable:
    """The layers of a model in the order in which it holds them, and their totals, in which nothing counts twice.

    Attributes:
        batch_size: number of samples that ran.
        layers: a row for each path to a module, the model's own first. A module that is reached by several paths has
            its figures in the first of these rows; the others name it in ``shared_with`` and repeat its parameters.
        batch_bytes: bytes of the batch.
        batch_elements: numbers in the batch.
        buffer_bytes: bytes of the model's buffers.
        notes: what had to be assumed, in plain words.
    """

    batch_size: int
    layers: tuple[Layer, ...]
    batch_bytes: int = 0
    batch_elements: int = 0
    buffer_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> Layer:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def within(self, name: str) -> LayerTable:
        """The rows of one module and all below it: its totals are those of the module with its children.

        Args:
            name: path of the module; empty for all.
        """
        rows = tuple(row for row in self.layers if not name or row.name == name or row.name.startswith(f"{name}."))
        return LayerTable(self.batch_size, rows)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every parameter once."""
        return tuple({weight.name: weight for layer in self.layers for weight in layer.weights}.values())

    @property
    def parameters(self) -> int:
        """Number of parameters, trainable or not."""
        return sum(weight.elements for weight in self.weights)

    @property
    def trainable_parameters(self) -> int:
        """Number of parameters that get a gradient."""
        return sum(weight.elements for weight in self.weights if weight.trainable)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(weight.nbytes for weight in self.weights)

    @property
    def trainable_parameter_bytes(self) -> int:
        """Bytes of the parameters that get a gradient, and so of these gradients."""
        return sum(weight.nbytes for weight in self.weights if weight.trainable)

    @property
    def output_elements(self) -> int:
        """Numbers that the leaves give back: the textbook's activations."""
        return sum(layer.output_elements for layer in self.layers if layer.is_leaf)

    @property
    def output_bytes(self) -> int:
        """Bytes that the leaves give back."""
        return sum(layer.output_bytes for layer in self.layers if layer.is_leaf)

    @property
    def activation_bytes(self) -> int:
        """Bytes kept for the backward pass when the forward pass is over, each storage once."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def flops(self) -> int:
        """Floating point operations of the forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of the forward pass."""
        return sum(layer.multiply_adds for layer in self.layers)


def layer_table(
    model: nn.Module,
    batch: Any,
    *,
    batch_size: int | None = None,
    step: Callable[[Any, Any], Any] | None = None,
    gpu: Gpu | None = None,
) -> LayerTable:
    """Tell what each layer of a model holds, keeps and computes in one forward pass.

    Only a copy without memory runs; each of its modules is in training or evaluation mode as the model's own is.

    Args:
        model: any module, on any device, the meta device included. Of a LightningModule the ``training_step`` runs
            where it has one of its own (with no Trainer behind it), else its forward.
        batch: an example batch: real, meta or fake tensors in any nesting. Without ``step`` a tensor is the model's
            argument, a list or tuple its arguments if it takes as many, and a mapping its keyword arguments.
        batch_size: number of samples to run with (default: the batch's own).
        step: ``(model, batch) -> anything``, run in place of all that.
        gpu: the GPU whose kernels run, which need not be there; None for the CPU's. What is kept differs: a dropout
            keeps a byte per number there and four here.

    Returns:
        The rows and their totals.

    Raises:
        MemGuardError: an argument is no such thing.
        CannotTraceError: the batch holds no tensor, or the model cannot be run on a copy.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(3456, 10))
        >>> table = layer_table(model, torch.zeros(1, 1, 28, 28), batch_size=8)
        >>> table["0"].output_shape, table["0"].multiply_adds, table["1"].activation_bytes
        ((8, 6, 24, 24), 691200, 110592)
        >>> table.parameters
        34726
    """
    if not isinstance(model, nn.Module):
        raise MemGuardError(f"model is a {type(model).__name__}; give an nn.Module.")
    if step is not None and not callable(step):
        raise MemGuardError(f"step= is a {type(step).__name__}; give a function: (model, batch) -> anything.")
    batches = batches_from_one(batch)
    size = batches.small_size if batch_size is None else batch_size
    check_count("batch_size", size)
    run = step or run_model
    device = FAKE_DEVICE if gpu else torch.device("cpu")
    try:
        with isolated_rng():
            known = _with_shapes(model, batches, size, run) if _lazy_tensors(model) else model
        with _tensors_of(gpu) as mode:
            module_copy = fake_copy(known, mode, device)
            return table_of(module_copy, batches.fake(size, device), size, run, gpu)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CannotTraceError(
            f"The layers of {type(model).__name__} cannot be told, as a copy of it did not run on fake tensors "
            f"({type(error).__name__}: {text[0][:200] if text else 'no message'}). "
            "Give step=(model, batch) -> anything if it is to be called in another way."
        ) from error


def table_of(
    module_copy: nn.Module, batch: Any, batch_size: int, step: Callable[[Any, Any], Any], gpu: Gpu | None = None
) -> LayerTable:
    """The same of a module that is fake already, for who has made one; call it under the fake mode.

    Args:
        module_copy: a module whose tensors are fake.
        batch: fake tensors in any nesting.
        batch_size: number of samples in it.
        step: ``(copy, batch) -> anything``.
        gpu: the GPU that is pretended, if any.
    """
    recorder = Recorder("cuda" if gpu else "cpu", worst_case=True, kernel_target=gpu.kernel_target if gpu else None)
    recorder.mark("forward")
    calls = _Calls()
    saved = _Saved(recorder)
    counter: Any = FlopCounterMode(display=False, custom_mapping=_FLOPS)
    counter.mod_tracker = _Here(recorder)
    with torch.enable_grad(), watching(recorder, module_copy), calls.watched(), counter, saved.watched():
        result = step(module_copy, batch)
    known = {storage_of(tensor) for tensor in (*module_copy.parameters(), *module_copy.buffers(), *tensors_in(batch))}
    kept = saved.bytes_by_module(known)
    del result  # held until here: with it goes the graph, and all that is saved
    flops = {module: sum(counts.values()) for module, counts in counter.flop_counts.items()}
    if recorder.ran_backward:
        recorder.assumptions["the step ran its own backward pass: what that had freed is not told"] = None
    return LayerTable(
        batch_size,
        tuple(_rows(module_copy, calls, kept, flops)),
        batch_bytes(batch),
        sum(tensor.numel() for tensor in tensors_in(batch)),
        sum(buffer.numel() * buffer.element_size() for buffer in module_copy.buffers()),
        tuple(recorder.assumptions),
    )


def run_model(model: Any, batch: Any) -> Any:
    """Call a model as its batch suggests: see ``batch`` of `layer_table`."""
    own_step = _own_training_step(model)
    if own_step is not None:
        return own_step(batch, 0) if _takes(own_step, (batch, 0)) else own_step(batch)
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):  # tokenizers' batches are no Mapping
        return model(**batch)
    if isinstance(batch, Sequence) and _takes(model.forward, batch):
        return model(*batch)
    return model(batch)


def _own_training_step(model: Any) -> Callable[..., Any] | None:
    """What a LightningModule trains with; None for any other, and where it is only the empty one of its base class."""
    step = getattr(model, "training_step", None)
    home = getattr(step, "__module__", None) or ""
    is_base = home.startswith(("lightning.pytorch.", "pytorch_lightning."))
    return step if callable(step) and not is_base else None


def _takes(function: Callable[..., Any], args: Sequence[Any]) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


# -- the copy and its batch


@contextmanager
def _tensors_of(gpu: Gpu | None) -> Iterator[FakeTensorMode]:
    mode = (FakeCudaMode if gpu else FakeTensorMode)(allow_non_fake_inputs=True)
    with isolated_rng(), pretended_cuda(gpu) if gpu else nullcontext(), faking(mode):
        yield mode


def _lazy_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Those that wait for a first batch to tell their shapes."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if nn.parameter.is_lazy(tensor)]


def _with_shapes(model: nn.Module, batches: Batches, size: int, run: Callable[[Any, Any], Any]) -> nn.Module:
    """A copy of a lazy model that has seen a batch. It is on the meta device: no fake tensor can become another."""
    with _tensors_of(None):
        batch = batches.fake(size, torch.device("cpu"))
    with torch.device("meta"), torch.no_grad():
        copies = {id(tensor): _on_meta(tensor) for tensor in (*model.parameters(), *model.buffers())}
        module_copy = real_copy(model, copies)
        run(module_copy, map_tensors(batch, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)))
    return module_copy


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape without memory; one without a shape for one that is lazy."""
    make: Any = type(tensor)
    if nn.parameter.is_lazy(tensor):
        return make(requires_grad=tensor.requires_grad, dtype=tensor.dtype)  # type: ignore[no-any-return]
    copy = torch.empty_like(tensor, device="meta")
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


# -- what each module gave back


@dataclass
class _Given:
    shape: tuple[int, ...] | None = None
    elements: int = 0
    nbytes: int = 0
    calls: int = 0


@dataclass
class _Calls:
    """What modules gave back, by ``id``; they all live on until the table stands."""

    given: dict[int, _Given] = field(default_factory=dict)

    @contextmanager
    def watched(self) -> Iterator[None]:
        hook = nn.modules.module.register_module_forward_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, module: nn.Module, _: Any, output: Any) -> None:
        given = self.given.setdefault(id(module), _Given())
        given.calls += 1
        for tensor in tensors_in(output):
            given.shape = tuple(tensor.shape) if given.shape is None else given.shape
            given.elements += tensor.numel()
            given.nbytes += tensor.numel() * tensor.element_size()


# -- what autograd keeps


class _Kept:
    """Stands in the graph for a tensor that autograd saved, and dies with its node."""

    __slots__ = ("__weakref__", "module", "tensor")

    def __init__(self, tensor: torch.Tensor, module: str) -> None:
        self.tensor = tensor
        self.module = module


class _Saved:
    """Notes each tensor that autograd saves, and the module that ran then."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.kept: list[weakref.ref[_Kept]] = []

    def watched(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def _pack(self, tensor: torch.Tensor) -> _Kept:
        # A node's own result comes with its history, and the node would keep itself alive.
        kept = _Kept(tensor.detach() if tensor.requires_grad else tensor, self.recorder.module)
        self.kept.append(weakref.ref(kept))
        return kept

    def bytes_by_module(self, known: Iterable[int]) -> dict[str, int]:
        """Bytes still kept, by module; those behind storages that are ``known`` are left out."""
        seen, totals = set(known), dict[str, int]()
        for reference in self.kept:
            kept = reference()
            if kept is None or kept.tensor.layout is not torch.strided:
                continue
            storage = storage_of(kept.tensor)
            if storage not in seen:
                seen.add(storage)
                totals[kept.module] = totals.get(kept.module, 0) + kept.tensor.untyped_storage().nbytes()
        return totals


def storage_of(tensor: torch.Tensor) -> int:
    """What tells storages apart while they live; -1 where there is none."""
    if tensor.layout is not torch.strided:
        return -1
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - `data_ptr` of a fake storage says nothing


# -- what it computes


class _Here:
    """Tells torch's counter which module runs.

    Torch's own tracker names modules by class and counts an operator once for every module around it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    @property
    def parents(self) -> set[str]:
        return {self.recorder.module} if graph_task() == -1 else set()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Queries by keys, then the scores by values; heads of keys and values may be fewer, and serve several."""
    return 2 * int(math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _lstm(x: Any, *weights: Any, **_: Any) -> int:
    """One layer in one direction: its input (steps, batch, inputs) by one weight, its state by another."""
    return 2 * int(math.prod(x[:-1]) * (math.prod(weights[0]) + math.prod(weights[1])))


def _cudnn_rnn(x: Any, weights: Any, *_: Any, **__: Any) -> int:
    """All layers: every weight that is a matrix is multiplied once a step and sample."""
    return 2 * int(math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2))


def _mv(matrix: Any, *_: Any, **__: Any) -> int:
    return 2 * int(math.prod(matrix))


def _addmv(_: Any, matrix: Any, *__: Any, **___: Any) -> int:
    return 2 * int(math.prod(matrix))


# Products that torch's counter does not know: it would call them 0, and up to 2.9 it refuses attention with fewer heads
# of keys than of queries. Each rule is given shapes in place of tensors.
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/flop_counter.py (`flop_registry`)
_FLOPS: dict[Any, Callable[..., int]] = {
    getattr(torch.ops.aten, name): rule
    for name, rule in (
        ("_scaled_dot_product_cudnn_attention", _attention),
        ("_scaled_dot_product_efficient_attention", _attention),
        ("_scaled_dot_product_flash_attention", _attention),
        ("_scaled_dot_product_flash_attention_for_cpu", _attention),
        ("_scaled_dot_product_fused_attention_overrideable", _attention),
        ("mkldnn_rnn_layer", _lstm),
        ("_cudnn_rnn", _cudnn_rnn),
        ("mv", _mv),
        ("addmv", _addmv),
        ("dot", _mv),
    )
}


# -- the rows


def _rows(module_copy: nn.Module, calls: _Calls, kept: Mapping[str, int], flops: Mapping[str, int]) -> Iterator[Layer]:
    first_names: dict[int, str] = {}
    parameter_names = {id(parameter): name for name, parameter in module_copy.named_parameters()}
    # The recorder names a module by its first path, as `named_modules` does when it leaves the others out.
    for name, module in module_copy.named_modules(remove_duplicate=False):
        first = first_names.setdefault(id(module), name)
        shared = first != name
        given = calls.given.get(id(module), _Given())
        yield Layer(
            name,
            type(module).__name__,
            given.shape,
            0 if shared else given.elements,
            0 if shared else given.nbytes,
            0 if shared else given.calls,
            tuple(_weight(parameter_names[id(p)], p) for p in module._parameters.values() if p is not None),  # noqa: SLF001
            0 if shared else kept.get(name, 0),
            0 if shared else flops.get(name, 0),
            first if shared else "",
            not any(True for _ in module.children()),
        )


def _weight(name: str, parameter: nn.Parameter) -> Weight:
    return Weight(name, parameter.numel(), parameter.numel() * parameter.element_size(), parameter.requires_grad)
