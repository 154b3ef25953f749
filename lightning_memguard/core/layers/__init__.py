"""The table by layer, and the textbook sums next to it."""
