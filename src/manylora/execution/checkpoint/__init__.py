"""Base checkpoints of every precision in which people store them, read one weight at a time from mapped files."""
