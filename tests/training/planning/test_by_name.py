"""A language model by its name: its configuration without a network, and its fine-tuning as the Trainer runs it."""

from __future__ import annotations

import importlib
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memguard import MemGuardError, estimate
from lightning_memguard.cli.main import BAD_USE, main
from lightning_memguard.core.capture.capture import capture_here
from lightning_memguard.core.decision.decision import Limits
from lightning_memguard.core.simulation import quantized
from lightning_memguard.core.trace.loading import _order
from lightning_memguard.training.planning import by_name
from lightning_memguard.training.planning.by_name import FineTuning, config_of, largest_of, model_of, subject_by_name
from lightning_memguard.training.planning.subject import program_of
from lightning_memguard.training.planning.target import target_of

TABLE = by_name._table()
SIZES = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
SMALL = {"length": 32, "checkpointing": True}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def transformers() -> Any:
    pytest.importorskip("accelerate", reason="of the extra hf, which is not installed")
    return pytest.importorskip("transformers", reason="of the extra hf, which is not installed")


@pytest.fixture
def small(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
    return str(tmp_path)


def counts() -> dict[str, int]:
    lines = Path(by_name.__file__).with_name("models.ini").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" = ") for line in lines if " = " in line and not line.startswith("#")]
    return {name: int(row.split()[8]) for name, row in rows}


@pytest.mark.parametrize("name", TABLE)
def test_a_model_of_the_table_has_as_many_parameters_as_were_published(name: str, transformers: Any) -> None:
    config = transformers.AutoConfig.for_model(**TABLE[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(each.numel() for each in model.parameters()) == counts()[name]


def test_a_configuration_is_read_from_a_file_its_folder_or_the_table(transformers: Any, small: str) -> None:
    assert config_of(small).hidden_size == config_of(f"{small}/config.json").hidden_size == 64
    assert config_of("meta-llama/Llama-3.1-8B").num_key_value_heads == 8
    with pytest.raises(MemGuardError, match=r"The built-in table has meta-llama/Llama-3\.\d-\dB"):
        config_of("meta-llama/Llama-3.1-7B")


def test_the_command_plans_lengths_of_a_configuration_and_the_epoch_over_them(
    transformers: Any, small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightning_memguard.core.capture.lengths.MOST_SECONDS", 0.5)
    options = ["plan", "--hf", f"{small}/config.json", "--length", "16", "32", "--device", "T4", "--budget", "256MiB"]
    assert main([*options, "--max-batch-size", "64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "example batch: 1 x 32 int64" in out
    assert "the largest batch size at each length" in out
    assert "over an epoch of lengths" in out
    assert main([*options, "--seq", "32"]) == BAD_USE


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MemGuardError, match=r"transformers is needed .*lightning-memguard\[hf\]"):
        estimate(hf="meta-llama/Llama-3.1-8B")


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(MemGuardError, match="rank for adapters"):
        FineTuning("x", bits=4)
    with pytest.raises(MemGuardError, match="brings its own model"):
        estimate(torch.nn.Linear(1, 1), hf="x")
    with pytest.raises(MemGuardError, match="Pass a model and an example batch"):
        estimate()


def test_the_loop_is_that_of_the_trainer(transformers: Any, small: str) -> None:
    """On the CPU: weights of 32 bits and two moments; gradients are gone when the next forward pass begins."""
    found = estimate(hf=FineTuning(small, length=32), batch_size=2, device="cpu")
    model = model_of(FineTuning(small), torch.float32)
    weights = sum(each.numel() * 4 for each in model.parameters())
    assert found.method == "fake"
    assert found.parts["parameters"] == weights
    assert found.parts["optimizer_state"] >= 2 * weights
    assert any("gradients clipped at 1" in note and "no sample is padded" in note for note in found.notes)
    assert any(f"transformers {transformers.__version__}" in note and "attention: sdpa" in note for note in found.notes)


def test_tied_embeddings_are_tied_without_memory(transformers: Any, small: str) -> None:
    model: Any = model_of(FineTuning(small), torch.float32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_adapters_alone_are_trained_and_4_bit_weights_are_smaller(transformers: Any, small: str) -> None:
    pytest.importorskip("peft", reason="of the extra hf, which is not installed")
    pytest.importorskip("bitsandbytes", reason="of the extra hf, which is not installed")
    half = estimate(hf=FineTuning(small, lora=8, **SMALL), precision="bf16-true", device="A100")
    packed = estimate(hf=FineTuning(small, lora=8, bits=4, **SMALL), precision="bf16-true", device="A100")
    assert {half.method, packed.method} == {"fake"}
    assert half.parts["optimizer_state"] == packed.parts["optimizer_state"] < half.parts["parameters"]
    linear = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128)  # weights of two layers
    embedding = 512 * 64
    assert half.parts["parameters"] > 2 * (linear + embedding)
    assert packed.parts["parameters"] < 0.7 * linear + 4 * embedding + 4 * 8 * 2 * 2000  # embeddings are of 32 bits


@pytest.mark.parametrize("name", ["adamw_torch", "paged_adamw_8bit", "adafactor", "no_such_optimizer"])
def test_optimizers_have_the_names_of_the_trainer(name: str, transformers: Any, small: str) -> None:
    pytest.importorskip("bitsandbytes", reason="of the extra hf, which is not installed")
    make = by_name.trainers_optimizer(name)
    assert (make is None) == name.startswith("no_")
    if make is not None:
        found = estimate(hf=FineTuning(small, length=32), optimizer=make, precision="bf16-true", device="A100")
        assert found.method == "fake"


def test_accumulation_keeps_gradients_through_the_next_forward_pass(transformers: Any, small: str) -> None:
    alone, several = (subject_by_name(FineTuning(small, length=32), accumulate=batches) for batches in (1, 4))
    assert (alone.trainer, several.trainer) == ({"accumulate_grad_batches": 1}, {"accumulate_grad_batches": 4})


@pytest.mark.parametrize("what", ["length", "rank"])
def test_the_largest_that_fits_fits_and_the_next_does_not(what: str, transformers: Any, small: str) -> None:
    pytest.importorskip("peft", reason="of the extra hf, which is not installed")
    tuning = FineTuning(small, lora=8, length=128)

    def changed(value: int) -> FineTuning:
        return by_name.replace(tuning, **{"lora" if what == "rank" else what: value})

    def most(value: int) -> int:
        return estimate(hf=changed(value), precision="bf16-true", device="T4").most_device_bytes

    step = {"length": 128, "rank": 8}[what]
    budget = most(5 * step)
    limits = Limits(margin=0.0, budget_bytes=budget)
    found = largest_of(
        what, 128 if what == "length" else 8, lambda value: subject_by_name(changed(value)), "T4", limits
    )
    assert most(found.value) == found.footprint.most_device_bytes <= budget < most(found.value + step)
    assert f"the largest {what} is {found.value:,}" in str(found)


@pytest.mark.parametrize("settings", [{}, {"lora": 4}, {"checkpointing": True}])
def test_a_step_of_few_layers_tells_the_step_of_many(
    settings: dict[str, Any], transformers: Any, tmp_path: Path
) -> None:
    """The trace of six layers from those of one, two and three is the one that is captured with all six."""
    if "lora" in settings:
        pytest.importorskip("peft", reason="of the extra hf, which is not installed")
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "num_hidden_layers": 6}), encoding="utf-8")
    subject = subject_by_name(FineTuning(str(tmp_path), length=32, **settings))
    program = program_of(subject, target_of("T4"))
    few, whole = capture_here(program, 4, "fake"), capture_here(replace(program, few=None), 4, "fake")  # type: ignore[type-var]
    assert program.few.known
    assert (few.events, few.scratch_spans, few.work) == (whole.events, whole.scratch_spans, whole.work)


def test_layers_that_differ_are_all_captured(transformers: Any) -> None:
    """Gemma 2 attends to a window in every other layer."""
    assert subject_by_name(FineTuning("google/gemma-2-2b", length=32)).few is None


def test_the_loss_of_trl_takes_a_tile_of_logits(transformers: Any, small: str) -> None:
    """Tokens but the last of each sample times 32,768 columns, whatever the vocabulary."""
    pytest.importorskip("trl", reason="TRL is not installed")
    found = estimate(hf=FineTuning(small, length=256, checkpointing=True, trl=True), batch_size=2, device="T4")
    tile = 2 * 255 * 32768 * 4
    assert found.method == "fake"
    assert tile < found.peak_allocated_bytes < 1.5 * tile
    assert any("loss: of TRL" in note for note in found.notes)


def test_weights_are_loaded_in_the_order_in_which_transformers_loads_and_quantizes_them(
    transformers: Any, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes", reason="of the extra hf, which is not installed")
    weights = quantized.weights_of(model_of(FineTuning(small, lora=2, bits=4), torch.bfloat16))
    loading = importlib.import_module("transformers.core_model_loading")
    moved: list[tuple[int, int]] = []  # bytes, and those of others that are not quantized yet
    alive: list[weakref.ref[Any]] = []
    original = loading._materialize_copy

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = original(*args, **kwargs).clone()
        linear = tensor.dim() > 1 and len(tensor) != SIZES["vocab_size"]
        moved.append((tensor.nbytes, sum(each() is not None for each in alive)))
        alive.extend([weakref.ref(tensor.untyped_storage())] if linear else [])
        return tensor

    transformers.AutoModelForCausalLM.from_config(config_of(small), dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "_materialize_copy", noted)
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    settings = {"dtype": torch.bfloat16, "quantization_config": how, "device_map": {"": "cpu"}}
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), **settings)
    order = [place for is_moved, place in _order(weights, quantized.loading_threads()) if is_moved]
    assert [(weights[place].nbytes, 0) for place in order] == moved
    assert [(each.nbytes, each.bits) for each in quantized.weights_of(model)] == [
        (each.nbytes, each.bits) for each in weights if each.name
    ]
