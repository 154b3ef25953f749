"""Memory left behind fills what is free at a batch that can be counted by hand."""

import math

import pytest

from lightning_memguard.core.trace.kept import Kept, RunsOut, fit_kept, runs_out


@pytest.mark.parametrize(
    ("room", "step", "epoch", "batches", "epochs", "steps", "end"),
    [
        (100, 10, 40, 4, math.inf, math.inf, RunsOut(3, 2)),  # 40, 80, then 110 after the third batch
        (80, 10, 40, 4, math.inf, math.inf, RunsOut(3, 0)),  # 80 fits, one more byte does not
        (100, 10, 40, 4, 3, math.inf, None),  # the last epoch is epoch 2
        (100, 10, 40, 4, math.inf, 14, None),  # batch 2 of epoch 3 is the 15th
        (100, 10, 40, 4, math.inf, 15, RunsOut(3, 2)),
        (100, 0, 40, 4, math.inf, math.inf, RunsOut(3, 3)),  # validation, at the end of an epoch
        (100, 10, 0, None, math.inf, math.inf, RunsOut(0, 10)),  # a stream without a length
        (100, 0, 0, 4, math.inf, math.inf, None),
    ],
)
def test_the_end_is_counted_in_batches(room, step, epoch, batches, epochs, steps, end):
    assert runs_out(room, step, epoch, batches, epochs, steps) == end


def test_bytes_are_split_into_those_of_a_sample_and_those_of_a_batch():
    kept = [Kept("self.a", "m.py:1", False, "step", True, nbytes) for nbytes in (140, 180)]
    (fitted,) = fit_kept([(8, kept[1:]), (4, kept[:1])])
    assert (fitted.bytes_at(4), fitted.bytes_at(8), fitted.bytes_at(100)) == (140, 180, 1100)
    assert fit_kept([(8, kept[1:])])[0].bytes_at(8) == 180
    assert fit_kept([]) == ()
