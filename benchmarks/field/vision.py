"""Libraries for images and video: classifiers, detection, segmentation, contrast, diffusion, losses of images."""

# Rows of tables, and names of libraries imported when they are called:
# fmt: off
# ruff: noqa: PLW0108

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from field.language import CODER, loss_of, of_all, of_itself
from field.pattern import Step, adamw, data, images, mlp, noise, of, pattern, row, sgd

# Detection -----------------------------------------------------------------------------------------------------------

SIDE = 128
Collate = Callable[[list[Any]], Any]


def some() -> list[int]:
    return torch.randint(1, 6, (64,)).tolist()


def objects(masks: bool = False, keypoints: int = 0, collate: Collate | None = None) -> Callable[[int, int], Any]:
    """Images with one to five boxes each, as torchvision's detectors take them: lists."""
    counts = some()

    def sample(i: int) -> Any:
        corners = torch.rand(counts[i], 2) * SIDE * 0.6
        boxes = torch.cat([corners, corners + 16 + torch.rand(counts[i], 2) * SIDE * 0.25], 1)
        target = {"boxes": boxes, "labels": torch.randint(1, 5, (counts[i],))}
        if masks:
            target["masks"] = torch.zeros(counts[i], SIDE, SIDE, dtype=torch.uint8)
            for mask, box in zip(target["masks"], boxes.int().tolist(), strict=True):
                mask[box[1] : box[3], box[0] : box[2]] = 1
        if keypoints:
            target["labels"] = torch.ones(counts[i], dtype=torch.long)
            points = boxes[:, None, :2] + torch.rand(counts[i], keypoints, 2) * 16
            target["keypoints"] = torch.cat([points, torch.ones(counts[i], keypoints, 1)], 2)
        return torch.rand(3, SIDE, SIDE), target

    return data(sample, collate or (lambda items: tuple(zip(*items, strict=True))))


def detection_loss(network: nn.Module, batch: Any) -> Tensor:
    pictures, targets = batch
    return sum(network(list(pictures), list(targets)).values())


DETECTORS: dict[str, tuple[tuple[int, int], str, dict[str, Any], dict[str, Any]]] = {
    "faster_rcnn": ((2, 4), "fasterrcnn_resnet50_fpn", {}, {}),
    "mask_rcnn": ((2, 4), "maskrcnn_resnet50_fpn", {"masks": True}, {}),
    "retinanet": ((2, 4), "retinanet_resnet50_fpn", {}, {}),
    "keypoint_rcnn": ((1, 2), "keypointrcnn_resnet50_fpn", {"keypoints": 17}, {"num_classes": 2}),
    "fcos": ((2, 4), "fcos_resnet50_fpn", {}, {}),
    "ssdlite": ((4, 8), "ssdlite320_mobilenet_v3_large", {}, {}),
}
for name, (sizes, model, targets, options) in DETECTORS.items():
    sides = {} if "ssd" in name else {"min_size": SIDE, "max_size": SIDE}
    row(name, "torchvision", sizes, f"torchvision.models.detection:{model}", lambda m, o={"num_classes": 5, **sides,
        **options}: m(weights=None, weights_backbone=None, **o), lambda t=targets: objects(**t), detection_loss, sgd)


def for_detr(items: list[Any]) -> Any:
    boxes = [target["boxes"] / SIDE for _, target in items]
    labels = [{"class_labels": t["labels"] - 1, "boxes": b} for (_, t), b in zip(items, boxes, strict=True)]
    return {"pixel_values": torch.stack([x for x, _ in items]), "labels": labels}


@pattern("transformers", (2, 8), "transformers", lambda: objects(collate=for_detr), loss_of, adamw)
def hf_detr(t: Any) -> nn.Module:
    """Boxes are matched by SciPy, on values."""
    features = t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
        out_features=["stage2"])
    return t.DetrForObjectDetection(t.DetrConfig(backbone_config=features, use_timm_backbone=False,
        use_pretrained_backbone=False, d_model=64, num_queries=20, num_labels=5, **CODER))


def for_effdet(items: list[Any]) -> Any:
    pictures, targets = zip(*items, strict=True)
    return torch.stack(pictures), {"bbox": [t["boxes"] for t in targets], "cls": [t["labels"] for t in targets]}


@pattern("effdet", (2, 4), "", lambda: objects(collate=for_effdet), lambda n, b: n(*b)["loss"], adamw)
def efficientdet_lite() -> nn.Module:
    config = of("effdet:get_efficientdet_config")("tf_efficientdet_lite0")
    config.num_classes, config.image_size = 5, (SIDE, SIDE)
    return of("effdet.bench:DetBenchTrain")(of("effdet:EfficientDet")(config, pretrained_backbone=False))


def boxed(more: bool = True) -> Callable[[int, int], Any]:
    def collate(items: list[Any]) -> dict[str, Tensor]:
        pictures, boxes, *rest = zip(*items, strict=True)
        whose = torch.cat([torch.full((len(b),), float(i)) for i, b in enumerate(boxes)])
        batch = {"img": torch.stack(pictures), "bboxes": torch.cat(boxes), "cls": torch.zeros(len(whose), 1),
            "batch_idx": whose}
        return {**batch, "masks": torch.stack(rest[0]), "keypoints": torch.cat(rest[1])} if rest else batch

    counts = some()

    def sample(i: int) -> Any:
        if not more:
            return torch.rand(3, 128, 128), torch.rand(counts[i], 4) * 0.4 + 0.2
        boxes, masks = torch.rand(counts[i], 4) * 0.4 + 0.2, torch.randint(counts[i] + 1, (32, 32)).float()
        return torch.rand(3, 128, 128), boxes, masks, torch.rand(counts[i], 17, 3)

    return data(sample, collate)


def yolo(cls: str, config: str, classes: int, **overrides: Any) -> nn.Module:
    """Ultralytics' heads for boxes, for masks, or for key points."""
    network = of(f"ultralytics.nn.tasks:{cls}")(f"{config}.yaml", nc=classes, verbose=False)
    network.args = of("ultralytics.cfg:get_cfg")(overrides=overrides)
    return network


YOLO: dict[str, tuple[Any, ...]] = {
    "yolov8": (False, "DetectionModel", "yolov8n", 5, {}),
    "yolo11_masks": (True, "SegmentationModel", "yolo11n-seg", 5, {"overlap_mask": True}),
    "yolo11_pose": (True, "PoseModel", "yolo11n-pose", 1, {"overlap_mask": True}),
}
for name, (more, *model, options) in YOLO.items():
    row(name, "ultralytics", (2, 4), "ultralytics.nn.tasks ultralytics.cfg", lambda *_, m=model, o=options: yolo(
        *m, **o), lambda m=more: boxed(m), lambda n, b: n(b)[0].sum(), sgd)

# Classifiers ---------------------------------------------------------------------------------------------------------


class Recipe(Step):
    """timm's own training recipe: mixup, an average of the weights, LAMB."""

    def __init__(self, timm: Any, t: Any, losses: Any, utils: Any, _: Any) -> None:
        super().__init__(timm.create_model("regnetx_002", num_classes=10), None)
        self.mixup, self.soft = t.Mixup(mixup_alpha=0.8, num_classes=10), losses.SoftTargetCrossEntropy()
        self.average = utils.ModelEmaV3(self.network)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.mixup(batch[0].clone(), batch[1])
        return self.soft(self.network(x), y)

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update(self.network)

    def configure_optimizers(self) -> Any:
        return of("timm.optim:create_optimizer_v2")(self.network, opt="lamb", lr=1e-3)


row("timm_regnet_ema_mixup", "timm", (4, 16), "timm timm.data timm.loss timm.utils timm.optim", Recipe,
    lambda: images(64))
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
    row(f"timm_{name}", "timm", (2, 8), "timm", lambda timm, m=model, o=options: timm.create_model(m, num_classes=10,
        **o), lambda s=side: images(s), optimizer=adamw)

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
    row(name, library, sizes, "", network, lambda s=side: images(s), optimizer=sgd)


def auxiliary(network: nn.Module, batch: Any) -> Tensor:
    """Two heads, trained together with the last one."""
    out, *others = network(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.3 * sum(F.cross_entropy(other, batch[1]) for other in others)


row("torchvision_googlenet", "torchvision", (4, 8), "", lambda: of("torchvision.models:googlenet")(weights=None,
    num_classes=10, init_weights=False, aux_logits=True), lambda: images(64), auxiliary, sgd)


def backbone() -> nn.Sequential:
    layers = (nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pattern("vit-pytorch", (4, 16), "", lambda: images(64), of_all)
def vit_pytorch_distillation() -> nn.Module:
    """A convolutional teacher's logits train a transformer's token."""
    teacher = nn.Sequential(backbone(), nn.Linear(64, 10))
    student = of("vit_pytorch.distill:DistillableViT")(image_size=64, patch_size=8, num_classes=10, dim=64, depth=2,
        heads=4, mlp_dim=128)
    return of("vit_pytorch.distill:DistillWrapper")(student=student, teacher=teacher, temperature=3, alpha=0.5,
        hard=False)


# Images of several sizes packed into sequences.
row("vit_pytorch_na_vit", "vit-pytorch", (2, 8), "vit_pytorch.na_vit:NaViT", lambda vit: vit(image_size=64,
    patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128), lambda: data(lambda i: (torch.randn(
    3, (32, 64)[i % 2], 64), i % 10), lambda items: ([x for x, _ in items], torch.tensor([y for _, y in items]))),
    lambda n, b: F.cross_entropy(n(list(b[0]), group_images=True, group_max_seq_len=96), b[1]))


class Augmented(nn.Module):
    def __init__(self, k: Any) -> None:
        super().__init__()
        first = (k.RandomHorizontalFlip(p=0.5), k.RandomAffine(15.0, p=0.7))
        second = (k.ColorJitter(0.2, 0.2, 0.2, 0.1, p=0.8), k.RandomGaussianBlur((3, 3), (0.1, 2.0), p=0.5))
        self.augment = nn.Sequential(*first, *second)
        self.network = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 256, 10))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.augment(x)
        return self.network(x)


row("kornia_augmentations", "kornia", (8, 32), "kornia.augmentation", Augmented, lambda: data(lambda i: (torch.rand(
    3, 32, 32), i % 10)))

# Segmentation --------------------------------------------------------------------------------------------------------

SMP, MONAI = "segmentation-models-pytorch", "monai.networks.nets"
small = {"encoder_weights": None, "classes": 4}


def deep_supervision(outputs: Any, y: Tensor) -> Tensor:
    """Outputs of each scale, the labels halved for each, as nnU-Net weighs them."""
    total = torch.zeros(())
    for level, out in enumerate(outputs):
        halved = F.interpolate(y[:, None].float(), out.shape[2:], mode="nearest")[:, 0].long()
        total = total + F.cross_entropy(out, halved) / 2**level
    return total


def nn_unet(unet: Any) -> nn.Module:
    return unet(1, num_classes=4, deep_supervision=True, n_stages=4, features_per_stage=(8, 16, 32, 64), kernel_sizes=3,
        strides=(1, 2, 2, 2), conv_op=nn.Conv3d, norm_op=nn.InstanceNorm3d, norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU, n_conv_per_stage=2, n_conv_per_stage_decoder=2, conv_bias=True)


def dice_and_focal(smp: Any) -> Any:
    dice, focal = smp.losses.DiceLoss("multiclass"), smp.losses.FocalLoss("multiclass")
    return smp.Unet("resnet18", **small), lambda x, y: dice(x, y) + focal(x, y)


# pixels or voxels of four classes: library, sizes, imports, a network and perhaps a loss, side, channels
SEGMENTED: dict[str, tuple[Any, ...]] = {
    "smp_unet": (SMP, (4, 8), "segmentation_models_pytorch", dice_and_focal),
    "smp_deeplab_lovasz": (SMP, (4, 8), "segmentation_models_pytorch", lambda smp: (smp.DeepLabV3Plus(
        "efficientnet-b0", **small), lambda x, y: smp.losses.LovaszLoss("multiclass")(x, y))),
    "smp_segformer_tversky": (SMP, (4, 8), "segmentation_models_pytorch", lambda smp: (smp.Segformer("mit_b0", **small),
        lambda x, y: smp.losses.TverskyLoss("multiclass")(x, y))),
    "smp_unet_plus_plus": (SMP, (4, 8), "segmentation_models_pytorch", lambda smp: smp.UnetPlusPlus("mobilenet_v2",
        **small)),
    "torchvision_lraspp": ("torchvision", (4, 8), "torchvision.models.segmentation", lambda s: (
        s.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4),
        lambda x, y: F.cross_entropy(x["out"], y))),
    "nn_unet_deep_supervision": ("dynamic-network-architectures", (2, 4),
        "dynamic_network_architectures.architectures.unet:PlainConvUNet", lambda u: (nn_unet(u), deep_supervision),
        (32, 32, 32), 1),
    "monai_seg_resnet": ("monai", (2, 4), MONAI, lambda m: m.SegResNet(3, 8, 1, 4), (32, 32, 32), 1),
    "monai_unetr": ("monai", (2, 4), MONAI, lambda m: m.UNETR(1, 4, (32, 32, 32), 8, 96, 192, 4), (32, 32, 32), 1),
}


def segmented(library: Any, network: Callable[[Any], Any]) -> tuple[nn.Module, Any]:
    found = network(library)
    model, criterion = found if isinstance(found, tuple) else (found, F.cross_entropy)
    return model, lambda n, b: criterion(n(b[0]), b[1])


for name, (library, sizes, imports, network, *shape) in SEGMENTED.items():
    side, channels = shape or ((64, 64), 3)
    row(name, library, sizes, imports, lambda found, n=network: segmented(found, n), lambda c=channels, s=side: data(
        lambda _: (torch.randn(c, *s), torch.randint(4, s))))


@pattern("monai", (2, 4), "monai.networks.nets:UNet monai.losses:DiceCELoss", lambda: data(lambda _: (torch.randn(
    1, 32, 32, 32), torch.randint(3, (1, 32, 32, 32)).float())))
def monai_unet_3d(unet: Any, dice: Any) -> Any:
    criterion = dice(to_onehot_y=True, softmax=True)
    return unet(3, 1, 3, (8, 16, 32, 64), (2, 2, 2), num_res_units=2), lambda n, b: criterion(n(b[0]), b[1])


class Prompted(nn.Module):
    """The mask decoder is trained; the image encoder is frozen; each image is decoded by itself, as SAM does."""

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


row("segment_anything_decoder", "segment-anything", (2, 4), "", Prompted, lambda: data(lambda _: (torch.randn(
    3, 128, 128), torch.rand(4) * 128, torch.rand(1, 32, 32).round())), lambda n, b: F.binary_cross_entropy_with_logits(
    n(b[0], b[1]), b[2]), adamw)

# Self-supervision and contrast ---------------------------------------------------------------------------------------


def views() -> Callable[[int, int], Any]:
    return noise((3, 48, 48), (3, 48, 48))


class MoCo(Step):
    def __init__(self, loss: Any, heads: Any, utils: Any) -> None:
        super().__init__(nn.Sequential(backbone(), heads.MoCoProjectionHead(64, 64, 32)), None, sgd)
        self.momentum, self.update = copy.deepcopy(self.network), utils.update_momentum
        utils.deactivate_requires_grad(self.momentum)
        self.criterion = loss.NTXentLoss(memory_bank_size=(1024, 32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.update(self.network, self.momentum, m=0.99)
        with torch.no_grad():
            key = self.momentum(batch[1])
        return self.criterion(self.network(batch[0]), key)


class TwoViews(Step):
    """A network and its head on both views; a loss of lightly between them."""

    def __init__(self, head: str, sizes: Sequence[int], criterion: Callable[[], Any], teacher: bool = False) -> None:
        network = lambda: nn.Sequential(backbone(), of(f"lightly.models.modules:{head}")(*sizes))  # noqa: E731
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


class Swav(Step):
    def __init__(self) -> None:
        m = of("lightly.models.modules")
        super().__init__(nn.Sequential(backbone(), m.SwaVProjectionHead(64, 64, 32), m.SwaVPrototypes(32, 64)), None)
        self.criterion = of("lightly.loss:SwaVLoss")()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.network[2].normalize()
        return self.criterion([self.network(view) for view in batch], [])


class Byol(Step):
    def __init__(self) -> None:
        resnet = of("torchvision.models:resnet18")(num_classes=10)
        super().__init__(of("byol_pytorch:BYOL")(resnet, image_size=48, hidden_layer="avgpool", projection_size=32,
            projection_hidden_size=64), of_itself)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.network.update_moving_average()


row("lightly_moco_memory_bank", "lightly", (8, 32), "lightly.loss lightly.models.modules lightly.models.utils", MoCo,
    views)
row("lightly_dino", "lightly", (8, 32), "", lambda: TwoViews("DINOProjectionHead", (64, 64, 32, 256), lambda: of(
    "lightly.loss:DINOLoss")(256), True), views)
row("lightly_vicreg", "lightly", (8, 32), "", lambda: TwoViews("BarlowTwinsProjectionHead", (64, 128, 128), lambda: of(
    "lightly.loss:VICRegLoss")()), views)
row("lightly_swav", "lightly", (8, 32), "", Swav, views)
row("byol_pytorch", "byol-pytorch", (4, 8), "", Byol, lambda: images(48))


def captioned(least: int = 1, words: int = 500) -> Callable[[int, int], Any]:
    return data(lambda _: (torch.randn(3, 32, 32), torch.randint(least, words, (24,))))


TOWER = {"layers": 2, "width": 64, "patch_size": 8, "image_size": 32, "head_width": 16}
PROMPT = {"context_length": 24, "vocab_size": 500, "width": 64, "heads": 4, "layers": 2}


def clip(image: dict[str, Any], text: dict[str, Any], criterion: str, **options: Any) -> tuple[nn.Module, Any]:
    loss = of(f"open_clip.loss:{criterion}")()
    return of("open_clip:CLIP")(64, image, text, **options), lambda n, b: loss(*n(b[0], b[1]))


row("open_clip", "open-clip-torch", (4, 16), "open_clip", lambda _: clip({**TOWER, "layers": 3, "width": 128,
    "head_width": 32}, {**PROMPT, "vocab_size": 1000}, "ClipLoss"), lambda: captioned(0, 1000), optimizer=adamw)
row("open_clip_siglip", "open-clip-torch", (4, 16), "", lambda: clip(TOWER, PROMPT, "SigLipLoss",
    init_logit_bias=-10.0), captioned, optimizer=adamw)


@pattern("open-clip-torch", (4, 16), "", captioned, optimizer=adamw)
def open_clip_coca() -> Any:
    pooled = {**TOWER, "attentional_pool": True, "attn_pooler_queries": 16, "attn_pooler_heads": 4,
        "output_tokens": True}
    words = {**PROMPT, "embed_cls": True, "output_tokens": True}
    network = of("open_clip:CoCa")(64, {**PROMPT, "mlp_ratio": 2}, words, pooled)
    loss = of("open_clip:CoCaLoss")(caption_loss_weight=2.0, clip_loss_weight=1.0)
    return network, lambda n, b: sum(loss(**n(b[0], b[1]), output_dict=True).values())


def near(classes: int = 8) -> Callable[[int, int], Any]:
    return data(lambda i: (torch.randn(64) + i % classes, i % classes))


def metric(loss: str, **options: Any) -> Step:
    step = Step(mlp(64, 256, 64), None)
    step.criterion = of(f"pytorch_metric_learning.losses:{loss}")(**options)
    step.loss = lambda n, b: step.criterion(n(b[0]), b[1])
    return step


@pattern("pytorch-metric-learning", (16, 64), "pytorch_metric_learning.losses pytorch_metric_learning.miners", near)
def metric_learning_miner(losses: Any, miners: Any) -> Any:
    miner, criterion = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

    def loss(network: nn.Module, batch: Any) -> Tensor:
        z = network(batch[0])
        return criterion(z, batch[1], miner(z, batch[1]))

    return mlp(64, 256, 64), loss


row("supervised_contrastive", "pytorch-metric-learning", (16, 64), "", lambda: metric("SupConLoss"), near)
row("proxy_anchor", "pytorch-metric-learning", (16, 64), "", lambda: metric("ProxyAnchorLoss", num_classes=8,
    embedding_size=64), near)

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
    return of("diffusers:UNet2DConditionModel")(16, 4, 4, block_out_channels=(32, 64), layers_per_block=1,
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8, down_block_types=("DownBlock2D",
        "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))


def latents(*more: Callable[[], Any]) -> Any:
    return data(lambda _: (torch.randn(4, 16, 16), torch.randn(12, 32), *(one() for one in more)))


row("diffusers_unet", "diffusers", (2, 8), "diffusers:UNet2DModel diffusers:DDPMScheduler", lambda unet, _: Denoise(
    unet(32, 3, 3, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8), lambda m, x, t, _: m.network(x, t).sample),
    lambda: images(32))


@pattern("diffusers", (2, 8), "", lambda: latents(lambda: torch.rand(3, 128, 128)))
def diffusers_controlnet() -> Step:
    def predict(m: Any, x: Tensor, t: Tensor, batch: Any) -> Tensor:
        down, middle = m.network(x, t, batch[1], controlnet_cond=batch[2], return_dict=False)
        return m.unet(x, t, batch[1], down_block_additional_residuals=down, mid_block_additional_residual=middle).sample

    unet = conditional_unet().requires_grad_(False)
    step = Denoise(of("diffusers:ControlNetModel").from_unet(unet, conditioning_channels=3), predict)
    step.unet = unet
    return step


@pattern("diffusers", (2, 8), "", latents)
def diffusers_lora_unet() -> Step:
    """As `train_text_to_image_lora.py` does: adapters in the attention of a frozen network."""
    unet = conditional_unet().requires_grad_(False)
    unet.add_adapter(of("peft:LoraConfig")(r=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    unet.enable_gradient_checkpointing()
    return Denoise(unet, lambda m, x, t, b: m.network(x, t, b[1]).sample)


row("diffusers_dit_ema", "diffusers", (4, 16), "", lambda: Denoise(of("diffusers:DiTTransformer2DModel")(
    num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=16,
    num_embeds_ada_norm=1000, norm_num_groups=8), lambda m, x, t, b: m.network(x, timestep=t, class_labels=b[2]).sample,
    average=True), lambda: latents(lambda: torch.randint(10, ()).item()))


def velocities(network: nn.Module, batch: Any) -> Tensor:
    """Velocities between data and noise, at a time drawn from a logit-normal distribution."""
    x, text, pooled = batch
    noise, t = torch.randn_like(x), torch.randn(len(x)).sigmoid()
    mixed = (1 - t[:, None, None]) * x + t[:, None, None] * noise
    ids, words = torch.zeros(x.shape[1], 3), torch.zeros(text.shape[1], 3)
    out = network(hidden_states=mixed, encoder_hidden_states=text, pooled_projections=pooled, timestep=t, img_ids=ids,
        txt_ids=words)
    return F.mse_loss(out.sample, noise - x)


@pattern("diffusers", (4, 16), "", lambda: noise((64, 16), (12, 32), (32,)), velocities, adamw)
def diffusers_flux() -> nn.Module:
    network = of("diffusers:FluxTransformer2DModel")(joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8], in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=4)
    network.enable_gradient_checkpointing()
    return network


row("lucidrains_diffusion", "denoising-diffusion-pytorch", (2, 8), "denoising_diffusion_pytorch",
    lambda d: d.GaussianDiffusion(d.Unet(16, dim_mults=(1, 2), flash_attn=False), image_size=32, timesteps=100),
    lambda: data(lambda i: (torch.rand(3, 32, 32), i)), of_itself)


class Quantized(nn.Module):
    def __init__(self, quantizer: Any) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 32, 4, 4), nn.ConvTranspose2d(32, 3, 4, 4)
        self.quantizer = quantizer(dim=32, num_quantizers=3, codebook_size=64, kmeans_init=True)

    def forward(self, x: Tensor) -> Any:
        z = self.down(x)
        out, *rest = self.quantizer(z.flatten(2).transpose(1, 2))
        return self.up(out.transpose(1, 2).view_as(z)), rest[-1]


def committed(network: nn.Module, batch: Any) -> Tensor:
    out, commitment = network(batch[0])
    return F.mse_loss(out, batch[0]) + commitment.mean()


row("residual_vq_kmeans", "vector-quantize-pytorch", (4, 16), "vector_quantize_pytorch:ResidualVQ", Quantized,
    lambda: images(32), committed)

# Losses --------------------------------------------------------------------------------------------------------------


def autoencoder() -> nn.Sequential:
    down, up = nn.Conv2d(3, 32, 4, 4), nn.ConvTranspose2d(32, 3, 4, 4)
    return nn.Sequential(down, nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), up, nn.Sigmoid())


def waves() -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(1, 16, 9, padding=4), nn.PReLU(), nn.Conv1d(16, 1, 9, padding=4))


def reconstruct(network: Callable[[], nn.Module], criterion: Callable[[], Any]) -> Step:
    step = Step(network(), None)
    step.criterion = criterion()
    step.loss = lambda n, b: step.criterion(n(b[0]), b[0]).mean()
    return step


def similarity() -> Any:
    measure = of("pytorch_msssim:MS_SSIM")(data_range=1.0)
    return lambda x, y: 1 - measure(x, y)


class Perceptual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.distance = of("lpips:LPIPS")(net="vgg", pretrained=False, pnet_rand=True, verbose=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.distance(x, y, normalize=True) + F.l1_loss(x, y)


LOSSES: dict[str, tuple[str, tuple[int, int], Callable[[], nn.Module], Sequence[int], Callable[[], Any]]] = {
    "lpips_vgg": ("lpips", (2, 8), autoencoder, (3, 64, 64), Perceptual),
    "multi_scale_ssim": ("pytorch-msssim", (2, 8), autoencoder, (3, 176, 176), similarity),
    "piq_gmsd": ("piq", (4, 16), autoencoder, (3, 96, 96), lambda: of("piq:MultiScaleGMSDLoss")(chromatic=True)),
    "piq_vif": ("piq", (4, 16), autoencoder, (3, 64, 64), lambda: of("piq:VIFLoss")(sigma_n_sq=2.0)),
    "multi_resolution_stft": ("auraloss", (2, 8), waves, (1, 8000), lambda: of(
        "auraloss.freq:MultiResolutionSTFTLoss")()),
    "sinkhorn": ("geomloss", (2, 8), lambda: mlp(3, 64, 3), (128, 3), lambda: of("geomloss:SamplesLoss")(
        "sinkhorn", p=2, blur=0.05, backend="tensorized")),
}
for name, (library, sizes, network, shape, criterion) in LOSSES.items():
    row(name, library, sizes, "", lambda n=network, c=criterion: reconstruct(n, c), lambda s=shape: data(
        lambda i: (torch.rand(*s), i)))
