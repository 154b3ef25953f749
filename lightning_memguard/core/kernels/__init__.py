"""The scratch memory that kernels take inside one operator, one family of kernels a file."""
