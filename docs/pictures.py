"""Make the pictures of the documentation from a training of `examples/quickstart.py`: ``make pictures`` (Chromium).

`images/made_from.txt` has a hash of the code that draws them; `tests/test_docs.py` compares it.
`images/terminal.svg` is drawn from the output in `story.md`, which `outputs.py` writes; the test draws it again.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 1400, 4000
_TRAINING = """
from examples.quickstart import MemGuard, parse, train
options = parse(["--epochs", "3"])
train(MemGuard(batch_size="largest", min_steps_per_epoch=None, budget=options.budget), options)
"""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def made_from() -> str:
    """Return a hash of what the pictures are made from."""
    report = ROOT / "lightning_memguard" / "report"
    files = [*sorted(report.glob("*.py")), *sorted((report / "assets").iterdir()), ROOT / "examples" / "quickstart.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def terminal() -> str:
    """Draw the run that dies, and the one that does not, as a terminal shows them."""
    from rich.console import Console
    from rich.text import Text

    story = (ROOT / "docs" / "story.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```text\n(\$ python .*?)```", story, re.DOTALL)[:2]
    screen = Console(record=True, width=88, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    for line in "\n".join(blocks).splitlines():
        text = Text(line)
        text.highlight_regex(r"^\$ .*", "bold")
        text.highlight_regex(r"^RuntimeError", "bold red")
        text.highlight_regex(r"^MemGuard:", "bold green")
        screen.print(text)
    svg = screen.export_svg(title="A run that dies at step 3,000", unique_id="terminal")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _screenshot(page: Path, picture: Path) -> None:
    """Take a picture of a page, down to where it ends."""
    from PIL import Image, ImageChops

    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"No browser takes the picture; install one of: {', '.join(_BROWSERS)}")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    subprocess.run([browser, *options, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)
    with Image.open(picture) as taken:
        whole = taken.convert("RGB")
    empty = Image.new("RGB", whole.size, whole.getpixel((0, HEIGHT - 1)))
    _, _, _, bottom = ImageChops.difference(whole, empty).getbbox() or (0, 0, 0, HEIGHT)
    whole.crop((0, 0, WIDTH, min(HEIGHT, bottom + 24))).save(picture, optimize=True)


def _figure(logs: Path, picture: Path) -> None:
    """Save the last figure that TensorBoard shows."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logs))
    events.Reload()
    Image.open(BytesIO(events.Images("memguard/peak")[-1].encoded_image_string)).save(picture, optimize=True)


def main() -> None:
    """Run the example's second training, and take the pictures."""
    (IMAGES / "terminal.svg").write_text(terminal(), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", _TRAINING], cwd=folder, env=environment, check=True)
        logs = Path(folder) / "lightning_logs" / "digits" / "version_0"
        _screenshot(logs / "memguard_report.html", IMAGES / "report_1400.png")
        _figure(logs, IMAGES / "tensorboard_figure.png")
    (IMAGES / "made_from.txt").write_text(f"{made_from()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
