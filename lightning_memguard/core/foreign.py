"""The one table of other people's private names: those of torch and Lightning that this package reads or patches.

Any release may move one. The engine is imported when a run is set up, and what fails says so in the table's words
(`reason_of`); what every run needs is looked up once (`gaps`), and operators that this torch lacks are left out of our
rules (`aten`). Naughty, but in one place: `tests/core/test_foreign.py` fails if a name moves, trains without each in
turn, and finds names that are not listed. Checked on torch 2.11 up to `NEWEST_TESTED`, and on Lightning from 2.5.0,
unless a row says otherwise.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lightning_memguard.errors import CannotTraceError


@dataclass(frozen=True)
class Need:
    """Private names that serve one purpose; a comment names the main files that read them.

    Attributes:
        purpose: completes "which MemGuard needs to".
        names: "home: name name; home: name", a home from a module, or from an object at hand such as ``trainer``.
        without: what becomes of a run that would need them.
        checked: on which versions, if not on those of the whole table.
    """

    purpose: str
    names: str
    without: str = "some steps are run on a copy instead of simulated, or not predicted"
    checked: str = ""

    @property
    def paths(self) -> list[str]:
        """The full path of each."""
        homes = (group.split(": ") for group in self.names.split("; "))
        return [f"{home}.{name}" for home, names in homes for name in names.split()]

    def lacks(self, path: str) -> str:
        """Say that a name is missing, and what it is for."""
        return f"{_version_of(path)} does not have {path}, which MemGuard needs to {self.purpose}"


_NOT_TUNED = "runs are not tuned"
_NOT_SUCH = "such runs are not tuned"
_UNKNOWN = "a step that calls what replaced it may take more than predicted"

TABLE: dict[str, tuple[Need, ...]] = {
    "every run": (
        Need(
            "run a step without memory",  # core/simulation/{fake,repeated,fake_cuda}, core/capture/recorder
            "torch._subclasses.fake_tensor: FakeTensor FakeTensorMode unset_fake_temporarily "
            "DataDependentOutputException DynamicOutputShapeException init_gpu_context; "
            "torch._subclasses: FakeTensor; mode: _allow_unsafe_data_ptr_access",
        ),
        Need(
            "see each operator of a step",  # core/capture/recorder, core/simulation/{fake,constants}
            "torch._ops: OpOverload; torch.utils._python_dispatch: TorchDispatchMode; "
            "torch.utils._mode_utils: no_dispatch; "
            "torch._C: _AutoDispatchBelowAutograd DisableTorchFunction DispatchKey DisableTorchFunctionSubclass "
            "_dispatch_has_kernel_for_dispatch_key _parse_dispatch_key; torch._library.custom_ops: OPDEFS; "
            "torch.library: _impls; operator: _schema _op_dk; operator.overloadpacket: _qualified_op_name; "
            "definition: _backend_fns",
        ),
        Need(
            "copy a module and its batches",  # core/simulation/fake, core/batch/
            "torch.utils._pytree: tree_leaves tree_map tree_flatten tree_unflatten; torch._C.TensorBase: clone; "
            "torch.nn.Module: _apply _call_impl _compiled_call_impl; module: _parameters _buffers; "
            "torch.nn.modules.batchnorm: _BatchNorm; torch._dynamo: OptimizedModule; "
            "torch._dynamo.eval_frame: _TorchDynamoContext innermost_fn _callback_from_stance",
        ),
        Need(
            "know which tensors share memory",  # core/capture/storages, core/simulation/backward
            "storage: _cdata; torch.Tensor: _is_view _use_count; torch._C: _storage_Use_Count",
        ),
        Need(
            "make the results of operators",  # core/simulation/{fake,repeated}
            "torch._C: _set_warn_deprecated_on_mutable_data_ptr _set_throw_on_mutable_data_ptr; "
            "torch.Tensor: _make_subclass; torch._prims_common: suggest_memory_format; "
            "torch.autograd.forward_ad: _current_level; torch.optim.optimizer: _foreach_supported_types; "
            "torch.utils._foreach_utils: _foreach_supported_types; torch.amp.GradScaler: _maybe_opt_step; "
            "torch: _is_all_true; torch.nn.init: _no_grad_trunc_normal_",
        ),
        Need(
            "walk the backward pass",  # core/simulation/backward
            "torch._C: _current_graph_task_id _FunctionBase; torch._C._functorch: is_gradtrackingtensor; "
            "torch.autograd.Variable: _execution_engine; torch.Tensor: _backward_hooks _post_accumulate_grad_hooks; "
            "node: _input_metadata _sequence_nr",
        ),
        Need(
            "see what the backward pass keeps",  # core/simulation/{backward,plain}
            "torch._C._autograd: _push_saved_tensors_default_hooks _pop_saved_tensors_default_hooks "
            "_saved_tensors_hooks_disable _saved_tensors_hooks_enable _make_saved_tensor _get_sequence_nr; "
            "node: _saved_self _saved_result _saved_dim _saved_keepdim _saved_reduction _saved_other _saved_mat1 "
            "_saved_mat2 _saved_self_sym_sizes _saved_self_sym_strides _saved_mat1_sym_sizes _saved_mat1_sym_strides "
            "_saved_mat2_sym_sizes _saved_mat2_sym_strides",
        ),
        Need(
            "ask operators what they take inside",
            "torch._C._profiler: ProfilerConfig ProfilerState _ExperimentalConfig; torch._C._autograd: "
            "_enable_profiler_legacy _disable_profiler_legacy _ProfilerDisableOptions",
            "what operators of C++ libraries take inside is not predicted",
        ),
        Need("follow Adafactor", "torch.optim: _adafactor", "its steps run for real, and it is not advised"),
    ),
    "lightning": (  # training/facts/run_facts, training/adapter/{shadow,loader_access,metrics,program}
        Need(
            "read a run's settings",
            "trainer: _detect_anomaly; trainer._accelerator_connector: use_distributed_sampler",
            _NOT_TUNED,
        ),
        Need("find a run's loaders", "trainer.fit_loop: _data_source; trainer: _data_connector", _NOT_TUNED),
        Need("hide its copy of a run from loggers", "trainer._logger_connector: update_eval_epoch_metrics"),
        Need("know what a run logs", "trainer.fit_loop.epoch_loop: _results"),
        Need("know when a step ends", "trainer.fit_loop: _should_accumulate"),  # training/strategies/ddp
        Need("log at Lightning's step", "trainer.fit_loop.epoch_loop: _batches_that_stepped", "no picture is logged"),
    ),
    "rescue": (
        Need(
            "do a step again that ran out of memory",  # training/rescue/{again,state,parts}
            "trainer.fit_loop.epoch_loop.automatic_optimization: _make_closure; closure: _step_fn _zero_grad_fn "
            "_backward_fn; trainer._logger_connector: _current_fx; module: _current_fx_name; "
            "parameter: _backward_hooks _post_accumulate_grad_hooks; torch.Tensor: _version _base; "
            "torch.UntypedStorage: _cdata; torch.autograd: _engine_run_backward; "
            "torch.autograd.Function: _backward_cls",
            "steps that run out of memory raise",
        ),
        Need(
            "have the other ranks see one step",  # training/rescue/other_ranks
            "ddp_module: _pre_forward; group: _get_sequence_number_for_group",
            "steps of several ranks that run out of memory raise",
        ),
    ),
    "some runs": (  # training/adapter/{shadow,loader_access,callbacks}
        Need("find hooks that move a batch", "connector: _datahook_selector", "validation is not predicted"),
        Need("construct a loader again", "connector: _replace_dunder_methods", _NOT_SUCH),
        Need("know how loaders are combined", "combined: _mode _spec", _NOT_SUCH),
        Need("change the batch size in hparams", "module: _hparams _hparams_initial", "it stays as it was"),
        Need("follow averages of weights", "swa: _avg_fn _device; averaging: _use_buffers _kwargs", _NOT_SUCH),
        Need("prune as the run will", "pruning: _parameters_to_prune _run_pruning", _NOT_SUCH),
        Need("know how many rates are tried", "finder: _num_training_steps", "a short search is not reported"),
        Need("wait for no other rank", "epoch_loop: _broadcast_sigterm_tensor", _NOT_SUCH, checked="Lightning 2.6"),
    ),
    "operators": (
        Need(
            "know the memory of such operators",  # core/simulation/, training/rescue/rules
            "torch.ops.aten: _addmm_activation _cudnn_rnn _cudnn_rnn_backward _efficientzerotensor _euclidean_dist "
            "_fused_adagrad_ _fused_sgd_ _fused_rms_norm _fused_rms_norm_backward _local_scalar_dense "
            "_masked_softmax _softmax _native_multi_head_attention _transformer_encoder_layer_fwd "
            "_pack_padded_sequence _unique2; "
            "torch._VF: _pack_padded_sequence _pad_packed_sequence gru lstm rnn_relu rnn_tanh",
            _UNKNOWN,
        ),
        Need("know what the CPU computes with", "torch.cpu: _is_avx512_bf16_supported", _UNKNOWN),
    ),
    "compile": (
        Need(
            "follow torch.compile",  # core/simulation/compiled
            "torch._inductor.config: _config; torch._functorch: config; torch._dynamo: reset; "
            "torch._inductor.async_compile: AsyncCompile; torch._inductor.cpu_vec_isa.VecISA: check_build; "
            "torch._inductor: compile_fx output_code; torch._inductor.codecache: write; "
            "torch._inductor.codecache.PyCodeCache: load_by_key_path; "
            "torch._C._dynamo.guards: _empty_strided_cpu _empty_strided_cuda _reinterpret_tensor assert_size_stride "
            "assert_alignment; torch._C._FunctionBase: maybe_clear_saved_tensors; "
            "torch._C._autograd: _get_current_graph_task_keep_graph",
            "a compiled step is predicted as it is written",
        ),
    ),
    "cuda": (
        Need(
            "simulate a GPU",  # core/simulation/{fake_cuda,sdpa,backward}
            "torch._C: _ensureCUDADeviceGuardSet _get_sdp_priority_order; torch._C._autograd.SavedTensor: data",
            _NOT_SUCH,
        ),
        Need(
            "record the actual snapshot",  # core/device/meter
            "memory: _record_memory_history _dump_snapshot; cuda: _cuda_isHistoryEnabled",
            "it is not written",
            checked="torch 2.11 to 2.15, in builds with CUDA",
        ),
        Need(
            "know whether CUDA has begun",  # core/device/context
            "cuda: _cuda_hasPrimaryContext",
            "the GPU is asked",
            checked="builds with CUDA",
        ),
    ),
    "strategies": (
        Need(
            "be one rank of several",  # core/simulation/one_rank
            "torch.testing._internal.distributed.fake_pg: FakeStore; torch._C: _get_accelerator; "
            "torch.distributed.distributed_c10d: _pg_map _pg_names _pg_group_ranks _pg_backend_config _group_count "
            "_tags_to_pg _pg_to_tag _world _unregister_all_process_groups; "
            "torch.distributed.tensor._dispatch: is_rng_supported_mesh; "
            "torch.distributed.tensor._random: _rng_tracker; "
            "torch.distributed._functional_collectives: AsyncCollectiveTensor; "
            "torch.distributed.tensor._sharding_prop.ShardingPropagator: _propagate_tensor_meta_non_cached; "
            "torch.distributed.tensor.debug: _clear_sharding_prop_cache; "
            "torch.distributed.tensor.placement_types: _StridedShard; "
            "torch.distributed.fsdp._fully_shard._fsdp_param: _chunk_with_empty; "
            "torch.distributed.fsdp._runtime_utils: _register_post_backward_hook _post_backward_hook; "
            "torch.distributed.fsdp._init_utils: _get_compute_device; "
            "torch.distributed.fsdp._flat_param: _data_ptr_allocated",
            _NOT_SUCH,
        ),
        Need(
            "follow DistributedDataParallel",  # training/strategies/ddp
            "ddp: _ddp_kwargs _layer_sync _ddp_comm_hook _ddp_comm_wrapper; "
            "torch._C._distributed_c10d: _compute_bucket_assignment_by_size",
            _NOT_SUCH,
        ),
        Need("follow sharding", "strategy: _data_parallel_size _tensor_parallel_size", _NOT_SUCH),
        Need(
            "follow Fabric",
            "strategy: _fsdp_kwargs; wrappers: _FabricModule; fabric_module: _forward_module _register_backward_hook",
            _NOT_SUCH,
        ),
        Need("follow DeepSpeed", "torch._C: _will_engine_execute_node; strategy: _init_optimizers", _NOT_SUCH),
    ),
}

NEWEST_TESTED = {"torch": (2, 15), "Lightning": (2, 6)}  # as in benchmarks/matrix.py and the canary's workflow

_THEIRS = ("torch", "torchmetrics", "pytorch_lightning", "lightning", "lightning_fabric")
# Where a path begins, if not at a trainer or another object of Lightning's.
_OF_TORCH = ("torch", "operator", "definition", "mode", "storage", "node", "memory", "cuda", "optimizer")


class Absent:
    """Placeholder for a name that is missing: a key that nothing equals, and a function that raises."""

    def __init__(self, path: str) -> None:
        self._path = path

    def overloads(self) -> tuple[str, ...]:
        """Return no overloads, as if this were an operator."""
        return ()

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._path}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        """Refuse, in one sentence."""
        raise CannotTraceError(f"{_version_of(self._path)} does not have {self._path}")


class _Operators:
    """``torch.ops.aten``, without an error for operators that this torch lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch"].ops.aten, name, None) or Absent(f"torch.ops.aten.{name}")


aten: Any = _Operators()


def find(path: str, **roots: object) -> Any:
    """Return the object at a dotted path, from torch or from one of ``roots``; an `Absent` if there is none."""
    first, *names = path.split(".")
    found: Any = roots[first] if first in roots else importlib.import_module(first)
    for name in names:
        home, found = found, getattr(found, name, _NOTHING)
        if found is _NOTHING and "__path__" in getattr(home, "__dict__", ()):
            with contextlib.suppress(ImportError):  # a part that is not loaded yet
                found = importlib.import_module(f"{home.__name__}.{name}")
        if found is _NOTHING:
            return Absent(path)
    return found


_NOTHING = object()


def nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of a function that is not to run."""


def patched(owner: object, /, **values: object) -> contextlib.AbstractContextManager[None]:
    """Replace attributes of a module, a class or an object, and restore them at the end.

    Raises:
        AttributeError: it lacks one.
    """
    for name in values:
        getattr(owner, name)
    return added(owner, **values)


@contextlib.contextmanager
def added(owner: object, /, **values: object) -> Iterator[None]:
    """Replace attributes as `patched` does, or add them if the owner lacks them."""
    before = {name: vars(owner).get(name, _NOTHING) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def gaps(*parts: str, **roots: object) -> str:
    """Say what MemGuard cannot do because names in parts of the table are missing; empty if all are there."""
    found = [
        f"{need.lacks(path)}: {need.without}"
        for need, path in _rows(*parts)
        if path.partition(".")[0] in ("torch", *roots) and isinstance(find(path, **roots), Absent)
    ]
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "") if found else ""


def untested() -> str:
    """Say that torch or Lightning is newer than any that the tests have run on; empty if neither is."""
    versions = [_version_of("torch"), _version_of("trainer")]
    newer = [
        each for each in versions if tuple(map(int, re.findall(r"\d+", each)[:2])) > NEWEST_TESTED[each.split()[0]]
    ]
    known = " and ".join(f"{name} {major}.{minor}" for name, (major, minor) in NEWEST_TESTED.items())
    return f"MemGuard is tested up to {known}; this is {' and '.join(newer)}." if newer else ""


def reason_of(error: BaseException, text: str = "") -> str:
    """Why something failed: in the table's words if a name of it is missing, else in ``text``, or the error's own."""
    return missing_in(error) or f"{type(error).__name__}: {text or error}"


def missing_in(error: BaseException) -> str:
    """Say which name of the table an error is about, and what it is for; empty if it is about another."""
    if isinstance(error, (AttributeError, ImportError)):
        words, owner = set(re.findall(r"\w+", str(error))), getattr(error, "obj", None)
        home = str(getattr(owner, "__module__", None) or getattr(owner, "__name__", "")).partition(".")[0]
        for need, path in _rows(*TABLE):
            named = any(name.startswith("_") and name in words for name in path.split("."))
            missing = isinstance(find(path), Absent) if named and path.startswith("torch.") else home in _THEIRS
            if named and missing:
                return need.lacks(path)
    return ""


def _rows(*parts: str) -> Iterator[tuple[Need, str]]:
    return ((need, path) for part in parts for need in TABLE[part] for path in need.paths)


def _version_of(path: str) -> str:
    if path.partition(".")[0] in _OF_TORCH:
        return f"torch {sys.modules['torch'].__version__}"
    known = [sys.modules[name] for name in ("pytorch_lightning", "lightning") if name in sys.modules]
    return f"Lightning {known[0].__version__}" if known else "Lightning"
