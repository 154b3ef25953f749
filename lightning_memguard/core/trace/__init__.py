"""What one training step allocates and frees, at any batch size."""
