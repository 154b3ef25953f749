"""Write the output of commands that the documentation shows: ``make outputs`` (``--quick`` leaves out the slow ones).

A fenced block after a comment ``<!-- output: memguard ... -->`` is the output of that command, run by `main` in a
folder with the examples, which the commands of one page share; ``python examples/...`` runs in a process of its own.
The comment may say which part is shown, as a beginning or as a pattern of lines, and that the command is slow:
``<!-- output from "MemGuard: layers", 20 lines, slow: memguard ... -->``, ``<!-- output of "^MemGuard": ... -->``.
`tests/test_docs.py` compares the blocks. What differs from run to run, such as seconds, is kept as it was.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from lightning_memguard.cli.main import BAD_USE, main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WIDTH = 124
SCRIPT_WIDTH = 84
_BLOCK = re.compile(
    r'(?P<mark><!-- output(?: of "(?P<pattern>[^"]*)")?(?: from "(?P<start>[^"]*)")?(?:, (?P<lines>\d+) lines)?'
    r"(?P<slow>, slow)?: (?P<command>.*?) -->\n+)```text\n(?P<shown>.*?)```",
    re.DOTALL,
)
# Of a script: what differs from run to run or from machine to machine, and the place that Python puts before a warning.
_VARYING = re.compile(
    r"[\d.]+ m?s a step|version_\d+|(?<=: )[+-][\d.]+%"
    r"|(?:(?<=the process took )|(?<=measured )|(?<=up to this error is ))[\d.]+ \w+"
)
_PLACE = re.compile(r"^\S+\.py:\d+: ")
_UNMARKED = re.compile(r"^ *\$ memguard .*|^ *[┏┡].*", re.MULTILINE)


def updated(text: str, folder: Path, *, slow: bool) -> str:
    """Return a page's text with its blocks as the commands print them now."""
    with _working_in(folder):
        return _BLOCK.sub(lambda block: block[0] if block["slow"] and not slow else _rewritten(block), text)


def unmarked(text: str) -> list[str]:
    """The lines of a page that show output and are in no marked block."""
    return _UNMARKED.findall(_BLOCK.sub("", text))


def _rewritten(block: re.Match[str]) -> str:
    if block["command"].startswith("python "):
        return _of_a_script(block)
    lines = _printed(block["command"]).splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith(block["start"] or "")), 0)
    end = start + int(block["lines"]) if block["lines"] else len(lines)
    shown = [*["..."] * (start > 0), *lines[start:end], *["..."] * (end < len(lines))]
    body = "\n".join(line.rstrip() for line in (f"$ {block['command']}", "", *shown))
    return f"{block['mark']}```text\n{body}\n```"


def _of_a_script(block: re.Match[str]) -> str:
    """Return the lines of a script that match, wrapped; as they were if they differ in what varies alone."""
    pattern = re.compile(block["pattern"])
    lines = [line for line in _lines_of(block["command"], Path.cwd()) if pattern.search(line)]
    wrapped = [part for line in lines for part in textwrap.wrap(line, SCRIPT_WIDTH, subsequent_indent="  ")]
    body = "\n".join((f"$ {block['command']}", "", *wrapped, ""))
    return block[0] if _steady(body) == _steady(block["shown"]) else f"{block['mark']}```text\n{body}```"


@functools.cache
def _lines_of(command: str, folder: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,  # some are to fail
    )
    return [_PLACE.sub("", line).replace(f"{folder}/", "") for line in done.stdout.splitlines()]


def _steady(text: str) -> str:
    return _VARYING.sub("...", " ".join(text.split()))


def _printed(command: str) -> str:
    printed, problems = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(problems):
        status = main(shlex.split(command.replace("\\\n", " "))[1:])
    if status == BAD_USE:
        raise SystemExit(f"{command}\n{problems.getvalue()}")
    return printed.getvalue()


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Be in a folder with the examples, with nothing in the environment that changes a prediction."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    before, path = Path.cwd(), list(sys.path)
    plain = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, {**plain, "COLUMNS": str(WIDTH)}, clear=True):
            yield
    finally:
        os.chdir(before)
        sys.path[:] = path


def write(say: Callable[[str], object] = print) -> None:
    """Rewrite the pages whose blocks differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave the slow blocks as they are")
    slow = not parser.parse_args().quick
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            now = updated(text, Path(folder), slow=slow)
        page.write_text(now, encoding="utf-8")
        say(f"{page.relative_to(ROOT)}: {'as it was' if now == text else 'rewritten'}")


if __name__ == "__main__":
    write()
