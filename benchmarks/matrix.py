"""Run the tests with other versions of Lightning, torch and Python, and with each package of Lightning alone.

    python benchmarks/matrix.py                                  # every cell: 16 of them, two to three minutes each
    python benchmarks/matrix.py --list                           # only list the cells
    python benchmarks/matrix.py --cells 'lightning 2.5*' --tests tests/training
    python benchmarks/matrix.py --cells '*torch 2.15*' --whole   # the whole suite

The whole suite runs in `make test`. This runs `TESTS`, which depend on the internals of Lightning or torch.

A cell is an environment in ``.matrix/``, kept for the next run (``--fresh`` recreates it); the package in it is the
working tree. `uv` creates it if installed, and shares torch between cells; otherwise `venv` and pip do, and every
cell has its own torch: several GB each on Linux, unless PIP_EXTRA_INDEX_URL is an index of CPU builds. Everything that
a cell does not pin is the newest version that is compatible. `lightning` depends on `pytorch-lightning`, so a cell with
`lightning` alone uninstalls the other again. pytest's output is in ``.matrix/<cell>.txt``. The exit status is 0 if
every cell passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".matrix"

TESTS = tuple(
    f"tests/{name}"
    for name in (
        *(f"core/simulation/test_{name}.py" for name in ("backward", "fake", "fake_cuda")),
        *(f"core/capture/test_{name}.py" for name in ("predict", "recorder")),
        *(f"training/adapter/test_{name}.py" for name in ("callbacks", "program")),
        *("training/strategies/test_sharded.py", "training/data/test_loaders.py", "training/planning/test_advise.py"),
        *("training/run", "cli", "test_public_names.py"),
    )
)

OLDEST, DEVELOPED_ON, NEWEST = "2.11.0", "2.13.0", "2.15.0"  # torch
# 2.6.2 and 2.6.3 of both packages were malicious uploads (GHSA-w37p-236h-pfx3): no cell may name or resolve to them.
OLD_LIGHTNING, LIGHTNING = "2.5.0", "2.6.6"
OTHERS = (
    "nvidia-ml-py>=12", "psutil", "rich", "tensorboard", "hypothesis", "pytest>=8", "scikit-learn",
    "jsonargparse[signatures]", "torchdata",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One environment: which Lightning, which torch, which Python."""

    package: str  # "lightning", "pytorch-lightning" or "both"
    lightning: str
    torch: str
    python: str = "3.11"

    @property
    def name(self) -> str:
        return f"{self.package} {self.lightning}, torch {self.torch}, python {self.python}"

    @property
    def folder(self) -> Path:
        return HOME / self.name.replace(", ", "_").replace(" ", "-")

    @property
    def interpreter(self) -> Path:
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def requirements(self) -> list[str]:
        """Both packages at one version, whichever stays: otherwise `lightning` brings the newest of the other."""
        packages = ("pytorch-lightning",) if self.package == "pytorch-lightning" else ("lightning", "pytorch-lightning")
        return [f"torch=={self.torch}", *(f"{package}=={self.lightning}" for package in packages), *OTHERS]


CELLS = (
    *(
        Cell(package, lightning, torch)
        for torch in (DEVELOPED_ON, NEWEST, OLDEST)
        for lightning in (LIGHTNING, OLD_LIGHTNING)
        for package in ("lightning", "pytorch-lightning")
    ),
    Cell("both", LIGHTNING, DEVELOPED_ON),
    Cell("both", "2.5.6", DEVELOPED_ON),
    Cell("both", OLD_LIGHTNING, OLDEST, python="3.10"),
    Cell("both", LIGHTNING, NEWEST, python="3.13"),
)


@dataclass(frozen=True)
class Result:
    """The test results of a cell, or why there are none."""

    cell: Cell
    passed: int = 0
    skipped: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # the first line of the error, by test
    seconds: float = 0.0
    trouble: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed and not self.trouble and self.passed > 0

    @property
    def row(self) -> str:
        counts = f"{self.passed} | {len(self.failed)} | {self.skipped} | {self.seconds:.0f}"
        cell = f"{self.cell.package} | {self.cell.lightning} | {self.cell.torch} | {self.cell.python}"
        return f"| {cell} | {counts} | {'yes' if self.ok else self.trouble or 'NO'} |"


HEAD = """\
| package | Lightning | torch | Python | passed | failed | skipped | seconds | ok |
|---|---|---|---|---:|---:|---:|---:|---|"""


SHARED = ("EXTRA_INDEX_URL", "FIND_LINKS", "INDEX_URL")  # settings of pip, for which uv has its own names
PATIENCE_SECONDS = 1200


def interpreter_of(version: str) -> str | None:
    """A working Python of this version: on the path, or one of pyenv's (whose shims do not always run)."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    for found in (shutil.which(f"python{version}"), *map(str, pyenv)):
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def make(cell: Cell, python: str) -> None:
    """Create a cell's environment, unless it exists."""
    done = cell.folder / ".installed"
    if done.exists() and done.read_text() == "\n".join(cell.requirements):
        return
    shutil.rmtree(cell.folder, ignore_errors=True)
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    here = str(cell.interpreter)
    given = {f"UV_{name}": os.environ[f"PIP_{name}"] for name in SHARED if f"PIP_{name}" in os.environ}
    if uv:
        call(uv, "venv", "--quiet", "--python", python, str(cell.folder))
        pip, of, yes = (uv, "pip"), ("--quiet", "--python", here), ()
    else:
        call(python, "-m", "venv", str(cell.folder))
        pip, of, yes = (here, "-m", "pip"), ("--quiet",), ("--yes",)
    call(*pip, "install", *of, *cell.requirements, **given)
    if cell.package == "lightning":
        call(*pip, "uninstall", *of, *yes, "pytorch-lightning")
    call(*pip, "install", *of, "--no-deps", "--editable", str(ROOT), **given)
    done.write_text("\n".join(cell.requirements))


def call(*command: str, **settings: str) -> None:
    subprocess.run(command, env={**os.environ, **settings}, check=True)


def run(cell: Cell, tests: tuple[str, ...]) -> Result:
    """Run the tests in a cell's environment, with one thread: cells are compared, and the machine may be shared."""
    report, log = (HOME / f"{cell.folder.name}.{suffix}" for suffix in ("xml", "txt"))
    report.unlink(missing_ok=True)
    command = [cell.interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    started = time.monotonic()
    with log.open("w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        given = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": file, "timeout": PATIENCE_SECONDS}
        subprocess.run(command, **given, check=False)
    seconds = time.monotonic() - started
    if not report.exists():
        return Result(cell, seconds=seconds, trouble=f"pytest took too long or did not run, see {log.name}")
    passed, skipped, failed = 0, 0, dict[str, str]()
    for case in ET.parse(report).getroot().iter("testcase"):
        bad = next(filter(lambda each: each is not None, map(case.find, ("failure", "error"))), None)
        if bad is not None:
            name = f"{case.get('classname')}::{case.get('name')}"
            failed[name] = (bad.get("message") or "").partition("\n")[0][:300]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return Result(cell, passed, skipped, failed, seconds)


def answer(cell: Cell, tests: tuple[str, ...], fresh: bool) -> Result:
    """Create a cell's environment and run its tests, or report why not."""
    python = interpreter_of(cell.python)
    if python is None:
        return Result(cell, trouble=f"no Python {cell.python} here")
    if fresh:
        shutil.rmtree(cell.folder, ignore_errors=True)
    try:
        make(cell, python)
    except subprocess.CalledProcessError as error:
        return Result(cell, trouble=f"could not be installed (exit status {error.returncode})")
    return run(cell, tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["*"], metavar="PATTERN", help="cells whose names match one")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), metavar="PATH", help="passed to pytest")
    parser.add_argument("--whole", action="store_true", help="every test, not only the part above")
    parser.add_argument("--fresh", action="store_true", help="recreate the environments")
    parser.add_argument("--list", action="store_true", help="list the cells")
    settings = parser.parse_args()
    cells = [cell for cell in CELLS if any(fnmatch(cell.name, f"{pattern}*") for pattern in settings.cells)]
    if settings.list or not cells:
        print("\n".join(cell.name for cell in CELLS))
        return 0 if settings.list else 2
    HOME.mkdir(exist_ok=True)
    tests = ("tests",) if settings.whole else tuple(settings.tests)
    print(HEAD, flush=True)
    results = []
    for cell in cells:
        results.append(answer(cell, tests, settings.fresh))
        print(results[-1].row, flush=True)
    for result in results:
        for test, error in result.failed.items():
            print(f"{result.cell.name}: {test}\n    {error}")
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
