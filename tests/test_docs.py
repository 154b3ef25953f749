"""The output that the documentation shows is what the commands print: `docs/outputs.py` would change nothing.

The numbers are of one version of torch: another has other kernels.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="the quickstart's digits come with scikit-learn")
ROOT = Path(__file__).parents[1]
PINNED = f"torch=={torch.__version__.partition('+')[0]}" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def outputs():
    spec = importlib.util.spec_from_file_location("outputs", ROOT / "docs" / "outputs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [page for page in outputs().PAGES if "<!-- output" in page.read_text(encoding="utf-8")]


@pytest.mark.skipif(not PINNED, reason="the pages show the output of the pinned version of torch")
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.long)], ids=["quick", "all"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_output_shown_is_what_the_commands_print(page: Path, slow: bool, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert outputs().updated(text, tmp_path, slow=slow).splitlines() == text.splitlines()


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_no_output_is_shown_that_is_not_written_so(page: Path) -> None:
    assert outputs().unmarked(page.read_text(encoding="utf-8")) == []


def test_a_block_shows_the_part_that_its_comment_names(tmp_path: Path) -> None:
    text = "Before.\n\n<!-- output{}: memguard gpus a100 -->\n```text\nold\n```\n\nAfter.\n"
    whole, part = (
        outputs().updated(text.format(options), tmp_path, slow=False).splitlines()
        for options in ("", ' from "│ NVIDIA A100-SXM4", 1 lines')
    )
    assert whole[:5] == ["Before.", "", "<!-- output: memguard gpus a100 -->", "```text", "$ memguard gpus a100"]
    assert [*part[:2], part[-1]] == ["Before.", "", "After."]
    assert part[4:-2] == [
        "$ memguard gpus a100",
        "",
        "...",
        next(line for line in whole if "SXM4" in line),
        "...",
        "```",
    ]
    slow = text.format(", slow")
    assert outputs().updated(slow, tmp_path, slow=False) == slow
