"""Trainings on PyTorch's own CUDA allocator, without a GPU: what a person who has one sees first.

``cuda.c`` stands in for CUDA's runtime in a process of its own, which trains with MemGuard. Its children must not call
the driver, and PyTorch's own counter is the truth that their predictions are compared with, to the byte.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
COMPILER = shutil.which("cc")
MEASURED = ("plain", "half", "manual", "asking", "pinned", "compiled", "on the GPU")
PREDICTED = ("validated", "convolutions", "estimated")  # no cuDNN: convolutions do not train

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="libraries are preloaded on Linux"),
    pytest.mark.skipif(torch.version.cuda is None, reason="this build of torch has no CUDA"),
    pytest.mark.skipif(not (torch.version.cuda or "13.").startswith("13."), reason="the stand-in is of CUDA 13"),
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
]


@pytest.fixture(name="trained", scope="module")
def fixture_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    library = tmp_path_factory.mktemp("gpu") / "libcuda.so.1"
    flags = ("-shared", "-fPIC", "-O1", f"-Wl,-soname,{library.name}")
    subprocess.run([str(COMPILER), *flags, str(HERE / "cuda.c"), "-o", str(library)], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_LIBCUDA_PATH": str(library.parent), "TORCHINDUCTOR_CACHE_DIR": str(library.parent)}
    script = [sys.executable, str(HERE / "trainings.py")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", [*MEASURED, *PREDICTED])
def test_a_step_is_predicted_in_a_process_that_uses_its_gpu(trained, name):
    assert trained[name]["method"] == ("compiled" if name == "compiled" else "fake"), trained[name]["said"]


@pytest.mark.parametrize("name", [*MEASURED, *PREDICTED])
def test_no_child_calls_the_driver(trained, name):
    assert trained[name]["refused"] == 0, trained[name]["first"]


@pytest.mark.parametrize("name", MEASURED)
def test_the_counter_of_pytorch_is_within_the_range(trained, name):
    lowest, highest = trained[name]["range"]
    assert not trained[name]["error"]
    assert lowest <= trained[name]["measured"] <= highest
    assert highest - lowest <= (1 << 20 if name != "compiled" else 64 << 20)  # of 70 MiB; kernels may be timed


def test_the_driver_refuses_a_child_that_calls_it(trained):
    """Else the tests above would pass with any child."""
    assert trained["refusing"]["refused"] == 1
    assert "initialization error" in trained["refusing"]["said"]
