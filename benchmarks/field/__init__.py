"""The patterns that `field.py` trains and predicts: models of real libraries, one file per family of libraries."""
