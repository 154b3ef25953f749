"""How much memory a training step takes. Nothing in here imports Lightning."""
