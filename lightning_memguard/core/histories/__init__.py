"""Recorded histories of CUDA's allocator: read, replayed under other settings, and compared."""
