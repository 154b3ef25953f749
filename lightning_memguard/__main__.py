"""``python -m lightning_memguard ...``: the same as ``memguard ...``."""

from __future__ import annotations

import sys

from lightning_memguard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
