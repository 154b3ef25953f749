"""What of a batch grows with the number of samples, and a batch of any number of them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_memguard.core.batch import Batches, batch_bytes, batch_size_of, batches_from_one, map_tensors, tensors_in
from lightning_memguard.errors import CannotTraceError

CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Item:
    x: Any
    label: Any = "cat"


@dataclasses.dataclass(frozen=True)
class FrozenItem:
    x: Any


class Boxes:
    """An object of the user's own, with tensors for attributes."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.size = (640, 480)


def fake_of(batch: Any, n: int, batch_size: int | None = None) -> Any:
    with FakeTensorMode():
        return batches_from_one(batch, batch_size).fake(n)


def shape_at(batch: Any, n: int, batch_size: int | None = None) -> tuple[int, ...]:
    return tuple(fake_of(batch, n, batch_size).shape)


# Containers

CONTAINERS = {
    "dict": lambda x: {"x": x, "mode": "train"},
    "tuple": lambda x: (x, "train"),
    "list": lambda x: [x],
    "namedtuple": lambda x: Pair(x, None),
    "dataclass": Item,
    "frozen dataclass": FrozenItem,
    "OrderedDict": lambda x: OrderedDict(x=x),
    "defaultdict": lambda x: defaultdict(list, x=x),
    "UserDict": lambda x: UserDict(x=x),
    "object with attributes": Boxes,
    "nesting": lambda x: {"a": (Item([x]), 3.5), "b": None},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_tensor_in_any_container_grows_and_the_container_keeps_its_type(name):
    batch = CONTAINERS[name](torch.zeros(4, 3))
    grown = fake_of(batch, 10)
    assert type(grown) is type(batch)
    assert [tuple(tensor.shape) for tensor in tensors_in(grown)] == [(10, 3)]
    assert [tuple(tensor.shape) for tensor in tensors_in(batch)] == [(4, 3)], "the example was changed"


def test_what_is_no_tensor_passes_through():
    item = Item(torch.zeros(4, 3), label={"cat": 1, "when": None, "flag": True})
    grown = fake_of(item, 10)
    assert grown.label == {"cat": 1, "when": None, "flag": True}
    assert fake_of(Boxes(torch.zeros(4)), 10).size == (640, 480)


def test_a_defaultdict_still_has_its_default():
    assert fake_of(defaultdict(list, x=torch.zeros(4)), 10)["new"] == []


def test_text_is_one_thing_and_not_its_letters():
    grown = fake_of({"x": torch.zeros(4), "name": "abcd", "raw": b"abcd"}, 10)
    assert (grown["name"], grown["raw"]) == ("abcd", b"abcd")


def test_tensors_are_found_in_order_and_their_bytes_added():
    batch = {"x": torch.zeros(2, 3), "more": [torch.zeros(5, dtype=torch.int8), Item(torch.zeros(1))]}
    assert [tensor.numel() for tensor in tensors_in(batch)] == [6, 5, 1]
    assert batch_bytes(batch) == 6 * 4 + 5 * 1 + 1 * 4


def test_map_tensors_leaves_the_original_alone():
    batch = Pair({"x": torch.zeros(2)}, Item(torch.zeros(3)))
    counts = map_tensors(batch, torch.numel)
    assert counts == Pair({"x": 2}, Item(3))
    assert isinstance(batch.y.x, torch.Tensor)


# How many samples


def test_the_first_dimension_of_the_first_tensor_is_the_batch_size():
    assert batch_size_of({"scale": torch.tensor(2.0), "x": torch.zeros(4, 3), "y": torch.zeros(7)}) == 4


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ("some text", "it is of type str"),
        (None, "it is of type NoneType"),
        ([], "it is a list of nothing"),
        ({"a": "text", "b": 3, "c": "more"}, "it is a dict of int, str"),
        ((torch.tensor(1.0), 2), "it is a tuple of Tensor, int"),
    ],
)
def test_a_batch_without_a_dimension_is_refused_in_words(batch, words):
    with pytest.raises(CannotTraceError) as error:
        batches_from_one(batch)
    assert str(error.value) == (
        f"The batch holds no tensor to size it by: {words}. "
        "Return tensors from the dataset or the collate function to have the step predicted."
    )


# What grows, told from one batch


def test_a_dimension_of_the_batchs_size_grows_and_others_stay():
    assert shape_at(torch.zeros(4, 3, 8), 10) == (10, 3, 8)


def test_a_tensor_without_such_a_dimension_stays():
    grown = fake_of({"x": torch.zeros(4, 3), "class_weights": torch.zeros(7), "scale": torch.tensor(1.0)}, 10)
    assert [tuple(tensor.shape) for tensor in grown.values()] == [(10, 3), (7,), ()]


def test_of_two_such_dimensions_the_first_grows():
    assert shape_at(torch.zeros(4, 4), 10) == (10, 4)


def test_sequence_first_tensors_grow_in_their_second_dimension():
    """Told the batch size, since the first dimension of the first tensor is the length here."""
    assert shape_at(torch.zeros(50, 4, 8), 10, batch_size=4) == (50, 10, 8)


def test_a_graph_batch_has_several_rows_a_sample():
    """Two graphs of five nodes each: ten rows; six graphs have thirty."""
    graphs = {"nodes": torch.zeros(10, 7), "graph_label": torch.zeros(2)}
    grown = fake_of(graphs, 6, batch_size=2)
    assert [tuple(tensor.shape) for tensor in grown.values()] == [(30, 7), (6,)]


def test_a_list_with_one_entry_a_sample_gets_as_many_entries_as_samples():
    """As detection models take them: a list of images and a list of dicts of boxes."""
    images = [torch.zeros(3, 8, 8), torch.zeros(3, 6, 6)]
    targets = [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}]
    grown = fake_of((images, targets), 5, batch_size=2)
    assert [tuple(image.shape) for image in grown[0]] == [(3, 8, 8), (3, 6, 6), (3, 8, 8), (3, 6, 6), (3, 8, 8)]
    assert [len(target["boxes"]) for target in grown[1]] == [5, 1, 5, 1, 5]


def test_a_list_of_texts_with_one_entry_a_sample_grows_too():
    grown = fake_of({"x": torch.zeros(2, 3), "caption": ["a cat", "a dog"], "classes": ["cat", "dog", "cow"]}, 3)
    assert grown["caption"] == ["a cat", "a dog", "a cat"]
    assert grown["classes"] == ["cat", "dog", "cow"]


def test_a_batch_can_shrink():
    grown = fake_of({"x": torch.zeros(4, 3), "caption": ["a", "b", "c", "d"]}, 2)
    assert tuple(grown["x"].shape) == (2, 3)
    assert grown["caption"] == ["a", "b"]


# What grows, told from two batches


def of(small: Any, large: Any, n: int) -> Any:
    """Samples collated in twos and in threes tell what a batch of n looks like."""
    with FakeTensorMode():
        return Batches(small, large, 2, 3).fake(n)


def test_two_sizes_tell_what_grows_and_how_fast():
    """Five rows a sample and one more: 11, 16, so 51 at ten."""
    assert tuple(of(torch.zeros(11, 2), torch.zeros(16, 2), 10).shape) == (51, 2)


def test_two_sizes_tell_apart_what_one_could_not():
    """2 features in a batch of 2 look like samples; in a batch of 3 they do not."""
    assert tuple(of(torch.zeros(2, 2), torch.zeros(2, 3), 10).shape) == (2, 10)


def test_an_int_that_counts_samples_counts_on():
    assert (
        of({"x": torch.zeros(2), "count": 2, "seed": 7}, {"x": torch.zeros(3), "count": 3, "seed": 7}, 10)["count"]
        == 10
    )
    assert (
        of({"x": torch.zeros(2), "count": 2, "seed": 7}, {"x": torch.zeros(3), "count": 3, "seed": 7}, 10)["seed"] == 7
    )


def test_a_tuple_with_one_entry_a_sample_gets_as_many_entries_as_samples():
    """What torchvision's detection references collate by `tuple(zip(*batch))`."""

    def collated(n: int) -> tuple[Any, ...]:
        return tuple(zip(*[(torch.zeros(3, 8, 8), {"boxes": torch.zeros(5, 4)})] * n, strict=True))

    images, targets = of(collated(2), collated(3), 10)
    assert (len(images), len(targets)) == (10, 10)
    assert tuple(images[9].shape) == (3, 8, 8)


@pytest.mark.parametrize(("small", "large"), [("a,b", "a,b,c"), (b"ab", b"abc")])
def test_text_may_differ_between_the_two(small, large):
    assert of({"x": torch.zeros(2), "ids": small}, {"x": torch.zeros(3), "ids": large}, 10)["ids"] == small


def test_flags_are_no_counts():
    assert of({"x": torch.zeros(2), "padded": False}, {"x": torch.zeros(3), "padded": True}, 10)["padded"] is False


def test_keys_that_come_and_go_are_refused():
    with pytest.raises(CannotTraceError) as error:
        of({"x": torch.zeros(2)}, {"x": torch.zeros(3), "mask": torch.zeros(3)}, 10)
    assert str(error.value) == "A batch of 2 and one of 3 samples have different keys: ['x'] against ['mask', 'x']."


def test_a_dimension_that_grows_in_no_straight_line_is_refused():
    with FakeTensorMode(), pytest.raises(CannotTraceError) as error:
        Batches(torch.zeros(2), torch.zeros(5), 2, 4).fake(10)
    assert str(error.value) == "A dimension is 2 at 2 samples and 5 at 4: it grows in no straight line."


# Fake batches


def test_a_fake_batch_keeps_dtype_device_and_gradient():
    example = torch.zeros(4, 3, dtype=torch.float16, requires_grad=True)
    grown = fake_of((example, torch.zeros(4, dtype=torch.bool)), 10)
    assert all(isinstance(tensor, FakeTensor) for tensor in grown)
    assert [(tensor.dtype, tensor.requires_grad) for tensor in grown] == [(torch.float16, True), (torch.bool, False)]
    assert {tensor.device.type for tensor in grown} == {"cpu"}


def test_channels_last_stays_channels_last():
    images = torch.zeros(4, 3, 8, 8).to(memory_format=torch.channels_last)
    assert fake_of(images, 10).is_contiguous(memory_format=torch.channels_last)
    assert fake_of(torch.zeros(4, 3, 8, 8), 10).is_contiguous()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_real_meta_and_fake_examples_tell_the_same(device):
    example = torch.zeros(4, 3, device=device)
    with FakeTensorMode():
        fake = torch.zeros(4, 3)
    assert shape_at(example, 10) == shape_at(fake, 10) == (10, 3)
    assert fake_of(example, 10).device.type == "cpu", "a step cannot run on meta tensors"


def test_a_fake_batch_can_be_on_a_device_the_example_is_not_on():
    with FakeTensorMode():
        assert batches_from_one(torch.zeros(4, 3)).fake(10, torch.device("meta")).device.type == "meta"


# Real batches


def test_a_real_batch_repeats_the_examples_values():
    """Class indices stay valid, and a mask stays as full as it was."""
    batches = batches_from_one({"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "y": torch.tensor([7, 9])})
    grown = batches.real(5, CPU)
    assert grown["y"].tolist() == [7, 9, 7, 9, 7]
    assert grown["x"].tolist() == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]


def test_a_real_batch_is_cut_to_size():
    assert batches_from_one(torch.tensor([1, 2, 3, 4])).real(2, CPU).tolist() == [1, 2]


def test_a_real_batch_shares_no_memory_with_the_example():
    example = torch.tensor([1.0, 2.0])
    batches_from_one({"x": example}).real(2, CPU)["x"].zero_()
    assert example.tolist() == [1.0, 2.0]


def test_a_real_batch_of_meta_tensors_is_zeros():
    grown = batches_from_one(torch.ones(2, 3, dtype=torch.long, device="meta")).real(4, CPU)
    assert grown.tolist() == [[0, 0, 0]] * 4
    assert grown.dtype == torch.long


def test_a_real_batch_asks_for_gradients_where_the_example_does():
    grown = batches_from_one((torch.zeros(2, requires_grad=True), torch.zeros(2))).real(4, CPU)
    assert [tensor.requires_grad for tensor in grown] == [True, False]
    assert grown[0].is_leaf


def test_a_real_batch_stays_channels_last():
    images = torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert batches_from_one(images).real(4, CPU).is_contiguous(memory_format=torch.channels_last)


def test_a_real_batch_of_fake_tensors_is_zeros():
    with FakeTensorMode():
        example = torch.ones(2, 3)
    assert batches_from_one(example).real(4, CPU).tolist() == [[0, 0, 0]] * 4
