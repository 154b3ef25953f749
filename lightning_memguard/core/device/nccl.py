"""Memory of NCCL on a GPU outside PyTorch's allocator: the buffers of its connections."""

from __future__ import annotations

from lightning_memguard.units import MIB

# Each connection of a channel to a peer holds a buffer for each protocol on its receiving side (`computeBuffSizes` in
# NCCL's src/init.cc: 4 MiB Simple, NCCL_LL128_BUFF_SIZE 4.7 MiB, NCCL_LL_BUFF_SIZE 0.5 MiB; 10 MiB when rounded up to
# CUDA's granularity) and 2 MiB on its sending side: the two sizes that NVIDIA/nccl#1685 counted on 8 H100.
_CONNECTION_BYTES = (10 + 2) * MIB

# Channels, and connections of each. Over NVLink: ring and tree on 24 channels are 576 MiB (544 MB for two, 688 MB for
# four A100 in NVIDIA/nccl#964); at most ring and a branching tree on all that there are. What there is of both follows
# the bandwidth (NVIDIA/nccl#864): over PCIe, a ring on two to four channels.
_LEAST = 2, 1
_NVLINK, _MOST_NVLINK = (24, 2), (32, 3)
_PCIE, _MOST_PCIE = (4, 2), (16, 3)
_WITH_NVLINK = ((7, 0), (8, 0), (9, 0), (10, 0), (10, 3))  # compute capabilities; such cards come without it too


def nccl_bytes(communicators: int, compute_capability: tuple[int, int]) -> tuple[int, int, int]:
    """Return the bytes that so many communicators take on each of their GPUs: at least, most likely, at most.

    A communicator is made by the first collective of a process group. Beyond two nodes it takes no more with more ranks
    (NVIDIA/nccl#864). Not counted: send and receive between all pairs, NVLink SHARP, and registered user buffers.
    """
    linked = compute_capability in _WITH_NVLINK
    likely, most = (_NVLINK, _MOST_NVLINK) if linked else (_PCIE, _MOST_PCIE)
    least, usual, largest = (channels * each * _CONNECTION_BYTES for channels, each in (_LEAST, likely, most))
    return communicators * least, communicators * usual, communicators * largest
