"""Data walks one way, and so do imports: a file of the package imports only from files above it in `ORDER`."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "lightning_memguard"
# The layout: rooms from first to last, and the files of each from first to last. All but NOT_STD import neither torch
# nor Lightning. report/ comes before training/ because the callback prints its table; a report knows no trainer.
ROOMS = {
    "": ["_version", "errors", "units"],
    "core": ["__init__", "foreign", "objects", "torch_port", "shown", "range"],
    "core/trace": [
        "__init__",
        "scratch",
        "kept",
        "work",
        "trace",
        "as_written",
        "growth",
        "depth",
        "lengths",
        "packed",
        "loading",
    ],
    "core/replay": [
        "__init__",
        "settings",
        "addresses",
        "allocator",
        "replay",
        "recurring",
        "validated",
        "epoch",
        "timeline",
        "snapshot",
        "seconds",
        "footprint",
        "learned",
    ],
    "core/histories": ["__init__", "pickles", "history", "compare", "alternatives"],
    "core/kernels": [
        "__init__",
        "arguments",
        "layout",
        "cuda_reductions",
        "sorting",
        "indexing",
        "norms",
        "cudnn_process",
        "cudnn",
        "convolutions",
        "rnn",
        "cuda",
        "attention",
        "onednn",
        "cpu_convolutions",
        "cpu_factorizations",
        "cpu",
        "table",
        "templates",
    ],
    "core/decision": ["__init__", "decision", "advice", "record"],
    "core/gpus": [],
    "core/device": [
        "__init__",
        "host",
        "nvml",
        "malloc",
        "process",
        "context",
        "budget",
        "tensor_counter",
        "meter",
        "out_of_memory",
        "children",
        "speed",
        "measurements",
    ],
    "core/isolation": ["__init__", "child", "pool", "sending"],
    "core/batch": [
        "__init__",
        "nesting",
        "batches",
    ],
    "core/simulation": [
        "__init__",
        "repeated",
        "constants",
        "quantized",
        "fake",
        "faking",
        "value_sizes",
        "mkldnn_lstm",
        "cudnn_rnn",
        "sdpa",
        "flex",
        "streams",
        "driver",
        "fake_cuda",
        "fast_paths",
        "plain",
        "backward",
        "compiled_cuda",
        "compiled",
        "one_rank",
    ],
    "core/capture": [
        "__init__",
        "holders",
        "counters",
        "storages",
        "kernel_scratch",
        "work",
        "recorder",
        "leftovers",
        "program",
        "capture",
        "curve",
        "predict",
        "lengths",
    ],
    "core/layers": ["__init__", "layers"],
    "report": [
        "__init__",
        "words",
        "comparison",
        "decision_table",
        "failure",
        "figure",
        "loggers",
        "page_data",
        "charts",
        "page",
    ],
    "training": ["__init__"],
    "training/facts": [
        "__init__",
        "lightning_types",
        "lightning_port",
        "run_facts",
        "ranks",
    ],
    "training/offload": ["__init__", "space", "tiers", "saved", "hooks", "engine", "policy", "predicted"],
    "training/strategies": [
        "__init__",
        "ddp",
        "deepspeed",
        "sharded",
        "fabric",
    ],
    "training/adapter": [
        "__init__",
        "callbacks",
        "metrics",
        "stand_ins",
        "epoch_end",
        "no_collectives",
        "shadow",
        "program",
    ],
    "training/data": [
        "__init__",
        "copies",
        "resizing",
        "set_sizes",
        "sizes_elsewhere",
        "loaders",
        "draws",
        "samples",
        "workers",
        "length_sampler",
    ],
    "training/planning": [
        "__init__",
        "search",
        "structure",
        "remedies",
        "advise",
        "target",
        "subject",
        "by_name",
        "epochs",
        "estimate",
        "plan",
        "lengths",
        "layouts",
        "ways",
    ],
    "training/hf": ["__init__", "callback"],
    "training/run": [
        "__init__",
        "guard_settings",
        "growth_watch",
        "progress",
        "reading",
        "saving",
        "host_side",
        "profile",
        "earlier_runs",
        "setup_seconds",
        "epochs",
        "freed",
        "choose",
        "tune",
        "resume",
        "batch_monitor",
        "own_size",
        "aftermath",
        "measuring",
        "overrun",
        "offloading",
        "run_report",
        "guarded_run",
        "callback",
    ],
    "cli": ["__init__", "status", "options", "names", "config", "inputs", "tables", "fine_tuning"],
    "cli/commands": [
        "__init__",
        "plan",
        "layers",
        "snapshot",
        "replay",
        "compare",
        "gpus",
        "devices",
        "doctor",
        "history",
    ],
    "cli/main": [],
    "__main__": [],
}
NOT_STD = {
    "core/objects.py",
    "core/torch_port.py",
    "core/batch/nesting.py",
    "core/batch/batches.py",
    "core/simulation/repeated.py",
    "core/simulation/constants.py",
    "core/simulation/quantized.py",
    "core/simulation/fake.py",
    "core/simulation/faking.py",
    "core/simulation/value_sizes.py",
    "core/simulation/mkldnn_lstm.py",
    "core/simulation/cudnn_rnn.py",
    "core/simulation/sdpa.py",
    "core/simulation/flex.py",
    "core/simulation/streams.py",
    "core/simulation/driver.py",
    "core/simulation/fake_cuda.py",
    "core/simulation/fast_paths.py",
    "core/simulation/plain.py",
    "core/simulation/backward.py",
    "core/simulation/compiled_cuda.py",
    "core/simulation/compiled.py",
    "core/simulation/one_rank.py",
    "core/capture/counters.py",
    "core/capture/holders.py",
    "core/capture/storages.py",
    "core/capture/kernel_scratch.py",
    "core/capture/work.py",
    "core/capture/recorder.py",
    "core/capture/leftovers.py",
    "core/capture/program.py",
    "core/capture/capture.py",
    "core/capture/predict.py",
    "core/capture/lengths.py",
    "core/kernels/attention.py",
    "core/kernels/table.py",
    "core/kernels/templates.py",
    "core/device/speed.py",
    "core/device/measurements.py",
    "core/device/nvml.py",
    "core/device/malloc.py",
    "core/device/process.py",
    "core/device/context.py",
    "core/device/budget.py",
    "core/device/tensor_counter.py",
    "core/device/meter.py",
    "core/device/out_of_memory.py",
    "core/layers/layers.py",
    "training/__init__.py",
    "cli/options.py",
    "cli/names.py",
    "cli/config.py",
    "cli/inputs.py",
    "cli/fine_tuning.py",
    "cli/commands/plan.py",
    "cli/commands/layers.py",
    "cli/commands/snapshot.py",
    "cli/commands/devices.py",
    "cli/commands/doctor.py",
    "cli/main.py",
    "__main__.py",
}
ORDER = {
    file: file not in NOT_STD and not file.startswith("training/")
    for room, names in ROOMS.items()
    for file in ([f"{room}/{name}.py".lstrip("/") for name in names] or [f"{room}.py"])
}

# A fit loads none of these before something in it needs them: without them the callback predicts what it did.
BESIDE = (
    *("core/histories/", "core/layers/", "cli/", "training/hf/", "training/offload/", "training/strategies/"),
    *(f"report/{name}.py" for name in ("comparison", "page", "page_data", "charts", "figure", "loggers")),
    *("training/data/length_sampler.py", "training/run/offloading.py", "training/run/run_report.py"),
    *(f"training/planning/{name}.py" for name in ROOMS["training/planning"] if name not in ("__init__", "search")),
)

TORCH = {"torch"}
LIGHTNING = {"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}
ROOM_OF_LIGHTNING = "training/"

FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
LISTED = [file for file in FILES if file in ORDER]


def test_every_file_has_its_place_in_the_order():
    assert [file for file in FILES if file not in ORDER] == ["__init__.py"]


def test_a_file_imports_only_from_files_above_it():
    place = {file: index for index, file in enumerate(ORDER)}
    ours = [(file, name) for file in LISTED for name in imported_names(tree_of(file)) if is_ours(name)]
    for file, name in ours:
        target = file_of(name)
        assert target != "__init__.py", f"{file} imports {name} through the front door; import it from its home"
        assert target in place, f"{file} imports {name}, which has no place in the order yet"
        assert place[target] < place[file], f"{file} imports {name}, which is below it"


def is_ours(name):
    return name.partition(".")[0] == ROOT.name


def test_a_std_file_imports_neither_torch_nor_lightning():
    for file in (file for file in LISTED if ORDER[file]):
        names = imported_names(without_type_checking(tree_of(file)))
        assert not {name for name in names if name.partition(".")[0] in TORCH | LIGHTNING}, file
        assert not {name for name in names if is_ours(name) and not ORDER.get(file_of(name), True)}, file


def test_lightning_is_imported_in_its_own_room_alone():
    for file in (file for file in LISTED if not file.startswith(ROOM_OF_LIGHTNING)):
        names = imported_names(without_type_checking(tree_of(file)))
        assert not {name for name in names if name.partition(".")[0] in LIGHTNING}, file


def test_loading_all_std_files_loads_neither_torch_nor_lightning():
    """Run the rule, too, which also sees imports that others make on our behalf."""
    modules = [module_of(file) for file in LISTED if ORDER[file]]
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert not set(answer.stdout.split()) & (TORCH | LIGHTNING)


def test_a_fit_loads_nothing_of_the_rooms_beside_its_way():
    found = set()
    to_read = {"training/run/callback.py", "training/run/guarded_run.py"}
    while to_read:
        found |= to_read
        names = {name for file in to_read for name in imported_names(as_loaded(tree_of(file))) if is_ours(name)}
        to_read = {file_of(name) for name in names} - found
    assert len(found) > 100
    assert not [file for file in found if file.startswith(BESIDE)]


def test_the_reader_of_imports_sees_every_spelling():
    code = """
        import a.b as c
        from d import e, f
        def late():
            from g.h import i
        if TYPE_CHECKING:
            import j
        else:
            import k
        importlib.import_module("l.m")
    """
    tree = ast.parse("if True:\n" + code)
    assert set(imported_names(tree)) == {"a.b", "d.e", "d.f", "g.h.i", "j", "k", "l.m"}
    assert "j" not in set(imported_names(without_type_checking(tree)))
    assert "k" in set(imported_names(tree))
    assert set(imported_names(as_loaded(ast.parse("if True:\n" + code)))) == {"a.b", "d.e", "d.f", "k", "l.m"}


def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full dotted names of what is imported at any level: `from a import b` gives "a.b"."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                assert level == 0, f"line {node.lineno}: a relative import hides where it leads"
                yield from (f"{module}.{alias.name}" for alias in aliases)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def without_type_checking(tree: ast.Module) -> ast.Module:
    """The tree as it runs: without what only type checkers read."""

    class Runs(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else node

    return Runs().visit(tree)


def as_loaded(tree: ast.Module) -> ast.Module:
    """The tree as it runs when the file is imported: without what functions import when they are called."""

    class Loads(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            """Nothing of it runs yet."""

    return Loads().visit(without_type_checking(tree))


def file_of(name: str) -> str:
    """The file that a dotted name of the package leads to: the longest part of it that is a file."""
    parts = name.split(".")[1:]
    while parts:
        for file in ("/".join(parts) + ".py", "/".join(parts) + "/__init__.py"):
            if (ROOT / file).exists():
                return file
        parts.pop()
    return "__init__.py"


def module_of(file: str) -> str:
    return ".".join([ROOT.name, *file.removesuffix(".py").removesuffix("__init__").strip("/").split("/")])
