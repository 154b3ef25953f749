"""The actual memory snapshot of a training on CUDA, recorded by PyTorch."""

from __future__ import annotations

from pathlib import Path

import torch


class ActualSnapshot:
    """Records what the caching allocator of a CUDA device does from now on, with the stack of each request.

    A recording that is already running goes on undisturbed; then only the file is written. Private functions of
    ``torch.cuda.memory``, checked on torch 2.11 to 2.15; `tests/core/device/test_recording.py` fails when they change.

    Args:
        device: the device to record.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded_by_others = torch._C._cuda_isHistoryEnabled()
        if not self._recorded_by_others:
            torch.cuda.memory._record_memory_history("all", stacks="python", device=device)

    def save(self, path: Path) -> Path:
        """Write the recording to a file, and stop it.

        Args:
            path: the file to write.
        """
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            if not self._recorded_by_others:
                torch.cuda.memory._record_memory_history(None, device=self._device)
        return path
