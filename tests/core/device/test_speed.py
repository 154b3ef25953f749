"""How fast a device is."""

import pytest
import torch

from lightning_memguard import estimate
from lightning_memguard.core.device.speed import cpu_speed, gpu_speed, speed_of
from lightning_memguard.core.gpus import Gpu, find
from lightning_memguard.core.trace.work import Work


def test_a_gpu_reaches_a_share_of_its_peaks():
    speed = gpu_speed(find("A100"), (0.5, 0.25))
    assert speed.flops["bfloat16"] == pytest.approx(156e12)
    assert speed.seconds(Work("", 0, 1e9)) == pytest.approx(1e9 / (1555e9 / 4), rel=0.01)


def test_a_gpu_read_from_the_device_is_found_by_its_name():
    assert speed_of(Gpu("NVIDIA H200", 1 << 37, (9, 0), 132)) == speed_of(find("H200"))
    assert speed_of(Gpu("a GPU of next year", 1 << 37, (9, 0), 132)) is None


def test_this_cpu_is_measured_under_whatever_is_set():
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"):
        speed = cpu_speed()
    assert speed.seconds(Work("float32", 1e12, 0)) > 0.001  # no processor has 1,000 TFLOPS
    assert speed.seconds(Work("", 0, 1)) < 0.01
    assert torch.equal(torch.get_rng_state(), state)


def test_a_footprint_says_how_long_its_step_takes():
    model = torch.nn.Linear(512, 512)
    small, large = (
        estimate(model, torch.ones(2, 512), device="H100", batch_size=size, step=lambda m, x: m(x).sum()).step_seconds
        for size in (1 << 14, 1 << 17)
    )
    assert small.low < small.likely < small.high
    assert 6 < large.likely / small.likely < 9
