"""How commands get their options: from the fields of the configuration, from a file, or in vLLM's words."""
