"""One training step on fake tensors -> its trace."""
