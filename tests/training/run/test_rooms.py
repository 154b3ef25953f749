"""Rooms beside the way of a fit can be missing: it is predicted and trains as with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.test_import_order import BESIDE, ROOT


def test_a_fit_is_the_same_without_the_rooms_beside_its_way(tmp_path):
    names = [f"{ROOT.name}.{each.removesuffix('.py').replace('/', '.')}" for each in BESIDE]
    program = Path(__file__).with_name("without_rooms.py")
    env = {**os.environ, "PYTHONPATH": str(ROOT.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, program, *names]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, cwd=tmp_path, env=env)
    without, with_all = map(json.loads, answer.stdout.splitlines())
    assert (without["predicted"], without["weights"]) == (with_all["predicted"], with_all["weights"])
    assert with_all["said"] == []
    assert without["said"] == [
        "MemGuard shows less of this run: ImportError: lightning_memguard.report.loggers is missing"
    ]
