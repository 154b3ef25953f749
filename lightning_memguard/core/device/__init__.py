"""What a device has free, and what a training took of it."""
