"""Where saved tensors go: files that are not in memory, spans that are taken again, copies in order."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import resource
import tempfile
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memguard.training.offload import tiers
from lightning_memguard.training.offload.engine import Offload
from lightning_memguard.training.offload.space import Space
from lightning_memguard.training.offload.tiers import File, Host, folder, in_memory

CPU = torch.device("cpu")


def mounts(kind: str, path: Path) -> str:
    device = path.stat().st_dev
    return f"25 1 {os.major(device)}:{os.minor(device)} / {path} rw,relatime shared:1 - {kind} none rw\n"


@pytest.mark.parametrize(("kind", "found"), [("tmpfs", True), ("ext4", False), ("overlay", False), ("ramfs", True)])
def test_a_folder_in_memory_is_known(kind, found, tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text("24 1 0:99999 / /elsewhere rw - tmpfs none rw\n" + mounts(kind, tmp_path))
    assert in_memory(tmp_path, table) is found
    assert not in_memory(tmp_path, tmp_path / "missing")


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="this system has no /dev/shm")
def test_memory_is_passed_over_for_a_disk(monkeypatch):
    assert in_memory(Path("/dev/shm"))
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert str(folder()) != "/dev/shm"


def test_without_a_disk_it_is_refused(monkeypatch):
    monkeypatch.setattr(tiers, "in_memory", lambda _: True)
    offload = Offload(torch.nn.Linear(2, 2))
    with offload:
        pass
    assert "is in memory or cannot be written to; set TMPDIR" in offload.refused


def test_a_full_disk_keeps_the_tensor():
    """`RLIMIT_FSIZE` ends a write in the middle, as a full disk does."""
    w, offload = torch.randn(20_000, requires_grad=True), Offload(torch.nn.Module())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with offload:
            loss = w.sigmoid().tanh().exp().sum()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    plain = w.sigmoid().tanh().exp().sum()
    assert torch.equal(*(torch.autograd.grad(each, w)[0] for each in (loss, plain)))
    assert "File too large" in offload.trouble
    assert (offload.moved_bytes, offload.kept_bytes) == (80_000, 160_000)


def test_spans_never_overlap_and_merge_when_all_are_given_back():
    draw, space, taken = random.Random(0), Space(), {}
    for _ in range(3000):
        if taken and draw.random() < 0.5:
            offset = draw.choice(list(taken))
            space.freed.append((offset, taken.pop(offset)))
        else:
            nbytes = draw.randint(1, 20_000)
            offset = space.take(nbytes)
            ends = sorted((start, start + size) for start, size in [*taken.items(), (offset, nbytes)])
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
            taken[offset] = nbytes
    space.freed.extend(taken.items())
    assert space.take(1) == 0
    assert space.end == 4096


def test_the_host_takes_what_it_may_and_the_file_the_rest():
    host = Host(CPU, 1 << 16, is_fake=False)
    places = [host.write(torch.zeros(1 << 13).untyped_storage(), CPU) for _ in range(3)]
    assert [each is not None for each in places] == [True, True, False]
    del places[0]
    gc.collect()
    assert host.write(torch.zeros(1 << 13).untyped_storage(), CPU) is not None  # it is used again


def test_with_fake_tensors_nothing_is_taken():
    with FakeTensorMode():
        storage = torch.empty(1 << 40, device="cuda").untyped_storage()
        device = torch.device("cuda", 0)
        assert Host(device, 1 << 50, is_fake=True).write(storage, device).nbytes == 4 << 40
        assert File(is_fake=True).write(storage, device).nbytes == 4 << 40


def test_originals_are_held_while_their_copies_may_run():
    device, gone = torch.device("cuda", 0), []
    host = Host(device, 1 << 40, is_fake=True)
    with FakeTensorMode():
        for megabytes in (1, 1, 40, 40, 100, 1):
            storage = torch.empty(megabytes << 20, dtype=torch.uint8, device=device).untyped_storage()
            place = host.write(storage, device)
            gone.append(weakref.ref(storage))
            del storage
        assert [each() is not None for each in gone] == [False, False, False, False, False, True]
        host.read(place, None)
        assert gone[-1]() is None


# -- copies of CUDA, with streams that note what they are asked for


class Stream:
    log: list[str] = []  # noqa: RUF012 - of one test

    def __init__(self, device=None, name="copies"):
        self.name = name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.log.append(f"{self.name} records")
        return "event"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def test_copies_run_on_their_own_stream_after_what_made_the_tensor(monkeypatch):
    compute = Stream(name="compute")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(tiers, "laid_over", lambda storage, *_: torch.empty(0, dtype=torch.uint8).set_(storage))
    Stream.log.clear()
    device = torch.device("cuda", 0)
    host = Host(device, None, is_fake=False)
    assert isinstance(host._link.memory(10), torch.Tensor)  # nothing can be pinned here
    content, back = torch.randn(64), torch.empty(256, dtype=torch.uint8)
    place = host.write(content.untyped_storage(), device)
    assert Stream.log == ["copies waits for compute", "copies records"]
    host.read(place, back)
    assert Stream.log[2:] == ["compute waits for event", "copies waits for compute", "compute waits for copies"]
    assert torch.equal(back.view(torch.float32), content)
