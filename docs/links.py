"""Links between the Markdown pages, checked without building the site: each leads to a page, a file or a heading.

A page of this folder may include one of the folder above (`contributing.md`); a link in that must hold in both places.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_INCLUDE = re.compile(r"^```\{include\} (\S+)$", re.MULTILINE)
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    """The Markdown pages of a checkout: those at its top, and those of its documentation."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def broken(root: Path = ROOT) -> Iterator[str]:
    """Name each link that leads nowhere, after its page."""
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        yield from (f"{page.relative_to(root)}: {link}" for link in _broken_in(text, page))
        for name in _INCLUDE.findall(text):
            there = (page.parent / name).read_text(encoding="utf-8")
            moved = re.sub(r"\]\(docs/", "](", there)  # as the directive's `relative-docs` does
            yield from (f"{page.relative_to(root)}, of {name}: {link}" for link in _broken_in(moved, page))


def _broken_in(text: str, page: Path) -> Iterator[str]:
    for link in _LINK.findall(_INLINE.sub("", _CODE.sub("", text))):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (heading and target.suffix == ".md" and heading not in headings(target)):
            yield link


def headings(page: Path) -> set[str]:
    """The anchors of a page, and of the pages that it includes."""
    text = page.read_text(encoding="utf-8")
    included = set[str]().union(*(headings(page.parent / name) for name in _INCLUDE.findall(text)))
    own = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(_CODE.sub("", text)))
    return included.union(own)


if __name__ == "__main__":
    found = [*broken()]
    sys.exit("\n".join(["These links lead nowhere:", *found]) if found else 0)
