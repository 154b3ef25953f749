"""Run the cells of `examples/tour.ipynb` as a notebook does, and write what they show as a page: part of `make docs`.

    python docs/tour.py build/gallery

The notebook is stored without its output: GitHub would strip the style from it.
"""

from __future__ import annotations

import ast
import html
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "tour.ipynb"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
pre { background: #f4f4f4; color: #222; padding: .75rem; overflow-x: auto; font-size: 14px; }
.shown { overflow-x: auto; margin: 1rem 0 2rem; }
"""


def cells() -> Iterator[tuple[str, str]]:
    """The kind and the text of each cell."""
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        yield cell["cell_type"], "".join(cell["source"])


def shown() -> Iterator[tuple[str, object]]:
    """Run the cells in this process: the text of each, and the value of its last line if that is an expression."""
    names: dict[str, object] = {"__name__": "__main__"}
    for kind, text in cells():
        value = None
        if kind == "code":
            *body, last = ast.parse(text).body
            ends_in_value = isinstance(last, ast.Expr)
            exec(compile(ast.Module(body if ends_in_value else [*body, last], []), "tour", "exec"), names)  # noqa: S102
            value = eval(compile(ast.Expression(last.value), "tour", "eval"), names) if ends_in_value else None  # noqa: S307
        yield text if kind == "code" else f"%markdown {text}", value


def page() -> str:
    """What the notebook shows, as HTML."""
    body = []
    for text, value in shown():
        if text.startswith("%markdown "):
            title, _, rest = text.removeprefix("%markdown ").partition("\n")
            level = len(title) - len(title.lstrip("#"))
            body.append(f"<h{level}>{html.escape(title.lstrip('# '))}</h{level}><p>{_inline(rest.strip())}</p>")
        else:
            body.append(f"<pre>{html.escape(text)}</pre>")
        if value is not None:
            body.append(f'<div class="shown">{value._repr_html_()}</div>')
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>A tour of MemGuard</title><style>{_STYLE}</style>{''.join(body)}</html>\n"
    )


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve() / "gallery" / "tour" / "tour.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(), encoding="utf-8")
