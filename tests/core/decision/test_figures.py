"""Figures of one refusal add up: what is needed, what a remedy needs, what is missing, and the largest part."""

import re

import pytest

from lightning_memguard.core.decision.advice import Advice, text
from lightning_memguard.core.decision.decision import Budget, Request, decide
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.errors import DoesNotFitError
from lightning_memguard.units import MIB


def refused(footprint: Footprint) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        decide(lambda _: footprint, Budget(100 * MIB, 100 * MIB, 5 * MIB, "given"), Request(1))
    return caught.value


def test_the_likely_peak_and_the_upper_bound_have_their_names():
    peak = Peak(100 * MIB, 100 * MIB, 110 * MIB)
    parts = {"parameters": 40 * MIB, "activations": 60 * MIB}
    error = refused(Footprint(1, "cpu", 100 * MIB, 100 * MIB, 100 * MIB, parts, doubts=(Doubt("process", (peak,)),)))
    assert "Batch size 1 needs 100.0 MiB, at most 110.0 MiB; cpu offers 95.0 MiB" in str(error)
    assert "short by 15.0 MiB" in str(error)


def test_a_remedy_is_written_as_the_error_is():
    doubt = Doubt("process", (Peak(20 * MIB, 20 * MIB, 25 * MIB),))
    less = Footprint(1, "cpu", 20 * MIB, 20 * MIB, 20 * MIB, doubts=(doubt,))
    line = text(Advice(("bf16",), ("how",), (), less, 85 * MIB, fits=True))
    assert line.startswith("bf16: 20.0 MiB, at most 25.0 MiB, 85.0 MiB less, fits.")


def test_a_context_that_is_more_than_any_part_is_the_largest():
    error = refused(Footprint(1, "cuda", 50 * MIB, 60 * MIB, 400 * MIB, {"workspaces": 50 * MIB}))
    assert error.largest_part == "context"
    assert "The largest part is the device's context and libraries, 340.0 MiB." in str(error)
    assert "workspaces" not in str(error)
    assert len(re.findall("340.0 MiB", str(error))) == 1
