"""How networks are trained: optimizers, averages of weights, adapters and losses of libraries."""

# Rows of tables, and names of libraries imported when they are called:
# fmt: off
# ruff: noqa: PLW0108

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from field.language import SMALL, causal_data, loss_of
from field.pattern import Net, Run, Step, adamw, add, classifier, classify, data, mlp, of, tokens, vectors
from field.trainer import trained_by

# Optimizers ----------------------------------------------------------------------------------------------------------


def low_rank(path: str, **options: Any) -> Callable[[Any], Any]:
    """Matrices in a group of their own, whose gradients are projected; the gap is the library's default."""

    def optimizer(parameters: Any) -> Any:
        groups: tuple[list[Any], list[Any]] = ([], [])
        for p in parameters:
            groups[p.ndim > 1].append(p)
        settings = {"params": groups[1], "rank": 32, "update_proj_gap": 200, "proj_type": "std", **options}
        return of(path)([{"params": groups[0]}, settings], lr=1e-3)

    return optimizer


def simple(path: str, **options: Any) -> Callable[[Any], Any]:
    return lambda parameters: of(path)(parameters, **{"lr": 1e-3, **options})


def heavy(path: str) -> Callable[[Any], Any]:
    def optimizer(parameters: Any) -> Any:
        of("heavyball.utils").compile_mode = None
        return of(path)(parameters, lr=1e-3)

    return optimizer


OPTIMIZERS: dict[str, tuple[str, Callable[[Any], Any], int]] = {
    "prodigy": ("prodigyopt", simple("prodigyopt:Prodigy", lr=1.0), 4),
    "d_adaptation": ("dadaptation", simple("dadaptation:DAdaptAdam", lr=1.0), 4),
    "ada_belief": ("adabelief-pytorch", simple("adabelief_pytorch:AdaBelief", print_change_log=False), 8),
    "came": ("came-pytorch", simple("came_pytorch:CAME"), 3),
    "madgrad": ("madgrad", simple("madgrad:MADGRAD"), 3),
    "adan": ("adan-pytorch", simple("adan_pytorch:Adan"), 3),
    "adam_mini": ("adam-mini", lambda p: of("adam_mini:Adam_mini")([(f"layer{i}", q) for i, q in enumerate(p)],
        verbose=False), 3),
    "apollo": ("apollo-torch", low_rank("apollo_torch:APOLLOAdamW", proj="random", scale_type="channel", scale=1.0), 3),
    "galore": ("galore-torch", low_rank("galore_torch:GaLoreAdamW", scale=0.25), 250),
    "heavyball_soap": ("heavyball", heavy("heavyball:SOAP"), 4),
    "heavyball_muon": ("heavyball", heavy("heavyball:Muon"), 3),
    "torchao_adamw_8bit": ("torchao", simple("torchao.optim:AdamW8bit"), 3),
    "torch_adafactor": ("torch", simple("torch.optim:Adafactor"), 3),
    "transformers_adafactor": ("transformers", lambda p: of("transformers:Adafactor")(
        p, scale_parameter=True, relative_step=True, warmup_init=True), 3),
}
for name, (library, optimizer, steps) in OPTIMIZERS.items():
    add(name, library, (16, 64), lambda optimizer=optimizer: trained_by(optimizer), steps)

# Averages of weights -------------------------------------------------------------------------------------------------


class Averaged(Step):
    def __init__(self, average: Callable[[Any], Any]) -> None:
        super().__init__(mlp(64, 384), classify)
        self.average = average(self.network)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update()


AVERAGES: dict[str, tuple[str, Callable[[Any], Any]]] = {"ema_of_lucidrains": (
    "ema-pytorch", lambda n: of("ema_pytorch:EMA")(n, update_after_step=2, update_every=2)),
    "ema_of_parameters": ("torch-ema", lambda n: of("torch_ema:ExponentialMovingAverage")(n.parameters(), decay=0.99))}
for name, (library, average) in AVERAGES.items():
    add(name, library, (16, 64), lambda average=average: Run(lambda: Averaged(average), vectors(64)), 8)

# Adapters and quantization -------------------------------------------------------------------------------------------


def llama() -> Any:
    return of("transformers:LlamaForCausalLM")(of("transformers:LlamaConfig")(**SMALL))


def adapted(name: str, **options: Any) -> Run:
    def build() -> Step:
        config = of(f"peft:{name}")(task_type="CAUSAL_LM", **options)
        return Step(of("peft:get_peft_model")(llama(), config), loss_of, adamw)

    return Run(build, causal_data())


HEADS = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {"prefix_tuning": {"name": "PrefixTuningConfig", "num_virtual_tokens": 8},
    "prompt_tuning": {"name": "PromptTuningConfig", "num_virtual_tokens": 8},
    "vera": {"name": "VeraConfig", "r": 16, **HEADS}, "oft": {"name": "OFTConfig", "oft_block_size": 8, **HEADS},
    "pissa_lora": {"name": "LoraConfig", "r": 8, "init_lora_weights": "pissa", **HEADS}}
for name, options in ADAPTERS.items():
    add(f"peft_{name}", "peft", (4, 16), lambda options=options: adapted(**options))


def qlora() -> Run:
    """A frozen base in four bits, dequantized in each pass; checkpointed, as QLoRA is."""

    def build() -> Step:
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
        return Step(of("peft:get_peft_model")(base, of("peft:LoraConfig")(r=8, **HEADS)), loss_of, adamw)

    return Run(build, causal_data())


add("qlora_4bit", "bitsandbytes", (4, 16), qlora)


def quantization_aware() -> Run:
    def build() -> Step:
        fake, base = of("torchao.quantization.qat:IntxFakeQuantizeConfig"), llama()
        activations, weights = fake(torch.int8, "per_token", is_symmetric=False), fake(torch.int4, group_size=32)
        config = of("torchao.quantization.qat:QATConfig")(activation_config=activations, weight_config=weights,
            step="prepare")
        of("torchao.quantization:quantize_")(base, config)
        return Step(base, loss_of, adamw)

    return Run(build, causal_data())


add("torchao_qat_llama", "torchao", (4, 16), quantization_aware)


def low_rank_layers() -> Run:
    """GPT's attention by loralib's merged layer; only its factors are trained."""

    def attend(m: Net, x: Tensor) -> Tensor:
        x = m.embedding(x)
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        return m.head(x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def build() -> Step:
        qkv = of("loralib:MergedLinear")(64, 192, r=8, enable_lora=[True, False, True])
        network = Net(attend, embedding=nn.Embedding(500, 64), qkv=qkv, head=nn.Linear(64, 500))
        of("loralib:mark_only_lora_as_trainable")(network)
        return Step(network, lambda n, b: F.cross_entropy(n(b[0]).flatten(0, 1), b[1].flatten()), adamw)

    return Run(build, tokens(64, 500))


add("loralib_merged", "loralib", (4, 16), low_rank_layers)


def lycoris(algorithm: str) -> Run:
    def build() -> Step:
        step = Step(mlp(64, 384).requires_grad_(False), classify, adamw)
        step.adapter = of("lycoris:create_lycoris")(step.network, 1.0, linear_dim=8, linear_alpha=4, algo=algorithm)
        step.adapter.apply_to()
        return step

    return Run(build, vectors(64))


for name in ("lokr", "loha"):
    add(f"lycoris_{name}", "lycoris-lora", (16, 64), lambda name=name: lycoris(name))

# Losses --------------------------------------------------------------------------------------------------------------


def autoencoder() -> nn.Sequential:
    down, up = nn.Conv2d(3, 32, 4, 4), nn.ConvTranspose2d(32, 3, 4, 4)
    return nn.Sequential(down, nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), up, nn.Sigmoid())


def waves() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 16, 9, padding=4), nn.PReLU(), nn.Conv1d(16, 1, 9, padding=4))


def reconstruct(network: Callable[[], nn.Module], shape: Sequence[int], criterion: Callable[[], Any]) -> Run:
    def build() -> Step:
        step = Step(network(), None)
        step.criterion = criterion()
        step.loss = lambda n, b: step.criterion(n(b[0]), b[0]).mean()
        return step

    return Run(build, data(lambda i: (torch.rand(*shape), i)))


def similarity(cls: str, **options: Any) -> Callable[[], Any]:
    def criterion() -> Any:
        measure = of(cls)(data_range=1.0, **options)
        return lambda x, y: 1 - measure(x, y)

    return criterion


class Perceptual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.distance = of("lpips:LPIPS")(net="vgg", pretrained=False, pnet_rand=True, verbose=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.distance(x, y, normalize=True) + F.l1_loss(x, y)


LOSSES: dict[str, tuple[str, tuple[int, int], Callable[[], nn.Module], Sequence[int], Callable[[], Any]]] = {
    "lpips_vgg": ("lpips", (2, 8), autoencoder, (3, 64, 64), Perceptual),
    "multi_scale_ssim": ("pytorch-msssim", (2, 8), autoencoder, (3, 176, 176), similarity("pytorch_msssim:MS_SSIM")),
    "piq_gmsd": ("piq", (4, 16), autoencoder, (3, 96, 96), lambda: of("piq:MultiScaleGMSDLoss")(chromatic=True)),
    "piq_vif": ("piq", (4, 16), autoencoder, (3, 64, 64), lambda: of("piq:VIFLoss")(sigma_n_sq=2.0)),
    "multi_resolution_stft": ("auraloss", (2, 8), waves, (1, 8000), lambda: of(
        "auraloss.freq:MultiResolutionSTFTLoss")()),
    "sinkhorn": ("geomloss", (2, 8), lambda: mlp(3, 64, 3), (128, 3), lambda: of("geomloss:SamplesLoss")(
        "sinkhorn", p=2, blur=0.05, backend="tensorized")),
}
for name, (library, sizes, network, shape, criterion) in LOSSES.items():
    add(name, library, sizes, lambda n=network, s=shape, c=criterion: reconstruct(n, s, c))


def tagger() -> Run:
    """A bidirectional LSTM and a conditional random field over padded sentences."""
    lengths = torch.randint(8, 33, (64,)).tolist()
    lengths[0] = 32

    def loss(m: Net, batch: Any) -> Tensor:
        words, tags = (nn.utils.rnn.pad_sequence(list(column), True) for column in zip(*batch, strict=True))
        return -m.crf(m.head(m.lstm(m.embedding(words))[0]), tags, mask=words > 0, reduction="mean")

    def build() -> Step:
        layers = {"embedding": nn.Embedding(500, 64), "lstm": nn.LSTM(64, 64, batch_first=True, bidirectional=True)}
        crf = of("torchcrf:CRF")(9, batch_first=True)
        return Step(Net(loss, **layers, head=nn.Linear(128, 9), crf=crf), lambda n, b: n(b))

    sentence = lambda i: (torch.randint(1, 500, (lengths[i],)), torch.randint(9, (lengths[i],)))  # noqa: E731
    return Run(build, data(sentence, list))


add("lstm_crf_tagger", "pytorch-crf", (4, 16), tagger)


def sparse_attention() -> Run:
    def attend(m: Net, ids: Tensor) -> Tensor:
        x = m.embedding(ids)
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.head(x + of("entmax:entmax15")(q @ k.mT / 8, dim=-1) @ v)

    def build() -> Step:
        network = Net(attend, embedding=nn.Embedding(500, 64), qkv=nn.Linear(64, 192), head=nn.Linear(64, 500))
        criterion = of("entmax:SparsemaxLoss")(k=100)
        return Step(network, lambda n, b: criterion(n(b[0]).flatten(0, 1), b[1].flatten()))

    return Run(build, tokens(64, 500))


add("entmax_attention", "entmax", (4, 16), sparse_attention)


def waveform_augmentation() -> Run:
    class Augmented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            a = of("torch_audiomentations")
            transforms = [a.Gain(p=0.5), a.PolarityInversion(p=0.5), a.AddColoredNoise(p=0.5), a.LowPassFilter(p=0.5)]
            self.augment = a.Compose(transforms, output_type="tensor")
            self.network = nn.Sequential(nn.Conv1d(1, 32, 80, 16), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.augment(x, sample_rate=16000)
            return self.head(self.network(x))

    return Run(classifier(Augmented), data(lambda i: (torch.randn(1, 8000), i % 10)))


add("waveform_augmentation", "torch-audiomentations", (4, 16), waveform_augmentation)


def metric_losses(loss: str, **options: Any) -> Run:
    def build() -> Step:
        step = Step(mlp(64, 256, 64), None)
        step.criterion = of(f"pytorch_metric_learning.losses:{loss}")(**options)
        step.loss = lambda n, b: step.criterion(n(b[0]), b[1])
        return step

    return Run(build, data(lambda i: (torch.randn(64) + i % 8, i % 8)))


add("supervised_contrastive", "pytorch-metric-learning", (16, 64), lambda: metric_losses("SupConLoss"))
add("proxy_anchor", "pytorch-metric-learning", (16, 64), lambda: metric_losses(
    "ProxyAnchorLoss", num_classes=8, embedding_size=64))
