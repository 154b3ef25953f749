"""The version of this package: nothing else, so that every file may read it."""

__version__ = "0.1.0"
