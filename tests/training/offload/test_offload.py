"""A step whose saved tensors are elsewhere is the same step: each test is a way in which it once was another one."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_memguard import estimate, offload_activations
from lightning_memguard.training.offload.engine import Offload
from lightning_memguard.training.offload.tiers import File

WAYS = [{"tier": "file"}, {"tier": "host"}, {"keep_bytes": 3000}, {"keep_bytes": 1 << 40}]
NOWHERE = nn.Module()


def depth() -> int:
    """How many pairs of hooks are on."""
    autograd, found = torch._C._autograd, []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(top)
        autograd._pop_saved_tensors_default_hooks()
    for each in reversed(found):
        autograd._push_saved_tensors_default_hooks(*each)
    return len(found)


@pytest.fixture(autouse=True)
def no_hook_is_left():
    disable = torch._C._autograd._saved_tensors_hooks_disable
    yield
    assert depth() == 0
    assert torch._C._autograd._saved_tensors_hooks_disable is disable


def outcome(step, hooks):
    """What a step returns, or the error that it raises."""
    torch.manual_seed(0)
    try:
        return step(hooks)
    except Exception as error:  # noqa: BLE001 - it is compared
        return f"{type(error).__name__}: {error}"


def assert_same(step, **how):
    """The step returns the same tensors, or raises the same error."""
    plain = outcome(step, contextlib.nullcontext())
    for each in [how] if how else WAYS:
        found = outcome(step, Offload(NOWHERE, **each))
        if isinstance(plain, str) or isinstance(found, str):
            assert found == plain, each
        else:
            assert all(
                a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(plain, found, strict=True)
            )
    return plain


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.3)
        self.rnn, self.qkv, self.head = nn.LSTM(64, 16, batch_first=True), nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x):
        h = self.rnn(F.relu_(self.norm(self.conv(x))).flatten(2))[0]
        q, k, v = self.qkv(h).view(*h.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.drop(checkpoint(torch.tanh, h, use_reentrant=False)).mean(1))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_training_is_the_same_to_the_bit(way, dtype):
    first = Net().to(dtype)
    x, y = torch.randn(16, 3, 8, 8, dtype=dtype), torch.randint(0, 5, (16,))

    def train(module, hooks):
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for index in range(3):
            torch.manual_seed(index)
            with hooks:
                z = module(x)
                loss = F.cross_entropy(z, y) + z.std(0).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(module.state_dict().values())

    plain, other = copy.deepcopy(first), copy.deepcopy(first)
    offload = Offload(other, **way)
    assert all(map(torch.equal, train(plain, contextlib.nullcontext()), train(other, offload)))
    assert (offload.refused, offload.trouble) == ("", "")
    assert offload.moved_bytes or way["keep_bytes"] == 1 << 40
    assert offload.kept_bytes <= offload.keep_bytes


# -- layouts


class Sees(torch.autograd.Function):
    """Notes how a saved view looks in the backward pass."""

    seen: list = []  # noqa: RUF012 - of one test

    @staticmethod
    def forward(ctx, x, view):
        ctx.save_for_backward(view)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        (view,) = ctx.saved_tensors
        where = view.storage_offset() * view.element_size() % 512
        layout = view.shape, view.stride(), where, view.dtype, view.is_conj(), view.is_neg()
        Sees.seen.append((layout, view.resolve_conj().resolve_neg().clone()))
        return grad, None


VIEWS = {
    "transposed": lambda h: h.t(),
    "every second": lambda h: h[:, ::2],
    "of qkv": lambda h: h.view(64, 3, 4, 16).unbind(1)[1].transpose(1, 2),
    "expanded": lambda h: h[:1].expand(64, -1),
    "windows": lambda h: h.view(-1).unfold(0, 64, 3),
    "one row": lambda h: h[17],
    "few columns": lambda h: h[:, 5:9],
    "one column": lambda h: h[:, 5],
    "few windows": lambda h: h.view(-1)[100:].unfold(0, 8, 3)[:4],
    "channels last": lambda h: h.view(4, 3, 16, 64).to(memory_format=torch.channels_last),
    "another dtype": lambda h: h.view(torch.int32)[3],
    "conjugate": lambda h: torch.view_as_complex(h.view(64, 96, 2)).conj()[3:50],
    "negative": lambda h: torch.view_as_complex(h.view(64, 96, 2)).conj().imag,
    "number": lambda h: h[3, 3],
    "empty": lambda h: h[:0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_strides_alignment_and_bits_come_back(view):
    def step(hooks):
        Sees.seen.clear()
        x = torch.randn(64, requires_grad=True)
        with hooks:
            loss = Sees.apply(x, view(torch.randn(64, 192))).sum()  # type: ignore[no-untyped-call]
        gc.collect()
        loss.backward()
        layouts.append(Sees.seen[0][0])
        return [Sees.seen[0][1]]

    layouts = []
    assert_same(step)
    assert len(set(map(str, layouts))) == 1


def moved(make, *saved, keep_bytes=0):
    """Bytes moved when a step saves these views of a tensor."""
    w = torch.ones(1, requires_grad=True)
    with Offload(NOWHERE, keep_bytes) as offload:
        whole = make()
        _ = [(w * view(whole)).sum() for view in saved]
    return offload.moved_bytes


def test_a_storage_is_copied_once_and_a_small_view_of_it_alone():
    make, whole = (lambda: torch.randn(256, 64)), 256 * 64 * 4
    assert moved(make, lambda t: t, lambda t: t.t(), lambda t: t[3], lambda t: t.view(-1)) == whole
    assert moved(make, lambda t: t[3]) == 64 * 4
    assert moved(make, lambda t: t[:, 2:4]) == 256 * 2 * 4
    assert moved(lambda: torch.randn(64), lambda t: t.expand(1000, 64)) == 64 * 4
    z = torch.view_as_complex(torch.randn(64, 2))
    assert moved(lambda: z, lambda t: t.abs(), lambda t: t.conj().abs()) <= 64 * 8


def test_what_was_written_between_is_another_copy():
    assert moved(lambda: torch.randn(64), lambda t: t, lambda t: t.mul_(2).data) == 2 * 64 * 4

    def refilled(hooks):  # a workspace whose writes autograd does not count
        w, workspace, grads = torch.ones(64, requires_grad=True), torch.zeros(64), []
        with hooks:
            for value in range(3):
                workspace.data.fill_(value)
                grads += torch.autograd.grad((w * workspace).sum(), w)
        return grads

    assert_same(refilled)


def test_views_that_are_read_together_are_brought_back_once():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *views):
            ctx.save_for_backward(*views)
            return sum(each.sum() for each in views)

        @staticmethod
        def backward(ctx, grad):
            storages.update(each.untyped_storage().data_ptr() for each in ctx.saved_tensors)
            return tuple(grad * each for each in ctx.saved_tensors)

    storages = set()
    w = torch.randn(64, 192, requires_grad=True)
    with Offload(NOWHERE):
        loss = Reads.apply(*(w * 1).view(64, 3, 64).unbind(1))  # type: ignore[no-untyped-call]
    loss.backward()
    assert len(storages) == 1


# -- versions


def written(hooks, at=0):
    w = torch.randn(64, requires_grad=True)
    with hooks:
        x = w * 2
        y = x.sin() if at == 0 else x.exp() if at == 1 else x[3:40].sigmoid()
        (x if at == 0 else y).add_(1)
        loss = y.sum()
    loss.backward()
    return [w.grad]


class Overwrites(torch.autograd.Function):
    """Its backward pass uses what was saved as memory, as fused kernels do."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0].mul_(grad * 2).clone()


def overwritten(hooks):
    w = torch.randn(64, requires_grad=True)
    with hooks:
        y = w.exp()
        loss = (y * y).sum()
        loss = loss + Overwrites.apply(y)  # type: ignore[no-untyped-call]
    del y
    loss.backward(retain_graph=True)
    loss.backward()
    return [w.grad]


def stepped(hooks):
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with hooks:
        z = module(torch.randn(4, 16))
        first, second = z.square().mean(), z.mean()
    first.backward(retain_graph=True)
    optimizer.step()
    second.backward()
    return []


PROGRAMS = {
    "input": written,
    "output": lambda hooks: written(hooks, 1),
    "output of a view": lambda hooks: written(hooks, 2),
    "in the backward pass": overwritten,
    "optimizer": stepped,
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_a_saved_tensor_that_is_written_to_raises_in_autograds_words(program):
    assert "has been modified by an inplace operation" in assert_same(program)


def test_the_words_know_of_anomaly_mode_and_of_half_precision():
    def step(hooks):
        w = torch.randn(8, requires_grad=True)
        with hooks:
            y = w.bfloat16().exp()
            y.add_(1)
        y.sum().backward()

    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Error detected in"):
        assert "CPUBFloat16Type [8]" in assert_same(step)


# -- what stays


def test_keep_bytes_is_never_exceeded_and_is_given_back():
    offload = Offload(NOWHERE, 1 << 16)
    small, large = torch.randn(256, requires_grad=True), torch.randn(1 << 18, requires_grad=True)
    with offload:
        y = small * 1
        for _ in range(80):  # of 1 KiB each, of which 64 stay
            y = y.sin()
        assert (offload.kept_bytes, offload.moved_bytes) == (1 << 16, 16 << 10)
        y.sum().backward()
        del y
        before, y = offload.moved_bytes, large * 1
        for _ in range(10):  # at addresses of those that stayed
            y = y.sin()
    assert offload.moved_bytes - before == 10 << 20
    with offload:  # all of the first graph are gone
        small.sin().sum().backward()
        assert offload.kept_bytes <= 1 << 16


def test_parameters_buffers_their_views_and_cast_weights_stay():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64)
            self.register_buffer("mask", torch.randn(64, 64))
            self.other = [nn.Parameter(torch.randn(64, 64))]  # registered nowhere, as FSDP's gathered ones

        def forward(self, x):
            x = self.linear(x) @ self.linear.weight.t()
            return x @ self.mask.t() @ self.other[0].view(64, 64).t() @ self.linear.weight.detach()

    module = Mixed()
    x = torch.randn(4, 64)
    with Offload(module) as offload:
        loss = module(x).sum()
    assert 0 < offload.moved_bytes <= 6 * 4 * 64 * 4  # activations
    loss.backward()
    layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    with torch.autocast("cpu", torch.bfloat16), Offload(layers) as offload:
        loss = layers(x).float().sum()
    assert 0 < offload.moved_bytes <= 3 * 4 * 64 * 2
    loss.backward()


def kinds():
    from torch.testing._internal.two_tensor import TwoTensor

    return {
        "sparse": lambda x: torch.diag(x).to_sparse(),
        "csr": lambda x: torch.diag(x).to_sparse_csr(),
        "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "mkldnn": lambda x: x.view(8, 8).to_mkldnn(),
        "nested": lambda x: torch.nested.nested_tensor([x[:3], x[3:9]], layout=torch.jagged),
        "subclass": lambda x: TwoTensor(x.clone(), x.clone() * 3),
        "meta": lambda x: x.to("meta"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["sparse", "csr", "quantized", "mkldnn", "nested", "subclass", "meta"])
def test_only_plain_strided_tensors_move(kind):
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(kinds()[kind](x))
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            assert type(ctx.saved_tensors[0]) is type(kinds()[kind](torch.randn(64)))
            return grad

    x = torch.randn(64, requires_grad=True)
    with Offload(NOWHERE) as offload:
        loss = Saves.apply(x).sum()  # type: ignore[no-untyped-call]
    assert offload.moved_bytes == 0
    loss.backward()


@pytest.mark.parametrize("name", ["main_grad", "ema"])
def test_a_parameter_that_carries_tensors_is_refused(name):
    module = nn.Linear(4, 4)
    offload = offload_activations(module)
    assert offload.refused == ""
    setattr(module.weight, name, torch.zeros(4, 4))
    with offload:
        assert depth() == 0
    assert name in offload.refused


# -- nothing leaks


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_forward_pass_without_a_backward_pass_leaves_nothing(way):
    w, gone = torch.randn(1 << 12, requires_grad=True), []
    offload = Offload(NOWHERE, **way)
    gc.disable()
    try:
        for _ in range(20):
            with offload:
                y = (w * 1).exp().sigmoid().tanh().softmax(0)
            gone.append(weakref.ref(y.untyped_storage()))
            del y
        assert not [each for each in gone if each() is not None]
    finally:
        gc.enable()
    packer = offload._packer
    packer._forget()
    assert (packer.kept_bytes, packer.kept, packer.copies) == (0, {}, {})
    for file in packer.files.values():
        file._space.take(1)
        assert file._space.end <= 4096 + 6 * (4 << 12)


def test_a_graph_does_not_hold_the_module():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with offload_activations(module):
        loss = module(torch.randn(4, 8)).sum()
    there = weakref.ref(module)
    module.last_loss = loss
    del module
    gc.collect()
    assert there() is None
    loss.backward()


def test_60_steps_grow_nothing():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    module = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU()) for _ in range(4)])
    constant, offload, sizes, ends = torch.randn(512, 256), offload_activations(module), [], set()
    for index in range(60):
        with offload:
            loss = (module(constant) * constant).std(0).mean()
        if index % 10:  # each tenth is abandoned
            loss.backward()
        del loss
        (file,) = offload._packer.files.values()
        file._space.freed.append((file._space.take(1), 1))
        sizes.append(resident())
        ends.add(file._space.end)
    assert sizes[-1] - sizes[20] < 16 << 20  # a leaked activation a step would be 20 MiB
    assert max(ends) <= 40 << 20


def test_the_collector_may_run_inside_pack():
    class Node:
        pass

    w = torch.randn(8, requires_grad=True)
    with Offload(NOWHERE):
        for _ in range(50):
            node = Node()
            node.me, node.kept = node, (w * 1).sin().sin()
            del node
            w.sin()
            gc.collect(0)


# -- several backward passes, threads, checkpoints


def twice(hooks):
    w = torch.randn(64, requires_grad=True)
    with hooks:
        loss = w.sin().exp().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [w.grad]


def penalty(hooks):
    w = torch.randn(64, requires_grad=True)
    with hooks:
        loss = w.sin().exp().sum()
        (grad,) = torch.autograd.grad(loss, w, create_graph=True)
        (loss + grad.square().sum()).backward()
    return [w.grad]


def late(hooks):
    w, losses = torch.randn(64, requires_grad=True), []
    for scale in (1, 2):
        with hooks:
            losses.append((w * scale).sin().exp().sum())
    for loss in losses:
        loss.backward()
    return [w.grad]


def checkpointed(hooks):
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    with hooks:
        loss = checkpoint(module, checkpoint(module, x, use_reentrant=True), use_reentrant=False).sum()
        loss.backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def in_another_thread(hooks):
    w = torch.randn(64, requires_grad=True)
    with hooks:
        loss = w.sin().exp().sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [w.grad]


def third_time(hooks):
    w = torch.randn(64, requires_grad=True)
    with hooks:
        loss = w.sin().sum()
    loss.backward()
    loss.backward()


@pytest.mark.parametrize("step", [twice, penalty, late, checkpointed, in_another_thread, third_time])
def test_backward_passes_are_the_same(step):
    assert_same(step)


# -- other hooks, and those who forbid them


def test_hooks_of_the_user_go_first():
    calls = []

    def packed(tensor):
        calls.append(tensor)
        return tensor.detach()

    w, offload = torch.randn(8, requires_grad=True), Offload(NOWHERE)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t), offload:
        w.sin()
    assert (len(calls), offload.moved_bytes) == (1, 0)
    assert offload.refused == "other saved-tensor hooks are on already, which would no longer see any tensor"
    with offload, torch.autograd.graph.saved_tensors_hooks(packed, lambda t: t):
        w.sin().sum().backward()
    assert (len(calls), offload.moved_bytes) == (2, 0)
    with offload, offload:  # it is entered once
        w.mul(2).sin().sum().backward()
    assert offload.moved_bytes == 32


def test_hooks_that_the_user_leaves_open_stay_open():
    theirs = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
    with Offload(NOWHERE):
        theirs.__enter__()
    assert depth() == 1
    theirs.__exit__()


def test_the_users_own_error_is_raised():
    with pytest.raises(ZeroDivisionError), Offload(NOWHERE):
        1 / 0  # noqa: B018 - it raises


TRANSFORMS = {
    "grad": lambda w: torch.func.grad(lambda x: x.sin().sum())(w).sum() + w.exp().sum(),
    "jacrev": lambda w: torch.func.jacrev(lambda x: x.sin()[:3])(w).sum() * w.sum(),
    "jvp": lambda w: torch.func.jvp(torch.sin, (w,), (torch.ones(64),))[1].sum(),
    "vmap": lambda w: torch.vmap(lambda x: x.sin() * x)(w).sum(),
    "nested": lambda w: torch.func.grad(lambda x: torch.func.grad(lambda y: (y**3).sum())(x).sum())(w).sum(),
    "double": lambda w: torch.autograd.functional.hvp(lambda x: x.sin().sum(), w, torch.ones(64), True)[1].sum(),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms_of_torch_func_run(transform):
    def step(hooks):
        w = torch.randn(64, requires_grad=True)
        with hooks:
            loss = transform(w) + w.tanh().sum()
        loss.backward()
        return [w.grad]

    assert_same(step)


def test_those_who_forbid_hooks_have_none():
    w, offload = torch.randn(8, requires_grad=True), Offload(NOWHERE)
    forbidden = torch.autograd.graph.disable_saved_tensors_hooks("none here")
    with offload:
        with forbidden:
            assert depth() == 0
            w.sin()
            with pytest.raises(RuntimeError, match="none here"), torch.autograd.graph.save_on_cpu():
                pass
        assert offload.moved_bytes == 0
        (w * 1).sin().sum().backward()
        assert offload.moved_bytes == 32
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"), offload:
        assert "none here" in offload.refused
    with offload:  # it ends while they are forbidden
        forbidden = torch.autograd.graph.disable_saved_tensors_hooks("none here")
        forbidden.__enter__()
    forbidden.__exit__(None, None, None)


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_compiled_module_is_the_same(whole):
    from torch._dynamo import compiled_autograd

    torch._dynamo.reset()
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)])
    other = copy.deepcopy(plain)
    if whole:
        run = torch.compile(other, backend="aot_eager")
    else:
        run = nn.Sequential(*[torch.compile(child, backend="aot_eager") for child in other])
    x, offload = torch.randn(4, 8), Offload(other)
    for switched_on in (False, True, False):
        plain(x).square().sum().backward()
        with offload if switched_on else contextlib.nullcontext():
            loss = run(x).square().sum()
        with compiled_autograd._enable(torch.compile(backend="eager")) if switched_on else contextlib.nullcontext():
            loss.backward()
    assert offload.moved_bytes
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), other.parameters(), strict=True))


# -- trouble


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError()])
def test_what_cannot_be_moved_stays(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(File, "write", fail)
    w, offload = torch.randn(64, requires_grad=True), Offload(NOWHERE)
    with offload:
        loss = (w * 1).sin().sum()
    loss.backward()
    assert torch.equal(w.grad, w.detach().cos())
    assert (offload.moved_bytes, offload.kept_bytes) == (0, 256)
    assert offload.trouble == f"{type(error).__name__}: {error}"


def test_a_disk_that_cannot_be_read_is_an_error_with_a_reason():
    w, offload = torch.randn(64, requires_grad=True), Offload(NOWHERE)
    with offload:
        loss = (w * 1).sin().sum()
    (file,) = offload._packer.files.values()
    file._file.truncate(100)
    with pytest.raises(RuntimeError, match="cannot read 256 bytes of saved activations back"):
        loss.backward()


def test_it_can_be_closed_and_used_again():
    w, offload = torch.randn(64, requires_grad=True), Offload(NOWHERE)
    for _ in range(2):
        with offload:
            loss = (w * 1).sin().sum()
        offload.close()
        loss.backward()
    assert not offload._packer.files


# -- predicted


def test_the_predicted_peak_falls_as_the_capture_runs_the_same_code():
    module = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)])
    batch = torch.empty(1 << 18, 64, device="meta")

    def peak(device, keep_bytes):
        def step(module, x):
            with offload_activations(module, keep_bytes) if keep_bytes is not None else contextlib.nullcontext():
                return module(x).square().mean()

        return estimate(module, batch, step=step, device=device).peak_allocated_bytes

    one = 64 << 20
    for device in ("cpu", "NVIDIA H100"):
        whole, kept, least = (peak(device, keep_bytes) for keep_bytes in (None, 4 * one, 0))
        assert whole - least > 10 * one
        assert 3 * one <= kept - least <= 4 * one


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
        self.offload = offload_activations(self, 123)

    def forward(self, x):
        with self.offload:
            return self.layers(x).square().mean()


def test_a_module_may_hold_it_and_be_copied():
    module, batch = Holds(), torch.randn(4096, 64)
    found = copy.deepcopy(module)
    assert found.offload.module is found
    assert (found.offload.keep_bytes, found.offload.refused) == (123, "")
    found(batch).backward()
    assert found.offload.moved_bytes > 8 << 20
    assert module.offload.moved_bytes == 0
    estimated = estimate(module, batch, step=lambda module, x: module(x), device="cpu")
    assert estimated.peak_allocated_bytes < 7 << 20


def test_a_capture_that_runs_a_copy_writes_no_file():
    module = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])

    def peak(keep_bytes):
        def step(module, x):
            rows = int(x.sum().item() * 0) + 4096  # a value, which fake tensors lack
            with offload_activations(module, keep_bytes) as offload:
                loss = module(x[:rows]).square().mean()
            assert offload.refused + offload.trouble == ""
            return loss

        found = estimate(module, torch.zeros(4096, 64), step=step, device="cpu")
        assert found.method == "real"
        return found.peak_allocated_bytes

    assert peak(1 << 40) - peak(0) >= 7 << 20


def test_without_a_private_name_nothing_moves(monkeypatch):
    monkeypatch.delattr(torch, "_neg_view")
    offload = Offload(NOWHERE)
    with offload:
        assert depth() == 0
    assert "torch._neg_view, which MemGuard needs to mark a tensor as negated" in offload.refused
