"""cuDNN in a process of its own, asked without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_memguard.core.kernels import cudnn
from lightning_memguard.core.kernels.cudnn import _table, kind_of, likely, tensors_bytes

IMAGES, WEIGHT = (8, 64, 56, 56), (64, 64, 3, 3)
QUESTION = cudnn.Question(
    "weight", IMAGES, WEIGHT, IMAGES, "float32", False, (1, 1), (1, 1), (1, 1), (8, 6), tf32=True, deterministic=False
)
INSTALLED = pytest.mark.skipif(not cudnn.version(), reason="needs the cuDNN of a CUDA build of torch, 9.8 or newer")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process runs, and nothing was asked."""
    monkeypatch.setattr(cudnn, "_running", [])
    cudnn.workspaces.cache_clear()
    yield
    cudnn.workspaces.cache_clear()


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    "script",
    ["raise SystemExit(3)", "print('no number')", "print(8907)", "print(91900)"],
    ids=["does not load", "talks nonsense", "too old", "dies when it is asked"],
)
def test_a_cudnn_that_cannot_be_asked_has_no_answer(script, tmp_path: Path, monkeypatch):
    module = tmp_path / "cudnn.py"
    (tmp_path / "cudnn_process.py").write_text(script, encoding="utf-8")
    monkeypatch.setattr(cudnn, "__file__", str(module))
    monkeypatch.setattr(cudnn, "_libraries", lambda: ("libcudnn.so.9",))
    assert cudnn.workspaces(QUESTION) is None


@pytest.mark.usefixtures("anew")
def test_where_there_is_no_library_no_process_is_started(monkeypatch):
    monkeypatch.setattr(cudnn, "_libraries", tuple)
    monkeypatch.setattr(cudnn.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert cudnn.workspaces(QUESTION) is None
    assert cudnn.version() == 0


@INSTALLED
def test_the_weights_gradient_of_a_3x3_convolution_takes_copies_on_tensor_cores():
    copies = tensors_bytes(QUESTION)
    first, *others = cudnn.workspaces(QUESTION) or ()
    assert copies < first < 1.2 * copies
    assert others
    first, *_ = cudnn.workspaces(replace(QUESTION, tf32=False)) or ()
    assert first < copies


@INSTALLED
def test_what_pytorch_leaves_out_is_left_out():
    every = cudnn.workspaces(replace(QUESTION, every=True)) or ()
    assert len(every) > len(cudnn.workspaces(QUESTION) or ())
    assert len(cudnn.workspaces(replace(QUESTION, every=True, deterministic=True)) or ()) < len(every)


@INSTALLED
@pytest.mark.parametrize(("operation", "nbytes"), [("forward", 51_328), ("input", 84_032)])
def test_a_turing_gpus_workspaces_are_those_that_were_recorded(operation, nbytes):
    """In the recorded allocator history of a training on a GPU of compute capability 7.5."""
    shapes = {"x": (1, 16, 64, 64), "weight": (32, 16, 3, 3), "y": (1, 32, 64, 64)}
    first, second, *_ = cudnn.workspaces(replace(QUESTION, operation=operation, capability=(7, 5), **shapes)) or ()
    assert nbytes in ((first, second) if cudnn.version() >= 92400 else (first,))  # the recorded cuDNN is older


@pytest.mark.skipif(cudnn.version() // 100 != 919, reason="needs the cuDNN of the recording, 9.19")
@pytest.mark.parametrize(
    ("operation", "image", "weight", "nbytes"),
    [
        ("forward", (128, 128, 48, 48), (128, 128, 3, 3), 308_871_635),
        ("forward", (128, 512, 12, 12), (512, 512, 3, 3), 100_664_051),
        ("forward", (128, 512, 6, 6), (512, 512, 3, 3), 36_176_623),
        ("input", (128, 512, 6, 6), (512, 512, 3, 3), 28_311_568),
        ("weight", (128, 512, 6, 6), (512, 512, 3, 3), 36_963_055),
        ("forward", (64, 64, 56, 56), (256, 64, 1, 1), 400),
        ("input", (64, 64, 56, 56), (64, 64, 1, 1), 400),
        ("weight", (64, 64, 56, 56), (256, 64, 1, 1), 4_194_704),
        ("weight", (64, 512, 7, 7), (2048, 512, 1, 1), 32_112_656),
    ],
)
def test_an_h100s_workspaces_are_those_that_were_recorded(operation, image, weight, nbytes):
    """In `benchmarks/recordings/h100.json.gz`; the last one is too small an image for a contraction."""
    shapes = {"x": image, "weight": weight, "y": (image[0], weight[0], *image[2:]), "padding": (weight[2] // 2,) * 2}
    asked = replace(QUESTION, operation=operation, capability=(9, 0), multiprocessors=132, **shapes)
    assert (cudnn.workspaces(asked) or ())[0] == nbytes


@pytest.mark.skipif(cudnn.version() // 100 != 919, reason="needs the cuDNN of the recording, 9.19")
@pytest.mark.parametrize(
    ("image", "window", "stride", "channels_last", "nbytes"),
    [
        ((64, 116, 28, 28), 3, 2, True, 2_359_296),
        ((32, 32, 112, 112), 3, 1, True, 294_912),
        ((16, 816, 19, 19), 5, 1, True, 10_649_600),
        ((16, 728, 19, 19), 3, 1, False, 0),
    ],
)
def test_a_depthwise_weights_gradient_takes_the_workspace_that_was_recorded(
    image, window, stride, channels_last, nbytes
):
    """In `benchmarks/recordings/calls/h100.json.gz`."""
    images, channels, *size = image
    asked = replace(
        QUESTION,
        operation="weight",
        x=image,
        weight=(channels, 1, window, window),
        y=(images, channels, *(each // stride for each in size)),
        kind="bfloat16" if channels_last else "float16",
        channels_last=channels_last,
        padding=(window // 2,) * 2,
        stride=(stride, stride),
        capability=(9, 0),
        multiprocessors=132,
    )
    assert (cudnn.workspaces(asked) or ())[0] == nbytes


@INSTALLED
def test_without_tf32_no_contraction_is_expected():
    shapes = {"x": (64, 64, 56, 56), "weight": (256, 64, 1, 1), "y": (64, 256, 56, 56), "padding": (0, 0)}
    first, *_ = cudnn.workspaces(replace(QUESTION, capability=(9, 0), tf32=False, **shapes)) or ()
    assert first != 4_194_704


@INSTALLED
@pytest.mark.skipif(sys.platform == "win32", reason="needs os.fork")
def test_a_fork_asks_a_process_of_its_own():
    assert cudnn.workspaces(QUESTION)
    child = os.fork()
    if not child:
        cudnn.workspaces.cache_clear()
        os._exit(0 if cudnn.workspaces(QUESTION) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cudnn.workspaces(replace(QUESTION, operation="input"))


def test_the_process_that_asks_opens_no_context_on_the_users_gpu(monkeypatch):
    seen = {}
    monkeypatch.setattr(cudnn.subprocess, "Popen", lambda *_, **named: seen.update(named["env"]))
    with pytest.raises(AttributeError):
        cudnn._Process(())
    assert seen == {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def test_the_table_knows_every_kind_of_convolution():
    for operation in ("forward", "input", "weight"):
        for kind in ("float32", "float16", "bfloat16"):
            for channels_last in (False, True):
                asked = replace(QUESTION, operation=operation, kind=kind, channels_last=channels_last)
                assert _table().get(kind_of(asked)), kind_of(asked)
    assert likely(replace(QUESTION, kind="float64")) == likely(replace(QUESTION, capability=(6, 1))) == 0
    assert likely(replace(QUESTION, capability=(12, 1))) == likely(replace(QUESTION, capability=(12, 0)))
