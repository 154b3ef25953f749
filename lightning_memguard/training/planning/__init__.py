"""Predictions for anyone without a running Trainer, and what would make a step fit."""
