"""The offline API: an engine as a Python object, prompts in, generations out."""

from manylora.serving.offline.batch import Generation
from manylora.serving.offline.engine import Engine

__all__ = ["Engine", "Generation"]
