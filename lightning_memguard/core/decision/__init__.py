"""Footprint and budget -> the batch size, advice, and the record of an epoch."""
