"""torch.compile on fake tensors: the user's own compilation runs as it is, only its kernels are never built.

Dynamo, AOTAutograd and Inductor see the fake copy as they would see the module. What they make in the end is a program
in Python that allocates buffers, calls kernels and drops buffers; it runs under the recorder like any other code, with
kernels that do nothing.

Private names of torch's compiler are used here and in `compiled_cuda` only; `tests/core/simulation/test_compiled.py`
has canary tests for them.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import operator
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import added, patched
from lightning_memguard.core.foreign import aten as _aten
from lightning_memguard.core.gpus import Gpu
from lightning_memguard.core.isolation.pool import beat
from lightning_memguard.core.simulation import compiled_cuda, fake_cuda
from lightning_memguard.core.simulation.backward import release_saved
from lightning_memguard.core.simulation.constants import MOST_ELEMENTS
from lightning_memguard.core.torch_port import FakeTensor, OpOverload
from lightning_memguard.core.trace.trace import Answers, Note

T = TypeVar("T")

NOTE = Note(
    "uncompiled",
    "predicted without torch.compile: the compiled step may take more or less",
)


def noting(note: Callable[[str], object]) -> AbstractContextManager[None]:
    """Call ``note`` once compiled code runs, here as it was written."""
    return port.telling_of_compiled_calls(lambda: note(NOTE))


READS = (Tensor.item, Tensor.__float__, Tensor.__bool__, port.is_all_true())
READS_WHOLE = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_READS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default})


class Reads:
    """Values that a step reads from its tensors, by line. Compiled, it reads the same, as no kernel computes anything.

    Args:
        given: the answers of a run as written, or of a real one, which are handed out in their order.
    """

    def __init__(self, given: Answers = ()) -> None:
        self._given = {line: list(values) for line, values in given}
        self._noted: defaultdict[str, list[float]] = defaultdict(list)
        self._count = 0

    @property
    def are_given(self) -> bool:
        """Whether there was another run."""
        return bool(self._given)

    @property
    def noted(self) -> Answers:
        """Return the answers of each line."""
        return tuple((line, tuple(values)) for line, values in self._noted.items())

    def follows(self, func: object, args: Sequence[Any]) -> bool:
        """Whether a function reads what is to be noted or answered."""
        if func not in READS_WHOLE:
            return func in READS
        return self.are_given or (type(args[0]) is not FakeTensor and args[0].numel() <= MOST_ELEMENTS)

    def given(self, func: OpOverload, line: Callable[[], str]) -> float | None:
        """Return the answer of the other run; of the last that the line read, if it read less often."""
        return self._next(_place(line)) if self._given and func in _READS else None

    def _next(self, place: str) -> Any:
        known = self._given.get(place, [])
        return known.pop(0) if len(known) > 1 else next(iter(known), None)

    def note(self, func: object, line: Callable[[], str], answer: Any) -> None:
        """Note an answer, if it is one."""
        if func in _READS or func in READS:
            self._count += 1
            self._noted[_place(line)].append(float(answer) if isinstance(answer, float) else answer)
        elif func in READS_WHOLE:
            self._noted[_place_of(func, line)].append(copy.deepcopy(answer))

    def noting(self, func: object, line: Callable[[], str], read: Callable[[], T]) -> T:
        """Read, and note the answer if no operator was asked for it; or return that of the other run."""
        given = self._next(_place_of(func, line)) if self._given else None
        if given is not None:
            return cast("T", _KINDS.get(func, copy.copy)(given))
        count, answer = self._count, read()
        if count == self._count and not isinstance(answer, Tensor):
            self.note(func, line, answer)
        return answer


_KINDS: dict[object, Callable[[Any], Any]] = {Tensor.__bool__: bool, Tensor.__float__: float}


def _place_of(func: object, line: Callable[[], str]) -> str:
    return f"{_place(line)} {READS_WHOLE.index(func)}" if func in READS_WHOLE else _place(line)


def _place(line: Callable[[], str]) -> str:
    """The line that reads, the model's or a library's, without the function's name: Dynamo changes it after a break."""
    return line().rpartition(":")[0] or _line_of_a_library()


def _line_of_a_library() -> str:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_MACHINERY):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""


# Between a line that reads and the value.
_MACHINERY = (
    "lightning_memguard.",
    "torch._ops",
    "torch._subclasses",
    "torch._tensor",
    "torch.utils.",
    "torch.overrides",
)


class _NoKernel:
    """Replacement for a compiled kernel: the caller allocated the buffers that the kernel reads and writes."""

    def __call__(self, *_: object, **__: object) -> None:
        pass

    run = __call__

    def result(self) -> _NoKernel:
        return self


class _Timed(_NoKernel):
    """A kernel of which the first call tries several ways to run it (`benchmark_all_configs` in triton_heuristics.py).

    Each is timed between writes to a buffer as large as the GPU's cache, on copies of what the kernel changes.
    """

    def __init__(self, source: str, gpu: Gpu, watcher: Watcher) -> None:
        self._untried = compiled_cuda.ways_to_run(source)
        self._changed, self._spares = compiled_cuda.changed_arguments(source)
        self._cache_bytes, self._watcher = compiled_cuda.timing_bytes(gpu.kernel_target), watcher

    def run(self, *args: object, **_: object) -> None:
        ways, self._untried = self._untried, 0
        if ways < 2:
            return
        changed = [arg for place, arg in enumerate(args) if place in self._changed and isinstance(arg, Tensor)]
        room = self._watcher.room_below_peak() if self._spares else None
        for _way in range(ways):
            self._copied(changed, room)
            buffer = torch.empty(self._cache_bytes, dtype=torch.uint8, device="cuda")
            self._copied(changed, room)
            del buffer

    __call__ = run

    def _copied(self, changed: Sequence[Tensor], room: int | None) -> None:
        """Copy what there is room for; the rest is copied to the host (`copy_args_to_cpu_if_needed`)."""
        copies = []
        for arg in changed:
            if room is None or arg.nbytes <= room:
                room = None if room is None else room - arg.nbytes
                copies.append(torch.empty_strided(arg.size(), arg.stride(), dtype=arg.dtype, device=arg.device))


# What `AsyncCompile` makes kernels with; a version of torch has those it knows.
COMPILERS = ("cpp", "cpp_pybinding", "triton", "multi_kernel", "size_hint_multi_kernel", "halide", "cuda", "cutlass")

_QUIET = {  # of `torch._inductor.config`: nothing is cached on disk, and no process is started
    "compile_threads": 1,
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "autotune_local_cache": False,
    "autotune_remote_cache": False,
    "cpp.vec_isa_ok": True,  # without trying to build something for the processor's instructions
}


_BY_FLOPS = (
    "torch.compile chooses by their speed which operators to compute again (activation_memory_budget_runtime_estimator"
    ' = "profile"): predicted by their FLOPs, as by its default'
)


class Watcher(Protocol):
    """Notes what a compilation cannot decide without a device; a recorder is one."""

    def assume(self, note: str) -> None:
        """Note an assumption, once."""

    def note_autotuning(self) -> None:
        """Something is compiled whose kernels torch would choose by their speed."""

    def note_graphs(self) -> None:
        """Something is compiled whose kernels would be recorded as CUDA graphs."""

    def room_below_peak(self) -> int:
        """How much less is allocated than was before."""

    def paused(self) -> AbstractContextManager[object]:
        """Notice nothing while the context is open."""

    def pooled(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a compiled program that is watched while it runs."""


def share_saved() -> float:
    """The share of what a compiled graph would save for its backward pass that the user lets it save."""
    return _functorch_config().activation_memory_budget  # type: ignore[no-any-return]


def saving(share: float | None) -> AbstractContextManager[None]:
    """Let graphs that are compiled save so much; None: as much as the user lets them."""
    if share is None:
        return nullcontext()
    return _functorch_config().patch(activation_memory_budget=share)  # type: ignore[no-any-return]


def for_any_shape(*, active: bool) -> AbstractContextManager[None]:
    """Compile for inputs of any shape, as Dynamo does by itself once it was given a second one."""
    config: Any = importlib.import_module("torch._dynamo.config")
    return config.patch(assume_static_by_default=False) if active else nullcontext()


def _functorch_config() -> Any:
    return importlib.import_module("torch._functorch.config")


@contextmanager
def compiling(watcher: Watcher) -> Iterator[None]:
    """Run compiled code on fake tensors, with kernels that do nothing, while the context is open.

    Forgets what was compiled in this process before, and patches torch's compiler for all its threads.
    """
    gpu = fake_cuda.simulated_gpu()
    with ExitStack() as exits:
        if gpu is not None:
            exits.enter_context(compiled_cuda.compiling_for(gpu))
        inductor: Any = importlib.import_module("torch._inductor.config")
        always = {name for name in (*_CHOOSE_KERNELS, _GRAPHS) if operator.attrgetter(name)(inductor)}
        quiet = {**_QUIET, **dict.fromkeys((*_CHOOSE_KERNELS, *_ON_DEVICE), False)}
        exits.enter_context(inductor.patch({name: value for name, value in quiet.items() if name in inductor._config}))
        functorch = _functorch_config()
        exits.enter_context(functorch.patch(enable_autograd_cache=False, graphsafe_rng_functionalization=False))
        if share_saved() < 1 and functorch.activation_memory_budget_runtime_estimator == "profile":
            watcher.assume(_BY_FLOPS)
            exits.enter_context(functorch.patch(activation_memory_budget_runtime_estimator="flops"))
        patches = (*_without_kernels(watcher, gpu), *_in_memory(watcher.pooled), *_through_dispatch(), *_when_walked())
        for home, name, instead in (*patches, _without_timing(watcher, always), _unwatched(watcher)):
            exits.enter_context((added if name == "open" else patched)(home, **{name: instead}))
        exits.enter_context(_drawing_again(type(watcher)))
        exits.enter_context(torch.compiler.set_stance("default"))
        torch._dynamo.reset()
        exits.callback(torch._dynamo.reset)
        exits.enter_context(_beating())
        yield


_Patch = tuple[Any, str, Any]


def _without_kernels(watcher: Watcher, gpu: Gpu | None) -> Iterator[_Patch]:
    """Patch the compilers: no kernel is compiled, and no test program either."""
    compiler = importlib.import_module("torch._inductor.async_compile").AsyncCompile
    for name in COMPILERS:
        if hasattr(compiler, name):
            yield compiler, name, lambda *_, **__: _NoKernel()

    def triton(_: object, __: str, source: str, *___: object, **____: object) -> _NoKernel:
        return _Timed(source, gpu, watcher) if gpu else _NoKernel()

    yield compiler, "triton", triton
    yield compiler, "wait", lambda *_: None
    yield importlib.import_module("torch._inductor.cpu_vec_isa").VecISA, "check_build", lambda *_: True


def _without_timing(watcher: Watcher, always: set[str]) -> _Patch:
    """Patch ``compile_fx``: nothing is timed to choose between kernels, and nothing recorded as a CUDA graph."""
    home = importlib.import_module("torch._inductor.compile_fx")
    original = home.compile_fx

    def compile_fx(*args: object, config_patches: dict[str, Any] | None = None, **kwargs: object) -> Any:
        asked = config_patches or {}
        chosen = always | {name for name, value in asked.items() if value}
        if not chosen.isdisjoint(_CHOOSE_KERNELS):
            watcher.note_autotuning()
        if _GRAPHS in chosen and fake_cuda.simulated_gpu() is not None:
            watcher.note_graphs()
        wanted = {name: value for name, value in asked.items() if name not in (*_CHOOSE_KERNELS, *_ON_DEVICE)}
        return original(*args, config_patches=wanted or None, **kwargs)

    return home, "compile_fx", compile_fx


def _unwatched(watcher: Watcher) -> _Patch:
    """Patch what compiles: the values that Dynamo follows have no memory."""
    home: Any = importlib.import_module("torch._dynamo.convert_frame")
    original = home._compile

    def compile_frame(*args: object, **kwargs: object) -> Any:
        with watcher.paused():
            return original(*args, **kwargs)

    return home, "_compile", compile_frame


_CHOOSE_KERNELS = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise")
_GRAPHS = "triton.cudagraphs"
_ON_DEVICE = ("coordinate_descent_tuning", _GRAPHS)


def _in_memory(watched: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> Iterator[_Patch]:
    """The program that Inductor writes stays in memory: a child cannot write files."""
    cache = importlib.import_module("torch._inductor.codecache")
    sources: dict[str, str] = {}

    def write(content: Any, extension: str, extra: str = "", *_: Any, **kwargs: Any) -> tuple[str, str]:
        key: str = kwargs.get("key") or cache.get_hash(content.strip(), extra)
        path = f"<{key}.{extension}>"
        sources[path] = content
        return key, path

    def load(
        _: type[Any],
        /,
        key: str,
        path: str,
        linemap: object = None,  # noqa: ARG001 - of the same name
        attrs: dict[str, Any] | None = None,
        **__: object,
    ) -> types.ModuleType:
        module = types.ModuleType(f"torch._inductor.runtime.compile_tasks.{key}")
        module.__file__, vars(module)["key"] = path, key
        if "AsyncCompile()" in sources[path]:  # a program, not the kernel that a template makes, which needs Triton
            with _triton_importable():
                exec(compile(sources[path], path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - as torch does
        vars(module).update(attrs or {})
        if "call" in vars(module):
            vars(module)["call"] = watched(vars(module)["call"])
        return module

    def open_source(path: Any, *args: Any, **kwargs: Any) -> Any:
        return io.StringIO(sources[path]) if path in sources else open(path, *args, **kwargs)  # noqa: PTH123 - in its place

    yield importlib.import_module("torch._inductor.output_code"), "open", open_source
    yield cache, "write", write
    yield cache.PyCodeCache, "load_by_key_path", classmethod(load)


@contextmanager
def _triton_importable() -> Iterator[None]:
    """Let a program import Triton where it is not installed, of which it uses nothing but kernels."""
    names = () if importlib.util.find_spec("triton") else ("triton", "triton.language")
    sys.modules.update({name: types.ModuleType(name) for name in names})
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _through_dispatch() -> Iterator[_Patch]:
    """The program allocates by functions in C++ that no dispatch mode sees; these do the same where it does."""
    guards = torch._C._dynamo.guards

    def allocate(device: str) -> Callable[..., Tensor]:
        def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)

        return empty_strided

    def reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    yield guards, "_empty_strided_cpu", allocate("cpu")
    yield guards, "_empty_strided_cuda", allocate("cuda")
    yield guards, "_reinterpret_tensor", reinterpret
    yield guards, "assert_size_stride", lambda *_, **__: None
    yield guards, "assert_alignment", lambda *_, **__: None


def _when_walked() -> Iterator[_Patch]:
    """Patch two calls of a compiled backward pass to autograd's engine, which does not run: the pass is walked."""
    clear = torch._C._FunctionBase.maybe_clear_saved_tensors  # type: ignore[attr-defined]

    def clear_saved(node: object) -> None:
        clear(node)
        release_saved(node)

    yield BackwardCFunction, "maybe_clear_saved_tensors", clear_saved
    yield torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False


@contextmanager
def _drawing_again(mode_type: type) -> Iterator[None]:
    """Run operators that draw random numbers, and those that draw the same again, as in compiled checkpoints."""

    def saved(mode: Any, func: Callable[..., Any], *args: object, **kwargs: object) -> tuple[Tensor, Any]:
        state = torch.get_rng_state()
        with mode:
            mode.watch(state, "get_rng_state")
            return state, func(*args, **kwargs)

    def again(mode: Any, _: Tensor, func: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        with mode:
            return func(*args, **kwargs)

    prims: Any = importlib.import_module("torch._prims.rng_prims")
    rules = ((prims.run_and_save_rng_state, saved), (prims.run_with_rng_state, again))
    for around, rule in rules:
        around.python_key_table[mode_type] = rule
    try:
        yield
    finally:
        for around, _ in rules:
            del around.python_key_table[mode_type]


@contextmanager
def _beating() -> Iterator[None]:
    """Send signs of life while the context is open: a compilation calls no operator of the step for long."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(1.0):
            with contextlib.suppress(OSError):
                beat()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
