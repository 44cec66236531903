"""The way of a request: the few fields that are read, the attempts at backends, the answer's bytes."""
