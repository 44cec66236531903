"""A router in front of OpenAI-compatible servers: manylora, vLLM, SGLang. It imports no torch."""
