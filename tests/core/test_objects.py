"""Whose code a thing is, and what objects hold."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections import UserDict, deque
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard.core import objects


class Mine:
    """An object of the user's."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.images = torch.zeros(7)


@pytest.mark.parametrize(
    ("thing", "is_users"),
    [(Mine(), True), (Data(), True), (nn.Linear(1, 1), False), (pl.Callback(), False), (deque(), False), (Mine, False)],
    ids=lambda each: type(each).__name__,
)
def test_an_object_is_the_users_if_any_of_its_classes_is(thing: object, is_users: bool) -> None:
    assert objects.is_users(thing) == is_users


def test_files_of_python_and_of_packages_are_installed() -> None:
    assert objects.is_installed(copy.__file__)
    assert objects.is_installed(torch.__file__)
    assert not objects.is_installed(__file__)


@pytest.mark.parametrize(
    ("module", "file", "is_users"),
    [
        ("nets.model", "/home/me/nets/model.py", True),
        ("code.model", "/home/me/code/model.py", True),
        ("copy", copy.__file__, False),
        ("importlib._bootstrap", "<frozen importlib._bootstrap>", False),
        ("torch.nn", "/home/me/pytorch/torch/nn/__init__.py", False),
    ],
)
def test_a_line_is_the_users_even_in_a_file_named_as_one_of_pythons(module: str, file: str, is_users: bool) -> None:
    assert objects._is_users_line(module, file) == is_users


def test_a_walk_comes_to_each_object_once_nearest_first_and_goes_on_after_an_error() -> None:
    class Raises:
        __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    inner = Mine(number=1)
    inner.itself = inner
    roots = [[inner, [[inner]]], Raises()]
    found = [*objects.walk(roots, objects.held_by)]
    assert found[:3] == [roots[0], roots[1], inner]
    assert found.count(inner) == 1


@pytest.mark.parametrize(
    "holds",
    [
        lambda tensor: [tensor],
        lambda tensor: {"a": {"b": deque([tensor])}},
        lambda tensor: UserDict(a=tensor),
        lambda tensor: Mine(of=Mine(args=Namespace(weight=tensor))),
        lambda tensor: nn.Sequential(nn.ParameterList([nn.Parameter(tensor)])),
    ],
)
def test_tensors_are_found_at_any_depth(holds: Any) -> None:
    tensor = torch.zeros(3)
    held = [each.untyped_storage().data_ptr() for each in objects.tensors_held(holds(tensor))]
    assert held == [tensor.untyped_storage().data_ptr()]


def test_data_and_what_is_left_out_are_not_walked() -> None:
    kept, left = nn.Linear(2, 2, bias=False), nn.Linear(2, 2)
    mine = Mine(kept=kept, left=left, data=Data(), loader=DataLoader(TensorDataset(torch.zeros(9))))
    assert [*objects.tensors_held(mine, but=[left])] == [kept.weight]
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert len([*objects.tensors_held([scripted])]) == 2
