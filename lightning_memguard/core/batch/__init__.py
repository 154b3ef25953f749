"""What a step is given: batches of any size, real or fake."""
