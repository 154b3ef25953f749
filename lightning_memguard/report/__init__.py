"""Tables, pictures, pages and messages for people. Nothing in here imports Lightning."""
