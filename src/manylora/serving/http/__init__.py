"""One HTTP server for every product: listening, bounds, turns of callers, access, errors."""
