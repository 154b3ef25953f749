"""Libraries for text, sound and both: Transformers, PEFT, x-transformers, state space models, speech."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from field.pattern import (
    Net,
    Run,
    Step,
    adamw,
    classify,
    data,
    dictionary,
    images,
    next_token,
    pattern,
    regress,
    sgd,
    tokens,
)

# Transformers --------------------------------------------------------------------------------------------------------


def loss_of(network: nn.Module, batch: Any) -> Tensor:
    return network(**batch).loss


def causal_data(length: int = 64, vocabulary: int = 500) -> Any:
    text = torch.randint(3, vocabulary, (64, length))
    return dictionary(
        input_ids=lambda i: text[i], labels=lambda i: text[i], attention_mask=lambda _: torch.ones(length).long()
    )


LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {"vocab_size": 500, "max_position_embeddings": 128, **LAYERS, **MARKS}
IMAGE = {"image_size": 32, "patch_size": 8, **LAYERS}


def labeled(model: str, config: str, options: dict[str, Any], **columns: Any) -> Run:
    import transformers

    def build() -> Step:
        return Step(getattr(transformers, model)(getattr(transformers, config)(**options)), loss_of, adamw)

    return Run(build, dictionary(**columns))


@pattern("transformers", sizes=(4, 16))
def hf_mixtral() -> Run:
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    run = labeled("MixtralForCausalLM", "MixtralConfig", {**SMALL, **experts})
    return replace(run, data=causal_data())


@pattern("transformers", sizes=(2, 4))
def wav2vec2_ctc() -> Run:
    """Speech of different lengths with CTC, time masks by NumPy, and layer drop."""
    import transformers

    def build() -> Step:
        speech = {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
        config = transformers.Wav2Vec2Config(vocab_size=32, ctc_loss_reduction="mean", **LAYERS, **speech)
        return Step(transformers.Wav2Vec2ForCTC(config), loss_of, adamw)

    seconds = (torch.randint(8000, 16001, (64,))).tolist()
    seconds[0] = 16000

    def collate(items: list[Any]) -> dict[str, Tensor]:
        longest = max(len(wave) for wave, _ in items)
        return {
            "input_values": torch.stack([F.pad(wave, (0, longest - len(wave))) for wave, _ in items]),
            "attention_mask": torch.stack([torch.arange(longest) < len(wave) for wave, _ in items]).long(),
            "labels": torch.nn.utils.rnn.pad_sequence([text for _, text in items], True, -100),
        }

    return Run(build, data(lambda i: (torch.randn(seconds[i]), torch.randint(1, 32, (5 + i % 8,))), collate))


@pattern("transformers", sizes=(2, 4))
def hf_whisper() -> Run:
    each = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in each.items()}
    sizes = {"vocab_size": 500, "d_model": 64, "max_source_positions": 100, "num_mel_bins": 20}
    words = {"decoder_start_token_id": 1, "suppress_tokens": [], "begin_suppress_tokens": [], **MARKS}
    text, sound = lambda _: torch.randint(3, 500, (16,)), lambda _: torch.randn(20, 200)
    options = {**sides, **sizes, **words}
    return labeled("WhisperForConditionalGeneration", "WhisperConfig", options, input_features=sound, labels=text)


@pattern("transformers", sizes=(4, 8))
def hf_vit() -> Run:
    options, pixels = {**IMAGE, "image_size": 64, "num_labels": 10}, lambda _: torch.randn(3, 64, 64)
    return labeled("ViTForImageClassification", "ViTConfig", options, pixel_values=pixels, labels=lambda i: i % 10)


@pattern("transformers", sizes=(4, 8))
def hf_segformer() -> Run:
    options = {"hidden_sizes": [16, 32, 40, 64], "decoder_hidden_size": 64, "num_labels": 5}
    pixels, classes = lambda _: torch.randn(3, 64, 64), lambda _: torch.randint(5, (64, 64))
    name = "SegformerForSemanticSegmentation"
    return labeled(name, "SegformerConfig", options, pixel_values=pixels, labels=classes)


@pattern("transformers", sizes=(4, 8))
def hf_clip() -> Run:
    import transformers

    settings = {"text_config": {**SMALL, "max_position_embeddings": 32}, "vision_config": IMAGE, "projection_dim": 32}

    def build() -> Step:
        network = transformers.CLIPModel(transformers.CLIPConfig(**settings))
        return Step(network, lambda n, b: n(**b, return_loss=True).loss, adamw)

    return Run(
        build,
        dictionary(pixel_values=lambda _: torch.randn(3, 32, 32), input_ids=lambda _: torch.randint(3, 500, (16,))),
    )


@pattern("peft", sizes=(4, 16))
def dora_llama_checkpointed() -> Run:
    import transformers
    from peft import LoraConfig, get_peft_model

    def build() -> Step:
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
        return Step(
            get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], use_dora=True)), loss_of, adamw
        )

    return Run(build, causal_data())


def sentence_encoder() -> nn.Module:
    """Pooled BERT embeddings."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(transformers.BertConfig(**SMALL))

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            out = self.bert(features["input_ids"], features["attention_mask"]).last_hidden_state
            return {**features, "token_embeddings": out}

    return SentenceTransformer(modules=[Bert(), Pooling(64)], device="cpu")


@pattern("sentence-transformers", sizes=(8, 32))
def sentence_pairs() -> Run:
    """Multiple negatives ranking over pooled BERT embeddings."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    def build() -> Step:
        return Step(MultipleNegativesRankingLoss(sentence_encoder()), lambda n, b: n(b, None), adamw)

    def collate(items: list[Any]) -> Any:
        return [
            {"input_ids": torch.stack(side), "attention_mask": torch.ones(len(side), 24).long()}
            for side in zip(*items, strict=True)
        ]

    return Run(build, data(lambda _: (torch.randint(3, 500, (24,)), torch.randint(3, 500, (24,))), collate))


# Other architectures of language models ------------------------------------------------------------------------------


@pattern("x-transformers", sizes=(4, 16))
def x_transformers_decoder() -> Run:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    def build() -> Step:
        layers = Decoder(dim=64, depth=2, heads=4, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
        network = AutoregressiveWrapper(TransformerWrapper(num_tokens=500, max_seq_len=64, attn_layers=layers))
        return Step(network, lambda n, b: n(b[0]))

    return Run(build, tokens(64, 500))


@pattern("performer-pytorch", sizes=(4, 16))
def performer() -> Run:
    from performer_pytorch import PerformerLM

    return Run(
        lambda: Step(PerformerLM(num_tokens=500, max_seq_len=64, dim=64, depth=2, heads=4), next_token), tokens(64, 500)
    )


@pattern("reformer-pytorch", sizes=(2, 8))
def reformer() -> Run:
    from reformer_pytorch import ReformerLM

    def build() -> Step:
        network = ReformerLM(
            num_tokens=500, dim=64, depth=2, max_seq_len=128, heads=4, bucket_size=16, n_hashes=2, causal=True
        )
        return Step(network, next_token)

    return Run(build, tokens(128, 500))


@pattern("linear-attention-transformer", sizes=(4, 16))
def linear_attention() -> Run:
    from linear_attention_transformer import LinearAttentionTransformerLM

    def build() -> Step:
        network = LinearAttentionTransformerLM(num_tokens=500, dim=64, heads=4, depth=2, max_seq_len=128, causal=True)
        return Step(network, next_token)

    return Run(build, tokens(128, 500))


@pattern("mambapy", sizes=(2, 8))
def mamba_parallel_scan() -> Run:
    from mambapy.mamba import Mamba, MambaConfig

    return Run(
        lambda: Step(Mamba(MambaConfig(d_model=32, n_layers=2)), regress),
        data(lambda _: (torch.randn(32, 32), torch.randn(32, 32))),
    )


@pattern("rotary-embedding-torch", sizes=(4, 16))
def rotary_attention() -> Run:
    from rotary_embedding_torch import RotaryEmbedding

    def attend(m: Net, ids: Tensor) -> Tensor:
        x = m.embedding(ids)
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        q, k = m.rotary.rotate_queries_or_keys(q), m.rotary.rotate_queries_or_keys(k)
        return m.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def build() -> Step:
        layers = {"embedding": nn.Embedding(500, 64), "qkv": nn.Linear(64, 192), "head": nn.Linear(64, 500)}
        return Step(Net(attend, rotary=RotaryEmbedding(16), **layers), next_token)

    return Run(build, tokens(64, 500))


@pattern("einops", sizes=(4, 16))
def einops_mixer() -> Run:
    from einops import rearrange
    from einops.layers.torch import EinMix, Rearrange, Reduce

    class Residual(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            return rearrange(x + self.layers(x), "b n c -> b n c")

    def build() -> Step:
        network = nn.Sequential(
            Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8),
            nn.Linear(192, 64),
            Residual(EinMix("b n c -> b m c", "n m", n=64, m=64), nn.GELU()),
            Residual(EinMix("b n c -> b n d", "c d", c=64, d=64), nn.GELU()),
            Reduce("b n c -> b c", "mean"),
            nn.Linear(64, 10),
        )
        return Step(network, classify)

    return Run(build, images(64))


@pattern("x-clip", sizes=(4, 8))
def x_clip() -> Run:
    from x_clip import CLIP

    def build() -> Step:
        widths = {"dim_text": 64, "dim_image": 64, "dim_latent": 32, "text_heads": 4, "visual_heads": 4}
        text = {"num_text_tokens": 500, "text_enc_depth": 1, "text_seq_len": 32}
        network = CLIP(visual_enc_depth=1, visual_image_size=32, visual_patch_size=8, **widths, **text)
        return Step(network, lambda n, b: n(b[0], b[1], freeze_image_encoder=False, return_loss=True))

    return Run(build, data(lambda _: (torch.randint(1, 500, (32,)), torch.randn(3, 32, 32))))


# Speech --------------------------------------------------------------------------------------------------------------


def utterances(features: int = 40, longest: int = 80) -> Any:
    lengths = torch.randint(longest // 2, longest + 1, (64,)).tolist()
    lengths[0] = longest

    def collate(items: list[Any]) -> Any:
        frames = torch.nn.utils.rnn.pad_sequence([frame for frame, _ in items], batch_first=True)
        texts = torch.nn.utils.rnn.pad_sequence([text for _, text in items], batch_first=True)
        sizes = torch.tensor([[len(frame), len(text)] for frame, text in items])
        return frames, sizes[:, 0], texts, sizes[:, 1]

    return data(lambda i: (torch.randn(lengths[i], features), torch.randint(1, 30, (3 + i % 6,))), collate)


@pattern("torchaudio", sizes=(4, 16))
def conformer_ctc() -> Run:
    from torchaudio.models import Conformer

    def recognize(m: Net, x: Tensor, lengths: Tensor) -> Any:
        out, lengths = m.net(x, lengths)
        return m.head(out).log_softmax(-1), lengths

    def loss(network: nn.Module, batch: Any) -> Tensor:
        scores, lengths = network(batch[0], batch[1])
        return F.ctc_loss(scores.transpose(0, 1), batch[2], lengths, batch[3])

    network = lambda: Net(recognize, net=Conformer(40, 4, 64, 2, 15), head=nn.Linear(40, 30))  # noqa: E731
    return Run(lambda: Step(network(), loss), utterances())


@pattern("speechbrain", sizes=(4, 8))
def ecapa_tdnn() -> Run:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    def loss(network: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(network(batch[0]).squeeze(1), batch[1])

    def build() -> Step:
        network = ECAPA_TDNN(40, channels=[64, 64, 64, 64, 192], attention_channels=16, lin_neurons=20)
        return Step(network, loss)

    return Run(build, data(lambda i: (torch.randn(80, 40), i % 20)))


@pattern("nnaudio", sizes=(4, 16))
def trainable_spectrogram() -> Run:
    from nnAudio.features import STFT

    def build() -> Step:
        stft = STFT(n_fft=128, hop_length=64, trainable=True, output_format="Magnitude", verbose=False)
        return Step(Net(lambda m, x: m.head(m.stft(x).mean(-1)), stft=stft, head=nn.Linear(65, 10)), classify, sgd)

    return Run(build, data(lambda i: (torch.randn(4000), i % 10)))


@pattern("asteroid-filterbanks", sizes=(4, 16))
def asteroid_mask() -> Run:
    from asteroid_filterbanks import Decoder, Encoder, FreeFB

    def separate(m: Net, x: Tensor) -> Tensor:
        z = m.encoder(x)
        return m.decoder(z * m.mask(z.transpose(1, 2))[0].transpose(1, 2).sigmoid())

    def build() -> Step:
        filters = {"encoder": Encoder(FreeFB(64, 16, 8)), "decoder": Decoder(FreeFB(64, 16, 8))}
        return Step(Net(separate, mask=nn.GRU(64, 64, batch_first=True), **filters), loss)

    def loss(network: nn.Module, batch: Any) -> Tensor:
        out = network(batch[0])
        return F.l1_loss(out, batch[1][..., : out.shape[-1]])

    return Run(build, data(lambda _: (torch.randn(1, 800), torch.randn(1, 800))))
