"""Random small training programs: is a step that ran out of memory and was done again in parts the same step?

    python benchmarks/rescue_random.py --count 500 --seed 0   # the verdict; status 1 if a step became another one
    python benchmarks/rescue_random.py --show 17              # the program of one seed, and how it ends
    python benchmarks/rescue_random.py --truth --count 500    # no rescue: all programs run, and run the same twice

A seed gives the source of a LightningModule, composed from `data/rescue_grammar.txt`. About half of the programs also
mix samples in a way that no sum over parts can repeat. Each trains four steps: once without a failure, and once with an
out-of-memory error in one step if the batch has more than `most` samples. Weights, buffers, optimizer state, plain
attributes, logged values and outputs are then compared, in float64 to 1e-9 and for every fourth program in float32 to
1e-5. A program that draws numbers for each sample (dropout) may end with other draws. It is then compared again with
draws of no effect.
"""

from __future__ import annotations

import argparse
import linecache
import logging
import random
import re
import sys
import textwrap
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves
from torch.utils.data import DataLoader

from rescue import direct_guard
from shared.truth import QUIET

GRAMMAR = Path(__file__).parent / "data" / "rescue_grammar.txt"


def _tables() -> dict[str, dict[str, tuple[list[str], list[str]]]]:
    """Return the grammar: table -> name -> lines of __init__ and of the step."""
    tables: dict[str, dict[str, tuple[list[str], list[str]]]] = {}
    pattern = r"^\[(.+?) -> (.+?)\] (.*?)(?=^\[|\Z)"
    for title, target, body in re.findall(pattern, GRAMMAR.read_text(), re.MULTILINE | re.DOTALL):
        entries = tables[title] = {}
        for entry in " ".join(body.split()).split(" | "):
            name, _, code = entry.partition(": ")
            init, _, step = f" => {code}".rpartition(" => ")
            lines = step.split("; ")
            if lines[-1][:2] in ("+ ", "- ", "* ", "/ "):
                lines[-1] = f"loss = loss {lines[-1]}"
            elif title == "log" and "self.log" not in lines[-1]:
                lines[-1] = f"self.log('{name}', {lines[-1]})"
            elif target != "-" and lines[-1] and not re.search(r"^if |^\[| [-+*]?= ", lines[-1]):
                lines[-1] = f"{target} = {lines[-1]}"
            entries[name] = ([line for line in init[4:].split("; ") if line], [line for line in lines if line])
    return tables


TABLES = _tables()
MIXERS = {name: title[6:] for title in TABLES if title.startswith("mixer ") for name in TABLES[title]}


@dataclass(frozen=True)
class Program:
    """A training as source text, and the failure that is planted in it."""

    seed: int
    source: str
    tags: tuple[str, ...]
    mixer: str = ""  # "": none
    gate: str = ""  # how it is used and hidden
    draws: bool = False  # numbers are drawn for each sample
    fail_at: int = 0  # the step that runs out of memory
    most: int = 4  # samples that fit
    place: str = "forward"
    operator: int = 0  # how many operators, or nodes of the backward pass, come before the error
    float32: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        failure = f"step {self.fail_at} above {self.most} samples, {self.place} {self.operator}"
        mixer = f"mixer {self.mixer} ({self.gate})" if self.mixer else "no mixer"
        precision = "float32" if self.float32 else "float64"
        return f"seed {self.seed}: {failure}; {precision} {self.settings}; {mixer}; {', '.join(self.tags)}"


class Draft:
    """A program while it is composed."""

    def __init__(self, rng: random.Random):
        self.rng, self.kind = rng, rng.choice(["features", "tokens", "tokens", "images"])
        self.batch, self.sizes = rng.choice([6, 7, 8]), {"D": rng.choice([4, 6, 8]), "T": rng.choice([4, 5, 7, 8])}
        self.init, self.step, self.functions, self.methods, self.tags = [], [], [], [], [self.kind]

    def fill(self, lines: list[str], **names: str) -> list[str]:
        linear = f"nn.Linear({self.sizes['D']}, {self.sizes['D']})"
        values = {**self.sizes, "n": self.batch, "linear": linear, "k": len(self.tags), **names}
        return [line.format(**values) for line in lines]

    def pick(self, table: str, name: str = "", **names: str) -> None:
        """Add an entry of a table."""
        name = name or self.rng.choice(list(TABLES[table]))
        init, step = TABLES[table][name]
        self.init += self.fill(init, **names)
        self.step += self.fill(step, **names)
        self.tags.append(f"{table}: {name}")


def compose(seed: int) -> Program:
    """Return the program of a seed."""
    rng = random.Random(seed)
    draft, draws = Draft(rng), rng.choice(["", "", "", "", "rows", "shared"])
    mixer = rng.choice(list(MIXERS)) if rng.random() < 0.55 else ""
    hidden = _forward(draft, mixer, draws)
    sizes, most = [draft.batch] * 3 + [rng.choice([draft.batch] * 3 + [draft.batch - 3])], rng.randint(1, 5)
    return Program(
        seed,
        _source(draft, sizes),
        tuple(draft.tags),
        mixer,
        hidden,
        draws=draws == "rows" or mixer in ("permuted", "mixup"),
        fail_at=rng.choice([k for k in range(4) if sizes[k] > most]),
        most=most,
        place=rng.choice(["forward", "forward", "backward"]),
        operator=rng.choice([0, rng.randrange(10), rng.randrange(60), 999]),
        float32=seed % 4 == 3,
        settings=rng.choice([{}] * 4 + [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}]),
    )


def _forward(draft: Draft, mixer: str, draws: str) -> str:
    """Compose the step; return how the mixer is used and hidden."""
    rng, kind, step = draft.rng, draft.kind, draft.step
    draft.pick("first", kind)
    for _ in range(rng.randint(1, 3)):
        draft.pick(kind)
        if draws == "rows" and rng.random() < 0.6:
            draft.pick("rows draws", v="h")
    draft.pick(f"pool {kind}")
    if draws:
        draft.pick(f"{draws} draws", v="z")
    use, lines, hidden = _mix(draft, mixer) if mixer else ("", [], "")
    step += lines if use in ("rows", "hook") else []
    tokens = " tokens" if kind == "tokens" and rng.random() < 0.4 else ""
    step += ["out = self.out(h + z[:, None])", "w = m.to(z)"] if tokens else ["out = self.out(z)"]
    step += ["few = (y == 1).to(z)"]
    if rng.random() < 0.4:
        draft.pick(f"reduced{tokens}")
    else:
        draft.pick(f"single{tokens}")
        names = [k for k in TABLES["normalizer"] if k != ("class of few" if tokens else "two stages")]
        draft.pick("normalizer", rng.choice(names))
    step += [] if use in ("rows", "hook") else lines
    for table, most in {"regularizer": 2, "state": 1, "branch": 2, "log": 3}.items():
        for name in rng.sample(list(TABLES[table]), rng.randint(0, most)):
            draft.pick(table, name)
    returns = ["loss"] * 4 + ["{'loss': loss}", "{'loss': loss, 'out': out.detach()}"]
    step.append(f"return {rng.choice(returns)}")
    return hidden


def _mix(draft: Draft, mixer: str) -> tuple[str, list[str], str]:
    """Return how a mixer is used, its lines, and how it is hidden."""
    rng, kind = draft.rng, MIXERS[mixer]
    init, body = (draft.fill(lines) for lines in TABLES[f"mixer {kind}"][mixer])
    draft.init += init
    uses = {"rows": ["rows", "term", "log", "weight"], "scalar": ["term", "log", "factor"], "number": ["factor", "log"]}
    use = rng.choice(uses.get(kind, ["hook"]))
    gates = ["", "", f"if batch_idx >= {rng.randint(1, 3)}:", "if random.random() < 0.6:", "if batch_idx % 2 == 1:"]
    gates += [f"if len(x) >= {draft.batch - 1}:", "if out.mean().item() < 0.2:" if use not in ("rows", "hook") else ""]
    gate, scale = ("", 1) if kind == "init" else (rng.choice(gates), rng.choice([1, 0.3, 1e-4]))
    function = kind not in ("hook", "init") and rng.random() < 0.5
    if function:
        owner = "self." if any("self." in line for line in body) else ""
        text = [f"def mix({'self, ' if owner else ''}z):", *(f"    {line}" for line in body), "    return e", ""]
        (draft.methods if owner else draft.functions).extend(text)
        body = [f"e = {owner}mix(z)"]
    if use in ("log", "weight", "factor"):
        body = ["with torch.no_grad():", *(f"    {line}" for line in body)]
    value = "(e * z).mean()" if kind == "rows" else "e"
    body += {
        "rows": [f"z = z + {scale} * e" if scale != 1 else "z = e"],
        "term": [f"loss = loss + {scale} * {value}"],
        "log": [f"self.log('mixed', {value})"],
        "weight": [f"loss = loss + {scale} * ((e * z).detach().mean(1) * z.square().mean(1)).mean()"],
        "factor": [f"loss = loss * (1 + {scale} * {value})"],
        "hook": [],
    }[use]
    body = [f"{line}  # mixer" for line in body]
    lines = [gate, *(f"    {line}" for line in body)] if gate else body
    return use, lines, f"{use}, times {scale:g}, {'in a function' if function else 'inline'}, {gate or 'always'}"


def _source(draft: Draft, sizes: list[int]) -> str:
    rng, (time_, kind) = draft.rng, (draft.sizes["T"], draft.kind)
    x = {
        "features": "torch.randn(n, 6)",
        "tokens": f"torch.randint(11, (n, {time_}))",
        "images": "torch.randn(n, 3, 4, 4)",
    }
    names = ["x", "y", "t", "w", *(["lengths", "yt"] if kind == "tokens" else [])]
    layout, entries = rng.choice(["tuple", "dict", "pop", "nested"]), ", ".join(f"{name!r}: {name}" for name in names)
    draft.tags.append(f"batch: {layout}")
    packed, unpack = {
        "tuple": (", ".join(names), [f"{', '.join(names)} = batch"]),
        "dict": (f"{{{entries}}}", [f"{name} = batch[{name!r}]" for name in names]),
        "pop": (f"{{{entries}}}", ["x = batch['x']", *(f"{name} = batch.pop({name!r})" for name in names[1:])]),
        "nested": (
            f"{{'x': [x], 'rest': ({', '.join(names[1:])})}}",
            ["(x,), rest = batch.values()", f"{', '.join(names[1:])} = rest"],
        ),
    }[layout]
    weights = rng.choice(["torch.rand(n)", "(torch.rand(n) < 0.4).float()"])
    data = [
        f"x, y, t, w = {x[kind]}, torch.randint(4, (n,)), torch.randn(n, 4), {weights}",
        f"y[{rng.randrange(3)}] = w[{rng.randrange(3)}] = 1",
    ]
    if kind == "tokens":
        data += [
            f"lengths = torch.randint(1, {time_ + 1}, (n,))",
            *(["lengths[: n // 2] = lengths.max()"] if rng.random() < 0.3 else []),
        ]
        data += [f"yt = torch.randint(4, (n, {time_})).masked_fill(torch.arange({time_}) >= lengths[:, None], -100)"]
        unpack = [*unpack, f"m = torch.arange({time_}) < lengths[:, None]"]
    optimizers = [f"SGD(self.parameters(), lr=0.05, momentum={m})" for m in (0, 0.9)] + [
        "Adam(self.parameters(), lr=0.01, eps=0.1)"
    ]

    def block(lines: list[str], depth: int) -> str:
        return textwrap.indent("\n".join(lines), "    " * depth)

    imports = ["", "import pytorch_lightning as pl", "import torch", "from torch import nn"]
    parts = ["import math", "import random", *imports, "from torch.nn import functional as F"]
    parts += [
        "\nDRAW = 0.2\n",
        *draft.functions,
        f"def batches():\n    for n in {sizes}:",
        block([*data, f"yield {packed}"], 2),
    ]
    parts += [
        "\n\nclass Program(pl.LightningModule):\n    def __init__(self):",
        block(["super().__init__()", *draft.init], 2),
        "",
        block(draft.methods, 1),
    ]
    parts += ["    def training_step(self, batch, batch_idx):", block([*unpack, *draft.step], 2)]
    return "\n".join(
        [*parts, f"\n    def configure_optimizers(self):\n        return torch.optim.{rng.choice(optimizers)}\n"]
    )


# -- a training


@dataclass(frozen=True)
class Run:
    """How a training ended."""

    values: dict[str, torch.Tensor]
    error: str = ""
    refused: str = ""
    failures: int = 0  # planted errors that were raised
    mixes: bool = False  # the mixer ran in the step with the failure


class Fails(TorchDispatchMode):
    """Fail in the operator of this number."""

    def __init__(self, left: int, fail: Callable[[], None]):
        super().__init__()
        self.left, self.fail = left, fail

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left < 0:
            self.fail()
        return func(*args, **(kwargs or {}))


class Recorder(pl.Callback):
    """Install the guard, and keep what each step logs and returns."""

    def __init__(self, guard: Callable[..., Any] | None):
        self.guard, self.rescuer, self.refused, self.values = guard, None, "", {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rescuer = self.guard(trainer, pl_module) if self.guard else None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.refused = str(getattr(self.rescuer, "refused", "") or "")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values |= flat(f"logged in step {batch_idx}", dict(trainer.callback_metrics))
        self.values |= flat(f"returned by step {batch_idx}", outputs)


class Planted:
    """Goes before a program's module: its step fails ("fail") or is watched ("watch")."""

    program, mode, notes = None, "", None  # set in the class of each run, so that no attribute of a module is ours

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch._C.DisableTorchFunction():  # the size that the batch has, whatever a rescue says about it
            n = tree_leaves(batch)[0].shape[0]
        if batch_idx != self.program.fail_at or (self.mode == "fail" and n <= self.program.most):
            return super().training_step(batch, batch_idx)
        return {"fail": fail, "watch": watch}[self.mode](self, super().training_step, batch, batch_idx)


def fail(model: Any, step: Any, batch: Any, batch_idx: int) -> Any:
    program, notes, armed = model.program, model.notes, [True]

    def now(*_: Any) -> None:
        if armed:  # a hook may outlive its attempt
            armed.clear()
            notes["failures"] += 1
            raise torch.OutOfMemoryError("planted")

    if program.place == "forward":
        with Fails(program.operator, now):
            step(batch, batch_idx)
        return now()
    out = step(batch, batch_idx)
    loss = out["loss"] if isinstance(out, dict) else out
    if loss is None or loss.grad_fn is None:
        return now() if torch.is_grad_enabled() else out
    nodes = [loss.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following and following not in nodes]
    nodes[min(program.operator, len(nodes) - 1)].register_prehook(now)
    return out


def watch(model: Any, step: Any, batch: Any, batch_idx: int) -> Any:
    """Do a step, and note whether one of the mixer's lines ran."""
    name, notes = f"{type(model).__mro__[2].__module__}.py", model.notes
    notes["mixes"] = False

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != name:
            return None
        notes["mixes"] |= event == "line" and "# mixer" in linecache.getline(name, frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        return step(batch, batch_idx)
    finally:
        sys.settrace(None)


def attributes(model: pl.LightningModule) -> dict[str, Any]:
    """Return what a program keeps in plain attributes."""
    return {k: v for k, v in vars(model).items() if k in ("seen", "counts", "history", "slow", "kept")}


def flat(name: str, tree: Any) -> dict[str, torch.Tensor]:
    """Return the numbers and tensors of a tree, by path."""
    leaves = [
        (path, leaf) for path, leaf in tree_flatten_with_path(tree)[0] if isinstance(leaf, (int, float, torch.Tensor))
    ]
    return {f"{name} {keystr(path)}".strip(): torch.as_tensor(leaf).detach().clone() for path, leaf in leaves}


def load(program: Program) -> types.ModuleType:
    """Execute the source as a module whose lines tracebacks can show."""
    name = f"random_program_{program.seed}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = f"{name}.py"
    linecache.cache[module.__file__] = (1, None, program.source.splitlines(keepends=True), module.__file__)
    exec(compile(program.source, module.__file__, "exec"), vars(module))
    return module


def train(program: Program, mode: str) -> Run:
    """Train the program's steps."""
    torch.manual_seed(program.seed)
    random.seed(program.seed)
    module, notes = load(program), {"failures": 0}
    model = type("Planted", (Planted, module.Program), {"program": program, "mode": mode, "notes": notes})()
    recorder, error = Recorder(direct_guard if mode == "fail" else None), ""
    precision = "32-true" if program.float32 else "64-true"
    settings = {"max_epochs": 1, "accelerator": "cpu", "precision": precision, **QUIET, **program.settings}
    trainer = pl.Trainer(callbacks=[recorder], **settings)
    try:
        trainer.fit(model, DataLoader(list(module.batches()), batch_size=None))
    except BaseException as raised:
        if isinstance(raised, KeyboardInterrupt):
            raise
        error = f"{type(raised).__name__}: {raised}"
    finally:
        if recorder.rescuer is not None:
            recorder.rescuer.close()
        del sys.modules[module.__name__]
    values = flat("weights", dict(model.state_dict())) | flat("attributes", attributes(model)) | recorder.values
    states = [optimizer.state[p] for optimizer in trainer.optimizers for p in model.parameters()]
    return Run(values | flat("optimizer", states), error, recorder.refused, **notes)


# -- the verdict


def difference(one: Run, other: Run, tolerance: float) -> str:
    """Return the largest difference of two runs beyond the tolerance, or nothing."""
    if one.values.keys() != other.values.keys():
        return f"only one has {sorted(one.values.keys() ^ other.values.keys())[:4]}"
    worst, words = 1.0, ""
    for name, a in one.values.items():
        b = other.values[name]
        if a.shape != b.shape:
            return f"{name}: shape {tuple(a.shape)} and {tuple(b.shape)}"
        if a.numel():
            off = float((a.double() - b.double()).abs().max()) / (float(a.double().abs().max()) + 1e-2) / tolerance
            if not off <= worst:
                worst, words = off, f"{name}: off by {off * tolerance:.1e}"
    return words


def outcome(program: Program, guarded: bool) -> tuple[str, str, Run]:
    """Return how a program ended, in which words, and its run without a failure."""
    truth, tolerance = train(program, "watch"), 1e-5 if program.float32 else 1e-9
    if truth.error or not all(v.isfinite().all() for v in truth.values.values()):
        return "broken", truth.error or "not finite", truth
    if not guarded:
        again = difference(truth, train(program, "watch"), 1e-15)
        return ("differs when run twice" if again else "runs"), again, truth
    run = train(program, "fail")
    if run.error.startswith("OutOfMemoryError") and run.refused:
        return "refused", run.refused, truth
    if run.error or not run.failures:
        return "OTHER", f"raises {run.error}" if run.error else "the planted error was not raised", truth
    words = difference(truth, run, tolerance)
    if words and program.draws:
        small = replace(program, source=program.source.replace("DRAW = 0.2", "DRAW = 1e-15"))
        words = difference(train(small, "watch"), train(small, "fail"), tolerance)
        return ("OTHER", f"without draws {words}", truth) if words else ("other draws", "", truth)
    return ("OTHER", words, truth) if words else ("equal", "", truth)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, help="print the program of this seed, and how it ends")
    parser.add_argument("--truth", action="store_true", help="without the rescue")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning.pytorch", "lightning_memguard"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seeds = [options.show] if options.show is not None else range(options.seed, options.seed + options.count)
    found, start = [], time.perf_counter()
    for seed in seeds:
        program = compose(seed)
        ended, words, truth = outcome(program, not options.truth)
        found.append((program, ended, words, truth))
        if options.show is not None or ended in ("OTHER", "broken", "differs when run twice"):
            print(program, program.source, f"{ended}: {words}", f"mixer active: {truth.mixes}", sep="\n", flush=True)
    print(f"{len(found)} programs in {time.perf_counter() - start:.0f} s")
    return report(found)


def report(found: list[tuple[Program, str, str, Run]]) -> int:
    """Print the verdict; return the exit status."""
    for mixed in (False, True):
        some = [(p, ended, words) for p, ended, words, truth in found if truth.mixes == mixed]
        print(f"\n{'with an active mixer' if mixed else 'without an active mixer'}: {len(some)}")
        for ended, count in Counter(ended for _, ended, _ in some).most_common():
            print(f"  {count:4} {ended}")
        reasons: dict[str, list[int]] = {}
        for p, ended, words in some:
            if ended == "refused":
                reasons.setdefault(re.sub(r"random_program_\d+\.py:\d+|\d+", "N", words)[:150], []).append(p.seed)
        for reason, seeds in sorted(reasons.items(), key=lambda item: -len(item[1])):
            print(f"       {len(seeds):4} {reason} (seeds {', '.join(map(str, seeds[:3]))})")
    for p, ended, _, truth in found:
        if truth.mixes and ended in ("equal", "other draws"):
            print(f"equal despite its mixer: {p}")
    bad = [p.seed for p, ended, _, _ in found if ended in ("OTHER", "broken", "differs when run twice")]
    print(f"OTHER or broken: {len(bad)} {bad}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
