"""Batches of any size, real or fake."""
