"""Runs on several devices: the user's own strategy, run as one rank."""
