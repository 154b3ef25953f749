"""Fit with each kind of logger where neither TensorBoard nor Pillow can be imported, and print a line of JSON for each.

python without_tensorboard.py FOLDER
"""

import json
import logging
import sys
import warnings
from importlib import metadata
from pathlib import Path

HIDDEN = ("tensorboard", "PIL", "pillow") if __name__ == "__main__" else ()
sys.modules.update(dict.fromkeys(HIDDEN))
found = metadata.Distribution.from_name


def from_name(name):
    """Lightning looks for the distribution, not for the module."""
    if name in HIDDEN:
        raise metadata.PackageNotFoundError(name)
    return found(name)


metadata.Distribution.from_name = from_name

import pytorch_lightning as pl  # noqa: E402
from pytorch_lightning.demos.boring_classes import BoringModel  # noqa: E402
from pytorch_lightning.loggers.logger import Logger  # noqa: E402

from lightning_memguard import MemGuard  # noqa: E402
from lightning_memguard.core.capture import capture  # noqa: E402
from tests import tape  # noqa: E402


class Scalars(Logger):
    """A logger that takes scalars; the class below also takes what Comet takes."""

    name, version = "scalars", 0

    def __init__(self):
        super().__init__()
        self.names = set()

    @property
    def experiment(self):
        return self

    def log_metrics(self, metrics, step=None):
        self.names |= metrics.keys()

    def log_hyperparams(self, *arguments, **named):
        pass


class CometExperiment:
    def log_text(self, text, step=None):
        pass

    def log_html(self, html):
        pass

    def log_table(self, name, data, headers):
        pass

    def log_image(self, *arguments):
        raise AssertionError("there is no image to log")


class CometLike(Scalars):
    @property
    def experiment(self):
        return CometExperiment()


def fit(name, logger, folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer = pl.Trainer(
            default_root_dir=folder, logger=logger, accelerator="cpu", max_epochs=2, limit_train_batches=2,
            limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[MemGuard("check", budget="1GiB")],
        )  # fmt: skip
        trainer.fit(BoringModel())
    return {
        "name": name,
        "logger": type(trainer.logger).__name__,
        "folder": trainer.log_dir,
        "steps": trainer.global_step,
        "scalars": sorted(getattr(trainer.logger, "names", ())),
        "files": sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "hparams.yaml"),
        "sentences": [str(each.message) for each in caught if "MemGuard" in str(each.message)],
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    capture.capture_here = tape.played
    folder = Path(sys.argv[1])
    loggers = {
        "csv": pl.loggers.CSVLogger(folder / "csv"),
        "CometLike": CometLike(),
    }
    if metadata.packages_distributions().get("tensorboardX"):
        loggers["tensorboardX"] = pl.loggers.TensorBoardLogger(folder / "tensorboardX")
    for name, logger in loggers.items():
        print(json.dumps(fit(name, logger, folder / name)), flush=True)
