"""NCCL's own memory: published measurements are within the range."""

from __future__ import annotations

import pytest

from lightning_memguard.core.device.context import nccl_bytes


@pytest.mark.parametrize("measured_megabytes", [544, 688])
def test_a_communicator_of_a100s_is_within_the_range(measured_megabytes: int) -> None:
    """NVIDIA/nccl#964: an all-reduce of two, and of more, A100 with NVLink; the likely figure is between the two."""
    least, likely, most = nccl_bytes(1, (8, 0))
    assert least < measured_megabytes * 10**6 < most
    assert likely == pytest.approx(measured_megabytes * 10**6, rel=0.2)


def test_each_communicator_has_its_own() -> None:
    assert nccl_bytes(3, (9, 0)) == tuple(3 * each for each in nccl_bytes(1, (9, 0)))
    assert nccl_bytes(0, (9, 0)) == (0, 0, 0)


def test_without_nvlink_there_are_fewer_channels() -> None:
    over_pcie, over_nvlink = nccl_bytes(1, (7, 5)), nccl_bytes(1, (9, 0))
    assert over_pcie[0] == over_nvlink[0]
    assert over_pcie[1] < over_nvlink[1] / 4
    assert over_pcie[2] < over_nvlink[2]
