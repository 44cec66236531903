"""The connections to backends: requests out, answers in, over httptools' parser."""
