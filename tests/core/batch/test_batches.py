"""Parts of a batch that grow with the number of samples, and a batch of any number of them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from lightning_memguard.core.batch.batches import Batches, Draws, batches_from_one
from lightning_memguard.core.batch.nesting import batch_bytes, batch_size_of, map_tensors, tensors_in
from lightning_memguard.core.capture.program import tensors
from lightning_memguard.core.simulation.constants import KnownFakeMode, known_value
from lightning_memguard.errors import CannotTraceError

CPU = torch.device("cpu")


@contextmanager
def on_fake_tensors():
    with tensors(fake=True):
        yield


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


class Slots:
    __slots__ = ("__x", "kind", "unset")

    def __init__(self, x: torch.Tensor) -> None:
        self.__x = x
        self.kind = "slots"


class Deep:
    """Called to iterate, as a graph of torch_geometric; its tensors are deeper than its attributes."""

    def __init__(self, x: torch.Tensor) -> None:
        self.fields = {"x": [x]}

    def __call__(self) -> Any:
        return self.fields["x"]


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
    "UserList": lambda x: UserList([x]),
    "deque": lambda x: deque([x]),
    "object with attributes": Boxes,
    "object with slots": Slots,
    "object with tensors deep inside": Deep,
    "nesting": lambda x: {"a": (Item([x]), 3.5), "b": None},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_tensor_in_any_container_grows_and_the_container_keeps_its_type(name):
    batch = CONTAINERS[name](torch.zeros(4, 3))
    grown = fake_of(batch, 10)
    assert type(grown) is type(batch)
    assert [tuple(tensor.shape) for tensor in tensors_in(grown)] == [(10, 3)]
    assert [tuple(tensor.shape) for tensor in tensors_in(batch)] == [(4, 3)], "the example was changed"


def test_what_is_not_a_tensor_passes_through():
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
def test_a_batch_without_a_dimension_is_refused_with_a_reason(batch, words):
    with pytest.raises(CannotTraceError) as error:
        batches_from_one(batch)
    assert str(error.value) == (
        f"The batch holds no tensor to size it by: {words}. "
        "Return tensors from the dataset or the collate function to have the step predicted."
    )


# What grows, from one batch


def test_a_dimension_of_the_batchs_size_grows_and_others_stay():
    assert shape_at(torch.zeros(4, 3, 8), 10) == (10, 3, 8)


def test_a_tensor_without_such_a_dimension_stays():
    grown = fake_of({"x": torch.zeros(4, 3), "class_weights": torch.zeros(7), "scale": torch.tensor(1.0)}, 10)
    assert [tuple(tensor.shape) for tensor in grown.values()] == [(10, 3), (7,), ()]


def test_of_two_such_dimensions_the_first_grows():
    assert shape_at(torch.zeros(4, 4), 10) == (10, 4)


def test_sequence_first_tensors_grow_in_their_second_dimension():
    """The batch size is passed, since the first dimension of the first tensor is the length here."""
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


# What grows, from two batches


def of(small: Any, large: Any, n: int) -> Any:
    """Samples collated in twos and in threes show what a batch of n looks like."""
    with FakeTensorMode():
        return Batches(small, large, 2, 3).fake(n)


def test_two_sizes_show_what_grows_and_how_fast():
    """Five rows a sample and one more: 11, 16, so 51 at ten."""
    assert tuple(of(torch.zeros(11, 2), torch.zeros(16, 2), 10).shape) == (51, 2)


def test_two_sizes_distinguish_what_one_could_not():
    """2 features in a batch of 2 look like samples; in a batch of 3 they do not."""
    assert tuple(of(torch.zeros(2, 2), torch.zeros(2, 3), 10).shape) == (2, 10)


def test_an_int_that_counts_samples_goes_on_counting():
    assert (
        of({"x": torch.zeros(2), "count": 2, "seed": 7}, {"x": torch.zeros(3), "count": 3, "seed": 7}, 10)["count"]
        == 10
    )
    assert (
        of({"x": torch.zeros(2), "count": 2, "seed": 7}, {"x": torch.zeros(3), "count": 3, "seed": 7}, 10)["seed"] == 7
    )


def test_a_tuple_with_one_entry_a_sample_gets_as_many_entries_as_samples():
    """Torchvision's detection references collate by `tuple(zip(*batch))`."""

    def collated(n: int) -> tuple[Any, ...]:
        return tuple(zip(*[(torch.zeros(3, 8, 8), {"boxes": torch.zeros(5, 4)})] * n, strict=True))

    images, targets = of(collated(2), collated(3), 10)
    assert (len(images), len(targets)) == (10, 10)
    assert tuple(images[9].shape) == (3, 8, 8)


@pytest.mark.parametrize(("small", "large"), [("a,b", "a,b,c"), (b"ab", b"abc")])
def test_text_may_differ_between_the_two(small, large):
    assert of({"x": torch.zeros(2), "ids": small}, {"x": torch.zeros(3), "ids": large}, 10)["ids"] == small


def test_flags_are_not_counts():
    assert of({"x": torch.zeros(2), "padded": False}, {"x": torch.zeros(3), "padded": True}, 10)["padded"] is False


def test_keys_that_come_and_go_are_refused():
    with pytest.raises(CannotTraceError) as error:
        of({"x": torch.zeros(2)}, {"x": torch.zeros(3), "mask": torch.zeros(3)}, 10)
    assert str(error.value) == "A batch of 2 and one of 3 samples have different keys: ['x'] versus ['mask', 'x']."


def test_a_dimension_that_does_not_grow_linearly_is_refused():
    with FakeTensorMode(), pytest.raises(CannotTraceError) as error:
        Batches(torch.zeros(2), torch.zeros(5), 2, 4).fake(11)
    assert str(error.value) == "A dimension of the batch is 2 at 2 samples and 5 at 4: it does not grow linearly."


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
def test_real_meta_and_fake_examples_give_the_same(device):
    example = torch.zeros(4, 3, device=device)
    with FakeTensorMode():
        fake = torch.zeros(4, 3)
    assert shape_at(example, 10) == shape_at(fake, 10) == (10, 3)
    assert fake_of(example, 10).device.type == "cpu", "a step cannot run on meta tensors"


def test_a_fake_batch_can_be_on_a_device_the_example_is_not_on():
    with FakeTensorMode():
        assert batches_from_one(torch.zeros(4, 3)).fake(10, torch.device("meta")).device.type == "meta"


def test_tensors_may_come_from_elsewhere():
    """A callable that is given shapes and examples: here it records them."""
    batch = {"x": torch.zeros(4, 3), "images": [torch.zeros(2)] * 4}
    calls: list[Any] = []

    def build(shape: tuple[int, ...], example: torch.Tensor) -> torch.Tensor:
        calls.append((shape, example.dtype))
        return torch.empty(shape, device="meta")

    grown = batches_from_one(batch).of(10, build)
    assert [tuple(tensor.shape) for tensor in tensors_in(grown)] == [(10, 3)] + [(2,)] * 10
    assert {shape for shape, _ in calls} >= {(10, 3)}


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


# How tensors share memory


def storage_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of all storages behind tensors, each counted once."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def test_what_is_in_a_batch_twice_is_made_once():
    """A language model's labels are its inputs: ten rows of eight bytes, and no more."""
    ids = torch.zeros(4, dtype=torch.long)
    grown = fake_of({"input_ids": ids, "labels": ids}, 10)
    assert grown["input_ids"] is grown["labels"]


@pytest.mark.parametrize("real", [False, True])
def test_views_of_one_tensor_stay_views_of_one(real):
    """Inputs and targets, one token apart: ten rows of nine tokens behind both."""
    tokens = torch.arange(36).view(4, 9)
    family = batches_from_one((tokens[:, :-1], tokens[:, 1:]))
    inputs, targets = family.real(10, CPU) if real else fake_of((tokens[:, :-1], tokens[:, 1:]), 10)
    assert (inputs.shape, targets.shape) == ((10, 8), (10, 8))
    assert (inputs.stride(), targets.storage_offset()) == ((9, 1), 1)
    assert storage_bytes(inputs, targets) == 10 * 9 * 8
    if real:
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_an_expanded_tensor_takes_no_more_than_what_it_was_expanded_from():
    mask = torch.ones(6, 6).expand(4, 6, 6)
    grown = fake_of(mask, 10)
    assert (grown.shape, storage_bytes(grown)) == ((10, 6, 6), 6 * 6 * 4)
    real = batches_from_one(mask).real(10, CPU)
    assert (real.sum(), storage_bytes(real)) == (360, 6 * 6 * 4)


def test_a_transposed_tensor_stays_transposed():
    grown = fake_of(torch.zeros(4, 50, 8).transpose(0, 1), 10, batch_size=4)
    assert (grown.shape, grown.stride()) == ((50, 10, 8), (8, 400, 1))


def test_a_column_keeps_the_tensor_it_was_taken_from():
    grown = fake_of(torch.zeros(4, 5)[:, 2], 10)
    assert (grown.shape, grown.stride(), storage_bytes(grown)) == ((10,), (5,), 10 * 5 * 4)


def test_a_few_rows_of_a_dataset_do_not_bring_the_dataset():
    assert storage_bytes(fake_of(torch.zeros(1000, 3)[8:12], 10)) == 10 * 3 * 4


def test_the_entries_of_a_list_have_memory_of_their_own():
    """Three images of 12 bytes each, though the example's list has two."""
    grown = fake_of([torch.zeros(3), torch.zeros(3)], 3, batch_size=2)
    assert storage_bytes(*grown) == 3 * 12


# Arrays


def test_an_array_grows_as_a_tensor_does():
    grown = of({"x": torch.zeros(2), "a": np.arange(4).reshape(2, 2)}, {"x": torch.zeros(3), "a": np.zeros((3, 2))}, 5)
    assert grown["a"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    assert fake_of({"x": torch.zeros(4, 3), "names": np.array(["a", "b", "c", "d"])}, 2)["names"].tolist() == ["a", "b"]


# Values that count samples


def graphs(n: int) -> dict[str, torch.Tensor]:
    """Graphs of two nodes and an edge between them."""
    return {
        "x": torch.zeros(2 * n, 3),
        "batch": torch.arange(n).repeat_interleave(2),
        "ptr": 2 * torch.arange(n + 1),
        "edge_index": torch.stack([2 * torch.arange(n), 2 * torch.arange(n) + 1]),
        "nodes": torch.tensor([2 * n]),
        "label": torch.full((n,), 7),
    }


def test_a_real_batch_goes_on_counting_where_the_values_count_samples():
    real, wanted = Batches(graphs(2), graphs(3), 2, 3).real(6, CPU), graphs(6)
    assert {name: real[name].tolist() for name in wanted} == {name: wanted[name].tolist() for name in wanted}


def test_values_that_count_samples_are_known_in_a_fake_batch_and_no_others_are():
    family = Batches(graphs(4), graphs(6), 4, 6)
    with on_fake_tensors():
        found = family.fake(10)
        count = found["batch"].max() + 1
        assert (int(count), found["ptr"].tolist()[-1], found["nodes"].item()) == (10, 20, 20)
        assert isinstance(found["label"], FakeTensor), "a class is not a count"
        assert isinstance(torch.zeros(count, 3), FakeTensor), "a size that is known makes a tensor that is fake"
        pooled = found["x"].new_zeros(count, 3).index_add(0, found["batch"], found["x"])
    assert (type(pooled), pooled.shape) == (FakeTensor, (10, 3))


class Masked(Draws):
    """Batches of texts; those of one draw are padded where one is given."""

    multiple = 1

    def __init__(self, padded: int = -1) -> None:
        self.padded = padded

    def has(self, batch_size: int) -> bool:
        return batch_size % 2 == 0

    def batch(self, batch_size: int, draw: int) -> dict[str, torch.Tensor]:
        ids = torch.full((batch_size, 6), draw) + torch.arange(6)
        mask = torch.ones(batch_size, 6, dtype=torch.long)
        mask[-1, -1] = draw != self.padded
        return {"ids": ids, "mask": mask, "weight": torch.ones(batch_size)}


@pytest.mark.parametrize(
    ("draws", "all_ones"), [(Masked(), True), (Masked(padded=5), None), (None, None)], ids=["same", "padded", "none"]
)
@pytest.mark.parametrize("drawn", [0, 3])
def test_integers_that_all_real_batches_have_throughout_are_known_in_a_fake_batch(draws, all_ones, drawn):
    example = Masked()
    family = Batches(example.batch(4, 0), example.batch(6, 0), 4, 6, draws, drawn)
    with KnownFakeMode(allow_non_fake_inputs=True):
        batch = family.fake(10)
        every = known_value(batch["mask"].bool().all())
        assert known_value(batch["ids"]) is None
        assert known_value(batch["weight"]) is None
    assert (None if every is None else bool(every)) is all_ones


def test_values_that_only_look_like_counts_are_repeated():
    small, large = torch.tensor([0, 1]), torch.tensor([0, 1, 5])
    assert Batches(small, large, 2, 3).real(4, CPU).tolist() == [0, 1, 0, 1]


# Packed sequences


def pack(*lengths: int, sort: bool = False) -> PackedSequence:
    return pack_sequence([torch.ones(length, 3) for length in lengths], enforce_sorted=sort)


def test_a_packed_batch_knows_how_many_sequences_it_holds():
    assert batch_size_of(pack(5, 5, 2)) == 3


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_batch_runs_on_fake_tensors_and_is_padded_again(kind):
    model, family = kind(3, 4, bidirectional=True), Batches(pack(5, 5), pack(5, 5, 5), 2, 3)
    with on_fake_tensors():
        packed = family.fake(10)
        assert (packed.data.shape, packed.batch_sizes.tolist()) == ((50, 3), [10] * 5)
        assert type(packed.batch_sizes) is torch.Tensor
        out, _ = model(packed)
        padded, lengths = pad_packed_sequence(out, batch_first=True)
    assert (type(padded), padded.shape, lengths.tolist()) == (FakeTensor, (10, 5, 8), [5] * 10)


def test_a_packed_batch_is_padded_where_functions_are_not_watched_as_in_a_compiled_step():
    batches = batches_from_one(pack(5, 3, 3))
    with tensors(fake=True):
        padded, lengths = pad_packed_sequence(batches.fake(3))
    assert (type(padded), padded.shape, lengths.tolist()) == (FakeTensor, (5, 3, 3), [5, 3, 3])


def test_a_packed_batch_is_padded_as_torch_does_it():
    """Five, three and three steps: the same shape, strides and lengths on fake tensors as on real ones."""
    batch = pack(5, 3, 3)
    real, lengths = pad_packed_sequence(batch)
    with on_fake_tensors():
        fake, fake_lengths = pad_packed_sequence(batches_from_one(batch).fake(3))
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())
    assert fake_lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize(("n", "rows"), [(2, [2, 2, 1]), (5, [5, 5, 4]), (1, [1, 1, 1])])
def test_unequal_sequences_grow_by_the_longest(n, rows):
    """One of three steps and one of two; with one alone, the longest is meant."""
    assert batches_from_one(pack(3, 2)).real(n, CPU).batch_sizes.tolist() == rows


def test_a_real_packed_batch_can_be_unpacked():
    padded, lengths = pad_packed_sequence(Batches(pack(5, 5), pack(5, 5, 5), 2, 3).real(4, CPU), batch_first=True)
    assert (padded.tolist(), lengths.tolist()) == (torch.ones(4, 5, 3).tolist(), [5] * 4)


# What depends on values


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (
            torch.eye(4).to_sparse(),
            "The batch holds a tensor of layout torch.sparse_coo: its bytes depend on its values",
        ),
        (torch.eye(4).to_sparse_csr(), "The batch holds a tensor of layout torch.sparse_csr"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "The batch holds a nested tensor: its bytes"),
        (
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "The batch holds a nested tensor: its bytes depend on how long its parts are.",
        ),
    ],
    ids=["sparse", "sparse rows", "nested", "jagged"],
)
def test_a_tensor_whose_size_depends_on_values_is_refused(tensor, words):
    assert batch_bytes(tensor) > 0
    assert batch_size_of(tensor) in (2, 4)
    for make in (Batches(tensor, tensor, 2, 3).fake, lambda n: Batches(tensor, tensor, 2, 3).real(n, CPU)):
        with pytest.raises(CannotTraceError, match=words):
            make(5)


class Keyed:
    """As torch_geometric's storage of one kind of nodes: a property reads what only its dictionary can be given."""

    def __init__(self, x: torch.Tensor) -> None:
        vars(self).update(_key="paper", x=x)

    @property
    def _key(self) -> str:
        return str(vars(self)["_key"])


def test_an_attribute_behind_a_property_without_a_setter_is_copied() -> None:
    copied = map_tensors([Keyed(torch.zeros(3))], torch.ones_like)[0]
    assert copied._key == "paper"
    assert torch.equal(copied.x, torch.ones(3))
