"""Libraries for images and video: torchvision, timm, Ultralytics, segmentation, medical images, diffusion, contrast."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from field.pattern import Run, Step, adamw, classifier, data, images, mlp, pattern, sgd

# torchvision: detection ----------------------------------------------------------------------------------------------

SIDE = 128


def objects(masks: bool = False, keypoints: int = 0) -> Callable[[int, int], Any]:
    """Images with one to five boxes each, as torchvision's detectors take them: lists."""
    counts = torch.randint(1, 6, (64,)).tolist()

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
            target["keypoints"] = torch.cat(
                [boxes[:, None, :2] + torch.rand(counts[i], keypoints, 2) * 16, torch.ones(counts[i], keypoints, 1)], 2
            )
        return torch.rand(3, SIDE, SIDE), target

    return data(sample, lambda items: tuple(zip(*items, strict=True)))


def detection_loss(network: nn.Module, batch: Any) -> Tensor:
    pictures, targets = batch
    return sum(network(list(pictures), list(targets)).values())


def detector(name: str, targets: Callable[[int, int], Any], **options: Any) -> Run:
    from torchvision.models import detection

    options = {"num_classes": 5, "min_size": SIDE, "max_size": SIDE, **options}

    def build() -> Step:
        network = getattr(detection, name)(weights=None, weights_backbone=None, **options)
        return Step(network, detection_loss, sgd)

    return Run(build, targets)


@pattern("torchvision", sizes=(2, 4))
def faster_rcnn() -> Run:
    return detector("fasterrcnn_resnet50_fpn", objects())


@pattern("torchvision", sizes=(2, 4))
def mask_rcnn() -> Run:
    return detector("maskrcnn_resnet50_fpn", objects(masks=True))


@pattern("torchvision", sizes=(2, 4))
def retinanet() -> Run:
    return detector("retinanet_resnet50_fpn", objects())


@pattern("torchvision", sizes=(1, 2))
def keypoint_rcnn() -> Run:
    return detector("keypointrcnn_resnet50_fpn", objects(keypoints=17), num_classes=2)


@pattern("torchvision", sizes=(2, 4))
def fcos() -> Run:
    return detector("fcos_resnet50_fpn", objects())


@pattern("torchvision", sizes=(4, 8))
def ssdlite() -> Run:
    from torchvision.models import detection

    def build() -> Step:
        network = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5)
        return Step(network, detection_loss, sgd)

    return Run(build, objects())


# timm ----------------------------------------------------------------------------------------------------------------


@pattern("timm", sizes=(4, 16))
def timm_regnet_ema_mixup() -> Run:
    """timm's own training recipe: mixup, an average of the weights, LAMB."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    class Recipe(Step):
        def __init__(self) -> None:
            super().__init__(timm.create_model("regnetx_002", num_classes=10), None)
            self.mixup, self.soft = Mixup(mixup_alpha=0.8, num_classes=10), SoftTargetCrossEntropy()
            self.average = ModelEmaV3(self.network)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = self.mixup(batch[0].clone(), batch[1])
            return self.soft(self.network(x), y)

        def on_train_batch_end(self, *_: Any) -> None:
            self.average.update(self.network)

        def configure_optimizers(self) -> Any:
            return create_optimizer_v2(self.network, opt="lamb", lr=1e-3)

    return Run(Recipe, images(64))


# Ultralytics ---------------------------------------------------------------------------------------------------------


@pattern("ultralytics", sizes=(2, 4))
def yolov8() -> Run:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    def build() -> Step:
        network = DetectionModel("yolov8n.yaml", nc=5, verbose=False)
        network.args = get_cfg()
        return Step(network, lambda n, b: n(b)[0].sum(), sgd)

    def collate(items: list[Any]) -> dict[str, Tensor]:
        pictures, boxes = zip(*items, strict=True)
        return {
            "img": torch.stack(pictures),
            "bboxes": torch.cat(boxes),
            "cls": torch.cat([torch.zeros(len(b), 1) for b in boxes]),
            "batch_idx": torch.cat([torch.full((len(b),), float(i)) for i, b in enumerate(boxes)]),
        }

    counts = torch.randint(1, 6, (64,)).tolist()
    return Run(build, data(lambda i: (torch.rand(3, 128, 128), torch.rand(counts[i], 4) * 0.4 + 0.2), collate))


# Segmentation, medical, augmentation ---------------------------------------------------------------------------------


@pattern("segmentation-models-pytorch", sizes=(4, 8))
def smp_unet() -> Run:
    import segmentation_models_pytorch as smp

    def build() -> Step:
        dice, focal = smp.losses.DiceLoss("multiclass"), smp.losses.FocalLoss("multiclass")
        network = smp.Unet("resnet18", encoder_weights=None, classes=4)

        def loss(network: nn.Module, batch: Any) -> Tensor:
            logits = network(batch[0])
            return dice(logits, batch[1]) + focal(logits, batch[1])

        return Step(network, loss)

    return Run(build, data(lambda _: (torch.randn(3, 64, 64), torch.randint(4, (64, 64)))))


@pattern("monai", sizes=(2, 4))
def monai_unet_3d() -> Run:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    def build() -> Step:
        criterion = DiceCELoss(to_onehot_y=True, softmax=True)
        network = UNet(3, 1, 3, (8, 16, 32, 64), (2, 2, 2), num_res_units=2)
        return Step(network, lambda n, b: criterion(n(b[0]), b[1]))

    return Run(build, data(lambda _: (torch.randn(1, 32, 32, 32), torch.randint(3, (1, 32, 32, 32)).float())))


@pattern("kornia", sizes=(8, 32))
def kornia_augmentations() -> Run:
    import kornia.augmentation as K

    class Augmented(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = (K.RandomHorizontalFlip(p=0.5), K.RandomAffine(15.0, p=0.7))
            second = (K.ColorJitter(0.2, 0.2, 0.2, 0.1, p=0.8), K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=0.5))
            self.augment = nn.Sequential(*first, *second)
            self.network = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 256, 10))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.augment(x)
            return self.network(x)

    return Run(classifier(Augmented), data(lambda i: (torch.rand(3, 32, 32), i % 10)))


# Self-supervised and contrastive -------------------------------------------------------------------------------------


def backbone() -> nn.Sequential:
    layers = (nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def views() -> Callable[[int, int], Any]:
    return data(lambda _: (torch.randn(3, 48, 48), torch.randn(3, 48, 48)))


@pattern("lightly", sizes=(8, 32))
def lightly_moco_memory_bank() -> Run:
    import copy

    from lightly.loss import NTXentLoss
    from lightly.models.modules import MoCoProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum

    class MoCo(Step):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(backbone(), MoCoProjectionHead(64, 64, 32)), None, sgd)
            self.momentum = copy.deepcopy(self.network)
            deactivate_requires_grad(self.momentum)
            self.criterion = NTXentLoss(memory_bank_size=(1024, 32))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            update_momentum(self.network, self.momentum, m=0.99)
            with torch.no_grad():
                key = self.momentum(batch[1])
            return self.criterion(self.network(batch[0]), key)

    return Run(MoCo, views())


@pattern("open-clip-torch", sizes=(4, 16))
def open_clip() -> Run:
    from open_clip import CLIP, ClipLoss

    def build() -> Step:
        network = CLIP(
            64,
            {"layers": 3, "width": 128, "patch_size": 8, "image_size": 32, "head_width": 32},
            {"context_length": 24, "vocab_size": 1000, "width": 64, "heads": 4, "layers": 2},
        )
        criterion = ClipLoss()
        return Step(network, lambda n, b: criterion(*n(b[0], b[1])), adamw)

    return Run(build, data(lambda _: (torch.randn(3, 32, 32), torch.randint(1000, (24,)))))


@pattern("pytorch-metric-learning", sizes=(16, 64))
def metric_learning_miner() -> Run:
    from pytorch_metric_learning import losses, miners

    def build() -> Step:
        miner, criterion = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

        def loss(network: nn.Module, batch: Any) -> Tensor:
            z = network(batch[0])
            return criterion(z, batch[1], miner(z, batch[1]))

        return Step(mlp(64, 256, 64), loss)

    return Run(build, data(lambda i: (torch.randn(64) + i % 8, i % 8)))


# Generation ----------------------------------------------------------------------------------------------------------


@pattern("diffusers", sizes=(2, 8))
def diffusers_unet() -> Run:
    from diffusers import DDPMScheduler, UNet2DModel

    class Ddpm(Step):
        def __init__(self) -> None:
            widths = {"layers_per_block": 1, "block_out_channels": (32, 64), "norm_num_groups": 8}
            down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
            network = UNet2DModel(32, 3, 3, down_block_types=down, up_block_types=up, **widths)
            super().__init__(network, None, adamw)
            self.scheduler = DDPMScheduler(1000)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, noise = batch[0], torch.randn_like(batch[0])
            t = torch.randint(1000, (len(x),), device=self.device)
            return F.mse_loss(self.network(self.scheduler.add_noise(x, noise, t), t).sample, noise)

    return Run(Ddpm, images(32))


@pattern("denoising-diffusion-pytorch", sizes=(2, 8))
def lucidrains_diffusion() -> Run:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    def build() -> Step:
        network = GaussianDiffusion(Unet(16, dim_mults=(1, 2), flash_attn=False), image_size=32, timesteps=100)
        return Step(network, lambda n, b: n(b[0]))

    return Run(build, data(lambda i: (torch.rand(3, 32, 32), i)))


@pattern("vector-quantize-pytorch", sizes=(4, 16))
def residual_vq_kmeans() -> Run:
    from vector_quantize_pytorch import ResidualVQ

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, 32, 4, 4), nn.ConvTranspose2d(32, 3, 4, 4)
            self.quantizer = ResidualVQ(dim=32, num_quantizers=3, codebook_size=64, kmeans_init=True)

        def forward(self, x: Tensor) -> Any:
            z = self.down(x)
            out, *rest = self.quantizer(z.flatten(2).transpose(1, 2))
            return self.up(out.transpose(1, 2).view_as(z)), rest[-1]

    def loss(network: nn.Module, batch: Any) -> Tensor:
        out, commitment = network(batch[0])
        return F.mse_loss(out, batch[0]) + commitment.mean()

    return Run(lambda: Step(Quantized(), loss), images(32))


@pattern("vit-pytorch", sizes=(2, 8))
def vit_pytorch_na_vit() -> Run:
    """Images of several sizes packed into sequences."""
    from vit_pytorch.na_vit import NaViT

    def build() -> Step:
        network = NaViT(image_size=64, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128)
        return Step(network, lambda n, b: F.cross_entropy(n(list(b[0]), group_images=True, group_max_seq_len=96), b[1]))

    sides = [(32, 64)[i % 2] for i in range(64)]

    def collate(items: list[Any]) -> Any:
        return [x for x, _ in items], torch.tensor([y for _, y in items])

    return Run(build, data(lambda i: (torch.randn(3, sides[i], 64), i % 10), collate))
