"""What a person sees. Nothing in here imports Lightning."""
