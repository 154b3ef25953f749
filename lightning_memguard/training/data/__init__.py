"""The loaders of a run: their samples, and the same loaders at another batch size."""
