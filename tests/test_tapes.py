"""Tapes say what was captured, to the byte, and are what is captured today; reading one needs no torch."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_memguard.core.capture import predict as predict_module
from lightning_memguard.core.capture.curve import Curve
from lightning_memguard.core.capture.predict import Prediction
from tests import tape
from tests.tapes import record

ROOT = Path(__file__).parents[1]
OTHER_SIZES = (3, 50)  # than those captured


def assert_equal(curve: Curve, back: Curve) -> None:
    """Equal events and footprints, also at sizes that were not captured."""
    for size in (*curve.captured, *OTHER_SIZES):
        if curve.knows(size):
            assert back.trace_at(size).events == curve.trace_at(size).events
            assert [*back.trace_at(size).work] == [*curve.trace_at(size).work]
            assert back.footprint_at(size) == curve.footprint_at(size)


@pytest.mark.exact
@pytest.mark.parametrize("name", record.TAPES)
def test_a_tape_is_what_is_captured_today(name: str) -> None:
    """If that is meant to change, `make tapes` makes them anew."""
    found = record.record(name)
    lines = tape.lines_of(found)
    kept = gzip.decompress((tape.FOLDER / f"{name}.jsonl.gz").read_bytes()).decode().splitlines()
    assert next(tape.differences([*map(tape.placeless, lines)], kept), "") == ""
    if isinstance(found, Curve):
        assert_equal(found, tape.value_of(lines))


@pytest.mark.long
def test_every_program_of_the_oracle_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import oracle

    def predicted(*asked: Any, **how: Any) -> Prediction:
        found = predict_module.predict(*asked, **how)
        assert_equal(found.curve, tape.value_of(tape.lines_of(found.curve)))
        return found

    monkeypatch.setattr(oracle, "predict", predicted)
    programs = {name: run for name, run in oracle.everything().items() if not name.startswith("fit ")}
    assert len(programs) > 60
    for run in programs.values():
        oracle.forked(run, threads=1)


def test_a_tape_is_read_and_replayed_without_torch() -> None:
    code = """
        import sys
        from tests import tape
        curve = tape.read("fit")
        assert curve.footprint_at(10).peak_allocated_bytes > 20_000
        assert not {"torch", "pytorch_lightning"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", "if True:" + code], cwd=ROOT, check=True, timeout=600)


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="Not a tape of version 1"):
        tape.value_of(['{"tape": 2}', "[]"])
