"""What a run is: Lightning's types, a Trainer's settings, agreement between ranks."""
