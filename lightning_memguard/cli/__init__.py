"""The command line: ``memguard plan``, ``layers``, ``snapshot``, ``gpus``, ``devices``."""
