"""A whole step with the tensors that autograd saves in host memory or in a file: imports torch, never Lightning."""
