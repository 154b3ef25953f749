"""Allocations and frees of one training step, at any batch size."""
