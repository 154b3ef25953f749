"""Work in children: its order, and that it finds the state of the training's own process."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from lightning_memguard.core.capture.capture import CaptureFailedError, UserCode, isolated
from lightning_memguard.core.isolation.pool import Children
from lightning_memguard.core.simulation.fake import training_threads
from lightning_memguard.errors import CannotTraceError


def test_a_child_runs_on_one_thread_and_predicts_for_those_of_the_training() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with UserCode[int, tuple[int, int]](lambda _: (torch.get_num_threads(), training_threads()), most=1) as each:
            assert [each.ask(0), each.ask(1)] == [(1, 3), (1, 3)]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_is_waited_for_is_worked_on_before_what_is_not() -> None:
    count = itertools.count()
    with Children[str, int](lambda _: next(count), most=1) as pool:
        pool.start("first", "second", "third")
        places = {name: pool.answer(name).value for name in ("third", "first", "second")}
    assert places == {"first": 0, "third": 1, "second": 2}


def test_a_failure_in_a_child_has_a_short_reason_and_a_text_with_its_place() -> None:
    def cannot() -> None:
        raise CannotTraceError("it is too large")

    def fail() -> None:
        raise ValueError("float32 or nothing")

    with pytest.raises(CaptureFailedError) as ours:
        isolated(cannot)
    with pytest.raises(CaptureFailedError, match=r"^ValueError: float32 or nothing, at .*test_isolated.py:") as theirs:
        isolated(fail)
    assert (ours.value.reason, theirs.value.reason) == ("it is too large", "ValueError: float32 or nothing")


def test_work_whose_child_is_lost_is_done_here_where_it_may_be() -> None:
    here = os.getpid()

    def work(_: int) -> int:
        if os.getpid() != here:
            os._exit(3)
        return os.getpid()

    with UserCode(work) as each:
        with pytest.raises(CaptureFailedError, match="exit code 3"):
            each.ask(0)
        assert each.ask(1, here_too=True) == here
