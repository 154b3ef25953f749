"""The front door: which names there are, and that knocking costs nothing."""

import subprocess
import sys

import pytest

import lightning_memguard

PUBLIC_NAMES = {
    "MemGuard",
    "LengthBatchSampler",
    "batch_sizes",
    "estimate",
    "offload_activations",
    "ways_to_train",
    "Footprint",
    "Budget",
    "Decision",
    "EpochRecord",
    "MemGuardError",
    "DoesNotFitError",
    "CannotTraceError",
    "CannotResizeLoaderError",
}


def test_importing_the_package_brings_in_neither_torch_nor_lightning():
    code = "import sys, lightning_memguard; print(*{name.partition('.')[0] for name in sys.modules})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    loaded = set(answer.stdout.split())
    assert "lightning_memguard" in loaded
    assert not loaded & {"torch", "lightning", "pytorch_lightning", "lightning_utilities", "numpy"}


def test_the_public_names_are_these_and_no_others():
    assert set(lightning_memguard.__all__) == PUBLIC_NAMES


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_every_public_name_loads(name):
    assert getattr(lightning_memguard, name).__name__ == name


def test_a_name_is_the_very_object_of_its_home():
    from lightning_memguard.errors import MemGuardError

    assert lightning_memguard.MemGuardError is MemGuardError


def test_dir_shows_names_that_have_not_been_loaded_yet():
    code = "import lightning_memguard; print(*dir(lightning_memguard))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert set(answer.stdout.split()) >= PUBLIC_NAMES | {"__version__"}


def test_an_unknown_name_is_an_attribute_error_that_names_both():
    with pytest.raises(AttributeError, match="module 'lightning_memguard' has no attribute 'MemGaurd'"):
        _ = lightning_memguard.MemGaurd
