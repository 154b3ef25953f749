"""Scratch inside operators, one family of operators a file: each rule names the function it was read from.

In the files for CUDA, paths of PyTorch are from aten/src/ATen/native/cuda on unless they begin with aten. Those rules
were read in PyTorch 2.9 to 2.11; `benchmarks/operators.py` compares what they say with PyTorch's own allocator.
"""
