"""Replay of traces by PyTorch's allocator."""
