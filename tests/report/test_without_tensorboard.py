"""The extra `tensorboard` is optional: without it, fits log their scalars to any logger, and draw no figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_memguard

PROGRAM = Path(__file__).with_name("without_tensorboard.py")
SENTENCE = 'MemGuard draws no figures: they need Pillow, as in pip install "lightning-memguard[tensorboard]".'


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of each fit, by the name of its logger."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(lightning_memguard.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(PROGRAM), str(tmp_path_factory.mktemp("fits"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return {fit["name"]: fit for fit in map(json.loads, done.stdout.splitlines())}


def test_each_fit_trains_and_says_at_most_one_sentence(fits: dict[str, Any]) -> None:
    assert {"csv", "CometLike"} <= fits.keys()
    assert {name: (fit["steps"], fit["sentences"]) for name, fit in fits.items()} == dict.fromkeys(
        fits, (4, [SENTENCE])
    )


def test_loggers_get_their_scalars(fits: dict[str, Any]) -> None:
    assert {"memguard/predicted_peak_gib", "memguard/actual_peak_gib"} <= {*fits["CometLike"]["scalars"]}


def test_files_are_written_except_for_figures(fits: dict[str, Any]) -> None:
    assert fits["csv"]["files"] == ["memguard_report.html", "memguard_report.json", "memguard_setup.md", "metrics.csv"]


def test_the_other_writer_of_tensorboard_gets_scalars_and_text(fits: dict[str, Any]) -> None:
    pytest.importorskip("tensorboardX", reason="TensorBoardLogger needs tensorboardX if TensorBoard is not installed")
    assert fits["tensorboardX"]["logger"] == "TensorBoardLogger"
    tags = EventAccumulator(fits["tensorboardX"]["folder"]).Reload().Tags()
    assert {"memguard/predicted_peak_gib", "memguard/actual_peak_gib"} <= {*tags["scalars"]}
    assert "memguard/setup/text_summary" in tags["tensors"]
    assert tags["images"] == []
