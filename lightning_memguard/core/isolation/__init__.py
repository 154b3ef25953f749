"""Work that leaves no trace: it is done in forked children, which return values."""
