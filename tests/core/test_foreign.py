"""Private names of others: each is where it was, each is in the table, and a run goes on without any one of them."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memguard.core import foreign, torch_port
from lightning_memguard.core.foreign import (
    NEWEST_TESTED,
    PORTS,
    Absent,
    find,
    gaps,
    port_table,
    reason_of,
    table,
    untested,
)
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.facts import lightning_port
from lightning_memguard.training.run import callback
from tests.forks import run_script

PROGRAM = Path(__file__).with_name("without_a_name.py")
PACKAGE = Path(foreign.__file__).parents[1]
PATHS = [path for need in table() for path in need.paths]
OF_PORT = [path for need in port_table() for path in need.paths]
OF_TORCH = [path for path in (*PATHS, *OF_PORT) if path.startswith("torch.")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


# -- the table


def samples() -> dict[str, list[Any]]:
    """Objects to find the names on that begin at none of torch's modules."""
    x = torch.ones(2, requires_grad=True)
    nodes = [x.exp(), x.cumsum(0), x.log(), x.amax(0, keepdim=True), torch.nn.functional.mse_loss(x, torch.ones(2))]
    matrix = torch.ones(2, 2, requires_grad=True)
    nodes += [x * x, matrix @ matrix, torch.addmm(x, matrix, matrix)]
    optimizer = torch.optim.SGD([x], lr=0.1)
    return {
        "parameter": [torch.nn.Parameter(torch.ones(2))],
        "ddp_module": [torch.nn.parallel.DistributedDataParallel],
        "group": [torch.distributed.ProcessGroup],
        "operator": [torch.ops.aten.add.Tensor],
        "definition": [torch.library.custom_op("memguard_tests::nothing", nothing, mutates_args=())],
        "mode": [FakeTensorMode()],
        "storage": [x.untyped_storage()],
        "node": [each.grad_fn for each in nodes],
        "memory": [torch.cuda.memory],
        "cuda": [torch._C],
        "optimizer": [optimizer],
    }


def nothing(x: torch.Tensor) -> None:
    """An operator that does nothing."""


@pytest.fixture(scope="module")
def roots() -> dict[str, list[Any]]:
    return samples()


@pytest.mark.parametrize("path", PATHS)
def test_a_name_is_where_it_was(path: str, roots: dict[str, list[Any]]) -> None:
    first = path.partition(".")[0]
    if first == "cuda" and torch.version.cuda is None:
        pytest.skip("in builds with CUDA alone")
    found = [find(path, **{first: each}) for each in roots.get(first, [torch])]
    assert not all(isinstance(each, Absent) for each in found), f"{path} has moved"


def test_no_run_has_a_gap() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert gaps(trainer=trainer) == ""


# Of Python itself, and of named tuples; and what is read only if it is there.
NOT_FOREIGN = {"_replace", "_asdict", "_fields", "_exit", "_getframe"}
IF_THERE = {
    *("_compute_coordinate_on_dim", "_post_backward_hook_state", "_torchdynamo_orig_callable"),
    *("_CudaDeviceProperties", "_experiment"),
    "_optimizer_step",  # of DeepSpeed, whose own test runs it
}


PORT_FILES = {port.rpartition(".")[2] for port in PORTS}


def private_names() -> Iterator[tuple[str, str]]:
    """Private names that are read of something which is none of ours, with the place."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.stem not in PORT_FILES]
    nodes = {
        file: [each for each in ast.walk(ast.parse(file.read_text())) if isinstance(each, NAMING)] for file in files
    }
    known = {name for each in nodes.values() for node in each for name in defined(node)} | NOT_FOREIGN | IF_THERE
    for file, each in nodes.items():
        for node in each:
            for name in read(node):
                if re.fullmatch("_[a-zA-Z].*", name) and name not in known:
                    yield name, f"{file.relative_to(PACKAGE)}:{node.lineno}"


NAMING = ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute, ast.ImportFrom, ast.Call


def defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            yield name


def read(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(attr=name):
            yield name
        case ast.ImportFrom(module=module, names=names) if not (module or "").startswith(PACKAGE.name):
            yield from (part for each in names for part in f"{module}.{each.name}".split("."))
        case ast.Call(func=ast.Attribute(attr="object"), args=[_, ast.Constant(value=str(name)), *_]):
            yield name


def test_each_private_name_is_in_the_table() -> None:
    listed = {part for path in PATHS for part in path.split(".")}
    assert {place: name for name, place in private_names() if name not in listed} == {}


# -- newer versions


@pytest.mark.parametrize("version", ["9.0.0", "2.16.0.dev20261124+cpu", "2.16"])
def test_a_version_above_the_tested_ones_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setitem(NEWEST_TESTED, "Lightning", (9, 9))
    assert untested() == f"MemGuard is tested up to torch 2.15 and Lightning 9.9; this is torch {version}."


@pytest.mark.parametrize("version", ["2.15.9", "2.11.0+cpu", "unknown"])
def test_a_tested_version_is_not(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setitem(NEWEST_TESTED, "Lightning", (9, 9))
    assert untested() == ""


def test_a_newer_lightning_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(callback, "untested", untested)
    monkeypatch.setitem(NEWEST_TESTED, "Lightning", (2, 0))
    callback._say_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("lightning_memguard"), "propagate", True)
    for _ in range(2):
        guard = callback.MemGuard()
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[guard])
        guard.setup(trainer, pl.LightningModule(), "test")
    said = [record.getMessage() for record in caplog.records if "tested up to" in record.getMessage()]
    assert said == [f"MemGuard is tested up to torch 2.15 and Lightning 2.0; this is Lightning {pl.__version__}."]


def test_the_newest_tested_versions_are_those_of_the_matrix() -> None:
    matrix = (PACKAGE.parent / "benchmarks" / "matrix.py").read_text()
    last = {name: re.search(rf', {name} = .*"(\d+)\.(\d+)[^"]*"', matrix) for name in ("NEWEST", "LIGHTNING")}
    assert [*NEWEST_TESTED.values()] == [(int(found[1]), int(found[2])) for found in last.values() if found]


# -- without a name


def test_an_absent_name_is_a_key_that_nothing_is_equal_to() -> None:
    missing = foreign.aten._no_such_operator
    table = {missing.default: 1, foreign.aten.add.Tensor: 2}
    assert table[torch.ops.aten.add.Tensor] == 2
    assert missing.default not in {missing.default.other: 1}
    assert {"default", "Tensor"}.intersection(missing.overloads()) == set()
    with pytest.raises(CannotTraceError, match=r"^torch \S+ does not have torch\.ops\.aten\._no_such_operator$"):
        missing(1)


@pytest.mark.parametrize("there", ["torch._use_count", "torch._Use_Count"])
def test_a_function_finds_a_name_that_has_moved_by_either_path(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def users() -> Any:
        """Count the tensors of a storage."""
        return find("torch._use_count or torch._Use_Count")

    (path,) = foreign._names_in(users, "torch")
    assert isinstance(users(), Absent)
    assert users()._path == path == "torch._use_count or torch._Use_Count"
    monkeypatch.setattr(there, len, raising=False)
    assert users() is len


def test_a_gap_names_the_version_the_purpose_and_what_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.library, "_impls")
    assert gaps("every run") == (
        f"torch {torch.__version__} does not have torch.library._impls, which MemGuard needs to find the Python "
        "function that is an operator's kernel: some steps are run on a copy instead of simulated, or not predicted"
    )
    monkeypatch.delattr(torch._C, "_parse_dispatch_key")
    assert gaps("every run").endswith("or not predicted (and 1 more)")


def test_an_error_has_its_own_words_if_the_table_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "table", lambda: 1 / 0)
    assert reason_of(ImportError("no disk")) == "ImportError: no disk"


def test_an_error_is_explained_if_a_name_of_the_table_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_of(error_of(lambda: SimpleNamespace()._impls)).startswith("AttributeError: 'types.SimpleNamespace'")
    monkeypatch.delattr(torch.library, "_impls")
    needed = f"torch {torch.__version__} does not have torch.library._impls, which MemGuard needs to find the Python"
    assert reason_of(error_of(lambda: torch.library._impls)).startswith(needed)
    assert reason_of(ValueError("torch.library._impls")) == "ValueError: torch.library._impls"
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    del trainer.fit_loop._data_source
    assert reason_of(error_of(lambda: lightning_port.data_source(trainer.fit_loop))) == (
        f"Lightning {pl.__version__} does not let MemGuard find where a loop gets its loaders ("
        "lightning_port.data_source: AttributeError: '_FitLoop' object has no attribute '_data_source')"
    )


def error_of(read: Any) -> BaseException:
    try:
        read()
    except AttributeError as error:
        return error
    raise AssertionError("it is there")


# By what becomes of a run that needs the name; `without_a_name.py` says how it is made to. `make long` takes each name.
SAMPLE = {
    "torch._subclasses.fake_tensor.FakeTensor": "stepped aside",
    "torch.ops.aten._fused_adagrad_": "tuned with less",
    "torch._C._ensureCUDADeviceGuardSet": "estimated with less",
}


@FORKS
def test_a_run_goes_on_without_a_name_and_says_so(tmp_path: Path) -> None:
    found = outcomes(forked(tmp_path, *SAMPLE))
    assert {path: outcome for path, (outcome, _) in found.items()} == SAMPLE
    for path, (_, words) in found.items():
        needs = rf"does not have {re.escape(path)}, which MemGuard needs to \w+"
        fails = rf"does not let MemGuard \w+.* \(torch_port\.\S+ .*\b{last(path)}\b"
        assert re.search(rf"torch \S+ ({needs}|{fails})", words)


@pytest.mark.long
@FORKS
@pytest.mark.parametrize("part", ["every run", "operators", "compile", "cuda", "strategies"])
def test_no_name_of_torch_stops_a_run(part: str) -> None:
    """Types of C++ keep their attributes, so a few cannot be removed. Others are not needed by a run this small."""
    needs = [need for need in (*table(), *port_table()) if need.part == part]
    paths = dict.fromkeys(path for need in needs for path in need.paths if path in OF_TORCH)
    found = outcomes(output_of(PROGRAM, *paths, env=ENVIRONMENT))  # where MemGuard was never imported
    assert not {path: words for path, (outcome, words) in found.items() if outcome in ("raised", "another peak")}
    silent = {path: outcome for path, (outcome, words) in found.items() if last(path) not in words}
    assert {*silent.values()} <= {"cannot be removed", "tuned"}
    assert {path for path, outcome in silent.items() if outcome == "tuned"} <= NOT_NEEDED


# Of the first, what a run that offloads asks outside and inside of a step; the others stop a way to capture one.
RAISING = ["saved_hooks", "sequence_number", "schema_of"]
FUNCTIONS = [name for name, each in vars(torch_port).items() if getattr(each, "__module__", "") == torch_port.__name__]


@FORKS
@pytest.mark.parametrize("names", [RAISING, pytest.param(FUNCTIONS, marks=pytest.mark.long, id="all")])
def test_a_run_trains_as_without_us_if_a_function_of_the_port_raises(names: list[str], tmp_path: Path) -> None:
    lines = [json.loads(line) for line in forked(tmp_path, "--port", *names).splitlines()]
    assert not {name: words for name, outcome, words, *_ in lines if outcome == "raised"}
    weights = {name: found for name, _, _, found in lines}
    assert not [name for name in names if weights[name] != weights[""]]
    silent = {name for name, outcome, words, _ in lines[1:] if f"torch_port.{name}" not in words}
    assert {outcome for name, outcome, *_ in lines if name in silent} <= {"kept"}  # not needed by a run this small
    assert len(silent) < 0.7 * len(names)


NOT_NEEDED = {
    "torch._C._will_engine_execute_node",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
    "torch._C._get_sdp_priority_order",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder._deduce_value",
    # nor by a step that is compiled for the CPU, without FlexAttention or random numbers in a checkpoint
    "torch._higher_order_ops.flex_attention",
    "torch._prims.rng_prims.run_and_save_rng_state",
    "torch._prims.rng_prims.run_with_rng_state",
    "torch._functorch.partitioners.functionalize_rng_ops",
    "torch._dynamo.device_interface.CudaInterface.exchange_device",
    "torch._dynamo.device_interface.CudaInterface.get_raw_stream",
    "torch._dynamo.device_interface.CudaInterface.maybe_exchange_device",
    "torch._dynamo.device_interface.CudaInterface.raise_if_triton_unavailable",
}


def last(path: str) -> str:
    return path.rpartition(".")[2]


def outcomes(lines: str) -> dict[str, tuple[str, str]]:
    return {path: (outcome, words) for path, outcome, words in map(json.loads, lines.splitlines())}


def forked(folder: Path, *arguments: str) -> str:
    """What the program prints; it imports MemGuard again, without the names that are gone by then."""
    lines = run_script(PROGRAM, folder, *arguments, without=PACKAGE.name).splitlines()
    return "\n".join(line for line in lines if line.startswith("["))  # and no warnings


def output_of(*arguments: object, **how: Any) -> str:
    command = [sys.executable, *map(str, arguments)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, **how)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return answer.stdout


# -- a Lightning that renamed one

RENAMED = {
    "_data_source": "did not tune this run: Lightning 2.* does not let MemGuard find where a loop gets its loaders",
    "_detect_anomaly": r"Lightning 2.* does not let MemGuard .* \(lightning_port.detects_anomaly: AttributeError",
    "_batches_that_stepped": "does less in this run: Lightning 2.* does not have .*_batches_that_stepped, ",
}


@pytest.mark.long
@pytest.mark.parametrize("name", RENAMED)
def test_a_lightning_that_renamed_a_name_still_trains(name: str, tmp_path: Path) -> None:
    original = Path(importlib.util.find_spec("pytorch_lightning").origin).parent  # type: ignore[union-attr, arg-type]
    copied = shutil.copytree(original, tmp_path / original.name)
    for file in copied.rglob("*.py"):
        text = file.read_text()
        if name in text:
            file.write_text(re.sub(rf"\b{name}\b", f"{name}_renamed", text))
    code = (
        "import without_a_name as w; from lightning_memguard import MemGuard; "
        "print(*w.fit(MemGuard(budget='1GiB', min_steps_per_epoch=None)))"
    )
    paths = os.pathsep.join(map(str, (tmp_path, PACKAGE.parent, PROGRAM.parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    said = output_of("-c", code, cwd=tmp_path, env=environment)
    assert re.search(RENAMED[name], said), said
