"""Length prediction: the number of tokens an answer will have."""
