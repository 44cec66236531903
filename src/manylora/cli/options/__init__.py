"""Options of commands: from the fields of the configuration, from a file, or as flags of vLLM."""
