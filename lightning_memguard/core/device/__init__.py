"""Free memory of a device, and the memory that a training took there."""
