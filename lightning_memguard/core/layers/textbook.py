"""The textbook beside the trace: the sums that people do on paper, each with what it takes for granted.

The reason to change is a sum that is taught and not here. None of them is a prediction: `ratio_to_peak` says how far
one is from the peak of a traced step.
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
"""Numbers that an optimizer keeps for each parameter, by its textbook name."""

BYTES_PER_ELEMENT = {
    "fp64": Fraction(8),
    "fp32": Fraction(4),
    "fp16": Fraction(2),
    "bf16": Fraction(2),
    "int8": Fraction(1),
    "int4": Fraction(1, 2),
}
"""Bytes of one number, by its textbook name."""


@dataclass(frozen=True)
class TextbookSum:
    """One classical sum.

    Attributes:
        name: which one.
        formula: its formula in words.
        terms: its terms in bytes; they add up to ``total_bytes``.
        assumptions: what it takes for granted.
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
_NO_REUSE = "every layer's output has memory of its own, and is kept if it is needed or not"


def weights_and_input_sum(parameters: int, input_elements: int, *, element: str = "fp32") -> TextbookSum:
    """Parameters x 4 + input x 4: the least that an inference can do with.

    Assumes that nothing between the input and the result stands in memory. Source: a rule of thumb that has no author.

    Args:
        parameters: number of parameters.
        input_elements: numbers in the whole batch.
        element: name of a number's type, see `BYTES_PER_ELEMENT`.
    """
    _refuse_negative(parameters=parameters, input_elements=input_elements)
    return TextbookSum(
        "weights and input",
        f"(parameters + input) x {_bytes_text(element)}",
        {"parameters": nbytes_of(parameters, element), "input": nbytes_of(input_elements, element)},
        ("inference", "no activation stands in memory", _NO_KERNEL),
    )


def states_sum(
    parameters: int,
    activations: int,
    input_elements: int,
    batch_size: int,
    *,
    optimizer: str = "adam",
    trainable_parameters: int | None = None,
    element: str = "fp32",
) -> TextbookSum:
    """Parameters x (1 + gradient + moments) + activations x 2 x batch + input x batch: training.

    Assumes one gradient for each parameter and, by optimizer, 0 (SGD), 1 (momentum, Adagrad, RMSprop) or 2 (Adam)
    moments of the parameters' type; and that each activation stands twice, itself and its gradient, all of them at
    the same time. Source: Stanford CS231n, "Computational Considerations" in cs231n.github.io/convolutional-networks
    (activations and their gradients; parameters, their gradients and a step cache; the batch), as worked out in
    datascience.stackexchange.com/questions/12649.

    Args:
        parameters: number of parameters.
        activations: numbers that all layers give back for one sample.
        input_elements: numbers in one sample.
        batch_size: number of samples.
        optimizer: a name of `MOMENTS`.
        trainable_parameters: number of parameters that get a gradient (default: all of them).
        element: name of a number's type, see `BYTES_PER_ELEMENT`.
    """
    trainable = parameters if trainable_parameters is None else trainable_parameters
    moments = _moments(optimizer)
    _refuse_negative(parameters=parameters, activations=activations, input_elements=input_elements)
    _refuse_negative(batch_size=batch_size, trainable_parameters=trainable)
    return TextbookSum(
        "states and activations",
        f"[parameters x (1 + 1 gradient + {moments} of {optimizer}) + (activations x 2 + input) x batch] "
        f"x {_bytes_text(element)}",
        {
            "parameters": nbytes_of(parameters, element),
            "gradients": nbytes_of(trainable, element),
            "optimizer_state": nbytes_of(moments * trainable, element),
            "activations": nbytes_of(2 * activations * batch_size, element),
            "input": nbytes_of(input_elements * batch_size, element),
        },
        (
            "all gradients stand while all activations do",
            "each activation has a gradient, and all of these stand together",
            _NO_REUSE,
            _NO_KERNEL,
        ),
    )


def forward_sum(
    parameters: int, activations: int, input_elements: int, batch_size: int, *, element: str = "fp32"
) -> TextbookSum:
    """Parameters + (activations + input) x batch: the forward pass alone, by the same rules as `states_sum`.

    Assumes that nothing is given back before the end, which inference under ``torch.no_grad`` does all the time.
    Source: the same as for `states_sum`, whose second author predicts one image at a time: ``batch_size=1``.

    Args:
        parameters: number of parameters.
        activations: numbers that all layers give back for one sample.
        input_elements: numbers in one sample.
        batch_size: number of samples.
        element: name of a number's type, see `BYTES_PER_ELEMENT`.
    """
    _refuse_negative(parameters=parameters, activations=activations)
    _refuse_negative(input_elements=input_elements, batch_size=batch_size)
    return TextbookSum(
        "forward only",
        f"[parameters + (activations + input) x batch] x {_bytes_text(element)}",
        {
            "parameters": nbytes_of(parameters, element),
            "activations": nbytes_of(activations * batch_size, element),
            "input": nbytes_of(input_elements * batch_size, element),
        },
        ("no gradients and no optimizer", _NO_REUSE, _NO_KERNEL),
    )


def lecture_sum(
    parameters: int,
    input_elements: int,
    outputs: Iterable[int],
    batch_size: int,
    *,
    trainable_parameters: int | None = None,
    element: str = "fp32",
) -> TextbookSum:
    """Parameters + gradients + batch x (input + 2 x sum of the outputs): training, as lectures write it.

    Assumes that each layer's output stands twice, itself and its gradient, and that the optimizer keeps nothing, as
    plain SGD does. Source: a lecture on a 3-D CNN, known to us by its figures alone, all of which are worked out in
    ``tests/core/layers/test_textbook.py``.

    Args:
        parameters: number of parameters.
        input_elements: numbers in one sample.
        outputs: numbers that each layer gives back for one sample.
        batch_size: number of samples.
        trainable_parameters: number of parameters that get a gradient (default: all of them).
        element: name of a number's type, see `BYTES_PER_ELEMENT`.
    """
    trainable = parameters if trainable_parameters is None else trainable_parameters
    total = sum(outputs)
    _refuse_negative(parameters=parameters, input_elements=input_elements, outputs=total)
    _refuse_negative(batch_size=batch_size, trainable_parameters=trainable)
    return TextbookSum(
        "lecture",
        f"[parameters + gradients + batch x (input + 2 x sum of outputs)] x {_bytes_text(element)}",
        {
            "parameters": nbytes_of(parameters, element),
            "gradients": nbytes_of(trainable, element),
            "input": nbytes_of(batch_size * input_elements, element),
            "outputs": nbytes_of(batch_size * total, element),
            "gradients of outputs": nbytes_of(batch_size * total, element),
        },
        ("the optimizer keeps nothing", "all gradients of outputs stand together", _NO_REUSE, _NO_KERNEL),
    )


@dataclass(frozen=True)
class WeightMemory:
    """Memory of a model's weights at one type of number, in bytes: of all, and of those that are trained."""

    element: str
    total_bytes: int
    trainable_bytes: int


def weight_memory(
    parameters: int, trainable_parameters: int, elements: Iterable[str] = ("fp32", "fp16", "bf16", "int8", "int4")
) -> tuple[WeightMemory, ...]:
    """Memory of the weights alone, in bytes, total and trainable, at several types of number.

    Assumes that every weight has that type and that quantized ones need no scales, zero points or padding, though real
    ones do. Source: what ``accelerate estimate-memory`` of Hugging Face prints for a model's size.

    Args:
        parameters: number of parameters.
        trainable_parameters: those of them that get a gradient.
        elements: names of types of number, see `BYTES_PER_ELEMENT`.
    """
    _refuse_negative(parameters=parameters, trainable_parameters=trainable_parameters)
    return tuple(
        WeightMemory(name, nbytes_of(parameters, name), nbytes_of(trainable_parameters, name)) for name in elements
    )


def textbook_sums(table: LayerTable, *, optimizer: str = "adam", element: str = "fp32") -> tuple[TextbookSum, ...]:
    """All sums for one model, from its table by layer: inference, forward only, training, and the lecture's.

    The activations are what the modules without children give back, all calls counted.

    Args:
        table: the layers at the batch size to sum for.
        optimizer: a name of `MOMENTS`.
        element: name of a number's type, see `BYTES_PER_ELEMENT`.
    """
    trainable = table.trainable_parameters
    # The table's figures are of the whole batch, and need not divide by its size: one "sample" is all of it.
    outputs, inputs = table.output_elements, table.batch_elements
    return (
        weights_and_input_sum(table.parameters, inputs, element=element),
        forward_sum(table.parameters, outputs, inputs, 1, element=element),
        states_sum(
            table.parameters, outputs, inputs, 1, optimizer=optimizer, trainable_parameters=trainable, element=element
        ),
        lecture_sum(table.parameters, inputs, (outputs,), 1, trainable_parameters=trainable, element=element),
    )


def ratio_to_peak(footprint: Footprint, textbook_bytes: int) -> float:
    """How far a textbook sum is from the traced peak: 1.0 where they agree, 2.0 where the sum is twice the peak.

    Args:
        footprint: the traced step, at the same batch size.
        textbook_bytes: ``total_bytes`` of a sum.

    Example:
        >>> footprint = Footprint(8, "cpu", 4_000, 4_000, 4_000)
        >>> ratio_to_peak(footprint, weights_and_input_sum(300, 200).total_bytes)
        0.5
    """
    if footprint.peak_allocated_bytes <= 0:
        raise MemGuardError("The footprint holds no bytes to compare a textbook sum with.")
    return textbook_bytes / footprint.peak_allocated_bytes


def nbytes_of(count: int, element: str = "fp32") -> int:
    """Bytes of so many numbers, rounded up to whole ones.

    Args:
        count: how many numbers.
        element: name of their type, see `BYTES_PER_ELEMENT`.

    >>> nbytes_of(3, "int4")
    2
    """
    return -(-count * _bytes_of(element) // 1)


def _bytes_of(element: str) -> Fraction:
    if element not in BYTES_PER_ELEMENT:
        raise MemGuardError(f"element={element!r} is unknown; choose one of {', '.join(BYTES_PER_ELEMENT)}.")
    return BYTES_PER_ELEMENT[element]


def _bytes_text(element: str) -> str:
    return f"{float(_bytes_of(element)):g} bytes"


def _moments(optimizer: str) -> int:
    if optimizer.lower() not in MOMENTS:
        raise MemGuardError(f"optimizer={optimizer!r} has no textbook sum here; choose one of {', '.join(MOMENTS)}.")
    return MOMENTS[optimizer.lower()]


def _refuse_negative(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise MemGuardError(f"{name}={count} is below zero; give a count.")
