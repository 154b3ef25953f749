"""What PyTorch's allocator makes of a trace."""
