"""The roofline, by hand."""

from dataclasses import replace

import pytest

from lightning_memguard.core.range import Range
from lightning_memguard.core.replay.seconds import Speed, Timing
from lightning_memguard.core.trace.work import COMMUNICATION, CONVOLUTION, Work

SPEED = Speed({"float32": 100.0, "float16": 200.0}, ((0.0, 20.0), (50.0, 10.0)), 0.5, (0.5, 2.0), link=4.0)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work("float32", 1000, 10), 10),  # its products
        (Work("float16", 1000, 10), 5),
        (Work("bfloat16", 1000, 10), 10),  # as float32, if nothing is known of it
        (Work(f"float16{CONVOLUTION}", 1000, 10), 5),
        (Work("float32", 1000, 400), 40),  # its bytes
        (Work("", 0, 40), 2),  # in a cache
        (Work("", 0, 1), 0.5),  # a launch
    ],
)
def test_an_operator_takes_what_limits_it(work, seconds):
    assert SPEED.seconds(work) == seconds


def test_a_step_has_several_batches_and_one_update():
    work = Work("float32", 100, 0, calls=3), Work("float32", 200, 0, updates=True)
    assert Timing(work, lambda: SPEED, batches_per_step=4).step == Range(7, 14, 28)


def test_what_is_sent_may_hide_behind_products_or_not():
    work = Work("float32", 1000, 0), Work(COMMUNICATION, 0, 8)
    assert Timing(work, lambda: SPEED).step == Range(5, 10, (10 + 2 * 2) * 2)
    assert Timing((*work, Work(COMMUNICATION, 0, 72)), lambda: SPEED).step.likely == 20


def test_a_compiled_step_takes_no_less_than_its_products():
    work = Work("float32", 1000, 0), Work("", 0, 1000)
    assert Timing(work, lambda: SPEED, compiled=True).step == Range(5, 110, 220)


def test_without_work_or_speed_there_is_no_time():
    assert Timing((), lambda: SPEED).step is None
    assert Timing((Work("", 0, 1),), lambda: None).step is None


def test_a_step_takes_as_long_as_the_host_needs_to_call_it():
    work = Work("float32", 100, 0, calls=3), Work("float32", 200, 0, updates=True)
    slow_host = replace(SPEED, host_seconds=Range(1.0, 3.0, 4.0))
    assert Timing(work, lambda: slow_host).step == Range(4, 12, 16)
    assert Timing(work, lambda: slow_host, compiled=True).step == Timing(work, lambda: SPEED).step
