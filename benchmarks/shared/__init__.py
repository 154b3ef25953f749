"""What the benchmark scripts share: the cases, the measurement and the prediction."""
