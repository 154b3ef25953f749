"""A language model by its name -> its fine-tuning, as transformers' Trainer runs it, without weights.

A model is built on meta by transformers' own class from its configuration: a file, the local cache of
``huggingface_hub``, or `models.ini`. Nothing is fetched. Checked on transformers 5.24, peft 0.21 and bitsandbytes 0.50.
"""

from __future__ import annotations

import configparser
import contextlib
import functools
import importlib
import importlib.metadata
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_memguard.core.capture.capture import Captures, quiet
from lightning_memguard.core.capture.program import FewLayers
from lightning_memguard.core.decision.decision import Budget, Limits, check_count, largest_within
from lightning_memguard.core.foreign import patched
from lightning_memguard.core.replay.footprint import Footprint
from lightning_memguard.core.trace.depth import DEPTHS
from lightning_memguard.errors import MemGuardError
from lightning_memguard.training.planning.subject import MakeOptimizer, Subject, predicted, subject_of
from lightning_memguard.training.planning.target import target_and_budget
from lightning_memguard.units import format_bytes

_COLUMNS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size"),
)
_MOST_TOKENS = 1 << 20
_MULTIPLES = {"length": 128, "rank": 8}
_CLIPPED_AT = 1.0  # `TrainingArguments.max_grad_norm`
_DEFAULT_OPTIMIZER = "adamw_torch_fused"  # `TrainingArguments.optim`


@dataclass(frozen=True)
class FineTuning:
    """How a causal language model of Hugging Face's transformers is fine-tuned.

    Attributes:
        name: a repository on the hub, such as ``"meta-llama/Llama-3.1-8B"``, that the local cache or the built-in table
            has; or the path of a ``config.json``, or of a folder with one.
        length: tokens of a sample.
        lora: the rank of peft's adapters; 0 to train all weights.
        targets: the modules with adapters, as peft takes them: ``"all-linear"``, or names.
        bits: 4 for ``nf4`` weights of bitsandbytes, 8 for its ``int8``, with adapters; 0 for weights as they are.
        double_quantization: whether the scales of 4-bit weights are quantized, too.
        checkpointing: whether activations are recomputed in the backward pass.
        attention: an implementation that transformers has, ``"sdpa"`` or ``"eager"``; empty for its own choice.
        trl: whether the loss is that of TRL's ``SFTTrainer``, which makes no logits.
    """

    name: str
    length: int = 1024
    lora: int = 0
    targets: str | tuple[str, ...] = "all-linear"
    bits: int = 0
    double_quantization: bool = False
    checkpointing: bool = False
    attention: str = ""
    trl: bool = False

    def __post_init__(self) -> None:
        check_count("length", self.length)
        if self.bits not in (0, 4, 8):
            raise MemGuardError(f"bits={self.bits} is unknown: 4 or 8 for weights of bitsandbytes, or 0.")
        if self.bits and not self.lora:
            raise MemGuardError("Weights of 4 or 8 bits cannot be trained themselves: give a rank for adapters (lora).")


# -- the configuration


def config_of(name: str) -> Any:
    """Return the configuration of a model of transformers, without a network.

    Raises:
        MemGuardError: transformers is not installed, or neither a file, the cache nor the table has it.
    """
    transformers: Any = _library("transformers")
    if Path(name).exists():
        return _from_file(transformers, Path(name))
    with quiet():
        try:
            return transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        except (OSError, ValueError):  # not in the cache, or with code of its own
            known = _table()
    if name in known:
        return transformers.AutoConfig.for_model(**known[name])
    similar = get_close_matches(name.lower(), [each.lower() for each in known], n=3, cutoff=0.4)
    meant = " or ".join(each for each in known if each.lower() in similar)
    raise MemGuardError(
        f"The configuration of {name!r} is not here: pass the path of its config.json, or load its configuration once "
        f"where there is a network (transformers.AutoConfig.from_pretrained({name!r})). "
        + (f"The built-in table has {meant}." if meant else f"The built-in table has {len(known)} models.")
    )


def _from_file(transformers: Any, path: Path) -> Any:
    path = path / "config.json" if path.is_dir() else path
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return transformers.AutoConfig.for_model(**settings)
    except (OSError, ValueError, TypeError) as error:
        raise MemGuardError(f"{path} is not a configuration of a model of transformers: {error}") from error


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    """Read `models.ini`: the settings of each model by its name."""
    rows = configparser.ConfigParser(delimiters="=", interpolation=None)
    rows.optionxform = str  # type: ignore[assignment]
    rows.read_string(files("lightning_memguard.training.planning").joinpath("models.ini").read_text(encoding="utf-8"))
    return {name: _settings(kind, row) for kind in rows.sections() for name, row in rows[kind].items()}


def _settings(kind: str, row: str) -> dict[str, Any]:
    sizes, (tied, _, *more) = row.split()[: len(_COLUMNS)], row.split()[len(_COLUMNS) :]
    settings: dict[str, Any] = {"model_type": kind, "tie_word_embeddings": tied == "yes", "pad_token_id": None}
    settings |= dict(zip(_COLUMNS, map(int, sizes), strict=True))
    return settings | {name: json.loads(value) for name, _, value in (each.partition(":") for each in more)}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MemGuardError(
            f"{name} is needed to fine-tune by a model's name: pip install 'lightning-memguard[hf]' ({error})."
        ) from error


# -- the model


def model_of(tuning: FineTuning, dtype: torch.dtype, layers: int | None = None) -> nn.Module:
    """Build a model without memory, quantized and with adapters as asked for; with so many layers, if that is given.

    Raises:
        MemGuardError: a library is missing, or refuses these settings.
    """
    transformers: Any = _library("transformers")
    config = config_of(tuning.name)
    if layers is not None:
        of_each = [name for name, value in vars(config).items() if _is_of_each(value, config.num_hidden_layers)]
        for name in of_each:
            setattr(config, name, getattr(config, name)[:layers])
        config.num_hidden_layers = layers
    with torch.device("meta"), quiet():
        try:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=tuning.attention or None
            )
            model.tie_weights()
        except (ValueError, ImportError, KeyError) as error:
            raise MemGuardError(f"transformers does not build {tuning.name} with these settings: {error}") from error
        model.config.use_cache = False
        if tuning.bits:
            _quantize(model, tuning, dtype)
        if tuning.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if tuning.trl:
            _trl("trainer.utils").add_fused_lm_head(model, outputs=_TRL_OUTPUTS)
        model = _with_adapters(model, tuning) if tuning.lora else model
    return model.train()  # type: ignore[no-any-return]


def _is_of_each(value: object, layers: int) -> bool:
    return isinstance(value, list) and len(value) == layers


def _few_layers(tuning: FineTuning, model: nn.Module, dtype: torch.dtype) -> FewLayers | None:
    """The model with fewer layers, if all of them are equal."""
    depth = getattr(model.config, "num_hidden_layers", 0)
    lists = [name for name, each in model.named_modules() if isinstance(each, nn.ModuleList) and len(each) == depth]
    if depth <= DEPTHS[-1] or len(lists) != 1:
        return None
    models = tuple(model_of(tuning, dtype, layers) for layers in DEPTHS)
    (path,) = lists
    kinds = {_outline(layer) for each in (model, *models) for layer in each.get_submodule(path).children()}
    of_each = [{*map(str, value)} for value in vars(model.config).values() if _is_of_each(value, depth)]
    return FewLayers(models, depth, path) if len(kinds) == 1 and all(len(kind) == 1 for kind in of_each) else None


def _outline(layer: nn.Module) -> tuple[object, ...]:
    """Describe a layer, to compare it with others: its modules, with their settings and parameters, but no number."""
    found: list[object] = []
    for name, module in layer.named_modules():
        settings = {key: value for key, value in vars(module).items() if isinstance(value, (int, float, str))}
        settings.pop("layer_idx", None)
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        shapes = [(key, type(each), each.shape, each.dtype, each.requires_grad) for key, each in tensors]
        found += [name, type(module), tuple(settings.items()), tuple(shapes)]
    return tuple(found)


def _quantize(model: Any, tuning: FineTuning, dtype: torch.dtype) -> None:
    """Put layers of bitsandbytes in place of linear ones, as loading does; they are quantized when they are moved."""
    bnb, transformers = _library("bitsandbytes"), _library("transformers")
    integration = importlib.import_module("transformers.integrations.bitsandbytes")
    base = importlib.import_module("transformers.quantizers.base")
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=tuning.bits == 4,
        load_in_8bit=tuning.bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=tuning.double_quantization,
    )
    kept = base.get_keys_to_not_convert(model)
    integration.replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=how)
    for module in model.modules():
        if isinstance(module, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
            module.to(dtype)  # as the weights that are loaded are
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = tuning.bits == 4, tuning.bits == 8


def _with_adapters(model: Any, tuning: FineTuning) -> Any:
    peft: Any = _library("peft")
    if tuning.bits:  # casts what is not quantized to 32 bits
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=tuning.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    elif tuning.checkpointing:
        model.enable_input_require_grads()
    targets = tuning.targets if isinstance(tuning.targets, str) else list(tuning.targets)
    try:
        adapters = peft.LoraConfig(
            r=tuning.lora, lora_alpha=2 * tuning.lora, task_type="CAUSAL_LM", target_modules=targets
        )
        return peft.get_peft_model(model, adapters)
    except (ValueError, ImportError) as error:
        raise MemGuardError(f"peft adds no adapters to {targets} of {tuning.name}: {error}") from error


# -- the loop


def subject_by_name(
    tuning: FineTuning,
    *,
    batch_size: int = 1,
    precision: str = "bf16-true",
    optimizer: MakeOptimizer | None = None,
    accumulate: int = 1,
) -> Subject:
    """Return a fine-tuning to plan for: the loop of transformers' Trainer around a model without memory.

    Args:
        tuning: the model, and what is trained of it.
        batch_size: samples of a step.
        precision: ``"bf16-true"`` and ``"16-true"``: weights, and the computations of quantized ones, of 16 bits;
            ``"bf16-mixed"`` and ``"16-mixed"``: weights of 32 bits under autocast.
        optimizer: ``(parameters) -> Optimizer``, in place of the Trainer's default.
        accumulate: batches of an optimizer step.

    Raises:
        MemGuardError: an extra is missing, or the model or a setting is unknown.
    """
    half = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
    compute = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    dtype = half.get(precision) or (compute.get(precision) if tuning.bits else None) or torch.float32
    model = model_of(tuning, dtype)
    tokens = torch.zeros(batch_size, tuning.length, dtype=torch.long, device="meta")
    make = optimizer or trainers_optimizer(_DEFAULT_OPTIMIZER)
    assert make is not None
    subject = subject_of(
        model,
        {"input_ids": tokens, "labels": tokens.clone()},
        batch_size=batch_size,
        precision=precision if precision in compute else "32-true",  # the weights have their types already
        step=_trl_loss if tuning.trl else lambda module, batch: module(**batch).loss,
        optimizer=_Clipping(make),
        context=_trl_kernels if tuning.trl else contextlib.nullcontext,
    )
    return replace(
        subject,
        trainer={"accumulate_grad_batches": accumulate},
        few=_few_layers(tuning, model, dtype),
        notes=(*subject.notes, *_rests_on(tuning, model, dtype, precision)),
    )


_TRL_OUTPUTS = ("log_probs", "entropy", "is_top1")


def _trl(module: str) -> Any:
    try:
        importlib.import_module("trl.kernels.chunked_logprob")  # which came with the loss
        return importlib.import_module(f"trl.{module}")
    except ImportError as error:
        raise MemGuardError(f"TRL 1.16 or later is needed to predict its loss: pip install trl ({error}).") from error


def _trl_loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of TRL's ``SFTTrainer``, all of whose tokens are trained. Checked on TRL 1.16."""
    batch["labels"].zero_()  # known, as it picks the positions whose label is not -100
    found = module(**batch, use_cache=False, fused_lm_head=True)
    loss: torch.Tensor = (-found.log_probs).sum() / torch.as_tensor(batch["labels"].numel()).clamp(min=1)
    _ = found.label_mask.sum(), found.entropy.detach().sum(), found.is_top1.sum()
    return loss


def _trl_kernels() -> contextlib.AbstractContextManager[Any]:
    """On a GPU, Triton's kernels write to what they are given and make nothing."""
    kernels = _trl("kernels.chunked_logprob")

    def on_cpu(run: Callable[..., None]) -> Callable[..., None]:
        return lambda tile, *args, **kwargs: None if tile.is_cuda else run(tile, *args, **kwargs)

    tiles = {name: on_cpu(getattr(kernels, name)) for name in ("_forward_tile", "_backward_tile")}
    exits = contextlib.ExitStack()
    exits.enter_context(patched(kernels, _use_triton=lambda _: False, **tiles))
    exits.enter_context(patched(_trl("trainer.utils"), _use_triton=lambda device: device.type == "cuda"))
    return exits


class _Clipping:
    """Makes an optimizer of the parameters that are trained, whose gradients are clipped before each step."""

    def __init__(self, make: MakeOptimizer) -> None:
        self.make = make
        self.__name__ = getattr(make, "__name__", "") or getattr(getattr(make, "func", make), "__name__", "its own")

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Make it with two groups: as the Trainer, without weight decay for biases and norms."""
        trained = [each for each in parameters if each.requires_grad]
        split = [[each for each in trained if (each.dim() > 1) is decays] for decays in (True, False)]
        groups: Any = [{"params": group} for group in split if group]
        made = self.make(groups)
        made.register_step_pre_hook(lambda *_: _clip(trained))
        return made


def _clip(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, _CLIPPED_AT)


def trainers_optimizer(name: str) -> MakeOptimizer | None:
    """Return the optimizer that transformers' Trainer makes by a name; None if it is not one of its names.

    Raises:
        MemGuardError: it needs a library that is missing, or more settings.
    """
    _library("accelerate")
    trainer: Any = importlib.import_module("transformers.trainer")
    names: Any = importlib.import_module("transformers.training_args").OptimizerNames
    if name not in [each.value for each in names]:
        return None
    options = {"learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
    settings = SimpleNamespace(optim=names(name), optim_args=None, weight_decay=0.0, **options)
    try:
        kind, given = trainer.Trainer.get_optimizer_cls_and_kwargs(settings)
    except (ValueError, ImportError, AttributeError) as error:
        raise MemGuardError(f"transformers' Trainer does not make {name!r} here: {error}") from error
    make = functools.partial(kind, **given)
    make.__name__ = name  # type: ignore[attr-defined]
    return make


def _rests_on(tuning: FineTuning, model: nn.Module, dtype: torch.dtype, precision: str) -> Iterator[str]:
    """Notes on what the figures of a fine-tuning rest on."""
    versions = {"transformers": True, "peft": bool(tuning.lora), "bitsandbytes": bool(tuning.bits)}
    built = " and ".join(f"{name} {importlib.metadata.version(name)}" for name, used in versions.items() if used)
    attention = tuning.attention or getattr(model.config, "_attn_implementation", "transformers' own choice")
    kind = type(model.get_base_model() if tuning.lora else model).__name__  # type: ignore[operator]
    loss = f"of TRL {importlib.metadata.version('trl')}" if tuning.trl else "the model's own"
    yield f"{kind} of {tuning.name}, without weights, by {built}; attention: {attention}; loss: {loss}"
    if tuning.lora:
        targets = tuning.targets if isinstance(tuning.targets, str) else ", ".join(tuning.targets)
        yield f"adapters of rank {tuning.lora} in {targets}"
    autocast = "under autocast" if precision.endswith("-mixed") else "without autocast"
    yield f"weights of {str(dtype)[6:]}, {autocast}"
    name = "TRL's SFTTrainer" if tuning.trl else "transformers' Trainer"
    loop = f"the loop of {name}, gradients clipped at {_CLIPPED_AT:g}"
    yield f"{loop}; no sample is padded"


# -- the largest of something


@dataclass(frozen=True)
class Largest:
    """The largest length or rank that fits.

    Attributes:
        what: ``"length"`` or ``"rank"``.
        value: tokens, or the rank; 0 if none fits.
        footprint: the memory there, or at the smallest value that was tried.
        budget: what the device offers.
        bounded: whether the search ended at its own bound, not the memory's.
    """

    what: str
    value: int
    footprint: Footprint
    budget: Budget
    bounded: bool = False

    def __str__(self) -> str:
        most, usable = format_bytes(self.footprint.most_device_bytes), format_bytes(self.budget.usable_bytes)
        if not self.value:
            return f"{self.budget.device}: no {self.what} fits; the smallest takes at most {most} of {usable}"
        more = " or more" if self.bounded else ""
        return f"{self.budget.device}: the largest {self.what} is {self.value:,}{more}, at most {most} of {usable}"


def largest_of(what: str, now: int, subject_with: Callable[[int], Subject], device: str, limits: Limits) -> Largest:
    """Find the largest length or rank that fits a device, the other settings as they are.

    Args:
        what: ``"length"`` or ``"rank"``.
        now: the length or rank as it is, where the search begins.
        subject_with: a length or rank -> the training with it.
        device: see `lightning_memguard.estimate`.
        limits: the budget and its margin.

    Each step of the search captures a whole step.

    Raises:
        CannotTraceError: the step cannot be predicted.
    """
    multiple = _MULTIPLES[what]
    known: dict[int, Footprint] = {}
    budget = target_and_budget(device, limits, nn.Identity())[1]

    def bytes_at(value: int) -> int:
        if value not in known:
            subject = subject_with(value)
            target, _ = target_and_budget(device, limits, subject.model)
            with Captures():
                known[value] = predicted(subject, target).footprint_at(subject.batch_size)
        return known[value].most_device_bytes

    bound = _MOST_TOKENS if what == "length" else 4096
    if bytes_at(multiple) > budget.usable_bytes:
        return Largest(what, 0, known[multiple], budget)
    first = max(2 * multiple, now // multiple * multiple)
    value = largest_within(multiple, bound, multiple, bytes_at, budget.usable_bytes, first)
    return Largest(what, value, known[value], budget, bounded=value == bound)
