"""A step that runs out of memory, done again in parts of its batch: the same step, or refused by name."""
