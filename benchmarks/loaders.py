"""Trains with worker processes in 30 configurations of loaders, /dev/shm as small as containers have it.

    python benchmarks/loaders.py [number ...]

Each is tuned and trained in a mount namespace with a /dev/shm of its own (`unshare -m`, which needs root), while
another process reads, every millisecond, what lies in it (statvfs), and every 50 ms what the workers' pages take
(smaps_rollup). Printed: the batch size, predicted and measured bytes, and whether the run ended well. Two runs in which
the batch size is not changed show what the loader itself takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_memguard.report.decision_table import new_table
from lightning_memguard.units import MIB, format_bytes

CHECKED = {"workers": 2, "shm": 64, "parameters": 2048, "epochs": 3, "count": 384, "mode": "check", "size": 16}
# number of workers, prefetch factor, persistent, kind of data, validation's workers, MiB of /dev/shm, other settings
CONFIGURATIONS: list[dict[str, Any]] = [
    {"workers": 2, "shm": 64, "mode": "check", "size": 16},
    {"workers": 2, "prefetch": 4, "shm": 600, "mode": "check", "size": 64},
    *({"workers": workers, "shm": 64} for workers in (0, 1, 2, 3, 4)),
    *({"workers": 2, "prefetch": prefetch, "shm": 64} for prefetch in (1, 3, 4, 8)),
    *({"workers": 2, "kind": kind, "shm": 128} for kind in ("list", "dict", "stack", "stream", "sized stream")),
    {"workers": 1, "prefetch": 8, "persistent": True, "shm": 64},
    {"workers": 4, "prefetch": 2, "persistent": True, "shm": 256},
    {"workers": 4, "prefetch": 8, "shm": 1024},
    {"workers": 2, "validation": 2, "shm": 64},
    {"workers": 2, "validation": 2, "shm": 128, "interval": 6},
    {"workers": 2, "validation": 2, "shm": 64, "sanity": 0},
    {"workers": 2, "validation": 1, "persistent": True, "shm": 64},
    {"workers": 2, "validation": 1, "persistent": True, "shm": 128, "interval": 12},
    {"workers": 0, "validation": 2, "shm": 64},
    {"workers": 2, "validation": 0, "shm": 64},
    {"workers": 3, "prefetch": 4, "validation": 3, "shm": 512, "validated": 2},
    {"workers": 2, "shm": 64, "pinned": True},
    {"workers": 2, "shm": 64, "kind": "dict", "persistent": True, "validation": 2},
    {"workers": 2, "shm": 1024, "features": 4096},
    {"workers": 2, "shm": 64, "strategy": "file_system"},
    *({**CHECKED, "persistent": persistent} for persistent in (False, True)),
]


def train(how: dict[str, Any]) -> None:
    """Train as configured, and print the decision."""
    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

    from lightning_memguard import MemGuard
    from shared.truth import QUIET

    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy(how.get("strategy", "file_descriptor"))
    features, width = how.get("features", 16384), how.get("parameters", 64)
    count = how.get("count", 200_000)

    class Items(Dataset[Any]):
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.full((features,), float(index % 7)), index % 2

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            info = get_worker_info()
            return (Items()[index] for index in range(count // (info.num_workers if info else 1)))

    class SizedStream(Stream):
        def __len__(self) -> int:
            return count

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, 2))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            time.sleep(0.05)  # so that the workers keep ahead
            x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
            x, y = (torch.stack(x), torch.tensor(y)) if isinstance(x, list) else (x, y)
            return nn.functional.cross_entropy(self.net(x[:, :64]), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-5)

    collate = {
        "list": lambda samples: ([x for x, _ in samples], [y for _, y in samples]),
        "dict": lambda samples: {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])},
        "stack": lambda samples: (torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])),
    }.get(how.get("kind", ""))
    data = {"stream": Stream, "sized stream": SizedStream}.get(how.get("kind", ""), Items)()

    def loader(workers: int, size: int) -> DataLoader[Any]:
        ahead = {"prefetch_factor": how.get("prefetch", 2), "persistent_workers": how.get("persistent", False)}
        pinned = how.get("pinned", False)
        settings = {"num_workers": workers, "collate_fn": collate, "pin_memory": pinned, **(ahead if workers else {})}
        return DataLoader(data, size, **settings)

    class Begun(pl.Callback):
        def on_train_start(self, *_: object) -> None:
            print("BEGUN", flush=True)

    guard = MemGuard(how.get("mode", "tune"), min_steps_per_epoch=None, budget="12GiB")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=how.get("epochs", 1),
        max_steps=-1 if "epochs" in how else 24,
        limit_val_batches=how.get("validated", 12) if "validation" in how else 0,
        val_check_interval=how.get("interval", 1.0),
        num_sanity_val_steps=how.get("sanity", 2),
        callbacks=[guard, Begun()],
        **QUIET,
    )
    validation = loader(how["validation"], how.get("validation_size", 16)) if "validation" in how else None
    trainer.fit(Module(), loader(how["workers"], how.get("size", 2)), validation)
    decision, footprint = guard.decision, guard.decision.footprint
    found = {
        "size": decision.batch_size,
        "limit": decision.limited_by,
        "shared": decision.host.shared_bytes if decision.host else 0,
        "workers": footprint.parts.get("workers", 0),
        "high": footprint.highest.device_bytes,
        "predicted": footprint.peak_device_bytes,
        "measured": guard.records[-1].measured.peak_bytes,
    }
    print("RESULT", json.dumps(found))


def rollup(pid: str) -> dict[str, int]:
    """The sums over the pages of a process, in bytes; none if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in map(str.split, lines)}


def children_of(pid: int) -> list[str]:
    """The processes that a process has started."""
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        return [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def watched(how: dict[str, Any]) -> dict[str, Any]:
    """Train in a child, and watch /dev/shm and the pages of its workers."""
    command = [sys.executable, __file__, "--train", json.dumps(how)]
    log, env = Path(f"/tmp/memguard_loaders_{os.getpid()}.log"), {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        shared = pages = reads = 0
        while child.poll() is None:
            usage = os.statvfs("/dev/shm")
            shared = max(shared, (usage.f_blocks - usage.f_bfree) * usage.f_frsize)
            reads += 1
            workers = children_of(child.pid) if reads % 50 == 0 and "BEGUN" in log.read_text() else []
            if workers and (own := rollup(str(child.pid))):  # which ends before them
                sums = sum(rollup(pid).get("Pss_Anon", 0) for pid in workers) + own.get("Pss_Anon", 0)
                pages = max(pages, sums - own.get("Anonymous", 0))
            time.sleep(0.001)
    text = log.read_text()
    log.unlink()
    found = next((json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")), {})
    return {**found, "shared_truth": shared, "pages_truth": pages, "ended": child.returncode, "text": text[-300:]}


def inside(number: int) -> None:
    """Run one configuration, in a namespace that has a /dev/shm of its size."""
    how = CONFIGURATIONS[number]
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={how['shm']}m", "tmpfs", "/dev/shm"], check=True)
    print("WATCHED", json.dumps(watched(how)))


def main() -> None:
    """Run all configurations, or those named by number."""
    if sys.argv[1:2] == ["--train"]:
        return train(json.loads(sys.argv[2]))
    if sys.argv[1:2] == ["--inside"]:
        return inside(int(sys.argv[2]))
    columns = "Loader", ">Size", "Limited by", ">Predicted shm", ">Measured", ">", ">Workers", ">Measured", "Ended"
    table = new_table("Worker processes", *columns)
    errors, broken = [], 0
    for number in map(int, sys.argv[1:] or range(len(CONFIGURATIONS))):
        command = ["unshare", "-m", sys.executable, __file__, "--inside", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("WATCHED ")), None)
        found = json.loads(line[8:]) if line else {"ended": done.stderr[-200:]}
        how = " ".join(f"{key}={value}" for key, value in CONFIGURATIONS[number].items())
        if found["ended"] or "size" not in found:
            broken += 1
            table.add_row(how, "", "", "", "", "", "", "", f"BROKEN {found}")
            continue
        truth = found["shared_truth"]
        ratio = found["shared"] / truth - 1 if truth > MIB else 0.0
        errors.append(abs(ratio))
        sizes = [found["workers"], found["pages_truth"], found["predicted"], found["high"], found["measured"]]
        workers, pages, *run = map(format_bytes, sizes)
        row = how, str(found["size"]), found["limit"], format_bytes(found["shared"]), format_bytes(truth)
        row = *row, f"{ratio:+.1%}", workers, pages
        table.add_row(*row, "well")
        print(*row, *run, flush=True)
    Console(width=180).print(table)
    near = sum(error <= 0.05 for error in errors)
    print(f"{broken} broken; /dev/shm within 5 %: {near} of {len(errors)}, worst {max(errors, default=0):.1%}")
    return None


if __name__ == "__main__":
    main()
