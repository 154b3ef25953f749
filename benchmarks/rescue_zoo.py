"""How often a training step that ran out of memory is done again in parts, for models that people train.

Subjects: each pattern of `field/`, 20 timm models, 20 transformers models, and 5 torchvision detectors, with random
weights and data. A real Trainer on the CPU trains two steps of each, twice from one seed: undisturbed, and with an
out-of-memory error at the end of the second step's forward pass. The gradients at each optimizer step of that batch,
and the weights, buffers, and logged values after it are compared. A result is

- equal: the step was done again in parts, and nothing differs by more than 1e-4 of a tensor's largest value
- equal gradients: only weights differ (Adam divides by gradients that are only rounding)
- refused, raised: it was not done again, for a reason; or because the rescue, or a part, raised an error
- OTHER: it was done again and something differs, or it failed without a reason
- broken: the undisturbed training differs from its own repetition
- skipped, too slow: it does not train here, or takes more than `--limit`, undisturbed or again

    python benchmarks/rescue_zoo.py                             # all; resumable: what the file has is not run again
    python benchmarks/rescue_zoo.py --only timm: hf_bert        # those whose name or library contains one
    python benchmarks/rescue_zoo.py --json zoo.jsonl --show     # only print what the file has
    python benchmarks/rescue_zoo.py --truth --json truth.jsonl  # only train undisturbed, twice

It needs the libraries of `make field`, and ends with status 1 if a result is OTHER.
"""

import argparse
import functools
import importlib
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from field.pattern import Pattern, Run, Step, classify, data, images
from rescue import direct_guard
from shared.process import describe, in_fork, script

TOLERANCE = 1e-4
PLANTED = 1  # the batch that runs out of memory
OUTCOMES = ("equal", "equal gradients", "refused", "raised", "OTHER", "broken", "skipped", "too slow")
KINDS = ("gradients", "weights", "buffers", "logged")
descend = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

field_script = script(Path(__file__).with_name("field.py"))


def timm_run(name: str, *options: str) -> Run:
    import timm

    numbers = {key: int(value) for key, value in (option.split("=") for option in options)}
    side = numbers.pop("side", 64)
    build = partial(timm.create_model, name, pretrained=False, num_classes=10, **numbers)
    return Run(lambda: Step(build(), classify, descend), images(side))


TIMM = """
    convnext_atto, resnet18, efficientnet_b0, regnety_002, mobilenetv3_small_050, poolformer_s12, edgenext_xx_small,
    nf_resnet26, levit_128s side=224, crossvit_tiny_240 side=240, swin_tiny_patch4_window7_224 img_size=56 side=56,
    mixer_s32_224 img_size=64, xcit_nano_12_p16_224 img_size=64, cait_xxs24_224 img_size=64, coat_lite_tiny img_size=64,
    maxvit_rmlp_pico_rw_256 img_size=64, gmlp_ti16_224 img_size=64, vit_tiny_patch16_224 img_size=64 depth=4,
    deit_tiny_distilled_patch16_224 img_size=64 depth=4,
    beit_base_patch16_224 img_size=64 depth=4 embed_dim=192 num_heads=3
"""


def transformers_run(kind: str, model: str, labels: str) -> Run:
    import transformers

    def build() -> Step:
        network = getattr(transformers, model)(transformers.AutoConfig.for_model(kind, **SMALL))
        return Step(network, lambda network, batch: network(**batch).loss, descend)

    return Run(build, data(partial(labeled_text, labels)))


def labeled_text(labels: str, i: int) -> dict[str, Tensor]:
    """A text of 7 to 24 tokens, padded, and a label of it, of each token, of some tokens, or another text."""
    ids = torch.randint(3, 500, (7 + 5 * i % 18,))
    some = torch.where((torch.rand(len(ids)) < 0.3).index_fill(0, torch.tensor(0), True), ids, -100)
    other = torch.randint(3, 500, (4 + 3 * i % 10,))
    label = {"text": torch.tensor(i % 3), "tokens": ids, "binary": ids % 2, "some": some, "other": other}[labels]
    label = F.pad(label, (0, 24 - len(label)), value=-100) if label.ndim else label
    ids, mask = (F.pad(each, (0, 24 - len(ids))) for each in (ids, torch.ones_like(ids)))
    return {"input_ids": ids, "attention_mask": mask, "labels": label}


SIZES = """
    0 pad_token_id decoder_start_token_id, 1 bos_token_id, 3 num_labels, 500 vocab_size, 16 d_kv,
    2 eos_token_id num_hidden_layers num_layers n_layers n_layer encoder_layers decoder_layers,
    4 num_attention_heads num_heads n_heads n_head decoder_attention_heads, 8 attention_window state_size,
    64 hidden_size n_embd d_model dim word_embed_proj_dim, 128 intermediate_size hidden_dim d_ff d_inner ffn_dim
"""  # in the words of all configurations; each ignores the others'
SMALL = {word: int(line.split()[0]) for line in SIZES.split(",") for word in line.split()[1:]}
SMALL["relative_attention"] = True
TEXTS = """
    bert BertForMaskedLM some, roberta RobertaForSequenceClassification text, gpt2 GPT2LMHeadModel tokens,
    t5 T5ForConditionalGeneration other, bart BartForConditionalGeneration other, llama LlamaForCausalLM tokens,
    distilbert DistilBertForTokenClassification binary, albert AlbertForSequenceClassification text,
    electra ElectraForPreTraining binary, deberta-v2 DebertaV2ForSequenceClassification text,
    opt OPTForCausalLM tokens, gpt_neox GPTNeoXForCausalLM tokens, xlnet XLNetForSequenceClassification text,
    longformer LongformerForMaskedLM some, mamba MambaForCausalLM tokens
"""
OF_THE_FIELD = ("hf_vit", "wav2vec2_ctc", "hf_whisper", "hf_clip", "hf_segformer")  # five more of transformers
DETECTORS = ("faster_rcnn", "mask_rcnn", "retinanet", "fcos", "ssdlite")


def detector_run(make: Callable[[], Run]) -> Run:
    """A detector of the field whose batch norm layers are frozen, as pretrained ones are, but not those of SSDlite."""
    from torchvision.models.detection.ssd import SSD
    from torchvision.ops import FrozenBatchNorm2d

    run = make()

    def build() -> pl.LightningModule:
        module = run.build()
        if hasattr(module.network, "roi_heads"):
            module.network.roi_heads.fg_bg_sampler.batch_size_per_image = 32  # of 512, for speed
        for path, norm in list(module.named_modules()):
            if isinstance(norm, nn.BatchNorm2d) and not isinstance(module.network, SSD):
                module.set_submodule(path, FrozenBatchNorm2d(norm.num_features))
        return module

    return replace(run, build=build)


def subjects() -> list[Pattern]:
    patterns = field_script.load_patterns()
    tables = (("timm", timm_run, TIMM), ("transformers", transformers_run, TEXTS))
    cells = [(group, make, row.split()) for group, make, table in tables for row in table.split(",")]
    made = {f"{group}: {name}": partial(make, name, *options) for group, make, (name, *options) in cells}
    made |= {f"transformers: {name}": patterns[name].make for name in OF_THE_FIELD}
    made |= {f"torchvision: {name}": partial(detector_run, patterns[name].make) for name in DETECTORS}
    new = [Pattern(name, name.split(":")[0], make, (5, 5), 2) for name, make in made.items()]
    return [*(replace(p, name=f"field: {p.name}") for p in patterns.values()), *new]


@dataclass(frozen=True)
class Row:
    name: str
    outcome: str
    reason: str = ""
    differences: tuple[float, ...] = ()  # of each of `KINDS`, relative to a tensor's largest value
    calls: int = 0  # of training_step with the batch, the failed one included
    seconds: float = 0.0  # of the step, from the error on
    whole_seconds: float = 0.0  # of the undisturbed step


class Watch(pl.Callback):
    """Plants the error, has the step done again, and keeps what is compared."""

    def __init__(self, plants: bool) -> None:
        self.plants, self.rescuer, self.refused = plants, None, ""
        self.batch, self.calls, self.begun, self.seconds = -1, 0, 0.0, 0.0
        self.found: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        inner = module.training_step

        @functools.wraps(inner)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            output = inner(*args, **kwargs)
            self.calls += self.batch == PLANTED
            if self.plants and self.batch == PLANTED and self.calls == 1:
                self.begun = time.perf_counter()
                raise torch.OutOfMemoryError("CUDA out of memory (planted)")
            return output

        module.training_step = training_step
        self.rescuer = direct_guard(trainer, module) if self.plants else None

    def on_exception(self, *_: Any) -> None:
        self.refused = self.rescuer.refused if self.rescuer else ""  # while the Trainer still trains

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batch, self.begun = -1 if self.seconds else batch_idx, time.perf_counter()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        found = self.found["gradients"]
        if self.batch == PLANTED and len(found) < 5000:
            named = {f"{name} {len(found)}": p.grad for name, p in module.named_parameters() if p.grad is not None}
            found.update(dense(named.items()))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.batch == PLANTED:
            self.seconds = time.perf_counter() - self.begun
            everything = module.named_parameters(), module.named_buffers(), trainer.callback_metrics.items()
            self.found.update(zip(KINDS[1:], map(dense, everything), strict=True))


def dense(named: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    values = {name: torch.as_tensor(value).detach() for name, value in named}
    wide = {name: value.to(torch.promote_types(value.dtype, torch.float64)) for name, value in values.items()}
    return {name: value.to_dense() if value.is_sparse else value.clone() for name, value in wide.items()}


def train(run: Run, batch_size: int, plants: bool, path: Path) -> dict[str, Any]:
    """Train two steps, and save what is compared."""
    watch = Watch(plants)
    try:
        options = field_script.trainer_options(PLANTED + 1, run)
        field_script.fit(run.build(), run.data(batch_size, PLANTED + 1), options, watch)
    except Exception as error:
        if not plants or not watch.calls:
            raise
        refused = watch.refused if isinstance(error, torch.OutOfMemoryError) else ""
        outcome = "raised" if re.search(r"(^|raises )\w*(Error|Exception)\b", refused) else "refused"
        return {"outcome": outcome if refused else "OTHER", "reason": refused or describe(error)}
    finally:
        if watch.rescuer is not None:
            watch.rescuer.close()
    if not watch.seconds or not all(value.isfinite().all() for value in watch.found["gradients"].values()):
        raise RuntimeError("there is no second batch, or its gradients are not finite")
    torch.save(watch.found, path)
    return {"seconds": round(watch.seconds, 4), "calls": watch.calls}


def difference(kind: str, one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, relative to a tensor's largest value; gradients and weights: at least 0.001 of all's."""
    if {name: value.shape for name, value in one.items()} != {name: value.shape for name, value in other.items()}:
        return math.inf
    largest = {name: float(value.nan_to_num(0, 0, 0).abs().max()) for name, value in one.items() if value.numel()}
    floor = 1e-3 * max(largest.values(), default=0) if kind in KINDS[:2] else 0
    worst = 0.0
    for name, scale in largest.items():
        a, b = one[name], other[name]
        off = (a - b).abs()[(a != b) & ~(a.isnan() & b.isnan())].nan_to_num(math.inf)
        worst = max([worst, *(off / max(scale, floor, 1e-30)).tolist()])
    return worst


def examine(subject: Pattern, truth: bool, double: bool, limit: float) -> dict[str, Any]:
    """Train a subject in forks of this process, and compare."""
    torch.manual_seed(0)
    run, size = subject.make(), min(max(subject.sizes[0], 4), 6)
    run = replace(run, trainer={**run.trainer, "precision": "64-true"}) if double else run
    tolerance = 0.2 if "16" in str(run.trainer.get("precision")) else TOLERANCE
    with tempfile.TemporaryDirectory() as folder:

        def trained(name: str, plants: bool = False) -> dict[str, Any]:
            return in_fork(partial(train, run, size, plants, Path(folder, name)), 1, limit)

        def differences(name: str) -> list[float]:
            one, other = torch.load(Path(folder, "whole")), torch.load(Path(folder, name))
            return [difference(kind, one[kind], other[kind]) for kind in KINDS]

        whole = trained("whole")
        if "failed" in whole:
            return whole
        again = trained("again", plants=not truth)
        if "seconds" not in again:
            is_slow = "it took more than" in again.get("failed", "")
            outcome = {"outcome": "too slow" if is_slow else "OTHER", "reason": f"again, {again.get('failed')}"}
            return again if "outcome" in again else outcome
        found = {**again, "differences": differences("again"), "whole_seconds": whole["seconds"]}
        off = [kind for kind, value in zip(KINDS, found["differences"], strict=True) if value > tolerance]
        outcome = "equal" if not off else "equal gradients" if off == ["weights"] else "OTHER"
        reason = "other " * bool(off) + ", ".join(off)
        if off and (truth or "failed" in trained("repeated") or max(differences("repeated")) > tolerance):
            outcome, reason = "broken", f"{reason} if it is repeated"
        elif not truth and again["calls"] < 3:
            outcome, reason = "OTHER", "the step was not done in parts"
        return {**found, "outcome": outcome, "reason": reason}


def work(subject: Pattern, arguments: argparse.Namespace, threads: int) -> None:
    """Examine a subject in a fork of this process, which imports what is large once for all forks."""
    if subject.library in ("timm", "transformers", "torchvision"):
        importlib.import_module(subject.library + ".modeling_utils" * (subject.library == "transformers"))
    limit = arguments.limit * (2 / 3 if subject.name.startswith("field:") else 1)
    found = in_fork(partial(examine, subject, arguments.truth, arguments.double, limit), threads, 4 * limit)
    if "failed" in found:
        outcome = "too slow" if "it took more than" in found["failed"] else "skipped"
        found = {"outcome": outcome, "reason": found["failed"]}
    field_script.keep(arguments.json, {"name": subject.name, **found})
    print(line_of(Row(subject.name, **found)), flush=True)


def line_of(row: Row) -> str:
    ratio = f"{row.seconds / row.whole_seconds:6.2f}" if row.seconds else " " * 6
    differences = " ".join(f"{value:7.0e}" for value in row.differences)
    return f"{row.name:<40} {row.outcome:<15} {row.calls:>4} {ratio} {differences} {' '.join(row.reason.split())[:200]}"


def print_summary(rows: Sequence[Row]) -> None:
    print(f"\n{'':<14}" + "".join(f"{outcome:>16}" for outcome in (*OUTCOMES, "all")))
    for group in (*dict.fromkeys(row.name.split(":")[0] for row in rows), ""):
        counts = Counter(row.outcome for row in rows if row.name.startswith(group))
        print(f"{group or 'all':<14}" + "".join(f"{counts[o]:>16}" for o in OUTCOMES) + f"{counts.total():>16}")
    for outcome in OUTCOMES[2:]:
        causes: dict[str, list[str]] = {}
        for row in (row for row in rows if row.outcome == outcome):
            without_line = re.sub(r"\s*\([^()]*\.py:\d+.*", "", row.reason, flags=re.DOTALL)
            causes.setdefault(re.sub(r"\d+", "N", without_line)[:150], []).append(row.name)
        for cause, names in sorted(causes.items(), key=lambda item: -len(item[1])):
            print(f"{outcome}, {len(names)}: {cause}\n    {', '.join(names[:8])}{' ...' * (len(names) > 8)}")
    again = [row for row in rows if row.outcome.startswith("equal")]
    if again:
        ratios = sorted(row.seconds / row.whole_seconds for row in again)
        worst = ", ".join(f"{kind} {max(row.differences[i] for row in again):.0e}" for i, kind in enumerate(KINDS))
        median = f"{statistics.median(ratios):.1f} whole steps (median)"
        print(f"done again: {median}, {ratios[-1]:.1f} at most; off: {worst}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="names or libraries that contain one of these")
    parser.add_argument("--json", type=Path, default=Path("build/rescue_zoo.jsonl"), help="a result a line; continued")
    parser.add_argument("--show", action="store_true", help="run nothing, print what the file has")
    parser.add_argument("--truth", action="store_true", help="only train undisturbed, twice")
    parser.add_argument("--double", action="store_true", help="train in double precision: is a difference rounding?")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a training; two thirds for `field/`")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="show what trainings print to stderr")
    parser.set_defaults(tune=False, threads=1, memory=6 * 2**30)
    arguments = parser.parse_args()
    chosen = {s.name: s for s in subjects() if any(only in f"{s.name} {s.library}" for only in arguments.only)}
    arguments.json.parent.mkdir(exist_ok=True)
    arguments.json.touch()
    if not arguments.show:
        if not arguments.truth:
            importlib.import_module("lightning_memguard.training.rescue.rescuer")
        known = {json.loads(line)["name"] for line in arguments.json.read_text().splitlines()}
        field_script.work = work
        field_script.run_all([s for s in chosen.values() if s.name not in known], arguments)
    rows = [row for line in arguments.json.read_text().splitlines() if (row := Row(**json.loads(line))).name in chosen]
    if arguments.show:
        print("\n".join(map(line_of, rows)))
    print_summary(rows)
    sys.exit(any(row.outcome == "OTHER" for row in rows))


if __name__ == "__main__":
    main()
