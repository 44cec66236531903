"""Published evaluations and ours as data: cases to run, published figures, and results."""
