"""Links between the pages: `docs/links.py`, which `make lint` runs."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def links():
    spec = importlib.util.spec_from_file_location("links", ROOT / "docs" / "links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_link_leads_somewhere(links):
    assert [*links.broken()] == []


def test_a_link_of_an_included_page_must_hold_on_both(links, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "RELEASING.md").touch()
    (tmp_path / "CONTRIBUTING.md").write_text("# Parts\n\n[Releasing](RELEASING.md), [here](docs/a.md#one-two)\n")
    (tmp_path / "docs" / "a.md").write_text("# One, two\n")
    (tmp_path / "docs" / "contributing.md").write_text("```{include} ../CONTRIBUTING.md\n```\n")
    assert [*links.broken(tmp_path)] == ["docs/contributing.md, of ../CONTRIBUTING.md: RELEASING.md"]


def test_a_heading_that_is_not_there_is_named_and_code_is_not_read(links, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("[a](#gone) [b](#a-b) `[c](no.md)`\n\n# A `B`\n\n```text\n[d](no.md)\n```\n")
    assert [*links.broken(tmp_path)] == ["README.md: #gone"]
