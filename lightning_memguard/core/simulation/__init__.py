"""What torch would do, without memory."""
