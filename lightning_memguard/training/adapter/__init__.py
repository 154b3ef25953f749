"""The only folder that reads private names of Lightning."""
