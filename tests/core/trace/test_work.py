"""What operators compute, at sizes that were not captured."""

import pickle

import pytest

from lightning_memguard.core.trace.work import Work, WorkAt, groups_of


def test_a_product_grows_on_the_line_through_two_sizes():
    small, large = (Work("float32", 2 * n * 10, 4 * (n + 10)) for n in (4, 8))
    assert tuple(WorkAt(groups_of([[small], [large]]), (4, 8), 100)) == (Work("float32", 2000, 440),)


def test_a_square_is_found_from_three_sizes():
    works = [[Work("float32", n * n, 3 * n)] for n in (4, 8, 16)]
    assert tuple(WorkAt(groups_of(works), (4, 8, 16), 32)) == (Work("float32", 1024, 96),)


def test_equal_calls_are_one_group():
    works = [[Work("", 0, n), Work("", 0, n), Work("", 0, 7)] for n in (4, 8)]
    assert tuple(WorkAt(groups_of(works), (4, 8), 10)) == (Work("", 0, 10, calls=2), Work("", 0, 7))


def test_other_operators_at_another_size_grow_in_proportion_but_for_the_optimizers():
    works = [[Work("", 0, 4)], [Work("float32", 80, 8), Work("", 0, 5, updates=True)]]
    grown = WorkAt(groups_of(works), (4, 8), 16)
    assert tuple(grown) == (Work("float32", 160, 16), Work("", 0, 5, updates=True))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_nothing_is_below_zero(batch_size):
    works = [[Work("", 0, nbytes)] for nbytes in (0, 100)]
    assert tuple(WorkAt(groups_of(works), (4, 8), batch_size)) == (Work("", 0, 0),)


def test_work_is_grown_when_it_is_read(monkeypatch):
    """A search asks for the events of many sizes, and for the time of one."""
    grown, asked = WorkAt(groups_of([[Work("", 0, 4)], [Work("", 0, 8)]]), (4, 8), 16), list[int]()
    monkeypatch.setattr("lightning_memguard.core.trace.work._at", lambda *_, **__: asked.append(1) or 5.0)
    assert (len(grown), asked) == (1, [])
    assert (pickle.loads(pickle.dumps(grown)), len(asked)) == ((Work("", 5.0, 5.0),), 2)
