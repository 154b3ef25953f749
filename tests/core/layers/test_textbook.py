"""The sums of the textbook, and two worked examples of it to the digit. (The third is in test_layers.py.)"""

import pytest
import torch
from torch import nn

from lightning_memguard import MemGuardError, estimate
from lightning_memguard.core.layers.layers import layer_table
from lightning_memguard.core.layers.textbook import (
    BYTES_PER_ELEMENT,
    MOMENTS,
    forward_sum,
    lecture_sum,
    nbytes_of,
    ratio_to_peak,
    states_sum,
    textbook_sums,
    weight_memory,
    weights_and_input_sum,
)
from lightning_memguard.core.replay.footprint import Footprint

MB, MIB = 10**6, 1 << 20


# -- a lecture's 3-D CNN

INPUT = (193, 229, 193, 1)
OUTPUTS = [
    (191, 227, 191, 30),
    (95, 113, 95, 30),
    (93, 111, 93, 60),
    (46, 55, 46, 60),
    (44, 53, 44, 120),
    (21, 26, 21, 120),
    (19, 24, 19, 240),
    (9, 11, 9, 240),
    (1,),
]
LECTURE_MB = [34.12, 993.74, 122.38, 230.41, 51.50, 49.25, 5.50, 8.32, 0.86, 4e-6]
LECTURE_PARAMETERS = [840, 24_330, 48_660, 97_260, 194_520, 388_920, 777_840, 1_555_440, 213_841]
CONVOLUTIONS = ["0", "1", "3", "4", "6", "7", "9", "10"]  # their places in the real networks
FILTERS = [30, 30, 60, 60, 120, 120, 240, 240]
DENSE_INPUTS = 9 * 11 * 9 * 240


def elements(shape):
    return torch.Size(shape).numel()


def megabytes(shape):
    return nbytes_of(elements(shape)) / MB


def test_the_lecture_counts_its_parameters_right():
    channels = [1, *FILTERS[:-1]]
    layers = [nn.Conv3d(c, f, 3, device="meta") for c, f in zip(channels, FILTERS, strict=True)]
    counted = [sum(p.numel() for p in layer.parameters()) for layer in [*layers, nn.Linear(DENSE_INPUTS, 1)]]
    assert counted == LECTURE_PARAMETERS
    assert sum(counted) == 3_301_651
    assert DENSE_INPUTS == 213_840
    assert round(nbytes_of(sum(counted)) / MB, 2) == 13.21


def test_the_lecture_counts_its_outputs_right_but_one():
    ours = [megabytes(shape) for shape in [INPUT, *OUTPUTS]]
    rounded = [round(size, 2) for size in ours[:-1]]
    assert ours[-1] == LECTURE_MB[-1]
    wrong = [place for place, (mine, theirs) in enumerate(zip(rounded, LECTURE_MB, strict=False)) if mine != theirs]
    assert wrong == [4]
    assert (LECTURE_MB[4], rounded[4]) == (51.50, 27.93)


@pytest.mark.parametrize(("batch_size", "expected_mb"), [(1, 2_937.31), (4, 11_670.02)])
def test_the_lecture_sum(batch_size, expected_mb):
    found = lecture_sum(sum(LECTURE_PARAMETERS), elements(INPUT), [elements(shape) for shape in OUTPUTS], batch_size)
    assert round(found.total_bytes / MB, 2) == expected_mb
    assert found.terms["parameters"] == found.terms["gradients"] == 13_206_604
    assert found.terms["outputs"] == found.terms["gradients of outputs"]


def test_the_lectures_own_error_is_not_in_its_totals():
    """With the 51.50 MB that it lists, it would come to 2,984.45 MB."""
    listed = 2 * 13.206604 + LECTURE_MB[0] + 2 * sum(LECTURE_MB[1:])
    assert round(listed, 2) == 2_984.45
    assert round(listed - 2 * (51.50 - 27.93), 2) == 2_937.31


def network_3d(second_padding: int, dense_inputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, filters in [(1, 30), (30, 60), (60, 120), (120, 240)]:
        layers += [nn.Conv3d(before, filters, 3), nn.Conv3d(filters, filters, 3, padding=second_padding)]
        layers += [nn.MaxPool3d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(dense_inputs, 1))


def shapes_as_listed(table):
    """Channels last and without the batch, as the lecture writes them; the second of each pair of convolutions and the
    flattening, which it does not list, left out."""
    rows = [layer for layer in table if layer.is_leaf and layer.name not in ("1", "4", "7", "10", "12")]
    return [(*row.output_shape[2:], row.output_shape[1]) for row in rows]


def test_the_real_network_closest_to_the_lectures():
    """Eight convolutions, a second one padded: the sizes agree until 44 x 53 x 44 is halved to 22 x 26 x 22, not 21."""
    with torch.device("meta"):
        model, volume = network_3d(1, 10 * 12 * 10 * 240), torch.empty(1, 1, *INPUT[:3])
    table = layer_table(model, volume)
    found = shapes_as_listed(table)
    assert found[:5] == OUTPUTS[:5]
    assert found[5:] == [(22, 26, 22, 120), (20, 24, 20, 240), (10, 12, 10, 240), (1,)]
    assert [table[name].parameters for name in CONVOLUTIONS] == LECTURE_PARAMETERS[:-1]
    assert table["13"].parameters == 288_001
    assert table.parameters == 3_375_811

    # What the lecture leaves out, the outputs of four convolutions, is nearly as much as what it lists.
    left_out = sum(table[name].output_bytes for name in ("1", "4", "7", "10", "12"))
    assert left_out == 1_283_771_640
    listed = table.output_bytes - left_out
    assert listed == 1_440_122_164
    (*_, lecture) = textbook_sums(table)
    assert lecture.total_bytes == 2 * 13_503_244 + 34_120_084 + 2 * (listed + left_out)
    # And what is really kept is neither the outputs once nor twice: the convolution that a pooling follows is kept for
    # it, the pooling keeps eight bytes of indices for each of its outputs, and gradients come one by one.
    assert table.activation_bytes == 3_037_746_840


def test_the_real_network_of_valid_convolutions():
    """All eight without padding: only the first of the sizes is the lecture's."""
    with torch.device("meta"):
        model, volume = network_3d(0, 8 * 10 * 8 * 240), torch.empty(1, 1, *INPUT[:3])
    table = layer_table(model, volume)
    found = shapes_as_listed(table)
    assert [place for place, (mine, theirs) in enumerate(zip(found, OUTPUTS, strict=True)) if mine == theirs] == [0, 8]
    assert found[1:8] == [
        (94, 112, 94, 30),
        (92, 110, 92, 60),
        (45, 54, 45, 60),
        (43, 52, 43, 120),
        (20, 25, 20, 120),
        (18, 23, 18, 240),
        (8, 10, 8, 240),
    ]
    assert table.parameters == 3_301_651 - 213_841 + 153_601


def test_no_chain_of_valid_convolutions_and_halvings_gives_the_lectures_sizes():
    """21 comes from 44 by a convolution and a halving, but 26 comes from 53 by a halving alone."""

    def reachable(size):
        found, steps = {size: {""}}, [(size, "")]
        while steps:
            now, way = steps.pop()
            for step, then in (("c", now - 2), ("p", now // 2)):
                if then > 0:
                    found.setdefault(then, set()).add(way + step)
                    steps.append((then, way + step))
        return found

    assert not reachable(44).get(21, set()) & reachable(53).get(26, set())
    assert reachable(21).get(19, set()) & reachable(26).get(24, set()) == {"c"}
    assert not reachable(19).get(9, set()) & reachable(24).get(11, set())


# -- 532,752 activations

PARAMETERS, ACTIVATIONS, INPUT_ELEMENTS, BATCH = 19_072_984, 532_752, 180 * 50 * 1, 128


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad", "rmsprop"])
def test_the_network_with_532752_activations(optimizer):
    found = states_sum(PARAMETERS, ACTIVATIONS, INPUT_ELEMENTS, BATCH, optimizer=optimizer)
    states = found.terms["parameters"] + found.terms["gradients"] + found.terms["optimizer_state"]
    assert states == PARAMETERS * 3 * 4
    assert round(states / MIB, 2) == 218.27
    assert round(found.terms["activations"] / BATCH / MIB, 2) == 4.06
    assert round(found.terms["input"] / MIB, 2) == 4.39
    assert found.total_bytes == 779_021_856
    assert round(found.total_bytes / MIB, 2) == 742.93


def test_the_source_rounds_the_activations_before_it_multiplies_them():
    assert round(218.27 + BATCH * 4.06 + 4.39, 2) == 742.34
    assert round(218.27 + BATCH * (ACTIVATIONS * 2 * 4 / MIB) + 4.39, 2) == 742.93


def test_the_forward_only_form():
    found = forward_sum(PARAMETERS, ACTIVATIONS, INPUT_ELEMENTS, BATCH)
    assert [round(nbytes / MIB, 2) for nbytes in found.terms.values()] == [72.76, 260.13, 4.39]
    assert round(found.total_bytes / MIB, 2) == 337.29
    one = forward_sum(PARAMETERS, ACTIVATIONS, INPUT_ELEMENTS, 1)  # the source predicts one image at a time
    assert round(one.total_bytes / MIB, 2) == 74.82
    least = weights_and_input_sum(PARAMETERS, INPUT_ELEMENTS)
    assert least.total_bytes == (PARAMETERS + INPUT_ELEMENTS) * 4


# -- the sums


@pytest.mark.parametrize(
    ("optimizer", "copies"), [("sgd", 2), ("momentum", 3), ("adagrad", 3), ("rmsprop", 3), ("adam", 4), ("Adam", 4)]
)
def test_an_optimizer_multiplies_the_parameters(optimizer, copies):
    assert states_sum(1000, 0, 0, 1, optimizer=optimizer).total_bytes == 4 * 1000 * copies


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.1)),
        ("momentum", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ("adagrad", torch.optim.Adagrad),
        ("rmsprop", torch.optim.RMSprop),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
    ],
)
def test_the_moments_are_those_that_torch_keeps(name, make):
    weight = nn.Parameter(torch.zeros(100))
    optimizer = make([weight])
    weight.grad = torch.zeros(100)
    optimizer.step()
    kept = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.numel() == 100]
    assert len(kept) == MOMENTS[name]


def test_frozen_parameters_have_neither_gradient_nor_moments():
    found = states_sum(1000, 0, 0, 1, optimizer="adam", trainable_parameters=10)
    assert found.terms == {
        "parameters": 4000,
        "gradients": 40,
        "optimizer_state": 80,
        "activations": 0,
        "input": 0,
    }
    assert lecture_sum(1000, 0, [], 1, trainable_parameters=10).total_bytes == 4040


def test_weights_by_type_of_number():
    rows = weight_memory(33_762, 33_761)
    assert [(row.element, row.total_bytes, row.trainable_bytes) for row in rows] == [
        ("fp32", 135_048, 135_044),
        ("fp16", 67_524, 67_522),
        ("bf16", 67_524, 67_522),
        ("int8", 33_762, 33_761),
        ("int4", 16_881, 16_881),  # half a byte is rounded up
    ]
    assert round(rows[0].total_bytes / MIB, 2) == 0.13


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_bytes_per_element_are_torchs(name, dtype):
    assert BYTES_PER_ELEMENT[name] == torch.empty(0, dtype=dtype).element_size()


def test_sums_are_the_terms():
    whole = states_sum(1001, 33, 7, 5, optimizer="adam")
    assert whole.total_bytes == sum(whole.terms.values())
    assert whole.assumptions


def test_all_sums_from_a_table():
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5, bias=False)).requires_grad_(True)
    model[0].requires_grad_(False)
    table = layer_table(model, torch.zeros(3, 10))
    found = {each.name: each.total_bytes for each in textbook_sums(table, optimizer="adam")}
    parameters, trainable, outputs, inputs = 320, 100, 3 * (20 + 20 + 5), 3 * 10
    assert found == {
        "weights and input": 4 * (parameters + inputs),
        "forward only": 4 * (parameters + outputs + inputs),
        "states and activations": 4 * (parameters + 3 * trainable + 2 * outputs + inputs),
        "lecture": 4 * (parameters + trainable + inputs + 2 * outputs),
    }


def test_the_distance_to_the_traced_peak():
    """States are all there is here, and yet the peak is half as high again: Adam works with two copies of a weight."""
    wide = nn.Linear(1000, 1000)
    footprint = estimate(
        wide, torch.zeros(1, 1000), step=lambda m, x: m(x).sum(), optimizer=torch.optim.Adam, device="cpu"
    )
    table = layer_table(wide, torch.zeros(1, 1000))
    training = textbook_sums(table, optimizer="adam")[2]
    assert ratio_to_peak(footprint, training.total_bytes) * footprint.peak_allocated_bytes == pytest.approx(
        training.total_bytes
    )
    assert ratio_to_peak(footprint, training.total_bytes) == pytest.approx(4 / 6, abs=0.01)
    assert ratio_to_peak(Footprint(1, "cpu", 1000, 1000, 1000), 2500) == 2.5


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: states_sum(1, 1, 1, 1, optimizer="lion"), "optimizer='lion'.*sgd, momentum"),
        (lambda: nbytes_of(1, "fp8"), "element='fp8'.*fp64, fp32"),
        (lambda: lecture_sum(-1, 1, [1], 1), "parameters=-1"),
        (lambda: forward_sum(1, 1, 1, -2), "batch_size=-2"),
        (lambda: ratio_to_peak(Footprint(1, "cpu", 0, 0, 0), 1), "no bytes"),
    ],
)
def test_what_makes_no_sense_is_refused(ask, words):
    with pytest.raises(MemGuardError, match=words):
        ask()
