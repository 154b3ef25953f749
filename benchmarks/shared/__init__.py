"""Shared by the benchmark scripts: the cases, the measurement and the prediction."""
