"""MemGuard in the loops of Hugging Face: transformers' Trainer, and loops with Accelerate."""
