"""The table by layer."""
