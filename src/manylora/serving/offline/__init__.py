"""The offline API: an engine as a Python object, prompts in, generations out."""

from manylora.serving.offline.engine import Engine
from manylora.serving.offline.generation import Generation

__all__ = ["Engine", "Generation"]
