"""Architectures that many train: Transformers, timm, torchvision, diffusion, segmentation, graphs, sound, tables."""

# Rows of tables, and names of libraries imported when they are called:
# fmt: off
# ruff: noqa: PLW0108

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from field.language import IMAGE, LAYERS, SMALL, labeled, loss_of, sentence_encoder, utterances
from field.pattern import (
    Net,
    Run,
    Step,
    adamw,
    add,
    classifier,
    data,
    dictionary,
    images,
    mlp,
    of,
    regression,
    sgd,
    tokens,
)
from field.science import columns
from field.vision import SIDE, backbone, objects, views

# Transformers --------------------------------------------------------------------------------------------------------

Column = Callable[[int], Any]
TEXT: dict[str, Column] = {"input_ids": lambda _: torch.randint(3, 500, (32,)),
    "attention_mask": lambda i: (torch.arange(32) < 32 - i % 16).long()}
PIXELS: dict[str, Column] = {"pixel_values": lambda _: torch.randn(3, 64, 64)}
CLASS: dict[str, Column] = {"labels": lambda i: i % 10}
WORDS: dict[str, Column] = {"labels": lambda _: torch.randint(3, 500, (32,))}
VIT = {**IMAGE, "image_size": 64}
EXPERTS = {"num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
LAYER = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
CODER = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in LAYER.items()}
SERIES: dict[str, Column] = {"past_values": lambda _: torch.rand(37), "past_time_features": lambda _: torch.randn(
    37, 2), "past_observed_mask": lambda _: torch.ones(37), "future_values": lambda _: torch.rand(12),
    "future_time_features": lambda _: torch.randn(12, 2)}
PREDICT = {"prediction_length": 12, "context_length": 30, "lags_sequence": [1, 2, 7], "num_time_features": 2,
    "d_model": 32}
HUGGING: dict[str, tuple[tuple[int, int], str, str, dict[str, Any], dict[str, Column]]] = {
    "roberta": ((4, 16), "RobertaForSequenceClassification", "RobertaConfig", {**SMALL, "num_labels": 10},
        {**TEXT, **CLASS}),
    "distilbert_ner": ((4, 16), "DistilBertForTokenClassification", "DistilBertConfig",
        {"vocab_size": 500, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "num_labels": 9},
        {**TEXT, "labels": lambda _: torch.randint(9, (32,))}),
    "modernbert_mlm": ((4, 16), "ModernBertForMaskedLM", "ModernBertConfig",
        {**SMALL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8}, {**TEXT, **WORDS}),
    "longformer_qa": ((2, 8), "LongformerForQuestionAnswering", "LongformerConfig",
        {**SMALL, "attention_window": [8, 8], "sep_token_id": 2}, {"input_ids": lambda _: torch.cat(
        [torch.randint(3, 500, (29,)), torch.full((3,), 2)]), "start_positions": lambda i: i % 16,
        "end_positions": lambda i: 16 + i % 16}),
    "gpt_oss": ((4, 16), "GptOssForCausalLM", "GptOssConfig", {**SMALL, **EXPERTS, "num_local_experts": 4,
        "sliding_window": 16}, {**TEXT, **WORDS}),
    "qwen3_moe": ((4, 16), "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**SMALL, **EXPERTS, "num_experts": 4,
        "moe_intermediate_size": 64, "output_router_logits": True}, {**TEXT, **WORDS}),
    "deepseek_v3": ((4, 16), "DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **SMALL, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "moe_intermediate_size": 64, "first_k_dense_replace": 1}, {**TEXT, **WORDS}),
    "vit_mae": ((4, 16), "ViTMAEForPreTraining", "ViTMAEConfig", {**VIT, "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4, "decoder_intermediate_size": 64}, PIXELS),
    "dinov2": ((4, 16), "Dinov2ForImageClassification", "Dinov2Config", {**VIT, "mlp_ratio": 2, "num_labels": 10},
        {**PIXELS, **CLASS}),
    "swin": ((4, 16), "SwinForImageClassification", "SwinConfig", {"image_size": 64, "patch_size": 4, "embed_dim": 16,
        "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 10}, {**PIXELS, **CLASS}),
    "video_mae": ((2, 8), "VideoMAEForPreTraining", "VideoMAEConfig", {**IMAGE, "num_frames": 8,
        "decoder_hidden_size": 32, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 64}, {"pixel_values": lambda _: torch.randn(8, 3, 32, 32),
        "bool_masked_pos": lambda _: torch.randperm(64) < 48}),
    "time_series": ((16, 64), "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig",
        {**PREDICT, **CODER}, SERIES),
    "autoformer": ((16, 64), "AutoformerForPrediction", "AutoformerConfig", {**PREDICT, **CODER, "label_length": 6},
        SERIES),
}
for name, (sizes, model, config, options, known) in HUGGING.items():
    add(f"hf_{name}", "transformers", sizes, lambda m=model, c=config, o=options, k=known: labeled(m, c, o, **k))


def detr() -> Run:
    """Boxes are matched by SciPy, on values."""
    import transformers

    def build() -> Step:
        small = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
        features = transformers.ResNetConfig(**small, out_features=["stage2"])
        sizes = {"d_model": 64, "num_queries": 20, "num_labels": 5, **CODER}
        config = transformers.DetrConfig(backbone_config=features, use_timm_backbone=False,
            use_pretrained_backbone=False, **sizes)
        return Step(transformers.DetrForObjectDetection(config), loss_of, adamw)

    def collate(items: list[Any]) -> Any:
        boxes = [target["boxes"] / SIDE for _, target in items]
        labels = [{"class_labels": t["labels"] - 1, "boxes": b} for (_, t), b in zip(items, boxes, strict=True)]
        return {"pixel_values": torch.stack([x for x, _ in items]), "labels": labels}

    detection = objects()
    return Run(build, lambda size, batches: relabel(detection(size, batches), collate))


def relabel(loader: Any, collate: Any) -> Any:
    return torch.utils.data.DataLoader(loader.dataset, batch_size=loader.batch_size, collate_fn=collate)


add("hf_detr", "transformers", (2, 8), detr)


def llava() -> Run:
    """Features of an image take the places of its tokens: `masked_scatter`."""
    import transformers

    def build() -> Step:
        text = transformers.LlamaConfig(**SMALL)
        config = transformers.LlavaConfig(vision_config=transformers.CLIPVisionConfig(**IMAGE), text_config=text,
            image_token_index=3)
        return Step(transformers.LlavaForConditionalGeneration(config), loss_of, adamw)

    words = lambda _: torch.cat([torch.full((16,), 3), torch.randint(4, 500, (24,))])  # noqa: E731
    text = {"input_ids": words, "labels": words, "attention_mask": lambda _: torch.ones(40).long()}
    return Run(build, dictionary(pixel_values=lambda _: torch.randn(3, 32, 32), **text))


add("hf_llava", "transformers", (4, 16), llava)


def trocr() -> Run:
    import transformers

    def build() -> Step:
        reader = transformers.TrOCRConfig(vocab_size=500, d_model=64, **{k: v for k, v in CODER.items() if k[0] == "d"})
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.ViTConfig(**VIT), reader)
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        return Step(transformers.VisionEncoderDecoderModel(config=config), loss_of, adamw)

    return Run(build, dictionary(**PIXELS, labels=lambda _: torch.randint(3, 500, (16,))))


add("hf_trocr", "transformers", (4, 16), trocr)


def wav2vec2_pretraining() -> Run:
    """The masked frames and the frames to tell them from are inputs, as in the official script."""
    import transformers

    def build() -> Step:
        speech = {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
        codes = {"codevector_dim": 32, "proj_codevector_dim": 32, "num_codevectors_per_group": 32}
        config = transformers.Wav2Vec2Config(**LAYERS, **speech, **codes, do_stable_layer_norm=True,
            feat_extract_norm="layer")
        return Step(transformers.Wav2Vec2ForPreTraining(config), loss_of, adamw)

    masks = {"mask_time_indices": lambda _: torch.rand(24) < 0.4, "sampled_negative_indices": lambda _: torch.randint(
        24, (24, 10))}

    def collate(items: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(items)
        batch["sampled_negative_indices"] += 24 * torch.arange(len(items))[:, None, None]
        return batch

    return Run(build, data(lambda i: {"input_values": torch.randn(8000), **{k: m(i) for k, m in masks.items()}},
        collate))


add("wav2vec2_pretraining", "transformers", (2, 8), wav2vec2_pretraining)

# Sentence embeddings -------------------------------------------------------------------------------------------------


def embeddings(criterion: Callable[[Any], nn.Module], texts: int, labels: Callable[[int], Any] | None = None) -> Run:
    """Pooled BERT embeddings of one or more texts a sample, and a loss of the library."""

    def build() -> Step:
        return Step(criterion(sentence_encoder()), lambda n, b: n(*b), adamw)

    def collate(items: list[Any]) -> Any:
        sides = [torch.stack(side) for side in zip(*(words for words, _ in items), strict=True)]
        features = [{"input_ids": side, "attention_mask": torch.ones_like(side)} for side in sides]
        return features, torch.tensor([label for _, label in items]) if labels else None

    make = lambda i: (list(torch.randint(3, 500, (texts, 24))), labels(i) if labels else 0)  # noqa: E731
    return Run(build, data(make, collate))


EMBED = "sentence_transformers.sentence_transformer.losses:"
add("sentence_cached_negatives", "sentence-transformers", (8, 32), lambda: embeddings(
    lambda n: of(f"{EMBED}CachedMultipleNegativesRankingLoss")(n, mini_batch_size=4), 2))
add("sentence_batch_hard", "sentence-transformers", (8, 32), lambda: embeddings(
    lambda n: of(f"{EMBED}BatchHardTripletLoss")(n), 1, lambda i: i % 4))
add("sentence_matryoshka", "sentence-transformers", (8, 32), lambda: embeddings(
    lambda n: of(f"{EMBED}MatryoshkaLoss")(n, of(f"{EMBED}CoSENTLoss")(n), [64, 32, 16]), 2, lambda i: i / 64))

# Image classifiers ---------------------------------------------------------------------------------------------------

TIMM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "eva02": ("eva02_tiny_patch14_224", 56, {"img_size": 56, "depth": 4}),
    "coatnet": ("coatnet_pico_rw_224", 64, {"img_size": 64}),
    "mobilenetv4": ("mobilenetv4_conv_small", 64, {}),
    "efficientnetv2": ("tf_efficientnetv2_b0", 64, {"drop_path_rate": 0.1}),
    "fastvit": ("fastvit_t8", 64, {}),
    "xcit": ("xcit_nano_12_p8_224", 64, {}),
    "mambaout": ("mambaout_femto", 64, {}),
}
for name, (model, side, options) in TIMM.items():
    add(f"timm_{name}", "timm", (2, 8), lambda m=model, s=side, o=options: Run(
        classifier(lambda: of("timm:create_model")(m, num_classes=10, **o), adamw), images(s)))

CLASSIFIERS: dict[str, tuple[str, tuple[int, int], int, Callable[[], nn.Module]]] = {
    "efficientnet_lukemelas": ("efficientnet-pytorch", (4, 8), 64, lambda: of(
        "efficientnet_pytorch:EfficientNet").from_name("efficientnet-b0", num_classes=10)),
    "facenet": ("facenet-pytorch", (4, 8), 96, lambda: of("facenet_pytorch:InceptionResnetV1")(
        classify=True, num_classes=10)),
    "perceiver": ("perceiver-pytorch", (4, 16), 32, lambda: nn.Sequential(of("einops.layers.torch:Rearrange")(
        "b c h w -> b h w c"), of("perceiver_pytorch:Perceiver")(input_channels=3, num_freq_bands=4, max_freq=10.0,
        depth=2, num_latents=32, latent_dim=64, num_classes=10, weight_tie_layers=True))),
    "torchvision_shufflenet": ("torchvision", (4, 16), 64, lambda: of("torchvision.models:shufflenet_v2_x0_5")(
        num_classes=10)),
}
for name, (library, sizes, side, network) in CLASSIFIERS.items():
    add(name, library, sizes, lambda n=network, s=side: Run(classifier(n, sgd), images(s)))


def googlenet() -> Run:
    """Two auxiliary heads, trained together with the last one."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        out, *others = network(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.3 * sum(F.cross_entropy(other, batch[1]) for other in others)

    options = {"weights": None, "num_classes": 10, "init_weights": False, "aux_logits": True}
    return Run(lambda: Step(of("torchvision.models:googlenet")(**options), loss, sgd), images(64))


add("torchvision_googlenet", "torchvision", (4, 8), googlenet)


def distillation() -> Run:
    """A convolutional teacher's logits train a transformer's token."""

    def build() -> Step:
        teacher = nn.Sequential(backbone(), nn.Linear(64, 10))
        student = of("vit_pytorch.distill:DistillableViT")(image_size=64, patch_size=8, num_classes=10, dim=64,
            depth=2, heads=4, mlp_dim=128)
        return Step(of("vit_pytorch.distill:DistillWrapper")(student=student, teacher=teacher, temperature=3,
            alpha=0.5, hard=False), lambda n, b: n(*b))

    return Run(build, images(64))


add("vit_pytorch_distillation", "vit-pytorch", (4, 16), distillation)

# Detection and segmentation ------------------------------------------------------------------------------------------


def efficientdet() -> Run:
    def build() -> Step:
        config = of("effdet:get_efficientdet_config")("tf_efficientdet_lite0")
        config.num_classes, config.image_size = 5, (SIDE, SIDE)
        network = of("effdet.bench:DetBenchTrain")(of("effdet:EfficientDet")(config, pretrained_backbone=False))
        return Step(network, lambda n, b: n(*b)["loss"], adamw)

    def collate(items: list[Any]) -> Any:
        pictures, targets = zip(*items, strict=True)
        return torch.stack(pictures), {"bbox": [t["boxes"] for t in targets], "cls": [t["labels"] for t in targets]}

    detection = objects()
    return Run(build, lambda size, batches: relabel(detection(size, batches), collate))


add("efficientdet_lite", "effdet", (2, 4), efficientdet)


def yolo(kind: str) -> Run:
    """Ultralytics' heads for masks, or for key points."""

    def build() -> Step:
        cls = {"seg": "SegmentationModel", "pose": "PoseModel"}[kind]
        network = of(f"ultralytics.nn.tasks:{cls}")(f"yolo11n-{kind}.yaml", nc=1 if kind == "pose" else 5,
            verbose=False)
        network.args = of("ultralytics.cfg:get_cfg")(overrides={"overlap_mask": True})
        return Step(network, lambda n, b: n(b)[0].sum(), sgd)

    def collate(items: list[Any]) -> dict[str, Tensor]:
        pictures, boxes, masks, points = zip(*items, strict=True)
        whose = torch.cat([torch.full((len(b),), float(i)) for i, b in enumerate(boxes)])
        batch = {"img": torch.stack(pictures), "bboxes": torch.cat(boxes), "cls": torch.zeros(len(whose), 1),
            "batch_idx": whose}
        return {**batch, "masks": torch.stack(masks), "keypoints": torch.cat(points)}

    counts = torch.randint(1, 6, (64,)).tolist()

    def sample(i: int) -> Any:
        boxes, masks = torch.rand(counts[i], 4) * 0.4 + 0.2, torch.randint(counts[i] + 1, (32, 32)).float()
        return torch.rand(3, 128, 128), boxes, masks, torch.rand(counts[i], 17, 3)

    return Run(build, data(sample, collate))


add("yolo11_masks", "ultralytics", (2, 4), lambda: yolo("seg"))
add("yolo11_pose", "ultralytics", (2, 4), lambda: yolo("pose"))


def segmented(network: Callable[[], nn.Module], criterion: Callable[[Any, Any], Tensor],
    side: tuple[int, ...] = (64, 64), channels: int = 3) -> Run:
    """Pixels or voxels of four classes."""
    make = lambda _: (torch.randn(channels, *side), torch.randint(4, side))  # noqa: E731
    return Run(lambda: Step(network(), lambda n, b: criterion(n(b[0]), b[1])), data(make))


def deep_supervision(outputs: Any, y: Tensor) -> Tensor:
    """Outputs of each scale, the labels halved for each, as nnU-Net weighs them."""
    total = torch.zeros(())
    for level, out in enumerate(outputs):
        halved = F.interpolate(y[:, None].float(), out.shape[2:], mode="nearest")[:, 0].long()
        total = total + F.cross_entropy(out, halved) / 2**level
    return total


def nn_unet() -> nn.Module:
    two = {"n_stages": 4, "features_per_stage": (8, 16, 32, 64), "kernel_sizes": 3, "strides": (1, 2, 2, 2)}
    norm = {"conv_op": nn.Conv3d, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True},
        "nonlin": nn.LeakyReLU}
    options = {**two, **norm, "n_conv_per_stage": 2, "n_conv_per_stage_decoder": 2, "conv_bias": True}
    return of("dynamic_network_architectures.architectures.unet:PlainConvUNet")(
        1, num_classes=4, deep_supervision=True, **options)


SMP, MONAI = "segmentation_models_pytorch", "monai.networks.nets"
small = {"encoder_weights": None, "classes": 4}
add("smp_deeplab_lovasz", "segmentation-models-pytorch", (4, 8), lambda: segmented(
    lambda: of(f"{SMP}:DeepLabV3Plus")("efficientnet-b0", **small), lambda x, y: of(f"{SMP}.losses:LovaszLoss")(
    "multiclass")(x, y)))
add("smp_segformer_tversky", "segmentation-models-pytorch", (4, 8), lambda: segmented(
    lambda: of(f"{SMP}:Segformer")("mit_b0", **small), lambda x, y: of(f"{SMP}.losses:TverskyLoss")("multiclass")(
    x, y)))
add("smp_unet_plus_plus", "segmentation-models-pytorch", (4, 8), lambda: segmented(
    lambda: of(f"{SMP}:UnetPlusPlus")("mobilenet_v2", **small), F.cross_entropy))
add("torchvision_lraspp", "torchvision", (4, 8), lambda: segmented(lambda: of(
    "torchvision.models.segmentation:lraspp_mobilenet_v3_large")(weights=None, weights_backbone=None, num_classes=4),
    lambda x, y: F.cross_entropy(x["out"], y)))
add("nn_unet_deep_supervision", "dynamic-network-architectures", (2, 4), lambda: segmented(
    nn_unet, deep_supervision, (32, 32, 32), 1))
add("monai_seg_resnet", "monai", (2, 4), lambda: segmented(lambda: of(f"{MONAI}:SegResNet")(3, 8, 1, 4),
    F.cross_entropy, (32, 32, 32), 1))
add("monai_unetr", "monai", (2, 4), lambda: segmented(lambda: of(f"{MONAI}:UNETR")(1, 4, (32, 32, 32), 8, 96, 192, 4),
    F.cross_entropy, (32, 32, 32), 1))


def segment_anything() -> Run:
    """The mask decoder is trained; the image encoder is frozen; each image is decoded by itself, as SAM does."""

    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            s = of("segment_anything.modeling")
            self.encoder = s.ImageEncoderViT(img_size=128, patch_size=16, embed_dim=64, depth=2, num_heads=4,
                out_chans=64).requires_grad_(False)
            self.prompt = s.PromptEncoder(64, (8, 8), (128, 128), 16)
            two_way = s.TwoWayTransformer(depth=2, embedding_dim=64, mlp_dim=128, num_heads=4)
            self.decoder = s.MaskDecoder(transformer_dim=64, transformer=two_way)

        def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
            with torch.no_grad():
                features = self.encoder(x)
            masks = []
            for feature, box in zip(features, boxes, strict=True):
                sparse, dense = self.prompt(points=None, boxes=box[None], masks=None)
                masks.append(self.decoder(feature[None], self.prompt.get_dense_pe(), sparse, dense,
                    multimask_output=False)[0])
            return torch.cat(masks)

    def loss(network: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(network(batch[0], batch[1]), batch[2])

    return Run(lambda: Step(Prompted(), loss, adamw), data(lambda _: (torch.randn(3, 128, 128), torch.rand(4) * 128,
        torch.rand(1, 32, 32).round())))


add("segment_anything_decoder", "segment-anything", (2, 4), segment_anything)

# Self-supervision ----------------------------------------------------------------------------------------------------


class TwoViews(Step):
    """A network and its head on both views; a loss of lightly between them."""

    def __init__(self, head: str, criterion: Callable[[], nn.Module], teacher: bool = False) -> None:
        sizes = {"DINOProjectionHead": (64, 64, 32, 256), "BarlowTwinsProjectionHead": (64, 128, 128)}
        network = lambda: nn.Sequential(backbone(), of(f"lightly.models.modules:{head}")(*sizes[head]))  # noqa: E731
        super().__init__(network(), None, sgd)
        self.criterion = criterion()
        self.teacher = network().requires_grad_(False) if teacher else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.teacher is None:
            return self.criterion(self.network(batch[0]), self.network(batch[1]))
        of("lightly.models.utils:update_momentum")(self.network, self.teacher, m=0.99)
        with torch.no_grad():
            targets = [self.teacher(view) for view in batch]
        return self.criterion(targets, [self.network(view) for view in batch], epoch=self.current_epoch)


add("lightly_dino", "lightly", (8, 32), lambda: Run(lambda: TwoViews("DINOProjectionHead",
    lambda: of("lightly.loss:DINOLoss")(256), True), views()))
add("lightly_vicreg", "lightly", (8, 32), lambda: Run(lambda: TwoViews("BarlowTwinsProjectionHead",
    lambda: of("lightly.loss:VICRegLoss")()), views()))


def swav() -> Run:
    class Swav(Step):
        def __init__(self) -> None:
            m = of("lightly.models.modules")
            super().__init__(nn.Sequential(backbone(), m.SwaVProjectionHead(64, 64, 32), m.SwaVPrototypes(32, 64)),
                None)
            self.criterion = of("lightly.loss:SwaVLoss")()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.network[2].normalize()
            return self.criterion([self.network(view) for view in batch], [])

    return Run(Swav, views())


add("lightly_swav", "lightly", (8, 32), swav)


def byol() -> Run:
    class Byol(Step):
        def __init__(self) -> None:
            resnet = of("torchvision.models:resnet18")(num_classes=10)
            super().__init__(of("byol_pytorch:BYOL")(resnet, image_size=48, hidden_layer="avgpool",
                projection_size=32, projection_hidden_size=64), lambda n, b: n(b[0]))

        def on_before_zero_grad(self, *_: Any) -> None:
            self.network.update_moving_average()

    return Run(Byol, images(48))


add("byol_pytorch", "byol-pytorch", (4, 8), byol)


def clip(criterion: str, coca: bool = False) -> Run:
    image = {"layers": 2, "width": 64, "patch_size": 8, "image_size": 32, "head_width": 16}
    text = {"context_length": 24, "vocab_size": 500, "width": 64, "heads": 4, "layers": 2}

    def build() -> Step:
        if coca:
            pooled = {**image, "attentional_pool": True, "attn_pooler_queries": 16, "attn_pooler_heads": 4,
                "output_tokens": True}
            words = {**text, "embed_cls": True, "output_tokens": True}
            network = of("open_clip:CoCa")(64, {**text, "mlp_ratio": 2, "heads": 4, "layers": 2}, words, pooled)
            loss = of("open_clip:CoCaLoss")(caption_loss_weight=2.0, clip_loss_weight=1.0)

            def both(n: nn.Module, b: Any) -> Tensor:
                return sum(loss(**n(b[0], b[1]), output_dict=True).values())

            return Step(network, both, adamw)
        network = of("open_clip:CLIP")(64, image, text, init_logit_bias=-10.0)
        loss = of(f"open_clip.loss:{criterion}")()
        return Step(network, lambda n, b: loss(*n(b[0], b[1])), adamw)

    return Run(build, data(lambda _: (torch.randn(3, 32, 32), torch.randint(1, 500, (24,)))))


add("open_clip_siglip", "open-clip-torch", (4, 16), lambda: clip("SigLipLoss"))
add("open_clip_coca", "open-clip-torch", (4, 16), lambda: clip("CoCaLoss", coca=True))

# Diffusion and flows -------------------------------------------------------------------------------------------------


class Denoise(Step):
    """Noise is added by a scheduler of diffusers and predicted by `predict(noisy, times, batch)`."""

    def __init__(self, network: nn.Module, predict: Callable[..., Tensor], average: bool = False) -> None:
        super().__init__(network, None, adamw)
        self.predict, self.scheduler = predict, of("diffusers:DDPMScheduler")(1000)
        self.average = of("diffusers.training_utils:EMAModel")(network.parameters()) if average else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, noise = batch[0], torch.randn_like(batch[0])
        t = torch.randint(1000, (len(x),), device=self.device)
        return F.mse_loss(self.predict(self, self.scheduler.add_noise(x, noise, t), t, batch), noise)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.average is not None:
            self.average.step(self.network.parameters())


def conditional_unet() -> Any:
    blocks = {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")}
    return of("diffusers:UNet2DConditionModel")(16, 4, 4, block_out_channels=(32, 64), layers_per_block=1,
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8, **blocks)


def latents(*more: Callable[[], Any]) -> Any:
    return data(lambda _: (torch.randn(4, 16, 16), torch.randn(12, 32), *(one() for one in more)))


def controlnet() -> Run:
    def predict(m: Any, x: Tensor, t: Tensor, batch: Any) -> Tensor:
        down, middle = m.network(x, t, batch[1], controlnet_cond=batch[2], return_dict=False)
        return m.unet(x, t, batch[1], down_block_additional_residuals=down, mid_block_additional_residual=middle).sample

    def build() -> Step:
        unet = conditional_unet().requires_grad_(False)
        step = Denoise(of("diffusers:ControlNetModel").from_unet(unet, conditioning_channels=3), predict)
        step.unet = unet
        return step

    return Run(build, latents(lambda: torch.rand(3, 128, 128)))


def lora_unet() -> Run:
    """As `train_text_to_image_lora.py` does: adapters in the attention of a frozen network."""

    def build() -> Step:
        unet = conditional_unet().requires_grad_(False)
        unet.add_adapter(of("peft:LoraConfig")(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
        unet.enable_gradient_checkpointing()
        return Denoise(unet, lambda m, x, t, b: m.network(x, t, b[1]).sample)

    return Run(build, latents())


def dit() -> Run:
    def build() -> Step:
        network = of("diffusers:DiTTransformer2DModel")(num_attention_heads=4, attention_head_dim=16, in_channels=4,
            num_layers=2, sample_size=16, num_embeds_ada_norm=1000, norm_num_groups=8)
        return Denoise(network, lambda m, x, t, b: m.network(x, timestep=t, class_labels=b[2]).sample, average=True)

    return Run(build, latents(lambda: torch.randint(10, ()).item()))


def flux() -> Run:
    """Velocities between data and noise, at a time drawn from a logit-normal distribution."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        x, text, pooled = batch
        noise, t = torch.randn_like(x), torch.randn(len(x)).sigmoid()
        mixed = (1 - t[:, None, None]) * x + t[:, None, None] * noise
        ids, words = torch.zeros(x.shape[1], 3), torch.zeros(text.shape[1], 3)
        out = network(hidden_states=mixed, encoder_hidden_states=text, pooled_projections=pooled, timestep=t,
            img_ids=ids, txt_ids=words)
        return F.mse_loss(out.sample, noise - x)

    def build() -> Step:
        sizes = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 4}
        network = of("diffusers:FluxTransformer2DModel")(joint_attention_dim=32, pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8], **sizes)
        network.enable_gradient_checkpointing()
        return Step(network, loss, adamw)

    return Run(build, data(lambda _: (torch.randn(64, 16), torch.randn(12, 32), torch.randn(32))))


add("diffusers_controlnet", "diffusers", (2, 8), controlnet)
add("diffusers_lora_unet", "diffusers", (2, 8), lora_unet)
add("diffusers_dit_ema", "diffusers", (4, 16), dit)
add("diffusers_flux", "diffusers", (4, 16), flux)


def flow_matching() -> Run:
    """Pairs of noise and data by optimal transport, computed by POT on the CPU."""

    def build() -> Step:
        matcher = of("torchcfm.conditional_flow_matching:ExactOptimalTransportConditionalFlowMatcher")(sigma=0.0)

        def loss(network: nn.Module, batch: Any) -> Tensor:
            t, x, velocity = matcher.sample_location_and_conditional_flow(torch.randn_like(batch[0]), batch[0])
            return F.mse_loss(network(torch.cat([x, t[:, None]], 1)), velocity)

        return Step(mlp(17, 256, 16), loss)

    return Run(build, regression(16))


add("flow_matching", "torchcfm", (32, 128), flow_matching)


def glow() -> Run:
    def build() -> Step:
        nf = of("normflows")
        flows = [nf.flows.GlowBlock(12, 32, split_mode="channel", scale=True) for _ in range(3)]
        squeezed = [[*flows, nf.flows.Squeeze()]]
        base = [nf.distributions.DiagGaussian((12, 8, 8))]
        return Step(nf.MultiscaleFlow(base, squeezed, []), lambda n, b: n.forward_kld(b[0]))

    return Run(build, images(16))


add("glow", "normflows", (4, 16), glow)

# Sound ---------------------------------------------------------------------------------------------------------------


def whisper() -> Run:
    def build() -> Step:
        sizes = of("whisper.model:ModelDimensions")(80, 100, 64, 4, 2, 500, 32, 64, 4, 2)
        network = of("whisper.model:Whisper")(sizes)
        return Step(network, lambda n, b: F.cross_entropy(n(b[0], b[1]).flatten(0, 1), b[2].flatten()), adamw)

    words = lambda: torch.randint(500, (24,))  # noqa: E731
    return Run(build, data(lambda _: (torch.randn(80, 200), words(), words())))


def encodec() -> Run:
    """Residual codes with moving averages; k-means in the first step."""

    def build() -> Step:
        m = of("encodec.modules")
        sizes = {"n_filters": 8, "ratios": [4, 4], "dimension": 32, "lstm": 1}
        quantizer = of("encodec.quantization:ResidualVectorQuantizer")(dimension=32, n_q=4, bins=32)

        def compute(n: Net, x: Tensor) -> Tensor:
            codes = n.quantizer(n.encoder(x), 16000 // 16, 24.0)
            return F.l1_loss(n.decoder(codes.quantized)[..., : x.shape[-1]], x) + codes.penalty

        network = Net(compute, encoder=m.SEANetEncoder(**sizes), decoder=m.SEANetDecoder(**sizes), quantizer=quantizer)
        return Step(network, lambda n, b: n(b[0]))

    return Run(build, data(lambda i: (torch.randn(1, 3200), i)))


def vocos() -> Run:
    def build() -> Step:
        features = of("vocos.models:VocosBackbone")(input_channels=40, dim=64, intermediate_dim=128, num_layers=2)
        network = nn.Sequential(features, of("vocos.heads:ISTFTHead")(dim=64, n_fft=256, hop_length=64))
        return Step(network, lambda n, b: F.l1_loss(n(b[0]), b[1]), adamw)

    return Run(build, data(lambda _: (torch.randn(40, 64), torch.randn(4096))))


def transformer_asr() -> Run:
    """SpeechBrain's joint CTC and attention training of padded speech."""

    def loss(m: Net, batch: Any) -> Tensor:
        frames, sizes, text, lengths = batch
        encoded, decoded = m.net(frames, text, sizes / sizes.max(), pad_idx=0)
        scores = m.ctc(encoded).log_softmax(-1).transpose(0, 1)
        frames_left = (sizes / sizes.max() * encoded.shape[1]).long()
        return F.cross_entropy(m.head(decoded).flatten(0, 1), text.flatten()) + F.ctc_loss(
            scores, text, frames_left, lengths)

    def build() -> Step:
        sizes = {"tgt_vocab": 30, "input_size": 40, "d_model": 64, "nhead": 4, "num_encoder_layers": 2,
            "num_decoder_layers": 1, "d_ffn": 128}
        network = of("speechbrain.lobes.models.transformer.TransformerASR:TransformerASR")(
            **sizes, encoder_module="conformer", attention_type="RelPosMHAXL", normalize_before=True, causal=False)
        return Step(Net(loss, net=network, ctc=nn.Linear(64, 30), head=nn.Linear(64, 30)), lambda n, b: n(b))

    return Run(build, utterances())


def tacotron() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        text, mel = batch
        sizes = torch.full((len(text),), text.shape[1]), torch.full((len(mel),), mel.shape[2])
        out, refined, stop, _ = network(text, sizes[0], mel, sizes[1])
        return F.mse_loss(out, mel) + F.mse_loss(refined, mel) + F.binary_cross_entropy_with_logits(
            stop, torch.zeros_like(stop))

    def build() -> Step:
        widths = {"symbol_embedding_dim": 64, "encoder_embedding_dim": 64, "decoder_rnn_dim": 128,
            "attention_rnn_dim": 128, "attention_hidden_dim": 32, "prenet_dim": 32, "postnet_embedding_dim": 64}
        return Step(of("torchaudio.models:Tacotron2")(n_symbol=40, n_mels=20, **widths), loss)

    return Run(build, data(lambda _: (torch.randint(40, (16,)), torch.randn(20, 32))))


def demucs() -> Run:
    def build() -> Step:
        network = of("torchaudio.models:HDemucs")(sources=["a", "b"], audio_channels=1, channels=8)
        return Step(network, lambda n, b: F.l1_loss(n(b[0]), b[1]))

    return Run(build, data(lambda _: (torch.randn(1, 44100), torch.randn(2, 1, 44100))))


add("openai_whisper", "openai-whisper", (4, 16), whisper)
add("encodec_codes", "encodec", (2, 8), encodec)
add("vocos_istft", "vocos", (4, 16), vocos)
add("speechbrain_transformer_asr", "speechbrain", (4, 16), transformer_asr)
add("torchaudio_tacotron2", "torchaudio", (4, 16), tacotron)
add("torchaudio_hdemucs", "torchaudio", (2, 4), demucs)

# Language models of other libraries ----------------------------------------------------------------------------------


def encoder_decoder() -> Run:
    def build() -> Step:
        sides = {f"{side}_{k}": v for side in ("enc", "dec") for k, v in {"num_tokens": 500, "depth": 2, "heads": 4,
            "max_seq_len": 64}.items()}
        network = of("x_transformers:XTransformer")(dim=64, tie_token_emb=True, **sides)
        return Step(network, lambda n, b: n(b[0], b[1], mask=b[0] > 50))

    return Run(build, tokens(64, 500))


add("x_transformers_seq2seq", "x-transformers", (4, 16), encoder_decoder)


def chronos() -> Run:
    def build() -> Step:
        import transformers

        forecast = {"context_length": 64, "prediction_length": 16, "input_patch_size": 8, "input_patch_stride": 8,
            "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True}
        config = transformers.T5Config(vocab_size=2, d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2,
            chronos_config=forecast, decoder_start_token_id=0, pad_token_id=0, reg_token_id=1)
        return Step(of("chronos.chronos_bolt:ChronosBoltModelForForecasting")(config),
            lambda n, b: n(context=b[0], target=b[1]).loss, adamw)

    return Run(build, data(lambda _: (torch.rand(64), torch.rand(16))))


add("chronos_bolt", "chronos-forecasting", (16, 64), chronos)

# Graphs --------------------------------------------------------------------------------------------------------------


def molecules(network: Callable[[], nn.Module], edges: int = 0) -> Run:
    """Graphs of different sizes; the network takes the batch."""
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    counts = torch.randint(10, 31, (64,)).tolist()
    counts[0] = 30
    samples = [Data(x=torch.randn(n, 16), edge_index=torch.randint(n, (2, 3 * n)), edge_attr=torch.randn(3 * n, 8),
        pos=torch.randn(n, 3), y=torch.tensor([i % 4])) for i, n in enumerate(counts) ]
    return Run(lambda: Step(network(), lambda n, b: F.cross_entropy(n(b), b.y)),
        lambda batch_size, batches: DataLoader(samples * (1 + batch_size * batches // 64), batch_size=batch_size))


def gps() -> nn.Module:
    """Message passing, and attention of each graph's nodes, padded to the largest graph."""
    g = of("torch_geometric.nn")

    def compute(m: Net, b: Any) -> Tensor:
        x, e = m.start(b.x), m.edge(b.edge_attr)
        for layer in m.layers:
            x = layer(x, b.edge_index, b.batch, edge_attr=e)
        return m.head(g.global_mean_pool(x, b.batch))

    layers = nn.ModuleList(g.GPSConv(64, g.GINEConv(mlp(64, 64, 64, 1)), heads=4) for _ in range(2))
    return Net(compute, start=nn.Linear(16, 64), edge=nn.Linear(8, 64), layers=layers, head=nn.Linear(64, 4))


def diff_pool() -> nn.Module:
    """Dense graphs, padded to the largest; clusters are learned."""
    g = of("torch_geometric.nn")

    def compute(m: Net, b: Any) -> Tensor:
        x, mask = of("torch_geometric.utils:to_dense_batch")(b.x, b.batch)
        adjacency = of("torch_geometric.utils:to_dense_adj")(b.edge_index, b.batch)
        x, adjacency, *_ = g.dense_diff_pool(m.embed(x, adjacency, mask).relu(), adjacency,
            m.pool(x, adjacency, mask), mask)
        return m.head(m.last(x, adjacency).mean(1))

    return Net(compute, embed=g.DenseSAGEConv(16, 64), pool=g.DenseSAGEConv(16, 8), last=g.DenseSAGEConv(64, 64),
        head=nn.Linear(64, 4))


def top_k_pool() -> nn.Module:
    g = of("torch_geometric.nn")

    def compute(m: Net, b: Any) -> Tensor:
        x = m.first(b.x, b.edge_index).relu()
        x, edges, _, batch, *_ = m.pool(x, b.edge_index, None, b.batch)
        return m.head(g.global_mean_pool(m.second(x, edges).relu(), batch))

    return Net(compute, first=g.GATv2Conv(16, 64), pool=g.TopKPooling(64, 0.5), second=g.GraphConv(64, 64),
        head=nn.Linear(64, 4))


def graph_transformer() -> nn.Module:
    g = of("torch_geometric.nn")

    def compute(m: Net, b: Any) -> Tensor:
        x = m.first(b.x, b.edge_index, b.edge_attr).relu()
        return m.head(m.read(m.second(x, b.edge_index, b.edge_attr), b.batch))

    first, second = g.TransformerConv(16, 16, heads=4, edge_dim=8), g.TransformerConv(64, 64, edge_dim=8)
    return Net(compute, first=first, second=second, read=g.SoftmaxAggregation(learn=True), head=nn.Linear(64, 4))


GRAPHS = {"gps": gps, "diff_pool": diff_pool, "top_k_pool": top_k_pool, "transformer_conv": graph_transformer}
for name, network in GRAPHS.items():
    add(f"graph_{name}", "torch-geometric", (8, 32), lambda n=network: molecules(n))


def hgt() -> Run:
    """Graphs of two types of nodes and two of edges."""
    from torch_geometric.data import HeteroData
    from torch_geometric.loader import DataLoader

    def sample(i: int) -> Any:
        graph, (a, b) = HeteroData(), torch.randint(8, 21, (2,)).tolist()
        graph["user"].x, graph["item"].x, graph.y = torch.randn(a, 16), torch.randn(b, 16), torch.tensor([i % 4])
        for one, two, n, m in (("user", "item", a, b), ("item", "user", b, a)):
            graph[one, "to", two].edge_index = torch.stack([torch.randint(n, (40,)), torch.randint(m, (40,))])
        return graph

    samples = [sample(i) for i in range(64)]
    kinds = (["user", "item"], [("user", "to", "item"), ("item", "to", "user")])

    def loss(m: Net, batch: Any) -> Tensor:
        x = batch.x_dict
        for layer in m.layers:
            x = layer(x, batch.edge_index_dict)
        return F.cross_entropy(m.head(of("torch_geometric.nn:global_mean_pool")(x["user"], batch["user"].batch)),
            batch.y)

    def build() -> Step:
        layers = nn.ModuleList(of("torch_geometric.nn:HGTConv")(size, 64, kinds, heads=4) for size in (16, 64))
        return Step(Net(loss, layers=layers, head=nn.Linear(64, 4)), lambda n, b: n(b))

    return Run(build, lambda batch_size, batches: DataLoader(samples * (1 + batch_size * batches // 64),
        batch_size=batch_size))


add("graph_hgt", "torch-geometric", (8, 32), hgt)


def egnn() -> Run:
    """Each sample is a cloud of points, all pairs of which are edges."""

    def compute(m: Net, x: Tensor, positions: Tensor) -> Tensor:
        for layer in m.layers:
            x, positions = layer(x, positions)
        return m.head(x.mean(1))

    def build() -> Step:
        layers = nn.ModuleList(of("egnn_pytorch:EGNN")(dim=32, num_nearest_neighbors=8) for _ in range(2))
        return Step(Net(compute, layers=layers, head=nn.Linear(32, 1)), lambda n, b: F.mse_loss(n(b[0], b[1]), b[2]))

    return Run(build, data(lambda _: (torch.randn(24, 32), torch.randn(24, 3), torch.randn(1))))


add("egnn", "egnn-pytorch", (4, 16), egnn)

# Tables and control --------------------------------------------------------------------------------------------------


def tabnet() -> Run:
    def loss(network: nn.Module, batch: Any) -> Tensor:
        out, sparsity = network(torch.cat([batch[0].float(), batch[1]], 1))
        return F.cross_entropy(out, batch[2]) - 1e-3 * sparsity

    def build() -> Step:
        network = of("pytorch_tabnet.tab_network:TabNet")(16, 3, cat_idxs=list(range(6)), cat_dims=[20] * 6,
            cat_emb_dim=[2] * 6, group_attention_matrix=torch.eye(16))
        return Step(network, loss)

    return Run(build, columns())


def tabm() -> Run:
    """An ensemble of 32 that shares its weights."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        out = network(batch[1], batch[0])
        return F.cross_entropy(out.flatten(0, 1), batch[2].repeat_interleave(out.shape[1]))

    return Run(lambda: Step(of("tabm:TabM").make(n_num_features=10, cat_cardinalities=[20] * 6, d_out=3, d_block=64),
        loss, adamw), columns())


def number_embeddings() -> Run:
    def build() -> Step:
        periodic = of("rtdl_num_embeddings:PeriodicEmbeddings")(10, 24, lite=False)
        return Step(nn.Sequential(periodic, nn.Flatten(), mlp(240, 128, 3)),
            lambda n, b: F.cross_entropy(n(b[1]), b[2]))

    return Run(build, columns())


def deep_fm() -> Run:
    def build() -> Step:
        inputs = of("deepctr_torch.inputs")
        sparse = [inputs.SparseFeat(f"c{i}", 20, embedding_dim=8) for i in range(6)]
        features = [*sparse, *(inputs.DenseFeat(f"n{i}", 1) for i in range(10))]
        network = of("deepctr_torch.models:DeepFM")(features, features, task="binary", device="cpu")

        def loss(n: nn.Module, b: Any) -> Tensor:
            return F.binary_cross_entropy(n(torch.cat([b[0].float(), b[1]], 1)).squeeze(1),
                (b[2] > 0).float()) + n.get_regularization_loss().sum()

        return Step(network, loss)

    return Run(build, columns())


def ppo_policy() -> Run:
    """Stable-Baselines3's policy for images, with the loss of its PPO."""

    def loss(network: nn.Module, batch: Any) -> Tensor:
        seen, action, old, advantage, target = batch
        values, log_prob, entropy = network.evaluate_actions(seen, action)
        ratio = (log_prob - old).exp()
        clipped = torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
        return F.mse_loss(values.flatten(), target) * 0.5 - clipped - 0.01 * entropy.mean()

    def build() -> Step:
        spaces = of("gymnasium.spaces")
        screen = spaces.Box(0, 255, (3, 64, 64), of("numpy:uint8"))
        return Step(of("stable_baselines3.common.policies:ActorCriticCnnPolicy")(
            screen, spaces.Discrete(4), lambda _: 1e-4), loss)

    number = lambda: torch.randn(())  # noqa: E731
    return Run(build, data(lambda i: (torch.randint(256, (3, 64, 64), dtype=torch.uint8), i % 4, number(), number(),
        number())))


add("tabnet", "pytorch-tabnet", (64, 256), tabnet)
add("tabm_ensemble", "tabm", (64, 256), tabm)
add("periodic_embeddings", "rtdl-num-embeddings", (64, 256), number_embeddings)
add("deep_fm", "deepctr-torch", (64, 256), deep_fm)
add("sb3_ppo_policy", "stable-baselines3", (16, 64), ppo_policy)


def torchrl_losses(kind: str) -> Run:
    def build() -> Step:
        m, n = of("torchrl.modules"), of("tensordict.nn")
        if kind == "dqn":
            criterion = of("torchrl.objectives:DQNLoss")(m.QValueActor(mlp(16, 128, 4), in_keys=["observation"],
                action_space="categorical"), action_space="categorical")
        else:
            body = n.TensorDictModule(nn.Sequential(mlp(16, 128, 8), m.NormalParamExtractor()), ["observation"],
                ["loc", "scale"])
            actor = m.ProbabilisticActor(body, in_keys=["loc", "scale"], distribution_class=m.TanhNormal,
                return_log_prob=False)
            critic = m.ValueOperator(Net(lambda s, o, a: s.net(torch.cat([o, a], -1)), net=mlp(20, 128, 1)),
                in_keys=["observation", "action"])
            criterion = of("torchrl.objectives:SACLoss")(actor, critic, num_qvalue_nets=2, action_spec=None,
                target_entropy=-4.0)
        criterion.make_value_estimator(gamma=0.99)

        def loss(network: nn.Module, batch: Any) -> Tensor:
            found = network(of("tensordict:TensorDict")(batch, [len(batch["observation"])]))
            return sum(value for name, value in found.items() if name.startswith("loss"))

        return Step(criterion, loss)

    def sample(i: int) -> Any:
        done = {"done": torch.zeros(1, dtype=torch.bool), "terminated": torch.zeros(1, dtype=torch.bool)}
        after = {"observation": torch.randn(16), "reward": torch.randn(1), **done}
        return {"observation": torch.randn(16), "action": torch.tensor(i % 4) if kind == "dqn" else torch.rand(
            4) - 0.5, "next": after}

    return Run(build, data(sample))


add("torchrl_dqn", "torchrl", (32, 128), lambda: torchrl_losses("dqn"))
add("torchrl_sac", "torchrl", (32, 128), lambda: torchrl_losses("sac"))
