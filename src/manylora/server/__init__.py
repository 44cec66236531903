"""Server: the OpenAI-compatible HTTP face and the engine process behind it."""
