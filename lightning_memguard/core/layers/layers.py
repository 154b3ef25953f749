"""The table by layer: what each module holds, returns, keeps for the backward pass and computes.

It comes from one forward pass of a fake copy: bytes from what autograd saves, FLOPs from its operators.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memguard.core.batch.batches import Batches, batches_from_one
from lightning_memguard.core.batch.nesting import map_tensors, tensors_in
from lightning_memguard.core.capture.program import tensors
from lightning_memguard.core.capture.recorder import Recorder, watching
from lightning_memguard.core.decision.decision import check_count
from lightning_memguard.core.foreign import LIBRARIES
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.objects import package_of
from lightning_memguard.core.shown import Shown
from lightning_memguard.core.simulation.fake import fake_copy, isolated_rng, real_copy, storage_address
from lightning_memguard.core.simulation.fake_cuda import FAKE_DEVICE
from lightning_memguard.errors import CannotTraceError, MemGuardError

Step = Callable[[Any, Any], object]  # (model, batch) -> anything


@dataclass(frozen=True)
class Weight:
    """One parameter of a model.

    Attributes:
        name: its path in the model; a parameter that several modules hold goes by the first.
        elements: its number of elements.
        nbytes: their bytes.
        trainable: whether it gets a gradient.
    """

    name: str
    elements: int
    nbytes: int
    trainable: bool


class _Weights:
    """Totals of the parameters in ``weights``."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The parameters."""
        raise NotImplementedError

    @property
    def parameters(self) -> int:
        """Number of elements of the parameters, trainable or not."""
        return sum(weight.elements for weight in self.weights)

    @property
    def trainable_parameters(self) -> int:
        """Number of elements of the parameters that get a gradient."""
        return sum(weight.elements for weight in self.weights if weight.trainable)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters."""
        return sum(weight.nbytes for weight in self.weights)


@dataclass(frozen=True)
class Layer(_Weights):
    """One module of a model, without its children: each byte and each FLOP counts in one row.

    Attributes:
        name: the module's path; empty for the model itself, which also counts what runs outside of any child.
        type: the class of the module.
        output_shape: shape of the first tensor that its first call returned; None if it returned none.
        output_bytes: bytes of all tensors that it returned, over all calls, each as if it had its own storage.
        calls: how often it ran; 0 for a module that did not run.
        weights: the parameters it holds itself.
        activation_bytes: bytes it keeps for the backward pass: storages that autograd saved here first. Parameters,
            buffers and the batch exist anyway and are left out.
        flops: floating point operations of its products (matrices, convolutions, attention), forward.
        shared_with: the row that counts this module, if the model reaches it by several paths; else empty.
        is_leaf: whether it has no children.
    """

    name: str
    type: str
    output_shape: tuple[int, ...] | None = None
    output_bytes: int = 0
    calls: int = 0
    weights: tuple[Weight, ...] = ()
    activation_bytes: int = 0
    flops: int = 0
    shared_with: str = ""
    is_leaf: bool = True

    @property
    def multiply_adds(self) -> int:
        """Multiplications that are added to a sum: half the FLOPs. Biases, norms and poolings have none."""
        return self.flops // 2

    @property
    def depth(self) -> int:
        """How deep it is nested: 0 for the model itself."""
        return self.name.count(".") + 1 if self.name else 0


@dataclass(frozen=True)
class LayerTable(_Weights, Shown):
    """The layers of a model in the order in which it holds them, and their totals, in which nothing counts twice.

    Attributes:
        batch_size: number of samples that ran.
        layers: a row for each path to a module, the model's own first. A module that is reached by several paths has
            its figures in the first of these rows; the others name it in ``shared_with`` and repeat its parameters.
        buffer_bytes: bytes of the model's buffers.
        notes: what had to be assumed, in words.
    """

    batch_size: int
    layers: tuple[Layer, ...]
    buffer_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> Layer:
        return {layer.name: layer for layer in self.layers}[name]

    def within(self, name: str) -> LayerTable:
        """The rows of the module with this path (empty: of all) and all below it: their totals include its children."""
        rows = tuple(row for row in self.layers if not name or row.name == name or row.name.startswith(f"{name}."))
        return LayerTable(self.batch_size, rows)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every parameter once."""
        return tuple({weight.name: weight for layer in self.layers for weight in layer.weights}.values())

    @property
    def activation_bytes(self) -> int:
        """Bytes kept for the backward pass at the end of the forward pass, each storage once."""
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
    model: nn.Module, batch: object, *, batch_size: int | None = None, step: Step | None = None, gpu: Gpu | None = None
) -> LayerTable:
    """Compute what each layer of a model holds, keeps and computes in one forward pass.

    Only a copy without memory runs; each of its modules is in training or evaluation mode as the model's own is.

    Args:
        model: any module, on any device, including meta. For a LightningModule the ``training_step`` runs if it has
            its own (without a Trainer), else its forward.
        batch: an example batch: real, meta or fake tensors in any nesting. Without ``step`` a tensor is the model's
            argument, a list or tuple its arguments if it takes as many, and a mapping its keyword arguments.
        batch_size: number of samples to run with (default: the batch's own).
        step: ``(model, batch) -> anything``, run instead of the model.
        gpu: the GPU whose kernels run, which need not be present; None for the CPU's. They keep different tensors: a
            dropout keeps a byte per element on a GPU and four on the CPU.

    Raises:
        MemGuardError: an argument has the wrong type.
        CannotTraceError: the batch holds no tensor, or the model cannot be run on a copy.

    Example:
        >>> import torch
        >>> from torch import Tensor, nn
        >>> model = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Flatten(), nn.Linear(3456, 10))
        >>> table = layer_table(model, torch.zeros(1, 1, 28, 28), batch_size=8)
        >>> table["0"].output_shape, table["0"].multiply_adds, table["1"].activation_bytes
        ((8, 6, 24, 24), 691200, 110592)
        >>> table.parameters
        34726
    """
    if not isinstance(model, nn.Module):
        raise MemGuardError(f"model is a {type(model).__name__}; pass an nn.Module.")
    if step is not None and not callable(step):
        raise MemGuardError(f"step= is a {type(step).__name__}; pass a function: (model, batch) -> anything.")
    batches = batches_from_one(batch)
    size = batches.small_size if batch_size is None else batch_size
    check_count("batch_size", size)
    device = FAKE_DEVICE if gpu else torch.device("cpu")
    try:
        with isolated_rng():
            known = _with_shapes(model, batches, size, step or run_model)
        with tensors(fake=True, gpu=gpu) as mode:
            assert mode
            module_copy = fake_copy(known, mode, device)
            return table_of(module_copy, batches.fake(size, device), size, step or run_model, gpu)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise CannotTraceError(
            f"The layers of {type(model).__name__} are unknown: a copy of it did not run on fake tensors "
            f"({type(error).__name__}: {text[0][:200] if text else 'no message'}). "
            "Pass step=(model, batch) -> anything if the model is called in another way."
        ) from error


def table_of(module_copy: nn.Module, batch: object, batch_size: int, step: Step, gpu: Gpu | None) -> LayerTable:
    """Make the table of `layer_table` for a module that is already fake; call it under the fake mode.

    ``batch`` holds ``batch_size`` samples as fake tensors, and ``gpu`` is the simulated GPU, if any.
    """
    recorder = Recorder("cuda" if gpu else "cpu", worst_case=True, kernel_target=gpu.kernel_target if gpu else None)
    recorder.mark("forward")
    recorder.flops = Counter()
    saving = _saved_watched(recorder)
    with torch.enable_grad(), watching(recorder, module_copy), _outputs_watched() as outputs, saving as saved:
        result = step(module_copy, batch)
    kept = _bytes_by_module(saved, (*module_copy.parameters(), *module_copy.buffers(), *tensors_in(batch)))
    del result  # held until here: it holds the graph, and all that is saved
    if recorder.ran_backward:
        recorder.assume("the step ran its own backward pass: what that freed is not counted")
    return LayerTable(
        batch_size,
        tuple(_rows(module_copy, outputs, kept, recorder.flops)),
        sum(buffer.numel() * buffer.element_size() for buffer in module_copy.buffers()),
        tuple(recorder.assumptions),
    )


def run_model(model: nn.Module, batch: Any) -> object:
    """Call a model as its batch suggests: see ``batch`` of `layer_table`."""
    own_step = getattr(model, "training_step", None)
    if callable(own_step) and package_of(own_step) not in LIBRARIES:  # the base class has an empty one
        return own_step(batch, 0) if _accepts(own_step, (batch, 0)) else own_step(batch)
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):  # tokenizers' batches are not a Mapping
        return model(**batch)
    if isinstance(batch, Sequence) and _accepts(model.forward, batch):
        return model(*batch)
    return model(batch)


def _accepts(function: Callable[..., object], args: Sequence[object]) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _with_shapes(model: nn.Module, batches: Batches, size: int, step: Step) -> nn.Module:
    """A lazy model's copy after its first batch. It is on the meta device: no fake tensor can become another."""
    states = [*model.parameters(), *model.buffers()]
    if not any(nn.parameter.is_lazy(tensor) for tensor in states):
        return model
    with tensors(fake=True):
        batch = batches.fake(size, torch.device("cpu"))
    with torch.device("meta"), torch.no_grad():
        module_copy = real_copy(model, {id(tensor): _on_meta(tensor) for tensor in states})
        step(module_copy, map_tensors(batch, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)))
    return module_copy


def _on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape without memory; a lazy one for one that is lazy."""
    if nn.parameter.is_lazy(tensor):
        make: Any = type(tensor)
        return make(requires_grad=tensor.requires_grad, dtype=tensor.dtype)  # type: ignore[no-any-return]
    copy = torch.empty_like(tensor, device="meta")
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


@dataclass
class _Output:
    shape: tuple[int, ...] | None = None
    nbytes: int = 0
    calls: int = 0


@contextmanager
def _outputs_watched() -> Iterator[dict[int, _Output]]:
    """Collect the outputs of modules that run inside, by the module's ``id``."""
    outputs: dict[int, _Output] = defaultdict(_Output)

    def note(module: nn.Module, _: object, result: object) -> None:
        output = outputs[id(module)]
        output.calls += 1
        for tensor in tensors_in(result):
            output.shape = tuple(tensor.shape) if output.shape is None else output.shape
            output.nbytes += tensor.numel() * tensor.element_size()

    with nn.modules.module.register_module_forward_hook(note):
        yield outputs


@dataclass(eq=False)
class _SavedTensor:
    """Replaces a tensor that autograd saved in the graph, and dies with its node."""

    tensor: Tensor
    module: str


@contextmanager
def _saved_watched(recorder: Recorder) -> Iterator[list[weakref.ref[_SavedTensor]]]:
    """Collect the tensors that autograd saves inside, each with the module that was running."""
    saved: list[weakref.ref[_SavedTensor]] = []

    def pack(tensor: Tensor) -> _SavedTensor:
        # A node's own result comes with its history, and the node would keep itself alive.
        kept = _SavedTensor(tensor.detach() if tensor.requires_grad else tensor, recorder.module)
        saved.append(weakref.ref(kept))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        yield saved


def _bytes_by_module(saved: Iterable[weakref.ref[_SavedTensor]], known: Iterable[Tensor]) -> dict[str, int]:
    """Bytes still kept, by module, without those in the storages of ``known`` tensors."""
    seen = {storage_address(tensor) for tensor in known if tensor.layout is torch.strided}
    totals: dict[str, int] = defaultdict(int)
    for kept in filter(None, (reference() for reference in saved)):
        if kept.tensor.layout is torch.strided and storage_address(kept.tensor) not in seen:
            seen.add(storage_address(kept.tensor))
            totals[kept.module] += kept.tensor.untyped_storage().nbytes()
    return totals


def _rows(
    module_copy: nn.Module, outputs: Mapping[int, _Output], kept: Mapping[str, int], flops: Mapping[str, int]
) -> Iterator[Layer]:
    first_names: dict[int, str] = {}
    parameter_names = {id(parameter): name for name, parameter in module_copy.named_parameters()}
    # The recorder names a module by its first path, as `named_modules` does when it leaves the others out: `kept` and
    # `flops` have nothing under the others.
    for name, module in module_copy.named_modules(remove_duplicate=False):
        first = first_names.setdefault(id(module), name)
        output = outputs.get(id(module), _Output())
        output = output if first == name else _Output(output.shape)
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        yield Layer(
            name,
            type(module).__name__,
            output.shape,
            output.nbytes,
            output.calls,
            tuple(Weight(parameter_names[id(p)], p.numel(), p.nbytes, p.requires_grad) for _, p in own),
            kept.get(name, 0),
            flops.get(name, 0),
            first if first != name else "",
            is_leaf=not any(True for _ in module.children()),
        )
