"""The site: Sphinx reads the Markdown of this folder. `make docs` builds it, and a warning or a dead link fails it."""

from __future__ import annotations

import argparse
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

from lightning_memguard import __version__
from lightning_memguard.cli.main import _parser

ROOT = Path(__file__).resolve().parents[1]

project = "lightning-memguard"
author = "The lightning-memguard authors"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["requirements.txt"]
myst_heading_anchors = 3
smartquotes = False  # options begin with two dashes
default_role = "code"  # docstrings are Markdown in this: `name`
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "pydata_sphinx_theme"
html_title = "lightning-memguard"
html_extra_path = [str(ROOT / "build" / "gallery")]  # what docs/gallery.py trained
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_sidebars = {"**": []}  # every page is one of the header's
html_theme_options = {
    "header_links_before_dropdown": 4,
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}


def commands() -> str:
    """The commands of ``memguard`` as Markdown, from the parser itself."""
    (found,) = (action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return "\n".join(_command(name, parser) for name, parser in found.choices.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    usage = parser.format_usage().strip()
    lines = [f"## memguard {name}", "", parser.description or "", "", "```text", usage, "```", ""]
    for group in parser._action_groups:
        if group._group_actions:
            lines += [f"**{(group.title or '').capitalize()}**", "", *map(_option, group._group_actions), ""]
    return "\n".join([*lines, parser.epilog or "", ""])


def _option(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    value = f" {action.metavar}" if action.option_strings and action.metavar else ""
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("<", "&lt;").replace("*", r"\*")
    return f"- `{names}{value}`: {text}"


def add_commands(_: Sphinx, page: str, source: list[str]) -> None:
    """Put the commands below the page that introduces them."""
    if page == "cli":
        source[0] += f"\n{commands()}"


class Links(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = {""}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            elif name == "id" and value:
                self.places.add(value)


def check_links(app: Sphinx, error: Exception | None) -> None:
    """Warn of each link of the site that leads to no file of the site, or to no place in it."""
    if error or app.builder.name != "html":
        return
    pages = {page: Links(page) for page in Path(app.outdir).rglob("*.html") if "_static" not in page.parts}
    for page, links in pages.items():
        for target in set(links.targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue  # `make links` asks the network
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            place = unquote(parts.fragment)
            if not file.is_file() or (file in pages and place not in pages[file].places):
                getLogger("links").warning("%s: %s leads nowhere", page.relative_to(app.outdir), target)


def setup(app: Sphinx) -> None:
    """Connect the two."""
    app.connect("source-read", add_commands)
    app.connect("build-finished", check_links)
