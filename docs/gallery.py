"""Train five models on the CPU and keep the pages that MemGuard writes, for the site's gallery: part of `make docs`.

    python docs/gallery.py build/gallery

Each is a process in a folder of its own; a training whose page is there already is not repeated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAININGS = {
    "digits": ["examples/quickstart.py", "--epochs", "2"],
    "char_gpt": ["examples/char_gpt.py", "--steps", "20", "--budget", "80MiB"],
    "long_tail": ["examples/long_tail.py", "--late"],
    "fsdp": ["examples/fsdp.py"],
    "frozen": ["docs/frozen.py"],
}


def train(name: str, command: list[str], folder: Path) -> None:
    """Run a script, and keep its page and data as ``gallery/<name>/``."""
    script, *options = command
    place = folder / "gallery" / name
    if (place / "memguard_report.html").exists():
        return
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *options],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{script} failed:\n{done.stdout}{done.stderr}")
        place.mkdir(parents=True, exist_ok=True)
        for file in Path(empty).rglob("memguard_report.*"):
            shutil.copy(file, place)
    print(f"{name}: {place / 'memguard_report.html'}")


if __name__ == "__main__":
    for each, its_command in TRAININGS.items():
        train(each, its_command, Path(sys.argv[1]).resolve())
