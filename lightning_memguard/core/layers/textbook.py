"""Textbook sums: what people compute on paper for a model's memory, each with its assumptions.

None of them is a prediction: `ratio_to_peak` compares one with the peak of a traced step. They share arguments:
``parameters`` and ``trainable_parameters`` (default: all of them) are numbers of elements, ``activations`` the number
of elements that all layers return for one sample, ``input_elements`` that of one sample and ``batch_size`` the number
of samples. All elements have four bytes (float32). They raise `MemGuardError` for negative counts and unknown names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.errors import MemGuardError

if TYPE_CHECKING:
    from lightning_memguard.core.layers.layers import LayerTable

MOMENTS = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""How many values an optimizer keeps for each parameter, by its textbook name."""

_BITS = {"fp64": 64, "fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4}
BYTES_PER_ELEMENT = {name: Fraction(bits, 8) for name, bits in _BITS.items()}
"""Bytes of one element, by the textbook name of its type."""


@dataclass(frozen=True)
class TextbookSum:
    """One classical sum.

    Attributes:
        name: which one.
        formula: its formula in words.
        terms: its terms in bytes; they add up to ``total_bytes``.
        assumptions: what it assumes.
    """

    name: str
    formula: str
    terms: Mapping[str, int]
    assumptions: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """All terms together."""
        return sum(self.terms.values())


_NO_KERNEL = "no workspace, no allocator, no CUDA context"
_NO_REUSE = "every layer's output has its own memory, and is kept whether needed or not"


def weights_and_input_sum(parameters: int, input_elements: int) -> TextbookSum:
    """Parameters x 4 + input x 4: the least that inference can take; here ``input_elements`` is for the whole batch.

    Assumes that nothing between the input and the result takes memory. Source: a rule of thumb without an author.
    """
    _refuse_negative(parameters=parameters, input_elements=input_elements)
    counts = {"parameters": parameters, "input": input_elements}
    assumptions = ("inference", "activations take no memory", _NO_KERNEL)
    return _sum("weights and input", "(parameters + input)", counts, assumptions)


def states_sum(
    parameters: int,
    activations: int,
    input_elements: int,
    batch_size: int,
    *,
    optimizer: str = "adam",
    trainable_parameters: int | None = None,
) -> TextbookSum:
    """Parameters x (1 + gradient + moments) + activations x 2 x batch + input x batch: training.

    Assumes one gradient for each parameter and, by optimizer (a name of `MOMENTS`), 0 (SGD), 1 (momentum, Adagrad,
    RMSprop) or 2 (Adam) moments of the parameters' type; and that each activation exists twice, itself and its
    gradient, all of them at the same time. Source: Stanford CS231n, "Computational Considerations" in
    cs231n.github.io/convolutional-networks (activations and their gradients; parameters, their gradients and a step
    cache; the batch), as worked out in datascience.stackexchange.com/questions/12649.
    """
    trainable = parameters if trainable_parameters is None else trainable_parameters
    if optimizer.lower() not in MOMENTS:
        raise MemGuardError(f"optimizer={optimizer!r} has no textbook sum; choose one of {', '.join(MOMENTS)}.")
    moments = MOMENTS[optimizer.lower()]
    _refuse_negative(parameters=parameters, activations=activations, input_elements=input_elements)
    _refuse_negative(batch_size=batch_size, trainable_parameters=trainable)
    formula = f"[parameters x (1 + 1 gradient + {moments} of {optimizer}) + (activations x 2 + input) x batch]"
    counts = {
        "parameters": parameters,
        "gradients": trainable,
        "optimizer_state": moments * trainable,
        "activations": 2 * activations * batch_size,
        "input": input_elements * batch_size,
    }
    together = "all gradients exist while all activations do"
    twice = "each activation has a gradient, and all of these exist together"
    return _sum("states and activations", formula, counts, (together, twice, _NO_REUSE, _NO_KERNEL))


def forward_sum(parameters: int, activations: int, input_elements: int, batch_size: int) -> TextbookSum:
    """Parameters + (activations + input) x batch: the forward pass alone, by the same rules as `states_sum`.

    Assumes that nothing is freed before the end, though inference under ``torch.no_grad`` frees all the time. Source:
    the same as for `states_sum`, whose second author predicts one image at a time: ``batch_size=1``.
    """
    _refuse_negative(parameters=parameters, activations=activations)
    _refuse_negative(input_elements=input_elements, batch_size=batch_size)
    formula = "[parameters + (activations + input) x batch]"
    counts = {"parameters": parameters, "activations": activations * batch_size, "input": input_elements * batch_size}
    assumptions = ("no gradients and no optimizer", _NO_REUSE, _NO_KERNEL)
    return _sum("forward only", formula, counts, assumptions)


def lecture_sum(
    parameters: int,
    input_elements: int,
    outputs: Iterable[int],
    batch_size: int,
    *,
    trainable_parameters: int | None = None,
) -> TextbookSum:
    """Parameters + gradients + batch x (input + 2 x sum of the outputs): training, as lectures write it.

    ``outputs`` are the elements that each layer returns for one sample. Assumes that each output exists twice, itself
    and its gradient, and that the optimizer keeps nothing, as plain SGD does. Source: a lecture on a 3-D CNN, known to
    us by its figures alone, all of which are worked out in ``tests/core/layers/test_textbook.py``.
    """
    trainable = parameters if trainable_parameters is None else trainable_parameters
    total = sum(outputs)
    _refuse_negative(parameters=parameters, input_elements=input_elements, outputs=total)
    _refuse_negative(batch_size=batch_size, trainable_parameters=trainable)
    formula = "[parameters + gradients + batch x (input + 2 x sum of outputs)]"
    counts = {
        "parameters": parameters,
        "gradients": trainable,
        "input": batch_size * input_elements,
        "outputs": batch_size * total,
        "gradients of outputs": batch_size * total,
    }
    assumptions = ("the optimizer keeps nothing", "all gradients of outputs exist together", _NO_REUSE, _NO_KERNEL)
    return _sum("lecture", formula, counts, assumptions)


def _sum(name: str, formula: str, counts: Mapping[str, int], assumptions: tuple[str, ...]) -> TextbookSum:
    terms = {term: nbytes_of(count) for term, count in counts.items()}
    return TextbookSum(name, f"{formula} x 4 bytes", terms, assumptions)


@dataclass(frozen=True)
class WeightMemory:
    """Memory of a model's weights at one type of element, in bytes: of all, and of the trainable ones."""

    element: str
    total_bytes: int
    trainable_bytes: int


def weight_memory(parameters: int, trainable_parameters: int) -> tuple[WeightMemory, ...]:
    """Memory of the weights alone, in bytes, total and trainable, at several types of element.

    Assumes that every weight has that type and that quantized ones need no scales, zero points or padding, though real
    ones do. Source: what ``accelerate estimate-memory`` of Hugging Face prints for a model's size.
    """
    _refuse_negative(parameters=parameters, trainable_parameters=trainable_parameters)
    return tuple(
        WeightMemory(name, nbytes_of(parameters, name), nbytes_of(trainable_parameters, name))
        for name in ("fp32", "fp16", "bf16", "int8", "int4")
    )


def textbook_sums(table: LayerTable, *, optimizer: str = "adam") -> tuple[TextbookSum, ...]:
    """All sums for one model, from its table by layer: inference, forward only, training, and the lecture's.

    The activations are what the modules without children return, all calls counted.

    Args:
        table: the layers at the batch size to sum for.
        optimizer: a name of `MOMENTS`.
    """
    weights, trainable = table.parameters, table.trainable_parameters
    # The table's figures are of the whole batch, and may not divide by its size: one "sample" is all of it.
    outputs, inputs = table.output_elements, table.batch_elements
    return (
        weights_and_input_sum(weights, inputs),
        forward_sum(weights, outputs, inputs, 1),
        states_sum(weights, outputs, inputs, 1, optimizer=optimizer, trainable_parameters=trainable),
        lecture_sum(weights, inputs, (outputs,), 1, trainable_parameters=trainable),
    )


def ratio_to_peak(footprint: Footprint, textbook_bytes: int) -> float:
    """Divide a textbook sum by the traced peak: 1.0 if they agree, 2.0 if the sum is twice the peak.

    ``footprint`` is the traced step at the same batch size, ``textbook_bytes`` the ``total_bytes`` of a sum.

    Example:
        >>> footprint = Footprint(8, "cpu", 4_000, 4_000, 4_000)
        >>> ratio_to_peak(footprint, weights_and_input_sum(300, 200).total_bytes)
        0.5
    """
    if footprint.peak_allocated_bytes <= 0:
        raise MemGuardError("The footprint holds no bytes to compare a textbook sum with.")
    return textbook_bytes / footprint.peak_allocated_bytes


def nbytes_of(count: int, element: str = "fp32") -> int:
    """Bytes of ``count`` elements, rounded up to whole ones.

    >>> nbytes_of(3, "int4")
    2
    """
    if element not in BYTES_PER_ELEMENT:
        raise MemGuardError(f"element={element!r} is unknown; choose one of {', '.join(BYTES_PER_ELEMENT)}.")
    return -(-count * BYTES_PER_ELEMENT[element] // 1)


def _refuse_negative(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise MemGuardError(f"{name}={count} is below zero; pass a count.")
