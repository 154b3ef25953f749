"""Simulation of torch without memory."""
