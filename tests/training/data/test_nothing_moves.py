"""Data that moves as it is read: a training under MemGuard sees the batches, and has the weights, of one without."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import queue
import random
import socket
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_memguard import MemGuard
from lightning_memguard.core.isolation import pool
from lightning_memguard.errors import CannotTraceError
from lightning_memguard.training.data.copies import refuse_one_shot
from lightning_memguard.training.run import choose
from tests.long import long_but
from tests.training.quiet import quiet_trainer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="without a fork, such data is not read at all")
STREAM: Iterator[int] = iter(())  # of the program at hand
EPOCHS, BATCHES, SIZE = 2, 4, 4


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        self.seen.append(batch.tolist())
        return self.layer(batch / 1000).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Samples(Dataset[torch.Tensor]):
    """Samples that a function makes."""

    def __init__(self, make: Callable[[int], Any], **held: Any) -> None:
        self.make = make
        vars(self).update(held)

    def __len__(self) -> int:
        return SIZE * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(self.make(index)))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, values: Any) -> None:
        self.values = values

    def __iter__(self) -> Iterator[torch.Tensor]:
        for value in self.values() if callable(self.values) else self.values:
            yield torch.full((4,), float(value))


class Held:
    """A plain object of the user's."""


def loader(make: Callable[[int], Any], **options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(make), SIZE, **options)


def in_a_plain_object() -> tuple[Net, Any]:
    outer, outer.inner = Held(), Held()  # type: ignore[attr-defined]
    outer.inner.parts = [itertools.count()]  # type: ignore[attr-defined]

    def make(_: int) -> int:
        return next(outer.inner.parts[0])  # type: ignore[attr-defined, no-any-return]

    return Net(), loader(make)


def in_a_loader_of_its_own() -> tuple[Net, Any]:
    values = itertools.count()

    class Epoch:  # as gluonts' IterableSlice: an epoch ends, the stream goes on
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.full((SIZE, 4), float(value)) for value in itertools.islice(values, BATCHES))

    return Net(), Epoch()


def of_a_class() -> tuple[Net, Any]:
    class Counted(Samples):
        values = itertools.count()

    return Net(), DataLoader(Counted(lambda _: next(Counted.values)), SIZE)


def of_the_file() -> tuple[Net, Any]:
    globals()["STREAM"] = itertools.count()
    return Net(), loader(lambda _: next(STREAM))


def a_generator() -> tuple[Net, Any]:
    return Net(), (torch.full((SIZE, 4), float(value)) for value in range(1000))


def lines_of_an_open_file() -> tuple[Net, Any]:
    path = Path(tempfile.mkdtemp()) / "lines"
    path.write_text("\n".join(map(str, range(1000))))
    return Net(), DataLoader(Stream(path.open()), SIZE)


def a_file_that_is_written_too() -> tuple[Net, Any]:
    file = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - it stays open
    file.write(bytes(range(200)))
    file.seek(0)
    return Net(), loader(lambda _: file.read(1)[0])


def a_database_cursor() -> tuple[Net, Any]:
    connection = sqlite3.connect(Path(tempfile.mkdtemp()) / "rows.db")
    connection.execute("CREATE TABLE rows (value)")
    connection.executemany("INSERT INTO rows VALUES (?)", [(value,) for value in range(1000)])
    connection.commit()
    rows = connection.execute("SELECT value FROM rows")
    return Net(), DataLoader(Stream(value for (value,) in rows), SIZE)


def shared_memory() -> tuple[Net, Any]:
    counter, total = multiprocessing.Value("i", 0), torch.zeros(()).share_memory_()
    array = np.memmap(Path(tempfile.mkdtemp()) / "array", np.int64, "w+", shape=(1,))

    def make(_: int) -> float:
        counter.value += 1
        total.add_(counter.value)
        array[0] += 1
        return float(total) + int(array[0])

    return Net(), loader(make)


def a_cache() -> tuple[Net, Any]:
    draw = random.Random(0)
    return Net(), loader(functools.cache(lambda _: draw.random()), shuffle=True)


def a_collate_function() -> tuple[Net, Any]:
    left = list(range(1000))
    return Net(), loader(lambda index: index, collate_fn=lambda samples: torch.stack(samples) + left.pop())


def hooks() -> tuple[Net, Any]:
    plans = [list(range(start, start + SIZE * BATCHES)) for start in range(100)]

    class Counted(Net):
        setups = 0

        def setup(self, stage: str) -> None:
            type(self).setups += 1

        def train_dataloader(self) -> Any:
            plan, setups = plans.pop(0), self.setups
            return loader(lambda index: plan[index] + 100 * setups)

    return Counted(), None


def a_queue_that_a_thread_fills() -> tuple[Net, Any]:
    waiting: queue.Queue[int] = queue.Queue(8)
    fill = threading.Thread(target=lambda: [waiting.put(value) for value in itertools.count()], daemon=True)
    fill.start()
    return Net(), loader(lambda _: waiting.get())


def a_socket() -> tuple[Net, Any]:
    mine, theirs = socket.socketpair()
    theirs.sendall(bytes(range(200)))

    def make(_: int, _open: socket.socket = theirs) -> int:
        return mine.recv(1)[0]

    return Net(), loader(make)


def a_service_of_this_machine() -> tuple[Net, Any]:
    server, values = socket.create_server(("127.0.0.1", 0)), itertools.cycle(range(250))
    address = server.getsockname()

    def serve() -> None:
        while True:
            client, _ = server.accept()
            client.sendall(bytes(next(values) for _ in range(SIZE * BATCHES)))
            client.close()

    def receive() -> Iterator[int]:
        with socket.create_connection(address) as client:
            while received := client.recv(1):
                yield received[0]

    threading.Thread(target=serve, daemon=True).start()
    return Net(), DataLoader(Stream(receive), SIZE)


def files_that_are_used_up() -> tuple[Net, Any]:
    folder = Path(tempfile.mkdtemp())
    for value in range(100):
        (folder / f"{value:03}").write_text(str(value))

    def take(_: int) -> int:
        first = min(folder.iterdir())
        value = int(first.read_text())
        first.unlink()
        return value

    return Net(), loader(take)


READ = [
    *(in_a_plain_object, in_a_loader_of_its_own, of_a_class, of_the_file, a_generator, lines_of_an_open_file),
    *(a_file_that_is_written_too, a_database_cursor, shared_memory, a_cache, a_collate_function, hooks),
    files_that_are_used_up,
]
LEFT_ALONE = [a_queue_that_a_thread_fills, a_socket, a_service_of_this_machine]


def train(make: Callable[[], tuple[Net, Any]], *guard: MemGuard) -> tuple[list[Any], list[Any]]:
    module, data = make()
    limits = {"max_epochs": EPOCHS, "limit_train_batches": BATCHES, "reload_dataloaders_every_n_epochs": 1}
    quiet_trainer(*guard, **limits).fit(module, data)
    return module.seen, module.layer.weight.tolist()


QUICK = [*READ[::2], *LEFT_ALONE[::2]]


@pytest.mark.filterwarnings("ignore:MemGuard")
@pytest.mark.parametrize("make", long_but(QUICK, [*READ, *LEFT_ALONE]))
def test_the_training_sees_every_batch(make: Callable[[], tuple[Net, Any]]) -> None:
    """If it could be read in a child, it was, and the step is predicted; else the decision says that it was not."""
    check = MemGuard("check")
    assert train(make, check) == train(make)
    assert check.decision.outcome == ("checked" if make in READ else "stepped aside")


@pytest.mark.filterwarnings("ignore:MemGuard")
@pytest.mark.parametrize("make", [in_a_plain_object, hooks, a_collate_function], ids=lambda make: make.__name__)
def test_so_does_one_that_is_tuned_to_its_own_size(make: Callable[[], tuple[Net, Any]]) -> None:
    assert train(make, MemGuard(batch_size="largest", max_batch_size=SIZE)) == train(make)


def test_what_data_keeps_as_it_is_read_is_not_kept_at_setup() -> None:
    class Kept(Samples):
        kept: list[Any] = []  # noqa: RUF012 - as the user's

        def __getitem__(self, index: int) -> torch.Tensor:
            self.kept.append(super().__getitem__(index))
            return self.kept[-1]

    class Forever:
        def __init__(self) -> None:
            self.given = itertools.cycle(DataLoader(Kept(float), SIZE))

        def __iter__(self) -> Iterator[Any]:
            return self.given

    counts = list[int]()

    class Count(pl.Callback):
        def on_train_start(self, *_: Any) -> None:
            counts.append(len(Kept.kept))

    guard = MemGuard("check")
    quiet_trainer(guard, Count(), limit_train_batches=2).fit(Net(), Forever())
    assert guard.decision.footprint is not None
    assert counts == [0]


# -- what a child that is cut off cannot read


def of_a_cache_file(folder: Path) -> Callable[[int], float]:
    def make(index: int) -> float:
        path = folder / f"{index}.npy"
        if not path.exists():
            np.save(path, float(index))
        return float(np.load(path))

    return make


@pytest.mark.filterwarnings("ignore:MemGuard")
def test_a_dataset_that_writes_a_cache_is_read_by_a_child_that_may(tmp_path: Path) -> None:
    check = MemGuard("check")
    (tmp_path / "kept").write_text("")
    train(lambda: (Net(), loader(of_a_cache_file(tmp_path))), check)
    assert check.decision.outcome == "checked"
    assert (tmp_path / "kept").exists()


@pytest.mark.filterwarnings("ignore:MemGuard")
def test_a_stream_that_does_may_come_only_once_and_is_not(tmp_path: Path) -> None:
    check, make = MemGuard("check"), of_a_cache_file(tmp_path)
    train(lambda: (Net(), DataLoader(Stream(lambda: map(make, range(100))), SIZE)), check)
    assert "may come only once" in check.decision.because


@pytest.mark.filterwarnings("ignore:MemGuard")
@pytest.mark.parametrize("holds", [False, True])
def test_data_that_no_child_can_read_is_read_here_unless_it_holds_an_iterator(holds: bool) -> None:
    own, values = os.getpid(), itertools.count() if holds else None

    def make(index: int) -> int:
        if os.getpid() != own:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return next(values) if values else index

    check = MemGuard("check")
    train(lambda: (Net(), loader(make)), check)
    assert check.decision.outcome == ("stepped aside" if holds else "checked")
    assert not values or next(values) == EPOCHS * BATCHES * SIZE


class Server(threading.Thread):
    """Gives one number after the other, when it is asked."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.given, self.is_asked, self.changed = 0, False, threading.Condition()
        self.start()

    def run(self) -> None:
        with self.changed:
            while self.changed.wait_for(lambda: self.is_asked):
                self.given, self.is_asked = self.given + 1, False
                self.changed.notify_all()

    def next(self) -> int:
        with self.changed:
            self.is_asked = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.is_asked)
            return self.given


@pytest.mark.filterwarnings("ignore:MemGuard")
@pytest.mark.parametrize("where", ["dataset", "collate", "step"])
def test_what_a_thread_gives_is_not_taken_from_the_training(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(pool, "BLOCKED_SECONDS", 0.3)
    server, check = Server(), MemGuard("check")

    class Asks(Net):
        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return super().training_step(batch + server.next(), _)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + server.next()

    data = Samples((lambda _: server.next()) if where == "dataset" else float)
    train(
        lambda: (
            Asks() if where == "step" else Net(),
            DataLoader(data, SIZE, collate_fn=collate if where == "collate" else None),
        ),
        check,
    )
    assert "such as a result of a thread" in check.decision.because
    assert server.given == EPOCHS * BATCHES * (SIZE if where == "dataset" else 1)


@pytest.mark.filterwarnings("ignore:MemGuard")
def test_data_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(choose, "LEAST_SECONDS", 0.5)
    own, check = os.getpid(), MemGuard("check", max_setup_seconds=0.5)

    def make(index: int) -> int:
        while os.getpid() != own:  # polls, and is never long asleep
            pass
        return index

    train(lambda: (Net(), loader(make)), check)
    assert "was not read: time was up (max_setup_seconds)" in check.decision.because


# -- where there is no fork


@pytest.mark.parametrize(
    "make", [in_a_plain_object, of_a_class, of_the_file, a_generator], ids=lambda make: make.__name__
)
def test_without_a_child_a_running_iterator_is_refused_wherever_it_is(make: Callable[[], tuple[Net, Any]]) -> None:
    with pytest.raises(CannotTraceError, match="can be read only once"):
        refuse_one_shot(make()[1])


def test_without_a_child_other_data_is_read(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes(100))
    with (tmp_path / "numbers").open("rb") as file:
        held = Samples(float, file=file, names=["a", "b"], draws=torch.Generator(), of=functools.partial(int))
        refuse_one_shot(DataLoader(held, SIZE, shuffle=True, persistent_workers=False))
