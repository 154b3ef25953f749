"""`memguard history` and `memguard plan --measured`: what a machine has measured is listed, cleared, used elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memguard.cli.main import BAD_USE, FITS, main
from lightning_memguard.core.device.measurements import Measurement, Setting, Store, learned_from
from lightning_memguard.training.planning import subject

pytestmark = pytest.mark.usefixtures("taped")

RENTED = Setting("Tesla T4", "570.86.15", "2.13.0+cu130", "13.0", "91900", "")
PLAN = ["plan", "torch.nn:Linear", "--args", "in_features=512", "out_features=512", "--input-shape", "64,512"]
PLAN += ["--target-shape", "64,512:float32", "--optimizer", "torch.optim.Adam", "--device"]


def measured(step: str, share: float = 1.3) -> Measurement:
    sizes = 100 << 20, int(share * (100 << 20)), 30 << 20, 0
    return Measurement("run", "2026-11-23T10:00:00+00:00", "Net", step, "32-true", 64, *sizes, RENTED)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return Store(tmp_path / "lightning-memguard" / "measurements.jsonl")


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = FITS) -> str:
    assert main([*map(str, arguments)]) == status
    out, err = capsys.readouterr()
    return err if status == BAD_USE else out


def test_what_was_measured_is_listed_and_cleared(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert "holds no measurement" in shown(capsys, "history")
    store.add(measured("5e9"))
    with store.path.open("a") as file:
        file.write("damaged\n")
    text = shown(capsys, "history")
    assert all(
        word in text for word in ("2026-11-23 10:00", "Net", "Tesla T4", "100.0 MiB", "130.0 MiB", "+30.0%", "5e9")
    )
    assert "1 line cannot be read" in text
    answer = json.loads(shown(capsys, "history", "--json"))
    assert (answer["file"], answer["damaged_lines"]) == (str(store.path), 1)
    assert answer["measurements"][0]["measured_bytes"] == int(1.3 * (100 << 20))
    assert "Deleted" in shown(capsys, "history", "--clear")
    assert not store.path.exists()


def test_a_file_that_is_not_there_or_not_readable_is_an_error(
    store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "does not exist" in shown(capsys, "history", tmp_path / "none", status=BAD_USE)
    assert "does not exist" in shown(capsys, *PLAN, "T4", "--measured", tmp_path / "none", status=BAD_USE)
    other = tmp_path / "model.py"
    other.write_text("import torch\n")
    assert "was not deleted" in shown(capsys, "history", other, "--clear", status=BAD_USE)
    assert other.exists()
    assert "cannot be read" in shown(capsys, "history", tmp_path, status=BAD_USE)


def test_a_plan_is_corrected_by_what_another_machine_has_measured(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(device: str, *options: object) -> Any:
        return json.loads(shown(capsys, *PLAN, device, "--json", *options))["devices"][0]["asked"]

    signatures = list[str]()

    def noted(found: Any, step: str, where: str) -> Any:
        signatures.append(step)
        return learned_from(found, step, where)

    monkeypatch.setattr(subject, "learned_from", noted)
    store.add(measured("another step"))
    before = planned("T4", "--measured", store.path)
    assert before["correction_bytes"] == 0
    assert f"{store.path} has no measurement of this step on this GPU" in before["notes"]
    store.add(replace(measured(signatures[0]), run="other"))
    after = planned("T4", "--measured", store.path)
    assert after["peak_device_bytes"] == int(1.3 * before["peak_device_bytes"])
    assert after["learned_from"] == "1 earlier run on Tesla T4"
    assert "from 1 earlier run on Tesla T4" in shown(capsys, *PLAN, "T4", "--measured", store.path)
    elsewhere = planned("H100", "--measured", store.path)
    assert f"{store.path} has no measurement of this step on this GPU, but on Tesla T4" in elsewhere["notes"]
