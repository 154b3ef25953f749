"""The output that the documentation shows is what the commands print: `docs/outputs.py` would change nothing.

The numbers are of one version of torch: another has other kernels.
"""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from lightning_memguard.core.foreign import NEWEST_TESTED
from tests.long import long_but

pytest.importorskip("sklearn", reason="the quickstart's digits come with scikit-learn")
ROOT = Path(__file__).parents[1]
PINNED = f"torch=={torch.__version__.partition('+')[0]}" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def outputs(name: str = "outputs"):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = [page for page in outputs().PAGES if "<!-- output" in page.read_text(encoding="utf-8")]


@pytest.mark.skipif(not PINNED, reason="the pages show the output of the pinned version of torch")
@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.long)], ids=["quick", "all"])
@pytest.mark.parametrize(
    "page", long_but([page for page in PAGES if page.name != "planning.md"], PAGES), ids=lambda page: page.name
)
def test_the_output_shown_is_what_the_commands_print(page: Path, slow: bool, tmp_path: Path, here: None) -> None:
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


def test_pictures_are_as_old_as_what_draws_them() -> None:
    """`make pictures` makes them again."""
    made_from = (ROOT / "docs" / "images" / "made_from.txt").read_text(encoding="utf-8").strip()
    assert made_from == outputs("pictures").made_from()


def test_the_terminal_shows_what_the_story_shows() -> None:
    assert (ROOT / "docs" / "images" / "terminal.svg").read_text(encoding="utf-8") == outputs("pictures").terminal()


def test_badges_and_the_support_page_have_the_versions_that_are_declared_and_tested() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pythons = re.findall(r"Python :: 3\.(\d+)", project)
    newest = {name: f"{major}.{minor}" for name, (major, minor) in NEWEST_TESTED.items()}
    versions = {
        "Python": (re.search(r'requires-python = ">=([\d.]+)"', project)[1], f"3.{pythons[-1]}"),
        "torch": (re.search(r'"torch>=([\d.]+)"', project)[1], newest["torch"]),
        "Lightning": (re.search(r'"pytorch-lightning>=([\d.]+),', project)[1], newest["Lightning"]),
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    support = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    license_name = re.search(r'^license = "([^"]+)"', project, re.MULTILINE)[1]
    assert f"license-{license_name.replace('-', '--')}-" in readme
    for name, (oldest, last) in versions.items():
        assert f"[![{name} {oldest} to {last}](https://img.shields.io/badge/{name}-{oldest}_to_{last}-" in readme
        assert re.search(rf"^\| {name}[^|]*\| {oldest} \| {last} \|", support, re.MULTILINE), name


def test_pages_of_the_site_link_to_pages_of_the_site() -> None:
    """Sphinx, which `make docs` runs, finds no others; CHANGELOG.md and CONTRIBUTING.md are included in two of them."""
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    for file in (*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+\.md)", file.read_text(encoding="utf-8")):
            target = (file.parent / link).resolve()
            assert target.exists(), f"{file.name}: {link}"
            assert target.name.lower() in pages or "accuracy" in target.parts, f"{file.name}: {link}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_pages_are_short() -> None:
    """A page that grows takes something out."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 15_500


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_a_page_says_first_whom_it_is_for(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if not text.startswith("```{include}"):
        heading, first = text.split("\n\n")[:2]
        assert heading.startswith("# ")
        assert first.startswith("For anyone who")
