"""What holds a tensor has a name that its user would write, and a line."""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memguard.core.capture.holders import Holder, Holding, holdings, roots_of, use_of

EVERYTHING: list[torch.Tensor] = []


def holder_of(tensor: torch.Tensor, roots: dict[str, object]) -> Holding | None:
    """What holds a tensor's memory, reached from these roots."""
    wanted = tensor.untyped_storage()._cdata
    tensors = ((each, each.thing) for each in holdings(roots))
    storages = ((each, thing.untyped_storage()._cdata) for each, thing in tensors if isinstance(thing, torch.Tensor))
    return next((each for each, storage in storages if storage == wanted), None)


@functools.cache
def cached(size: int) -> torch.Tensor:
    return torch.zeros(size)


class Store:
    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[Any] = []


class Net(nn.Module):
    shared: ClassVar[dict[int, torch.Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.store = Store()
        self.plain: list[Any] = []
        self.cleared: list[Any] = []
        self.few: list[Any] = []
        self.first: list[Any] = []
        self.last = deque[Any]()
        self.recent: list[Any] = []
        self.total = torch.zeros(3)
        inputs: list[Any] = []
        self.layer.register_forward_hook(lambda module, args, out: inputs.append(args[0]))

    def keep(self, batch_idx: int, x: torch.Tensor) -> None:
        self.plain.append(x)
        if batch_idx < 3:
            self.few.append(x)
        self.cleared += [x]
        self.recent.append(x)
        self.recent = self.recent[-10:]
        self.total = self.total + x
        self.last = deque([x])
        if len(self.first) > 2:
            return
        self.first.append(x)

    def on_train_epoch_end(self) -> None:
        self.cleared.clear()


def put_into(net: Net, name: str, tensor: torch.Tensor) -> None:
    ways = {
        "self.layer.weight": lambda: net.layer.register_parameter("weight", nn.Parameter(tensor)),
        "self.store.values": lambda: net.store.values.append({"a": [tensor]}),
        "self.shared": lambda: net.shared.update({0: tensor}),
        "self.last": lambda: net.last.append(functools.partial(print, tensor)),
        "self.plain": lambda: net.plain.append(tensor.numpy()[1:]),
        "EVERYTHING": lambda: EVERYTHING.append(tensor),
        "inputs in Net.__init__.<lambda>()": lambda: net.layer(tensor),
    }
    ways[name]()


@pytest.mark.parametrize(
    "name",
    [
        *("self.layer.weight", "self.store.values", "self.shared", "self.last", "self.plain", "EVERYTHING"),
        "inputs in Net.__init__.<lambda>()",
    ],
)
def test_a_holder_has_the_name_its_user_would_write(name: str):
    net, tensor = Net(), torch.rand(2, 3)
    assert holder_of(tensor, roots_of(net)) is None
    put_into(net, name, tensor)
    found = holder_of(tensor, roots_of(net))
    assert found is not None
    assert (found.holder.name, found.in_graph) == (name, False)


def test_a_cached_function_and_a_graph_hold_tensors():
    net = Net()
    result, hidden = cached(7), net.layer(torch.rand(2, 3)).exp()
    net.plain.append(hidden.mean())
    held = holder_of(result, {"cached": cached}), holder_of(hidden, {"self": net})
    assert [each and (each.holder.name, each.in_graph) for each in held] == [
        ("the cache of cached()", False),
        ("self.plain", True),
    ]


def test_long_lists_are_sampled_and_arrays_counted_once():
    array = np.zeros(1000)
    net = Net()
    net.plain += [array, array[:10], *[torch.zeros(256) for _ in range(5000)]]
    found = sum(each.nbytes for each in holdings({"self": net}) if each.holder.name == "self.plain")
    assert 5000 * 1024 < found < 5000 * 1700


@pytest.mark.parametrize(
    ("name", "line", "conditional", "cleared"),
    [
        ("plain", "self.plain.append(x)", False, False),
        ("few", "    self.few.append(x)", True, False),
        ("first", "self.first.append(x)", True, False),
        ("cleared", "self.cleared += [x]", False, True),
        ("recent", "self.recent.append(x)", False, True),
        ("total", "self.total = self.total + x", False, False),
        ("last", "", False, True),  # set anew each time
        ("nothing", "", False, False),
    ],
)
def test_the_code_says_where_an_attribute_is_filled_and_emptied(name: str, line: str, conditional: bool, cleared: bool):
    use = use_of(Holder(f"self.{name}", name, Net()))
    assert (use.is_conditional, use.is_cleared) == (conditional, cleared)
    file, _, number = use.line.partition(":")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert (lines[int(number) - 1].endswith(line) and file == "test_holders.py") if line else not use.line
