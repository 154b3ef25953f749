"""What CPU kernels allocate inside one operator, where a tracer of operators sees only the outputs.

A real training runs under the profiler and a dispatch mode at the same time. The mode leaves a marker around each
operator it sees (what any tracer at that level sees); the profiler records what was allocated inside the marker.
An operator's scratch is its peak of live bytes minus the bytes of its new outputs.

    python benchmarks/cpu_scratch.py unet                         # by operator and shapes, the largest scratch first
    python benchmarks/cpu_scratch.py unet --threads 1 --batch-size 8
"""

import argparse
import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from shared.truth import fit, operator_of, quieten, walk
from shared.zoo import Case, case_named

MARKER = "dispatched::"


@dataclass(frozen=True)
class Call:
    """One operator as a dispatch mode sees it."""

    operator: str
    arguments: str
    output_bytes: int  # storages that are not those of the arguments


@dataclass(frozen=True)
class Scratch:
    """What was allocated inside one call."""

    call: Call
    peak_bytes: int  # the most alive at once of what this call allocated
    kept_bytes: int  # of it, alive when the call returned
    blocks: tuple[str, ...]  # every block in order: its bytes (negative if freed) and the operator inside

    @property
    def unseen_bytes(self) -> int:
        return self.peak_bytes - self.call.output_bytes


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {storage_key(t) for t in tensors_in((args, kwargs))}
        arguments = describe((args, kwargs))
        with record_function(f"{MARKER}{len(self.calls)}"):
            result = func(*args, **kwargs)
        fresh = {storage_key(t): t.untyped_storage().nbytes() for t in tensors_in(result)}
        output_bytes = sum(size for key, size in fresh.items() if key not in known)
        self.calls.append(Call(str(func), arguments, output_bytes))
        return result


def tensors_in(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout != torch._mkldnn)


def storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def describe(tree: Any) -> str:
    def short(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return "x".join(map(str, leaf.shape)) or "scalar"
        return "storage" if isinstance(leaf, torch.UntypedStorage) else leaf

    args, kwargs = tree_map(short, tree)
    return ", ".join([*map(str, args), *(f"{key}={value}" for key, value in kwargs.items())]).replace("'", "")


def scratch_of(case: Case, optimizer: str, batch_size: int, steps: int) -> tuple[list[Scratch], int]:
    """Every call of a training with what it allocated inside, and the bytes allocated outside any call."""
    quieten()
    gc.collect()
    batches = steps * case.period
    loader = DataLoader(case.dataset(batches * batch_size), batch_size=batch_size)
    watch = Watch()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    profiler.start()
    with watch:
        fit(case, optimizer, loader, batches)
    profiler.stop()
    inside: list[list[tuple[int, int, int, str]]] = [[] for _ in watch.calls]
    outside = 0
    for node, ancestors in walk(profiler.profiler.kineto_results.experimental_event_tree()):
        if node.tag != _EventType.Allocation:
            continue
        block = node.extra_fields
        marks = [name for name in ancestors if name.startswith(MARKER)]
        if marks:
            asker = operator_of(ancestors).removeprefix("aten::")
            inside[int(marks[-1].removeprefix(MARKER))].append((node.start_time_ns, block.ptr, block.alloc_size, asker))
        elif block.alloc_size > 0:
            outside += block.alloc_size
    return [replay(call, sorted(blocks)) for call, blocks in zip(watch.calls, inside, strict=True)], outside


def replay(call: Call, blocks: Sequence[tuple[int, int, int, str]]) -> Scratch:
    live: dict[int, int] = {}
    peak = 0
    for _, address, size, _ in blocks:
        if size > 0:
            live[address] = size
        else:
            live.pop(address, None)
        peak = max(peak, sum(live.values()))
    return Scratch(call, peak, sum(live.values()), tuple(block_text(size, asker) for _, _, size, asker in blocks))


def block_text(size: int, asker: str) -> str:
    return f"{size:_} {asker}" if size > 0 else f"{size:_}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--optimizer")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--at-least", type=int, default=64, help="leave out operators with less scratch, in bytes")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    for case in map(case_named, arguments.cases):
        optimizer = arguments.optimizer or case.optimizers[0]
        batch_size = arguments.batch_size or case.batch_sizes[1]
        seen, outside = scratch_of(case, optimizer, batch_size, arguments.steps)
        print(
            f"{case.name}, {optimizer}, batch size {batch_size}, {torch.get_num_threads()} threads; "
            f"{len(seen)} operators, {outside:,} bytes allocated outside any of them"
        )
        counts = Counter(s for s in seen if abs(s.unseen_bytes) >= arguments.at_least)
        for scratch, count in sorted(counts.items(), key=lambda pair: -pair[0].unseen_bytes):
            print(
                f"  {scratch.unseen_bytes:>12,} unseen  {scratch.call.output_bytes:>12,} outputs "
                f"{scratch.kept_bytes:>12,} kept {count:>4} x {scratch.call.operator}({scratch.call.arguments})"
            )
            print(f"        {', '.join(scratch.blocks)}")


if __name__ == "__main__":
    main()
