"""The offline API: an engine as a Python object, prompts in, generations out."""

from manylora.offline.engine import Engine
from manylora.offline.generation import Generation

__all__ = ["Engine", "Generation"]
