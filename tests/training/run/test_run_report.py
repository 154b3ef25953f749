"""Files that a run leaves: its report, and snapshots of its step."""

from __future__ import annotations

import gc
import json
import multiprocessing
import pickle
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard, MemGuardError, estimate
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.report.page import DATA_NAME, PAGE_NAME
from lightning_memguard.training.run import guarded_run, run_report
from lightning_memguard.training.run.run_report import FOLDER, folder_of

pytestmark = pytest.mark.usefixtures("taped")


@pytest.fixture
def loader(dataset: TensorDataset) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=10)


@pytest.fixture(autouse=True)
def _layers_are_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table by layer comes of a capture of its own, which one test makes."""
    if request.node.name != "test_the_report_is_next_to_the_log_and_holds_all_that_the_guard_knows":
        monkeypatch.setattr(run_report, "_layers", lambda *_: None)


# -- the report


def test_the_report_is_next_to_the_log_and_holds_all_that_the_guard_knows(
    trainer: Any, small: Any, loader: DataLoader[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = MemGuard(batch_size="largest", max_batch_size=50)
    run = trainer(guard, logger=CSVLogger(tmp_path), max_epochs=3)
    run.fit(small(), loader)
    folder = Path(run.logger.log_dir)
    data = json.loads((folder / DATA_NAME).read_text())
    assert (data["title"], data["decision"]["batch_size"]) == ("Small", 50)
    assert [epoch["epoch"] for epoch in data["epochs"]] == [0, 1, 2]
    assert [layer["name"] for layer in data["layers"]] == ["", "net", "net.0", "net.1", "net.2"]
    assert data["layers"][2]["output_shape"] == [50, 64]
    peak = guard.decision.footprint.peak_allocated_bytes  # type: ignore[union-attr]
    assert max(map(sum, zip(*data["timeline"]["parts_bytes"].values(), strict=True))) == peak
    assert {point["batch_size"]: point["peak_device_bytes"] for point in data["curve"]}[50] == peak
    assert str(folder / PAGE_NAME) in caplog.text
    assert guard.report().path == folder / PAGE_NAME


@pytest.mark.usefixtures("at_own_size")
def test_without_a_logger_it_is_in_its_own_folder(
    trainer: Any, small: Any, loader: DataLoader[Any], tmp_path: Path
) -> None:
    """Each Trainer has a version of its own; a second fit on it gets the next, unless it resumes."""
    guard, module, root = MemGuard("check"), small(), tmp_path / "here"

    def pages() -> dict[str, int]:
        found = {path.parent.name: json.loads(path.read_text()) for path in (root / FOLDER).glob(f"*/{DATA_NAME}")}
        return {name: len(data["epochs"]) for name, data in sorted(found.items())}

    first, second = (trainer(guard, default_root_dir=root) for _ in range(2))
    first.fit(module, loader)
    second.fit(module, loader)
    assert pages() == {"version_0": 1, "version_1": 1}
    first.save_checkpoint(tmp_path / "first.ckpt")
    first.fit_loop.max_epochs = 4
    first.fit(module, loader, ckpt_path=tmp_path / "first.ckpt")
    assert pages() == {"version_0": 3, "version_1": 1}
    second.fit(module, loader)
    assert pages() == {"version_0": 3, "version_1": 1, "version_2": 0}
    assert {path.name for path in (root / FOLDER / "version_2").iterdir()} >= {PAGE_NAME, DATA_NAME}


def test_processes_that_start_at_once_get_a_folder_each(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)

    def take_fifty() -> None:
        start.wait(60)
        for _ in range(50):
            run_report._next_version(tmp_path / "memguard")

    several = [context.Process(target=take_fifty) for _ in range(3)]
    for each in several:
        each.start()
    for each in several:
        each.join(60)
    assert [each.exitcode for each in several] == [0, 0, 0]
    assert {each.name for each in (tmp_path / "memguard").iterdir()} == {f"version_{number}" for number in range(150)}


def test_it_is_there_before_the_first_step_that_may_fail(
    trainer: Any, small: Any, loader: DataLoader[Any], tmp_path: Path
) -> None:
    class Fails(small):  # type: ignore[misc]
        def on_train_start(self) -> None:
            assert (tmp_path / FOLDER / "version_0" / PAGE_NAME).exists()
            raise ValueError("now")

    with pytest.raises(ValueError, match="now"):
        trainer(MemGuard("check"), default_root_dir=tmp_path).fit(Fails(), loader)


def test_a_trial_run_leaves_nothing(trainer: Any, small: Any, loader: DataLoader[Any], tmp_path: Path) -> None:
    guard = MemGuard("check")
    with pytest.raises(MemGuardError, match="no report before the first run"):
        guard.report()
    trainer(guard, fast_dev_run=True, default_root_dir=tmp_path).fit(small(), loader)
    assert not list(tmp_path.iterdir())
    with pytest.raises(MemGuardError, match="has no report, because it writes no files"):
        guard.report()


def test_a_folder_that_cannot_be_written_to_is_told_once_and_stops_nothing(
    trainer: Any, small: Any, loader: DataLoader[Any], tmp_path: Path
) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder would be")
    guard = MemGuard("check")
    with pytest.warns(UserWarning, match="MemGuard's report was not written") as warned:
        trainer(guard, default_root_dir=tmp_path, max_epochs=2).fit(small(), loader)
    assert len([each for each in warned if "report was not written" in str(each.message)]) == 1
    assert len(guard.records) == 2


@pytest.mark.usefixtures("at_own_size")
def test_a_validation_alone_leaves_one_too(trainer: Any, loader: DataLoader[Any], small: Any, tmp_path: Path) -> None:
    class Validated(small):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

    trainer(MemGuard("check"), default_root_dir=tmp_path).validate(Validated(), loader, verbose=False)
    data = json.loads((tmp_path / FOLDER / "version_0" / "memguard_report_validate.json").read_text())
    assert data["footprint"]["phase"] == "validation"
    assert len(data["epochs"]) == 1


@pytest.mark.usefixtures("at_own_size")
@pytest.mark.captures
def test_what_is_evaluated_after_a_fit_leaves_the_fits_report_alone(
    trainer: Any, loader: DataLoader[Any], small: Any, tmp_path: Path
) -> None:
    class Tested(small):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch[0])

    guard, module, folder = MemGuard("check"), Tested(), tmp_path / FOLDER / "version_0"
    run = trainer(guard, default_root_dir=tmp_path, max_epochs=2)
    run.fit(module, loader)
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    run.test(module, loader, verbose=False)
    run.predict(module, loader)
    assert {name: (folder / name).read_bytes() for name in left} == left
    assert [record.epoch for record in guard.records] == [0, 1]
    phases = {stage: record.predicted.phase for stage, record in guard.evaluations.items()}
    assert phases == {"test": "test", "predict": "prediction"}
    for stage, phase in phases.items():
        data = json.loads((folder / f"memguard_report_{stage}.json").read_text())
        assert data["footprint"]["phase"] == phase
        assert f"memguard_report_{stage}.json" in (folder / f"memguard_report_{stage}.html").read_text()
        assert (folder / f"memguard_setup_{stage}.md").exists()


@pytest.mark.parametrize(
    ("loggers", "folder"),
    [
        ([SimpleNamespace(log_dir="logs/digits/version_0", save_dir="logs")], "logs/digits/version_0"),
        ([SimpleNamespace(save_dir="mlruns", name="digits", version="4f1c")], "mlruns/digits/4f1c"),
        ([SimpleNamespace(save_dir="logs", name="digits", version=3)], "logs/digits/version_3"),
        ([SimpleNamespace(save_dir=None, name="digits", version=3)], f"root/{FOLDER}/version_8"),
        ([SimpleNamespace(save_dir=None), SimpleNamespace(log_dir="second")], "second"),
        ([SimpleNamespace(log_dir="s3://bucket/digits")], None),
        ([], f"root/{FOLDER}/version_8"),
    ],
)
def test_the_folder_is_the_first_loggers_that_has_one(loggers: list[Any], folder: str | None) -> None:
    for name in ("version_7", "version_x", "other"):
        Path("root", FOLDER, name).mkdir(parents=True)
    facts: Any = SimpleNamespace(leaves_files=True, loggers=loggers, default_root_dir="root")
    assert folder_of(object(), facts, {}) == (None if folder is None else Path(folder))  # type: ignore[arg-type]


def test_a_guard_that_is_kept_does_not_keep_the_trainer_the_module_and_the_data(
    trainer: Any, small: Any, dataset: Any, tmp_path: Path
) -> None:
    """In a notebook, it is what one looks at once the rest has been deleted to make room."""
    guard, module, data = MemGuard(batch_size="largest", max_batch_size=8), small(), DataLoader(dataset, batch_size=4)
    run = trainer(guard)
    run.fit(module, data)
    kept = [weakref.ref(each) for each in (run, module, module.net, data)]
    del run, module, data
    gc.collect()
    assert [each() for each in kept] == [None] * 4
    assert guard.save_snapshot(tmp_path / "step.pickle").stat().st_size > 0
    assert guard.decision.batch_size == 8


# -- snapshots


@pytest.mark.usefixtures("at_own_size")
def test_the_predicted_step_is_written_when_the_run_starts_or_afterwards(
    trainer: Any, small: Any, loader: DataLoader[Any], tmp_path: Path
) -> None:
    guard = MemGuard("check")
    assert guard.save_snapshot(tmp_path / "asked_before.pickle") == tmp_path / "asked_before.pickle"
    trainer(guard).fit(small(), loader)
    guard.save_snapshot(tmp_path / "asked_after.pickle")
    before, after = (pickle.loads((tmp_path / f"asked_{when}.pickle").read_bytes()) for when in ("before", "after"))
    assert before == after
    entries = before["device_traces"][0]
    live, peak = 0, 0
    for entry in entries:
        live += {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        peak = max(peak, live)
    assert peak == guard.decision.footprint.peak_allocated_bytes  # type: ignore[union-attr]
    lines = {frame["filename"].rpartition("/")[2] for entry in entries for frame in entry["frames"] if frame["line"]}
    assert lines == {"conftest.py"}, "where `Small` is written"


def test_where_the_run_was_not_tuned_there_is_no_step_to_write(begun: Any, small: Any, tmp_path: Path) -> None:
    guard = MemGuard("check")
    with pytest.warns(UserWarning, match="did not tune this run"):
        guard._last_run = begun(small(), DataLoader(["some", "text"], batch_size=2), mode="check")  # type: ignore[arg-type]
    with pytest.raises(MemGuardError, match=r"no predicted step to write: .*no tensor"):
        guard.save_snapshot(tmp_path / "step.pickle")


def test_on_cuda_the_actual_step_is_recorded_for_two_optimizer_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hook with a Trainer on a GPU; a GPU test shows what torch does then."""
    saved: list[Path] = []
    monkeypatch.setattr(guarded_run, "ActualSnapshot", lambda device: SimpleNamespace(save=saved.append))
    run = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda")), is_global_zero=True, global_step=0, optimizers=[0]
    )
    recorder: Any = guarded_run.SnapshotRecorder(run, tmp_path / "step.pickle")  # type: ignore[arg-type]
    seen = []
    for step in (0, 0, 1, 1, 2, 2, 3):
        run.global_step = step
        if recorder and not recorder.goes_on():
            recorder = recorder.close()
        seen.append(len(saved))
    assert seen == [0, 0, 0, 0, 1, 1, 1]
    assert saved == [tmp_path / "step_actual.pickle"]


def test_a_footprint_that_was_estimated_can_be_written_too(tmp_path: Path) -> None:
    footprint = estimate(
        torch.nn.Linear(8, 8), torch.zeros(4, 8), step=lambda m, x: m(x).sum(), device="H100", batch_size=32
    )
    taken = pickle.loads(footprint.save_snapshot(tmp_path / "step.pickle").read_bytes())
    live, peak = 0, 0
    for entry in taken["device_traces"][0]:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry.get("allocated_size", 0)
        peak = max(peak, live)
    assert peak == footprint.peak_allocated_bytes


def test_a_footprint_without_events_says_where_there_are_some(tmp_path: Path) -> None:
    with pytest.raises(MemGuardError, match=r"guard\.save_snapshot"):
        Footprint(8, "cpu", 1, 1, 1).save_snapshot(tmp_path / "step.pickle")


def test_the_predicted_step_is_compared_with_the_actual_one(
    begun: Any, small: Any, loader: DataLoader[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_run.GuardedRun, "_show", lambda *_: None)
    guard, path = MemGuard("check"), tmp_path / "step.pickle"
    with pytest.raises(MemGuardError, match=r"call guard\.save_snapshot\(.*step\.pickle'\) before a fit on CUDA"):
        guard.compare(path)
    guard._last_run = begun(small(), loader, mode="check")
    guard.save_snapshot(path)
    shutil.copy(path, tmp_path / "step_actual.pickle")  # as a fit on CUDA would
    assert "No allocation of the step differs." in guard.compare(path)
