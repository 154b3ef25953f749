"""Scripts of the benchmarks as modules: what they compare with is what tests compare with, too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def benchmark(name: str) -> Any:
    """Import a script of `benchmarks/` by its path without ``.py``, once."""
    module = name.replace("/", "_of_")
    if module not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(module, BENCHMARKS / f"{name}.py")
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]
