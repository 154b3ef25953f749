"""Libraries for text, sound and both: Transformers, PEFT, sentence embeddings, other language models, speech."""

# Rows of tables, and names of libraries imported when they are called:
# fmt: off

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from field.pattern import (
    Net,
    adamw,
    classed,
    data,
    dictionary,
    images,
    noise,
    of,
    pattern,
    regress,
    row,
    sgd,
    tokens,
)

TEXTS = (4, 16)


def loss_of(network: nn.Module, batch: Any) -> Tensor:
    return network(**batch).loss


def next_token(network: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(network(batch[0]).flatten(0, 1), batch[1].flatten())


def of_itself(network: nn.Module, batch: Any) -> Tensor:
    return network(batch[0])


def of_all(network: nn.Module, batch: Any) -> Tensor:
    return network(*batch)


def of_sound(network: nn.Module, batch: Any) -> Tensor:
    return F.l1_loss(network(batch[0]), batch[1])


def causal_data() -> Any:
    text = torch.randint(3, 500, (64, 64))
    return dictionary(input_ids=lambda i: text[i], labels=lambda i: text[i], attention_mask=lambda _: torch.ones(
        64).long())


# Transformers --------------------------------------------------------------------------------------------------------

LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {"vocab_size": 500, "max_position_embeddings": 128, **LAYERS, **MARKS}
IMAGE = {"image_size": 32, "patch_size": 8, **LAYERS}
VIT = {**IMAGE, "image_size": 64}
EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
CODER = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in {"layers": 2,
    "attention_heads": 4, "ffn_dim": 128}.items()}
DECODED = {f"decoder_{key}": value for key, value in {"hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "intermediate_size": 64}.items()}
PREDICT = {"prediction_length": 12, "context_length": 30, "lags_sequence": [1, 2, 7], "num_time_features": 2,
    "d_model": 32, **CODER}
WAVES = {**LAYERS, "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}

Columns = dict[str, Callable[[int], Any]]
TEXT: Columns = {"input_ids": lambda _: torch.randint(3, 500, (32,)),
    "attention_mask": lambda i: (torch.arange(32) < 32 - i % 16).long()}
PIXELS: Columns = {"pixel_values": lambda _: torch.randn(3, 64, 64)}
THUMBS: Columns = {"pixel_values": lambda _: torch.randn(3, 32, 32)}
CLASS: Columns = {"labels": lambda i: i % 10}
WORDS: Columns = {"labels": lambda _: torch.randint(3, 500, (32,))}
SENTENCE: Columns = {"labels": lambda _: torch.randint(3, 500, (16,))}
SERIES: Columns = {"past_values": lambda _: torch.rand(37), "past_time_features": lambda _: torch.randn(37, 2),
    "past_observed_mask": lambda _: torch.ones(37), "future_values": lambda _: torch.rand(12),
    "future_time_features": lambda _: torch.randn(12, 2)}
HUGGING: dict[str, tuple[tuple[int, int], str, str, dict[str, Any], Columns]] = {
    "hf_mixtral": (TEXTS, "MixtralForCausalLM", "MixtralConfig", {**SMALL, **EXPERTS, "num_local_experts": 4,
        "output_router_logits": True}, {}),
    "hf_whisper": ((2, 4), "WhisperForConditionalGeneration", "WhisperConfig", {**CODER, "vocab_size": 500,
        "d_model": 64, "max_source_positions": 100, "num_mel_bins": 20, "decoder_start_token_id": 1,
        "suppress_tokens": [], "begin_suppress_tokens": [], **MARKS}, {"input_features": lambda _: torch.randn(
        20, 200), **SENTENCE}),
    "hf_vit": ((4, 8), "ViTForImageClassification", "ViTConfig", {**VIT, "num_labels": 10}, {**PIXELS, **CLASS}),
    "hf_segformer": ((4, 8), "SegformerForSemanticSegmentation", "SegformerConfig", {"hidden_sizes": [16, 32, 40, 64],
        "decoder_hidden_size": 64, "num_labels": 5}, {**PIXELS, "labels": lambda _: torch.randint(5, (64, 64))}),
    "hf_roberta": (TEXTS, "RobertaForSequenceClassification", "RobertaConfig", {**SMALL, "num_labels": 10},
        {**TEXT, **CLASS}),
    "hf_distilbert_ner": (TEXTS, "DistilBertForTokenClassification", "DistilBertConfig", {"vocab_size": 500, "dim": 64,
        "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "num_labels": 9}, {**TEXT, "labels": lambda _: torch.randint(
        9, (32,))}),
    "hf_modernbert_mlm": (TEXTS, "ModernBertForMaskedLM", "ModernBertConfig", {**SMALL, "cls_token_id": 1,
        "sep_token_id": 2, "local_attention": 8}, {**TEXT, **WORDS}),
    "hf_longformer_qa": ((2, 8), "LongformerForQuestionAnswering", "LongformerConfig", {**SMALL,
        "attention_window": [8, 8], "sep_token_id": 2}, {"input_ids": lambda _: torch.cat([torch.randint(
        3, 500, (29,)), torch.full((3,), 2)]), "start_positions": lambda i: i % 16, "end_positions": lambda i:
        16 + i % 16}),
    "hf_gpt_oss": (TEXTS, "GptOssForCausalLM", "GptOssConfig", {**SMALL, **EXPERTS, "head_dim": 16,
        "num_local_experts": 4, "sliding_window": 16}, {**TEXT, **WORDS}),
    "hf_qwen3_moe": (TEXTS, "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**SMALL, **EXPERTS, "head_dim": 16,
        "num_experts": 4, "moe_intermediate_size": 64, "output_router_logits": True}, {**TEXT, **WORDS}),
    "hf_deepseek_v3": (TEXTS, "DeepseekV3ForCausalLM", "DeepseekV3Config", {**SMALL, "num_key_value_heads": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 64,
        "first_k_dense_replace": 1}, {**TEXT, **WORDS}),
    "hf_vit_mae": (TEXTS, "ViTMAEForPreTraining", "ViTMAEConfig", {**VIT, **DECODED}, PIXELS),
    "hf_dinov2": (TEXTS, "Dinov2ForImageClassification", "Dinov2Config", {**VIT, "mlp_ratio": 2, "num_labels": 10},
        {**PIXELS, **CLASS}),
    "hf_swin": (TEXTS, "SwinForImageClassification", "SwinConfig", {"image_size": 64, "patch_size": 4, "embed_dim": 16,
        "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 10}, {**PIXELS, **CLASS}),
    "hf_video_mae": ((2, 8), "VideoMAEForPreTraining", "VideoMAEConfig", {**IMAGE, "num_frames": 8, **DECODED},
        {"pixel_values": lambda _: torch.randn(8, 3, 32, 32), "bool_masked_pos": lambda _: torch.randperm(64) < 48}),
    "hf_time_series": ((16, 64), "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", PREDICT, SERIES),
    "hf_autoformer": ((16, 64), "AutoformerForPrediction", "AutoformerConfig", {**PREDICT, "label_length": 6}, SERIES),
}
for name, (sizes, model, config, options, known) in HUGGING.items():
    row(name, "transformers", sizes, "transformers", lambda t, m=model, c=config, o=options: getattr(t, m)(getattr(
        t, c)(**o)), lambda k=known: dictionary(**k) if k else causal_data(), loss_of, adamw)

row("hf_clip", "transformers", (4, 8), "transformers", lambda t: t.CLIPModel(t.CLIPConfig(text_config={**SMALL,
    "max_position_embeddings": 32}, vision_config=IMAGE, projection_dim=32)), lambda: dictionary(**THUMBS,
    input_ids=lambda _: torch.randint(3, 500, (16,))), lambda n, b: n(**b, return_loss=True).loss, adamw)
# Features of an image take the places of its tokens: `masked_scatter`.
row("hf_llava", "transformers", TEXTS, "transformers", lambda t: t.LlavaForConditionalGeneration(t.LlavaConfig(
    text_config=t.LlamaConfig(**SMALL), vision_config=t.CLIPVisionConfig(**IMAGE), image_token_index=3)),
    lambda: dictionary(**THUMBS, **{name: lambda _: torch.cat([torch.full((16,), 3), torch.randint(4, 500, (24,))])
    for name in ("input_ids", "labels")}, attention_mask=lambda _: torch.ones(40).long()), loss_of, adamw)


def speech() -> Any:
    """Speech of different lengths."""
    seconds = torch.randint(8000, 16001, (64,)).tolist()
    seconds[0] = 16000

    def collate(items: list[Any]) -> dict[str, Tensor]:
        longest = max(len(wave) for wave, _ in items)
        return {"input_values": torch.stack([F.pad(wave, (0, longest - len(wave))) for wave, _ in items]),
            "attention_mask": torch.stack([torch.arange(longest) < len(wave) for wave, _ in items]).long(),
            "labels": pad_sequence([text for _, text in items], True, -100)}

    return data(lambda i: (torch.randn(seconds[i]), torch.randint(1, 32, (5 + i % 8,))), collate)


def masked_speech() -> Any:
    """The masked frames and the frames to tell them from are inputs, as in the official script."""
    def collate(items: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(items)
        batch["sampled_negative_indices"] += 24 * torch.arange(len(items))[:, None, None]
        return batch

    return data(lambda _: {"input_values": torch.randn(8000), "mask_time_indices": torch.rand(24) < 0.4,
        "sampled_negative_indices": torch.randint(24, (24, 10))}, collate)


# CTC, time masks by NumPy, and layer drop.
row("wav2vec2_ctc", "transformers", (2, 4), "transformers", lambda t: t.Wav2Vec2ForCTC(t.Wav2Vec2Config(vocab_size=32,
    ctc_loss_reduction="mean", **WAVES)), speech, loss_of, adamw)
row("wav2vec2_pretraining", "transformers", (2, 8), "transformers", lambda t: t.Wav2Vec2ForPreTraining(
    t.Wav2Vec2Config(**WAVES, codevector_dim=32, proj_codevector_dim=32, num_codevectors_per_group=32,
    do_stable_layer_norm=True, feat_extract_norm="layer")), masked_speech, loss_of, adamw)


@pattern("transformers", TEXTS, "transformers", lambda: dictionary(**PIXELS, **SENTENCE), loss_of, adamw)
def hf_trocr(t: Any) -> nn.Module:
    reader = t.TrOCRConfig(vocab_size=500, d_model=64, **{k: v for k, v in CODER.items() if k[0] == "d"})
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(t.ViTConfig(**VIT), reader)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return t.VisionEncoderDecoderModel(config=config)


@pattern("chronos-forecasting", (16, 64), "", lambda: data(lambda _: (torch.rand(64), torch.rand(16))),
    lambda n, b: n(context=b[0], target=b[1]).loss, adamw)
def chronos_bolt() -> nn.Module:
    forecast = {"context_length": 64, "prediction_length": 16, "input_patch_size": 8, "input_patch_stride": 8,
        "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True}
    config = of("transformers:T5Config")(vocab_size=2, d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2,
        chronos_config=forecast, decoder_start_token_id=0, pad_token_id=0, reg_token_id=1)
    return of("chronos.chronos_bolt:ChronosBoltModelForForecasting")(config)


# Adapters and quantization -------------------------------------------------------------------------------------------


def llama() -> Any:
    return of("transformers:LlamaForCausalLM")(of("transformers:LlamaConfig")(**SMALL))


def checkpointed() -> Any:
    base = llama()
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    return base


HEADS = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "peft_prefix_tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 8}),
    "peft_prompt_tuning": ("PromptTuningConfig", {"num_virtual_tokens": 8}),
    "peft_vera": ("VeraConfig", {"r": 16, **HEADS}),
    "peft_oft": ("OFTConfig", {"oft_block_size": 8, **HEADS}),
    "peft_pissa_lora": ("LoraConfig", {"r": 8, "init_lora_weights": "pissa", **HEADS}),
}
for name, (config, options) in ADAPTERS.items():
    row(name, "peft", TEXTS, "peft", lambda peft, c=config, o=options: peft.get_peft_model(llama(), getattr(peft, c)(
        task_type="CAUSAL_LM", **o)), causal_data, loss_of, adamw)
row("dora_llama_checkpointed", "peft", TEXTS, "peft", lambda peft: peft.get_peft_model(checkpointed(), peft.LoraConfig(
    r=8, **HEADS, use_dora=True)), causal_data, loss_of, adamw)


@pattern("bitsandbytes", TEXTS, "", causal_data, loss_of, adamw)
def qlora_4bit() -> nn.Module:
    """A frozen base in four bits, dequantized in each pass; checkpointed, as QLoRA is."""
    base = llama()
    for layer in base.model.layers:
        for parent, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            for child in names:
                old = getattr(parent, f"{child}_proj")
                new = of("bitsandbytes.nn:Linear4bit")(old.in_features, old.out_features, False, quant_type="nf4")
                new.weight = of("bitsandbytes.nn:Params4bit")(old.weight.data, False, quant_type="nf4")
                setattr(parent, f"{child}_proj", new.to("cpu"))
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    return of("peft:get_peft_model")(base, of("peft:LoraConfig")(r=8, **HEADS))


@pattern("torchao", TEXTS, "", causal_data, loss_of, adamw)
def torchao_qat_llama() -> nn.Module:
    fake, base = of("torchao.quantization.qat:IntxFakeQuantizeConfig"), llama()
    activations, weights = fake(torch.int8, "per_token", is_symmetric=False), fake(torch.int4, group_size=32)
    of("torchao.quantization:quantize_")(base, of("torchao.quantization.qat:QATConfig")(
        activation_config=activations, weight_config=weights, step="prepare"))
    return base


# Sentence embeddings -------------------------------------------------------------------------------------------------


def sentence_encoder() -> nn.Module:
    """Pooled BERT embeddings."""
    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = of("transformers:BertModel")(of("transformers:BertConfig")(**SMALL))

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            out = self.bert(features["input_ids"], features["attention_mask"]).last_hidden_state
            return {**features, "token_embeddings": out}

    pooling = of("sentence_transformers.sentence_transformer.modules:Pooling")
    return of("sentence_transformers:SentenceTransformer")(modules=[Bert(), pooling(64)], device="cpu")


def sentences(texts: int, labels: Callable[[int], Any] | None = None) -> Any:
    def collate(items: list[Any]) -> Any:
        sides = [torch.stack(side) for side in zip(*(words for words, _ in items), strict=True)]
        features = [{"input_ids": side, "attention_mask": torch.ones_like(side)} for side in sides]
        return features, torch.tensor([label for _, label in items]) if labels else None

    return data(lambda i: (list(torch.randint(3, 500, (texts, 24))), labels(i) if labels else 0), collate)


SENTENCES: dict[str, tuple[Callable[[Any, Any], nn.Module], Callable[[], Any]]] = {
    "pairs": (lambda e, n: e.MultipleNegativesRankingLoss(n), lambda: sentences(2)),
    "cached_negatives": (lambda e, n: e.CachedMultipleNegativesRankingLoss(n, mini_batch_size=4), lambda: sentences(2)),
    "batch_hard": (lambda e, n: e.BatchHardTripletLoss(n), lambda: sentences(1, lambda i: i % 4)),
    "matryoshka": (lambda e, n: e.MatryoshkaLoss(n, e.CoSENTLoss(n), [64, 32, 16]), lambda: sentences(
        2, lambda i: i / 64)),
}
for name, (criterion, samples) in SENTENCES.items():
    row(f"sentence_{name}", "sentence-transformers", (8, 32), "sentence_transformers.sentence_transformer.losses",
        lambda e, c=criterion: c(e, sentence_encoder()), samples, of_all, adamw)

# Other architectures of language models ------------------------------------------------------------------------------

row("x_transformers_decoder", "x-transformers", TEXTS, "x_transformers", lambda x: x.AutoregressiveWrapper(
    x.TransformerWrapper(num_tokens=500, max_seq_len=64, attn_layers=x.Decoder(dim=64, depth=2, heads=4,
    rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True))), lambda: tokens(64), of_itself)
row("x_transformers_seq2seq", "x-transformers", TEXTS, "x_transformers:XTransformer", lambda x: x(dim=64,
    tie_token_emb=True, **{f"{side}_{k}": v for side in ("enc", "dec") for k, v in {"num_tokens": 500, "depth": 2,
    "heads": 4, "max_seq_len": 64}.items()}), lambda: tokens(64), lambda n, b: n(b[0], b[1], mask=b[0] > 50))
row("performer", "performer-pytorch", TEXTS, "performer_pytorch:PerformerLM", lambda lm: lm(num_tokens=500,
    max_seq_len=64, dim=64, depth=2, heads=4), lambda: tokens(64), next_token)
row("reformer", "reformer-pytorch", (2, 8), "reformer_pytorch:ReformerLM", lambda lm: lm(num_tokens=500, dim=64,
    depth=2, max_seq_len=128, heads=4, bucket_size=16, n_hashes=2, causal=True), lambda: tokens(128), next_token)
row("linear_attention", "linear-attention-transformer", TEXTS,
    "linear_attention_transformer:LinearAttentionTransformerLM", lambda lm: lm(num_tokens=500, dim=64, heads=4,
    depth=2, max_seq_len=128, causal=True), lambda: tokens(128), next_token)
row("mamba_parallel_scan", "mambapy", (2, 8), "mambapy.mamba", lambda m: m.Mamba(m.MambaConfig(d_model=32,
    n_layers=2)), lambda: noise((32, 32), (32, 32)), regress)


def attention(**modules: nn.Module) -> Net:
    def attend(m: Net, ids: Tensor) -> Tensor:
        x = m.embedding(ids)
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        if hasattr(m, "rotary"):
            q, k = m.rotary.rotate_queries_or_keys(q), m.rotary.rotate_queries_or_keys(k)
        return m.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return Net(attend, **modules)


@pattern("rotary-embedding-torch", TEXTS, "rotary_embedding_torch:RotaryEmbedding", lambda: tokens(64), next_token)
def rotary_attention(rotary: Any) -> Net:
    layers = {"embedding": nn.Embedding(500, 64), "qkv": nn.Linear(64, 192), "head": nn.Linear(64, 500)}
    return attention(rotary=rotary(16), **layers)


@pattern("loralib", TEXTS, "", lambda: tokens(64), next_token, adamw)
def loralib_merged() -> Net:
    """GPT's attention by loralib's merged layer; only its factors are trained."""
    qkv = of("loralib:MergedLinear")(64, 192, r=8, enable_lora=[True, False, True])
    network = attention(embedding=nn.Embedding(500, 64), qkv=qkv, head=nn.Linear(64, 500))
    of("loralib:mark_only_lora_as_trainable")(network)
    return network


@pattern("entmax", TEXTS, "", lambda: tokens(64))
def entmax_attention() -> Any:
    def attend(m: Net, ids: Tensor) -> Tensor:
        x = m.embedding(ids)
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.head(x + of("entmax:entmax15")(q @ k.mT / 8, dim=-1) @ v)

    network = Net(attend, embedding=nn.Embedding(500, 64), qkv=nn.Linear(64, 192), head=nn.Linear(64, 500))
    criterion = of("entmax:SparsemaxLoss")(k=100)
    return network, lambda n, b: criterion(n(b[0]).flatten(0, 1), b[1].flatten())


def sentences_of_tags() -> Any:
    lengths = torch.randint(8, 33, (64,)).tolist()
    lengths[0] = 32
    return data(lambda i: (torch.randint(1, 500, (lengths[i],)), torch.randint(9, (lengths[i],))), list)


@pattern("pytorch-crf", TEXTS, "", sentences_of_tags, lambda n, b: n(b))
def lstm_crf_tagger() -> Net:
    """A bidirectional LSTM and a conditional random field over padded sentences."""
    def loss(m: Net, batch: Any) -> Tensor:
        words, tags = (pad_sequence(list(column), True) for column in zip(*batch, strict=True))
        return -m.crf(m.head(m.lstm(m.embedding(words))[0]), tags, mask=words > 0, reduction="mean")

    layers = {"embedding": nn.Embedding(500, 64), "lstm": nn.LSTM(64, 64, batch_first=True, bidirectional=True)}
    crf = of("torchcrf:CRF")(9, batch_first=True)
    return Net(loss, **layers, head=nn.Linear(128, 9), crf=crf)


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return of("einops:rearrange")(x + self.layers(x), "b n c -> b n c")


row("einops_mixer", "einops", TEXTS, "einops.layers.torch", lambda e: nn.Sequential(
    e.Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8), nn.Linear(192, 64),
    Residual(e.EinMix("b n c -> b m c", "n m", n=64, m=64), nn.GELU()),
    Residual(e.EinMix("b n c -> b n d", "c d", c=64, d=64), nn.GELU()),
    e.Reduce("b n c -> b c", "mean"), nn.Linear(64, 10)), lambda: images(64))
row("x_clip", "x-clip", (4, 8), "x_clip:CLIP", lambda clip: clip(visual_enc_depth=1, visual_image_size=32,
    visual_patch_size=8, dim_text=64, dim_image=64, dim_latent=32, text_heads=4, visual_heads=4, num_text_tokens=500,
    text_enc_depth=1, text_seq_len=32), lambda: data(lambda _: (torch.randint(1, 500, (32,)), torch.randn(3, 32, 32))),
    lambda n, b: n(b[0], b[1], freeze_image_encoder=False, return_loss=True))

# Speech --------------------------------------------------------------------------------------------------------------


def utterances() -> Any:
    lengths = torch.randint(40, 81, (64,)).tolist()
    lengths[0] = 80

    def collate(items: list[Any]) -> Any:
        frames, texts = (pad_sequence(list(column), batch_first=True) for column in zip(*items, strict=True))
        sizes = torch.tensor([[len(frame), len(text)] for frame, text in items])
        return frames, sizes[:, 0], texts, sizes[:, 1]

    return data(lambda i: (torch.randn(lengths[i], 40), torch.randint(1, 30, (3 + i % 6,))), collate)


def ctc(network: nn.Module, batch: Any) -> Tensor:
    scores, lengths = network(batch[0], batch[1])
    return F.ctc_loss(scores.transpose(0, 1), batch[2], lengths, batch[3])


@pattern("torchaudio", TEXTS, "torchaudio.models:Conformer", utterances, ctc)
def conformer_ctc(conformer: Any) -> Net:
    def recognize(m: Net, x: Tensor, lengths: Tensor) -> Any:
        out, lengths = m.net(x, lengths)
        return m.head(out).log_softmax(-1), lengths

    return Net(recognize, net=conformer(40, 4, 64, 2, 15), head=nn.Linear(40, 30))


@pattern("speechbrain", TEXTS, "", utterances, lambda n, b: n(b))
def speechbrain_transformer_asr() -> Net:
    """SpeechBrain's joint CTC and attention training of padded speech."""
    def loss(m: Net, batch: Any) -> Tensor:
        frames, sizes, text, lengths = batch
        encoded, decoded = m.net(frames, text, sizes / sizes.max(), pad_idx=0)
        scores = m.ctc(encoded).log_softmax(-1).transpose(0, 1)
        frames_left = (sizes / sizes.max() * encoded.shape[1]).long()
        return F.cross_entropy(m.head(decoded).flatten(0, 1), text.flatten()) + F.ctc_loss(
            scores, text, frames_left, lengths)

    network = of("speechbrain.lobes.models.transformer.TransformerASR:TransformerASR")(tgt_vocab=30, input_size=40,
        d_model=64, nhead=4, num_encoder_layers=2, num_decoder_layers=1, d_ffn=128, encoder_module="conformer",
        attention_type="RelPosMHAXL", normalize_before=True, causal=False)
    return Net(loss, net=network, ctc=nn.Linear(64, 30), head=nn.Linear(64, 30))


row("ecapa_tdnn", "speechbrain", (4, 8), "speechbrain.lobes.models.ECAPA_TDNN:ECAPA_TDNN", lambda ecapa: ecapa(40,
    channels=[64, 64, 64, 64, 192], attention_channels=16, lin_neurons=20), lambda: classed(80, 40, classes=20),
    lambda n, b: F.cross_entropy(n(b[0]).squeeze(1), b[1]))
row("trainable_spectrogram", "nnaudio", TEXTS, "nnAudio.features:STFT", lambda stft: Net(
    lambda m, x: m.head(m.stft(x).mean(-1)), stft=stft(n_fft=128, hop_length=64, trainable=True,
    output_format="Magnitude", verbose=False), head=nn.Linear(65, 10)), lambda: classed(4000), optimizer=sgd)


@pattern("asteroid-filterbanks", TEXTS, "asteroid_filterbanks", lambda: noise((1, 800), (1, 800)))
def asteroid_mask(bank: Any) -> Any:
    def separate(m: Net, x: Tensor) -> Tensor:
        z = m.encoder(x)
        return m.decoder(z * m.mask(z.transpose(1, 2))[0].transpose(1, 2).sigmoid())

    def loss(network: nn.Module, batch: Any) -> Tensor:
        out = network(batch[0])
        return F.l1_loss(out, batch[1][..., : out.shape[-1]])

    coders = {"encoder": bank.Encoder(bank.FreeFB(64, 16, 8)), "decoder": bank.Decoder(bank.FreeFB(64, 16, 8))}
    return Net(separate, mask=nn.GRU(64, 64, batch_first=True), **coders), loss


row("openai_whisper", "openai-whisper", TEXTS, "", lambda: of("whisper.model:Whisper")(of(
    "whisper.model:ModelDimensions")(80, 100, 64, 4, 2, 500, 32, 64, 4, 2)), lambda: data(lambda _: (torch.randn(
    80, 200), torch.randint(500, (24,)), torch.randint(500, (24,)))), lambda n, b: F.cross_entropy(
    n(b[0], b[1]).flatten(0, 1), b[2].flatten()), adamw)
row("vocos_istft", "vocos", TEXTS, "", lambda: nn.Sequential(of("vocos.models:VocosBackbone")(input_channels=40, dim=64,
    intermediate_dim=128, num_layers=2), of("vocos.heads:ISTFTHead")(dim=64, n_fft=256, hop_length=64)),
    lambda: noise((40, 64), (4096,)), of_sound, adamw)
row("torchaudio_hdemucs", "torchaudio", (2, 4), "", lambda: of("torchaudio.models:HDemucs")(sources=["a", "b"],
    audio_channels=1, channels=8), lambda: noise((1, 44100), (2, 1, 44100)), of_sound)


@pattern("encodec", (2, 8), "", lambda: data(lambda i: (torch.randn(1, 3200), i)), of_itself)
def encodec_codes() -> Net:
    """Residual codes with moving averages; k-means in the first step."""
    def compute(n: Net, x: Tensor) -> Tensor:
        codes = n.quantizer(n.encoder(x), 16000 // 16, 24.0)
        return F.l1_loss(n.decoder(codes.quantized)[..., : x.shape[-1]], x) + codes.penalty

    m, sizes = of("encodec.modules"), {"n_filters": 8, "ratios": [4, 4], "dimension": 32, "lstm": 1}
    quantizer = of("encodec.quantization:ResidualVectorQuantizer")(dimension=32, n_q=4, bins=32)
    return Net(compute, encoder=m.SEANetEncoder(**sizes), decoder=m.SEANetDecoder(**sizes), quantizer=quantizer)


def tacotron(network: nn.Module, batch: Any) -> Tensor:
    text, mel = batch
    sizes = torch.full((len(text),), text.shape[1]), torch.full((len(mel),), mel.shape[2])
    out, refined, stop, _ = network(text, sizes[0], mel, sizes[1])
    return F.mse_loss(out, mel) + F.mse_loss(refined, mel) + F.binary_cross_entropy_with_logits(
        stop, torch.zeros_like(stop))


row("torchaudio_tacotron2", "torchaudio", TEXTS, "", lambda: of("torchaudio.models:Tacotron2")(n_symbol=40, n_mels=20,
    symbol_embedding_dim=64, encoder_embedding_dim=64, decoder_rnn_dim=128, attention_rnn_dim=128,
    attention_hidden_dim=32, prenet_dim=32, postnet_embedding_dim=64), lambda: data(lambda _: (torch.randint(
    40, (16,)), torch.randn(20, 32))), tacotron)


class Augmented(nn.Module):
    def __init__(self, a: Any) -> None:
        super().__init__()
        transforms = [a.Gain(p=0.5), a.PolarityInversion(p=0.5), a.AddColoredNoise(p=0.5), a.LowPassFilter(p=0.5)]
        self.augment = a.Compose(transforms, output_type="tensor")
        self.network = nn.Sequential(nn.Conv1d(1, 32, 80, 16), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.augment(x, sample_rate=16000)
        return self.head(self.network(x))


row("waveform_augmentation", "torch-audiomentations", TEXTS, "torch_audiomentations", Augmented,
    lambda: classed(1, 8000))
