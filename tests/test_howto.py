"""The snippets of docs/howto.md run as they are written."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memguard import MemGuard, estimate

pytestmark = pytest.mark.usefixtures("here")

_PAGE = Path(__file__).parents[1] / "docs" / "howto.md"
_SECTIONS = _PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
_SNIPPETS = [
    (f"{section.splitlines()[0]} {number}", snippet)
    for section in _SECTIONS
    for number, snippet in enumerate(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
]


class Model(pl.LightningModule):
    """Any features in the last dimension, averaged over those between."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x).reshape(len(x), -1, 4).mean(1), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Names that a snippet may use; levels and filters that it sets are put back."""
    monkeypatch.chdir(tmp_path)
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    loader = DataLoader(TensorDataset(torch.randn(2000, 16), torch.randint(0, 4, (2000,))), 8)
    trainer = partial(pl.Trainer, **quiet, enable_checkpointing=False)  # type: ignore[arg-type]
    logger = logging.getLogger("lightning_memguard")
    level = logger.level
    with warnings.catch_warnings():
        yield {
            "torch": torch,
            "MemGuard": MemGuard,
            "estimate": estimate,
            "Trainer": trainer,
            "Model": Model,
            "model": Model(),
            "loader": loader,
        }
    logger.setLevel(level)


@pytest.mark.parametrize("snippet", [snippet for _, snippet in _SNIPPETS], ids=[name for name, _ in _SNIPPETS])
def test_a_snippet_runs_as_it_is_written(snippet: str, names: dict[str, Any], caplog: Any) -> None:
    exec(compile(snippet, "docs/howto.md", "exec"), names)
    if "class Scaled" in snippet:
        assert "batch size 40 (was 8)" in caplog.text
    if "keep_effective" in snippet:
        assert names["decision"].batch_size * names["decision"].accumulate_grad_batches == 64
    if "filterwarnings" in snippet:
        assert "MemGuard" not in caplog.text
    if "for learning_rate" in snippet:
        assert names["size"] == names["guard"].decision.batch_size == 40
    if "last.ckpt" in snippet:
        assert names["guard"].decision.batch_size == 40
    if "network, example, batch_size=512" in snippet:
        assert names["footprint"].most_device_bytes > 4 * 512 * (16 + 4)  # the batch and its products
    if "LengthBatchSampler" in snippet:
        assert len({len(batch) for batch in names["sampler"]}) > 1
    if "def fits" in snippet:
        assert names["budget"] in (256, 512, 1024)


def test_every_section_has_a_snippet() -> None:
    assert all("```python" in section or "```yaml" in section for section in _SECTIONS)
