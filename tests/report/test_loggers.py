"""Everything that each logger is given, as one exact list.

The fakes have the signatures of the real libraries' methods: torch 2.13, Lightning 2.6, MLflow 3.17, Comet 3.58.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from lightning_memguard.core.decision.decision import Budget, Decision
from lightning_memguard.core.decision.record import EpochRecord, Measured
from lightning_memguard.core.replay.footprint import Doubt, Footprint, Peak
from lightning_memguard.report import loggers as file
from lightning_memguard.report.decision_table import markdown
from lightning_memguard.report.loggers import Boards, layout
from lightning_memguard.units import MIB

FOOTPRINT = Footprint(
    8, "cpu", 100 * MIB, 100 * MIB, 100 * MIB, {"parameters": 20 * MIB, "activations": 80 * MIB}, "backward"
)
BUDGET = Budget(200 * MIB, 120 * MIB, 10 * MIB, "given", "CPU")
DECISION = Decision(8, 4, 1, "tuned", FOOTPRINT, BUDGET, "memory")
RECORD = EpochRecord(3, 8, FOOTPRINT, Measured(104 * MIB, "VmHWM", {"parameters": 20 * MIB}), 120 * MIB, 10 * MIB)
IMAGE = "an image"


class Calls:
    """Calls in their order; images by a word, as their pixels are not the question here."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def see(self, *call: object) -> None:
        self.seen.append(
            tuple(IMAGE if hasattr(value, "getpixel") or hasattr(value, "shape") else value for value in call)
        )


class FakeWriter(Calls):
    def __init__(self, log_dir: Path) -> None:
        super().__init__()
        self.log_dir = str(log_dir)

    def add_text(self, tag, text_string, global_step=None, walltime=None):
        self.see("add_text", tag, text_string, global_step)

    def add_image(self, tag, img_tensor, global_step=None, walltime=None, dataformats="CHW"):
        self.see("add_image", tag, img_tensor, global_step, dataformats)

    def add_custom_scalars(self, layout):
        self.see("add_custom_scalars", layout)

    def flush(self):
        pass


class FakeLogger:
    def __init__(self, experiment: object) -> None:
        self.experiment = experiment


class FakeWandbLogger(Calls):
    @property
    def experiment(self):
        raise AssertionError("the logger's own methods will do")

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        self.see("log_table", key, columns, data, step)

    def log_image(self, key, images, step=None, **kwargs):
        assert isinstance(images, list)
        self.see("log_image", key, *images, step)


class FakeMlflowClient(Calls):
    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.see("log_text", run_id, text, artifact_file)

    def log_image(self, run_id, image, artifact_file=None, key=None, step=None, timestamp=None, synchronous=None):
        self.see("log_image", run_id, image, artifact_file)

    def log_table(self, run_id, data, artifact_file):
        raise AssertionError("needs pandas")


class FakeMlflowLogger(FakeLogger):
    @property
    def run_id(self) -> str:
        return "run"


class FakeCometExperiment(Calls):
    def log_text(self, text, step=None, metadata=None):
        self.see("log_text", text, step)

    def log_image(self, image_data, name=None, overwrite=False, image_format="png", image_scale=1.0, step=None):
        self.see("log_image", image_data, name, step)

    def log_table(self, filename, tabular_data=None, headers=False, **format_kwargs):
        self.see("log_table", filename, tabular_data, headers)

    def log_html(self, html, clear=False):
        raise AssertionError("Comet joins all HTML of a run into one")


def shown(loggers, folder=None):
    """A run of one epoch."""
    boards = Boards(loggers, folder)
    boards.log_setup(DECISION)
    boards.log_epoch(RECORD, 13)
    return boards


HEADING = ["Part at the peak", "Predicted at batch size 8", "Share"]
ROWS = [
    ["parameters", "20.0 MiB", "20%"],
    ["activations", "80.0 MiB", "80%"],
    ["Peak allocated", "100.0 MiB", "100%"],
    ["Budget on CPU (given)", "120.0 MiB", ""],
    ["Usable after 8% margin", "110.0 MiB", ""],
    ["Peak", "Peak in the backward pass; traced on fake tensors, no memory allocated.", ""],
    ["Batch size", "Batch size 8 (was 4) fits: 100.0 of 110.0 MiB; no larger one does.", ""],
]
TEXT = markdown(DECISION)


# Each of them


def test_tensorboard_gets_the_table_a_layout_and_pictures_by_step(tmp_path):
    writer = FakeWriter(tmp_path)
    shown([FakeLogger(writer)])
    assert writer.seen == [
        ("add_text", "memguard/setup", TEXT, 0),
        ("add_custom_scalars", layout(DECISION)),
        ("add_image", "memguard/peak", IMAGE, 0, "HWC"),
        ("add_image", "memguard/peak", IMAGE, 13, "HWC"),
    ]


def test_weights_and_biases_gets_a_table_and_images():
    logger = FakeWandbLogger()
    shown([logger])
    assert logger.seen == [
        ("log_table", "memguard/setup", HEADING, ROWS, 0),
        ("log_image", "memguard/peak", IMAGE, 0),
        ("log_image", "memguard/peak", IMAGE, 13),
    ]


def test_mlflow_gets_artifacts_in_a_folder():
    client = FakeMlflowClient()
    shown([FakeMlflowLogger(client)])
    assert client.seen == [
        ("log_text", "run", TEXT, "memguard/memguard_setup.md"),
        ("log_image", "run", IMAGE, "memguard/peak_setup.png"),
        ("log_image", "run", IMAGE, "memguard/peak_epoch_0003.png"),
    ]


def test_comet_gets_a_table_text_and_images():
    experiment = FakeCometExperiment()
    shown([FakeLogger(experiment)])
    assert experiment.seen == [
        ("log_table", "memguard_setup.csv", ROWS, HEADING),
        ("log_text", TEXT, 0),
        ("log_image", IMAGE, "memguard/peak", 0),
        ("log_image", IMAGE, "memguard/peak", 13),
    ]


def test_a_csv_logger_gets_files_next_to_its_metrics(tmp_path):
    logger = CSVLogger(tmp_path, name="run")
    shown([logger], tmp_path / "elsewhere")
    assert sorted(path.name for path in Path(logger.log_dir).iterdir()) == ["memguard_peak.png", "memguard_setup.md"]
    assert (Path(logger.log_dir) / "memguard_setup.md").read_text() == TEXT
    assert not (tmp_path / "elsewhere").exists()


def test_without_a_logger_the_same_files_go_where_the_caller_says(tmp_path):
    folder = tmp_path / "not" / "there yet"
    shown([], folder)
    assert sorted(path.name for path in folder.iterdir()) == ["memguard_peak.png", "memguard_setup.md"]


def test_an_unknown_logger_leaves_it_to_the_files(tmp_path):
    shown([FakeLogger(object())], tmp_path)
    assert (tmp_path / "memguard_setup.md").exists()


def test_of_several_loggers_each_gets_its_own(tmp_path):
    writer, wandb = FakeWriter(tmp_path), FakeWandbLogger()
    shown([FakeLogger(writer), wandb, CSVLogger(tmp_path)])
    assert (len(writer.seen), len(wandb.seen)) == (4, 3)
    assert (tmp_path / "lightning_logs" / "version_0" / "memguard_peak.png").exists()


# Where there is nothing to show, or it fails


def test_nothing_is_drawn_for_loggers_that_only_pretend(monkeypatch):
    """Lightning's dummies, of a trial run and of ranks other than zero, answer to any method."""
    monkeypatch.setattr(file, "draw", lambda picture: pytest.fail("a picture was drawn"))
    shown([DummyLogger()])
    shown([])


def test_a_logger_that_fails_is_named_once_and_the_others_go_on(tmp_path):
    class Broken(FakeWandbLogger):
        def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
            raise ConnectionError("no network")

    class Unopened:
        @property
        def experiment(self):
            raise ModuleNotFoundError("No module named 'comet_ml'")

    broken, writer = Broken(), FakeWriter(tmp_path)
    with pytest.warns(UserWarning, match="table and pictures are missing from") as caught:
        shown([broken, Unopened(), FakeLogger(writer)])
    assert [str(warning.message) for warning in caught] == [
        "MemGuard's table and pictures are missing from Unopened: ModuleNotFoundError: No module named 'comet_ml'",
        "MemGuard's table and pictures are missing from Broken: ConnectionError: no network",
    ]
    assert broken.seen == []
    assert len(writer.seen) == 4


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.warns(UserWarning, match=r"missing from .*taken: FileExistsError") as caught:
        shown([], tmp_path / "taken")
    assert len(caught) == 1


def test_a_picture_that_cannot_be_drawn_costs_a_warning_alone(tmp_path, monkeypatch):
    def fails(picture):
        raise OSError("no fonts")

    monkeypatch.setattr(file, "draw", fails)
    with pytest.warns(UserWarning, match="missing from picture: OSError: no fonts") as caught:
        shown([], tmp_path)
    assert len(caught) == 1
    assert (tmp_path / "memguard_setup.md").exists()


# How often


def test_thousands_of_epochs_leave_few_pictures_and_what_changes_leaves_one(tmp_path):
    writer = FakeWriter(tmp_path)
    boards = Boards([FakeLogger(writer)])
    for epoch in range(2000):
        boards.log_epoch(replace(RECORD, epoch=epoch), epoch)
    drawn = [step for _, _, _, step, _ in writer.seen]
    assert drawn == [*range(16), 31, 63, 127, 255, 511, 1023]
    for step, mib in enumerate((105, 106, 104), start=2000):  # against 104: 1.0 %, 1.9 %; then against 106
        boards.log_epoch(replace(RECORD, measured=Measured(mib * MIB, "VmHWM")), step)
    assert [step for _, _, _, step, _ in writer.seen][len(drawn) :] == [2001, 2002]


# The layout


def test_the_layout_draws_names_that_are_logged():
    bounded = replace(FOOTPRINT, doubts=(Doubt("process", (Peak(1, 1, 90 * MIB), Peak(1, 1, 110 * MIB))),))
    logged = replace(RECORD, predicted=bounded).as_metrics()
    charts = layout(replace(DECISION, footprint=bounded))["memguard"]
    names = [name for _, tags in charts.values() for name in tags if not name.endswith("/.*")]
    assert set(names) <= logged.keys()
    assert len(charts) == 4
    assert any(name.startswith("memguard/stacked/") for name in logged)


def test_the_predicted_range_has_a_chart_where_there_is_one():
    assert len(layout(DECISION)["memguard"]) == 3


def test_the_layout_follows_a_loggers_prefix():
    tags = [tag for _, tags in layout(DECISION, "fold1")["memguard"].values() for tag in tags]
    assert {tag.partition("/")[0] for tag in tags} == {"fold1-memguard"}


def read(logger: TensorBoardLogger) -> EventAccumulator:
    logger.experiment.flush()
    return EventAccumulator(logger.log_dir, size_guidance={"images": 0, "tensors": 0}).Reload()


def layouts_of(logger: TensorBoardLogger) -> list[layout_pb2.Layout]:
    events = read(logger).Tensors("custom_scalars__config__")
    return [layout_pb2.Layout.FromString(event.tensor_proto.string_val[0]) for event in events]


def test_a_real_tensorboard_has_it_all_and_one_layout_after_two_fits(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        shown([logger])
        shown([logger])
    (written,) = layouts_of(logger)
    assert [category.title for category in written.category] == ["memguard"]
    tags = read(logger).Tags()
    assert tags["images"] == ["memguard/peak"]
    assert "memguard/setup/text_summary" in tags["tensors"]


def test_a_layout_of_the_users_own_stays_the_only_one(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    logger.experiment.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss"]]}})
    shown([logger])
    (written,) = layouts_of(logger)
    assert [category.title for category in written.category] == ["mine"]
