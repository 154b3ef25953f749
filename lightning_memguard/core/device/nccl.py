"""What NCCL takes on a GPU outside PyTorch's allocator: the buffers of its connections."""

from __future__ import annotations

from lightning_memguard.units import MIB

# Each connection of a channel to a peer holds a buffer for each protocol on its receiving side (`computeBuffSizes` in
# NCCL's src/init.cc: 4 MiB Simple, NCCL_LL128_BUFF_SIZE 4.7 MiB, NCCL_LL_BUFF_SIZE 0.5 MiB; 10 MiB when rounded up to
# CUDA's granularity) and 2 MiB on its sending side: the two sizes that NVIDIA/nccl#1685 counted on 8 H100.
_CONNECTION_BYTES = (10 + 2) * MIB

# Channels, and connections of each: a ring alone over PCIe; ring and tree over NVLink, which is 576 MiB (544 MB for two
# and 688 MB for four A100 in NVIDIA/nccl#964); ring and a branching tree over the most channels that there are.
_LEAST, _LIKELY, _MOST = (2, 1), (24, 2), (32, 3)


def nccl_bytes(communicators: int) -> tuple[int, int, int]:
    """What so many communicators take on each of their GPUs: at least, most likely, at most.

    A communicator is made by the first collective of a process group. Beyond two nodes it takes no more with more ranks
    (NVIDIA/nccl#864). Not counted: send and receive between all pairs, NVLink SHARP, and registered user buffers.
    """
    least, likely, most = (channels * each * _CONNECTION_BYTES for channels, each in (_LEAST, _LIKELY, _MOST))
    return communicators * least, communicators * likely, communicators * most
