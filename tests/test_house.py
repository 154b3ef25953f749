"""What keeps the package one that a person can hold: limits on files, classes, functions and parameters typed `Any`."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_memguard"


@functools.cache  # read by the tests, not when they are collected
def trees() -> dict[Path, ast.Module]:
    return {path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


def nodes(kind: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    return ((path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, kind))


@pytest.mark.parametrize(("kind", "most"), [(ast.ClassDef, 500), (ast.FunctionDef, 80)], ids=["class", "function"])
def test_a_definition_has_a_length_that_can_be_read(kind, most):
    long = [f"{path}: {node.name}" for path, node in nodes(kind) if node.end_lineno - node.lineno >= most]
    assert not long, f"more than {most} lines"


def test_a_file_has_at_most_950_lines():
    assert not [path for path, tree in trees().items() if tree.body and tree.body[-1].end_lineno > 950]


def test_fewer_than_3_in_100_parameters_are_typed_any():
    annotations = [
        ast.unparse(argument.annotation) for _, argument in nodes(ast.arg) if argument.annotation is not None
    ]
    assert annotations.count("Any") < 0.03 * len(annotations)


def test_the_architecture_lists_every_file():
    page = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \|.*\|(.*)\|$", page, re.MULTILINE)
    listed = {folder: re.findall(r"\w+", files) for folder, files in rows}
    files = {path for path in trees() if path.parent.as_posix() in listed and path.stem != "__init__"}
    assert len(files) > 150
    assert not [path for path in files if path.stem not in listed[path.parent.as_posix()]]
