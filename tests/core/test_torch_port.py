"""What each function of the port has to return, in plain torch: if a release moves a name, one of these fails."""

from __future__ import annotations

import copy
import importlib
import inspect
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode

from lightning_memguard.core import torch_port as port
from lightning_memguard.core.foreign import nothing, patched

pytestmark = pytest.mark.contract

aten = torch.ops.aten
WITH_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KEEPS_INPUTS = pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "_make_saved_tensor"), reason="since torch 2.13")


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape or 2, requires_grad=True)


class Double(torch.autograd.Function):
    """Keeps its input, and notes what runs in its backward pass."""

    seen: list[object] = []  # noqa: RUF012 - of the whole class

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        Double.seen[:] = [ctx, port.running_node(), port.running_task()]
        assert ctx.saved_tensors
        return 2 * grad


class Called(port.TorchDispatchMode):
    """The operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(port.packet_name(func))
        return func(*args, **(kwargs or {}))


class CalledFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


# -- tensors and storages


@pytest.mark.parametrize("fake", [False, True])
def test_a_storage_has_one_id_and_no_other_has_it(fake):
    with port.FakeTensorMode() if fake else torch.no_grad():
        x, y = torch.ones(4), torch.ones(4)
        view = x[1:]
    ids = [port.storage_id(each.untyped_storage()) for each in (x, view, y)]
    assert ids[0] == ids[1] != ids[2]
    assert all(type(each) is int for each in ids)


@pytest.mark.parametrize("fake", [False, True])
def test_users_of_a_storage_are_its_tensors_and_its_object(fake):
    with port.FakeTensorMode() if fake else torch.no_grad():
        storage = (x := torch.ones(2)).untyped_storage()
        assert port.storage_users(storage) == 2
        other = x.view(2, 1)
        assert port.storage_users(storage) == 3
        del other
        assert port.storage_users(storage) == 2


def test_users_of_a_tensor_are_its_object_and_the_nodes_that_saved_it():
    x = leaf()
    assert port.tensor_users(x) == 1
    y = x.pow(3)
    assert port.tensor_users(x) > 1 == port.tensor_users(y)


def test_a_write_makes_another_version():
    x = torch.ones(2)
    before, view = port.version_of(x), x[1:]
    view.add_(1)
    assert port.version_of(x) == port.version_of(view) == before + 1


def test_a_view_knows_its_base():
    x = torch.ones(4)
    assert port.base_of(x[1:]) is x
    assert port.base_of(x) is None
    assert [port.is_view(each) for each in (x, x[1:], x.clone())] == [False, True, False]


def test_zeros_without_memory_are_known():
    assert port.has_no_memory(aten._efficientzerotensor((2,)))
    assert not port.has_no_memory(torch.zeros(2))


def test_a_negated_tensor_shares_memory():
    x = torch.ones(2)
    assert port.negated(x).tolist() == [-1, -1]
    assert port.negated(x).is_neg()
    assert port.negated(x).data_ptr() == x.data_ptr()


def test_the_suggested_format_is_that_of_the_strides():
    x = torch.ones(2, 3, 4, 5)
    assert port.suggested_format(x) is torch.contiguous_format
    assert port.suggested_format(x.to(memory_format=torch.channels_last)) is torch.channels_last


def test_the_question_whether_all_are_true_is_a_function_that_modes_see():
    with CalledFunctions() as called:
        assert port.is_all_true()(torch.tensor([True, True]))
    assert port.is_all_true() in called.functions


# -- the graph of autograd


def test_later_nodes_have_larger_numbers():
    x = leaf()
    following = port.next_sequence_number()
    first = x.exp()
    second = first.log()
    assert [port.sequence_number(each.grad_fn) for each in (first, second)] == [following, following + 1]
    assert port.sequence_number(first.grad_fn.next_functions[0][0]) == (1 << 64) - 1


def test_a_node_knows_the_gradients_it_receives():
    x = leaf(4, 3)
    (expected,) = port.expected_grads(x.double().grad_fn)
    assert (tuple(expected.shape), expected.dtype, expected.device) == ((4, 3), torch.float64, x.device)
    assert len(port.expected_grads(x.unbind()[0].grad_fn)) == 4


def saving() -> dict[str, tuple[torch.Tensor, str, object]]:
    x, matrix = leaf(), leaf(2, 2)
    return {
        "exp": (y := x.exp(), "result", y),
        "log": (x.log(), "self", x),
        "dim from the end": (x.cumsum(-1), "dim", -1),
        "dim": (matrix.prod(1), "dim", 1),
        "keepdim": (x.prod(0, keepdim=True), "keepdim", True),
        "reduction": (mse_loss(x, torch.ones(2)), "reduction", 1),
        "other": (x * (y := leaf()), "other", y),
        "mat2": (matrix @ (y := leaf(2, 2)), "mat2", y),
        "sizes": (matrix @ y, "self_sym_sizes", (2, 2)),
        "strides": (matrix @ y, "mat2_sym_strides", (2, 1)),
        "mat1": (torch.addmm(x, matrix, y), "mat1", matrix),
    }


@pytest.mark.parametrize("name", saving())
def test_a_node_tells_what_it_saved(name):
    result, saved, expected = saving()[name]
    found = port.saved_by(result.grad_fn, saved)
    assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


def test_what_hooks_packed_is_reached_without_unpacking():
    packed = object()
    with torch.autograd.graph.saved_tensors_hooks(lambda _: packed, lambda _: 1 / 0):
        x, index = leaf(3, 3), torch.tensor([0, 1])
        results = x.log(), Double.apply(x), x[index, index]
    assert [[*port.saved_handles(each.grad_fn)] for each in results] == [[packed], [packed], [packed, packed]]


def test_nodes_of_functions_are_known_and_emptied():
    y = Double.apply(leaf())
    assert port.is_of_function(y.grad_fn)
    assert not port.is_of_function(leaf().exp().grad_fn)
    (other := leaf()).register_hook(lambda _: port.clear_saved(y.grad_fn))
    other.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_hooks_on_gradients_are_found():
    x = leaf()
    assert not port.grad_hooks(x)
    assert port.hooks_after_accumulation(x) == ()
    x.register_hook(hook := lambda grad: None)
    x.register_post_accumulate_grad_hook(after := lambda parameter: None)
    assert [*port.grad_hooks(x).values()] == [hook]
    assert port.hooks_after_accumulation(x) == (after,)


def test_the_running_node_and_pass_are_known():
    y = Double.apply(leaf())
    assert port.running_task() == -1
    y.sum().backward()
    ctx, node, task = Double.seen
    assert node is ctx is y.grad_fn
    assert task >= 0


def test_a_backward_pass_runs_in_the_engine_that_is_put_in_place():
    class Engine:
        passes = 0

        def run_backward(self, *_: object, **__: object) -> tuple[()]:
            self.passes += 1
            return ()

    engine, own = Engine(), port.engine()
    with port.running_backward_by(engine, lambda: 7):
        leaf().sum().backward()
        assert port.engine() is engine
        assert torch._C._current_graph_task_id() == 7
        assert port.running_task() == -1  # of torch's own engine
    assert (engine.passes, port.engine()) == (1, own)


def test_transforms_and_tangents_are_known():
    found = []
    torch.func.grad(lambda x: found.append(port.is_transformed(x)) or x.sum())(torch.ones(2))
    assert (found, port.is_transformed(torch.ones(2)), port.has_tangents()) == ([True], False, False)
    with torch.autograd.forward_ad.dual_level():
        assert port.has_tangents()


def test_a_transform_that_is_over_is_known():
    inside, found = [], []
    torch.func.vjp(lambda x: inside.append(x) or found.append(port.has_ended(x)) or x.sum(), torch.ones(2))
    assert (found, port.has_ended(inside[0]), port.has_ended(torch.ones(2))) == ([False], True, False)


def test_a_callback_runs_after_the_backward_pass():
    x, order = leaf(), []
    y = x.exp()
    y.register_hook(lambda _: port.after_backward(lambda: order.append("after")))
    x.register_hook(lambda _: order.append("inside"))
    y.sum().backward()
    assert order == ["inside", "after"]


# -- hooks on saved tensors

PAIR = (lambda tensor: tensor), (lambda tensor: tensor)


def test_hooks_on_saved_tensors_are_found_put_on_and_taken_off():
    push, pop = port.putting_of_saved_hooks()
    assert port.saved_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(*PAIR):
        assert port.saved_hooks() == PAIR
        push(*PAIR[::-1])
        assert port.saved_hooks() == PAIR[::-1]
        pop()
        assert port.saved_hooks() == PAIR
    assert port.saved_hooks() is None


def test_hooks_on_saved_tensors_can_be_forbidden():
    disable, enable = port.forbidding_of_saved_hooks()
    disable("not here")
    try:
        with pytest.raises(RuntimeError, match="not here"):
            torch.autograd.graph.saved_tensors_hooks(*PAIR).__enter__()
    finally:
        enable()
    with torch.autograd.graph.saved_tensors_hooks(*PAIR):
        pass


def test_others_are_asked_where_hooks_are_put_on_or_forbidden():
    asked = []
    put_by = port.saved_hooks_put_by(lambda *pair: asked.append(pair), lambda: asked.append("pop"))
    with put_by, torch.autograd.graph.saved_tensors_hooks(*PAIR):
        pass
    forbidden_by = port.saved_hooks_forbidden_by(lambda *said: asked.append(said[0]), lambda: asked.append("enable"))
    with forbidden_by, torch.autograd.graph.disable_saved_tensors_hooks("no"):
        pass
    assert asked == [PAIR, "pop", "no", "enable"]


@KEEPS_INPUTS
def test_a_checkpoint_saves_its_inputs_by_a_function():
    saved = []

    def make(tensor, *, is_output):
        saved.append(tensor)
        return port.make_saved(tensor, is_output=is_output)

    x = leaf()
    with port.checkpoints_saving_by(make):
        torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False).sum().backward()
    assert saved
    assert all(each is x for each in saved)
    assert torch.allclose(x.grad, x.detach().exp())


# -- operators


def test_a_schema_tells_arguments_results_and_writes():
    schema = port.schema_of(aten.add_.Tensor)
    assert (schema.name, schema.is_mutable) == ("aten::add_", True)
    assert [(each.name, each.default_value) for each in schema.arguments[1:]] == [("other", None), ("alpha", 1)]
    assert schema.arguments[0].alias_info.is_write
    assert [result.alias_info for result in port.schema_of(aten.add.Tensor).returns] == [None]
    assert port.packet_name(aten.add.Tensor) == "aten::add"


def test_an_operator_of_operators_runs_as_on_plain_tensors():
    product = port.eager_kernel(torch.ops.higher_order.out_dtype)(
        aten.mm.default, torch.int32, *torch.eye(2)[None].char().expand(2, 2, 2)
    )
    assert product.dtype is torch.int32
    assert product.tolist() == [[1, 0], [0, 1]]


def test_an_operator_that_calls_others_is_known_and_taken_apart():
    assert port.decomposes(aten.conv2d.default, "cpu")
    assert not port.decomposes(aten.mm.default, "cpu")
    x, weight = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    with torch.inference_mode(), Called() as called:
        result = port.decomposed(aten.conv2d.default)(x, weight)
    assert torch.equal(result, nn.functional.conv2d(x, weight))
    assert "aten::convolution" in called.names
    assert "aten::conv2d" not in called.names


def test_the_kernel_of_all_devices_calls_operators():
    x, y = torch.randn(30, 2), torch.randn(40, 2)
    with torch.no_grad(), Called() as called:
        result = port.kernel_of_any_device(aten._euclidean_dist.default)(x, y)
    assert torch.allclose(result, torch.cdist(x, y), atol=1e-3)
    assert "aten::matmul" in called.names or "aten::mm" in called.names


@torch.library.custom_op("memguard_port::third", mutates_args=())
def third(x: torch.Tensor) -> torch.Tensor:
    return x / 3


def test_a_kernel_in_python_is_found():
    assert port.python_kernel(torch.ops.memguard_port.third.default, "cpu")(torch.full((1,), 6.0)) == 2
    library = torch.library.Library("memguard_port", "FRAGMENT")
    library.define("half(Tensor x) -> Tensor")
    library.impl("half", lambda x: x.clone() / 2, "CPU")
    half = torch.ops.memguard_port.half.default
    assert port.python_kernel(half, "cpu")(torch.full((1,), 6.0)) == 3
    assert port.python_kernel(aten.add.Tensor, "cpu") is None


def test_below_autograd_no_graph_is_made():
    with port.below_autograd():
        assert (leaf() * 2).grad_fn is None


def test_functions_of_torch_are_known_behind_a_users_wrapper():
    known = {
        name: getattr(home, name)
        for home, name in ((torch, "batch_norm"), (nn.functional, "scaled_dot_product_attention"))
    }
    with patched(torch, batch_norm=print), patched(nn.functional, scaled_dot_product_attention=print):
        assert {name: port.own_function(name) for name in known} == known
    assert port.own_function("no_such_function") is None


def test_modules_call_the_recurrent_functions():
    lstm, x = nn.LSTM(2, 2), torch.ones(3, 1, 2)
    with CalledFunctions() as called:
        expected = lstm(x)[0]
    assert port.recurrent_function("lstm") in called.functions
    with patched(port.recurrent_functions(), lstm=lambda *_: (expected + 1, expected, expected)):
        assert torch.equal(lstm(x)[0], expected + 1)
    assert len({*map(port.recurrent_function, port.RECURRENT)}) == 4


def test_the_order_of_attention_is_what_a_user_set():
    order = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(order, set_priority=True):
        assert port.attention_order()[:2] == [each.value for each in order]
    assert SDPBackend.MATH.value in port.attention_order()


def test_flexible_attention_has_its_results_and_its_formula():
    q = torch.ones(1, 2, 16, 8)
    no_blocks = create_block_mask(lambda _, __, query, key: query >= key, None, None, 16, 16, "cpu")
    (results, formula), _ = port.flexible_attention().values()
    given = (q, q, q, lambda score, *_: score, no_blocks.as_tuple(), 1.0, {})
    assert [each.shape for each in results(*given)] == [each.shape for each in formula(*given)]


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_a_processor_that_multiplies_bfloat16_says_so():
    assert port.multiplies_bfloat16() == ("avx512_bf16" in Path("/proc/cpuinfo").read_text())


# -- fake tensors


class Marked(torch.Tensor):
    pass


def test_a_subclass_shares_the_memory_and_can_be_made_otherwise():
    x, made = torch.ones(2), []
    with port.subclasses_made_by(lambda own: lambda kind, *rest: made.append(kind) or own(kind, *rest)):
        shared = [nn.Parameter(x), torch.Tensor._make_subclass(Marked, x)]
    assert made == [*map(type, shared)] == [nn.Parameter, Marked]
    assert {each.data_ptr() for each in shared} == {x.data_ptr()}


@pytest.mark.parametrize("reads_addresses", [False, True])
def test_a_fake_tensor_without_attributes_refuses_its_address(reads_addresses):
    mode = port.FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = reads_addresses
    meta = torch.empty(2, 3, device="meta")
    made, device = port.without_address(mode, meta, torch.device("cpu")), torch.device("cpu")
    made.__dict__.update(vars(port.FakeTensor(mode, meta, device)))
    assert (type(made), made.device, tuple(made.shape)) == (port.FakeTensor, device, (2, 3))
    with pytest.raises(RuntimeError) if not reads_addresses else torch.no_grad():
        assert (made + 1).untyped_storage().data_ptr() == 0


def test_libraries_can_be_shown_another_class():
    with port.fakes_known_as(Marked):
        assert importlib.import_module("torch._subclasses").FakeTensor is Marked
    assert importlib.import_module("torch._subclasses").FakeTensor is port.FakeTensor


def test_the_foreach_way_is_taken_on_fake_tensors():
    def called() -> list[str]:
        with port.FakeTensorMode(), Called() as seen:
            parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
            for each in parameters:
                each.grad = torch.ones(2)
            nn.utils.clip_grad_norm_(parameters, 1.0)
        return seen.names

    assert "aten::_foreach_norm" not in called()
    with port.foreach_on_fakes():
        assert "aten::_foreach_norm" in called()


def test_adafactor_compares_by_what_is_given():
    compared, x = [], leaf()
    x.grad = torch.ones(2)
    with port.adafactor_with(lambda *pair: compared.append(pair) or max(pair)):
        torch.optim.Adafactor([x], foreach=False).step()
    assert compared


def test_a_truncated_draw_can_be_made_otherwise():
    drawn = []

    def noting(own):
        return lambda tensor, *rest, **kwargs: drawn.append(tuple(tensor.shape)) or own(tensor, *rest, **kwargs)

    with port.truncated_draw_by(noting):
        x = nn.init.trunc_normal_(torch.empty(100), std=5.0)
    assert drawn == [(100,)]
    assert x.abs().max() <= 2


def test_fake_tensors_of_a_gpu_do_not_initialize_it():
    before = torch.cuda.is_initialized()
    with port.gpus_not_initialized():
        fake = port.FakeTensor(port.FakeTensorMode(), torch.empty(2, device="meta"), torch.device("cuda:0"))
    assert (fake.device.type, torch.cuda.is_initialized()) == ("cuda", before)


def test_an_operator_without_a_fake_kernel_can_be_run_otherwise():
    asked = []

    def noting(own):
        return lambda mode, func, *rest: asked.append(func.name()) or own(mode, func, *rest)

    with port.real_kernels_run_by(noting), port.FakeTensorMode():
        x, target = torch.randn(2, 3, requires_grad=True), torch.zeros(2, dtype=torch.long)
        nn.functional.multi_margin_loss(x, target).backward()
    assert asked == ["aten::multi_margin_loss_backward"]


def test_libraries_find_the_function_that_asks_for_a_stream():
    with port.raw_streams_added():
        assert callable(torch._C._cuda_getCurrentRawStream)


def test_a_gpu_is_asked_nothing():
    from torch.accelerator import current_device_index, get_memory_info
    from torch.cuda import current_device, memory_stats, synchronize  # the answers reach these names, too

    with port.gpu_answers(lambda *_: (3, 4)), port.gpu_initialized_by(nothing):
        assert current_device() == current_device_index() == 0
        assert memory_stats()["allocated_bytes.all.peak"] == 0
        assert get_memory_info() == (3, 4)
        synchronize()


# -- modules


def test_a_modules_own_tensors_can_be_replaced():
    module = nn.BatchNorm1d(2)
    port.parameters_of(module)["weight"] = weight = nn.Parameter(torch.zeros(2))
    port.buffers_of(module)["running_mean"] = mean = torch.ones(2)
    assert module.weight is weight
    assert module.running_mean is mean
    assert isinstance(module, port.AnyBatchNorm)


def test_hooks_on_what_a_module_saves_are_known():
    plain, before, after = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    before.register_state_dict_pre_hook(lambda *_: None)
    after.register_state_dict_post_hook(lambda *_: None)
    assert [*map(port.has_state_dict_hooks, (plain, before, after))] == [False, True, True]


def test_tensors_of_modules_are_moved_by_one_function():
    module, moved = nn.Sequential(nn.Linear(1, 1)), []

    def noting(own):
        return lambda module, function, recurse=True: moved.append(type(module)) or own(module, function, recurse)

    with port.applied_by(noting):
        port.apply_to(module, torch.Tensor.double)
    assert moved == [nn.Sequential, nn.Linear]
    assert {each.dtype for each in module.parameters()} == {torch.float64}
    with port.applied_by(noting):
        module.float()
    assert moved == [nn.Sequential, nn.Linear] * 2


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_what_was_compiled_and_by_what_is_found():
    compiled = torch.compile(plus_one, backend="eager")
    assert port.as_written(compiled) is plus_one
    assert port.as_written(plus_one) is plus_one
    assert port.as_written(port.compiler_of(compiled)(leaf)) is leaf
    assert port.compiler_of(plus_one) is None
    module = nn.Linear(1, 1)
    assert port.compiler_of_module(module) is None
    assert port.compiler_of_module(torch.compile(module, backend="eager")) is not None


def test_the_compiled_call_of_a_module_is_copied():
    module = nn.Linear(1, 1)
    module.compile(backend="eager")
    copied, calls = copy.deepcopy(module), []

    def like(function, other):
        assert inspect.unwrap(other) == module._call_impl
        return lambda x: calls.append(x) or function(x)

    port.copy_compiled_call(module, copied, like)
    assert torch.equal(copied(torch.ones(1)), module(torch.ones(1)))
    assert len(calls) == 1


def test_calls_of_compiled_code_are_told():
    told = []
    with port.telling_of_compiled_calls(lambda: told.append(1)), torch.compiler.set_stance("force_eager"):
        plus_one(torch.ones(1))
        assert not told
        torch.compile(plus_one, backend="eager")(torch.ones(1))
    assert told


# -- gradients across ranks and scales


@pytest.mark.skipif(not torch.distributed.is_available(), reason="built without torch.distributed")
def test_gradients_are_sorted_into_buckets_by_their_bytes():
    tensors = [torch.ones(256) for _ in range(5)]  # 1 KiB each
    assert port.ddp_buckets(tensors, [1 << 10, 2 << 10]) == [[0], [1, 2], [3, 4]]


def test_a_scaler_steps_whether_or_not_a_gradient_overflowed():
    x = leaf()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([x], lr=1.0)
    scaler.scale(x.sum()).backward()
    x.grad.fill_(torch.inf)
    port.steps_unscaled(scaler)
    scaler.step(optimizer)
    assert x.isinf().all()


def test_all_nodes_can_be_said_to_run():
    with port.nodes_all_run():
        assert torch._C._will_engine_execute_node(None)


# -- profilers and allocators


@contextmanager
def profiling() -> Iterator[None]:
    with torch.autograd.profiler.profile():
        yield


def test_a_running_profiler_is_known():
    assert not port.is_profiling()
    with profiling():
        assert port.is_profiling()
    assert not port.is_profiling()


@pytest.mark.parametrize("operators", [True, False])
def test_blocks_are_counted_in_order(operators):
    port.count_blocks(operators=operators)
    block = torch.empty(1 << 20, dtype=torch.uint8)
    del block
    counted = port.counted_blocks(operators=operators)
    assert [each for each in counted if abs(each) >= 1 << 20] == [1 << 20, -(1 << 20)]
    assert not port.is_profiling()


def test_a_profiler_begins_by_one_of_the_functions():
    begun, homes = [], port.profilers_begin_by()
    for home, name in homes:
        assert callable(getattr(home, name))
    (home, name), *_ = homes
    own = getattr(home, name)
    with patched(home, **{name: lambda *given, **named: begun.append(name) or own(*given, **named)}), profiling():
        pass
    assert begun


def test_without_a_gpu_there_is_no_history_and_the_context_is_taken_for_granted():
    if torch.version.cuda:
        pytest.skip("such a build asks the driver")
    assert not port.is_recording()
    assert port.has_primary_context(0)


@WITH_CUDA
@pytest.mark.gpu
def test_the_history_of_the_allocator_is_recorded_and_written(tmp_path):
    device = torch.device("cuda", 0)
    block = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    assert port.has_primary_context(0)
    port.record_history(device)
    try:
        assert port.is_recording()
        del block
        assert any(port.allocator_state(device)["device_traces"][0])
        port.write_allocator_state(str(tmp_path / "state"))
    finally:
        port.record_history(device, None)
    assert not port.is_recording()
    assert (tmp_path / "state").stat().st_size


@pytest.mark.skipif(torch.version.cuda is not None, reason="a build with CUDA has its own guard")
def test_torch_can_be_told_to_count_devices_again():
    port.count_devices_again()
    assert not torch.cuda.is_available()


def test_each_function_has_a_test():
    text = Path(__file__).read_text()
    named = [each.__name__ for each in vars(port).values() if getattr(each, "__module__", "") == port.__name__]
    assert [name for name in named if not name.startswith("_") and f"port.{name}" not in text] == []
