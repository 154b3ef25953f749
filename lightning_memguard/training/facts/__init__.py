"""Facts of a run: Lightning's types, a Trainer's settings, agreement between ranks."""
