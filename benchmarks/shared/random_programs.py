"""Random small training programs, composed from `data/program_grammar.txt`: a seed gives a LightningModule's source.

About half of the programs also mix samples, as no step in parts of a batch could: norms over a batch, contrastive
losses, counts.
"""

from __future__ import annotations

import linecache
import random
import re
import sys
import textwrap
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

GRAMMAR = Path(__file__).parents[1] / "data" / "program_grammar.txt"


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
    """A training as source text."""

    seed: int
    source: str
    tags: tuple[str, ...]
    mixer: str = ""  # "": none
    gate: str = ""  # how it is used and hidden
    settings: dict[str, Any] = field(default_factory=dict)  # of the Trainer

    @property
    def precision(self) -> str:
        """Float64, but float32 for every fourth program."""
        return "32-true" if self.seed % 4 == 3 else "64-true"

    def __str__(self) -> str:
        mixer = f"mixer {self.mixer} ({self.gate})" if self.mixer else "no mixer"
        return f"seed {self.seed}: {self.precision} {self.settings}; {mixer}; {', '.join(self.tags)}"

    def training(self, _: int) -> tuple[Any, DataLoader]:
        """Execute the source as a module whose lines tracebacks can show; its program, and its batches."""
        name = f"random_program_{self.seed}"
        module = sys.modules[name] = types.ModuleType(name)
        module.__file__ = f"{name}.py"
        linecache.cache[module.__file__] = (1, None, self.source.splitlines(keepends=True), module.__file__)
        exec(compile(self.source, module.__file__, "exec"), vars(module))
        return module.Program(), DataLoader(list(module.batches()), batch_size=None)


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
    sizes = [draft.batch] * 3 + [rng.choice([draft.batch] * 3 + [draft.batch - 3])]
    settings = rng.choice([{}] * 4 + [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.5}])
    return Program(seed, _source(draft, sizes), tuple(draft.tags), mixer, hidden, settings)


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
