"""The HTTP server: OpenAI's routes, adapters at run time, metrics.

It parses, tokenizes and streams; the engines are run by ``hosting`` and seen as a ``Fleet``. With it comes the
web framework, so the command line imports it only to serve.
"""

from __future__ import annotations

from manylora.serving.hosting.fleet.adapter_book import LoraModule
from manylora.serving.hosting.fleet.keeper import RestartPolicy
from manylora.serving.server.background import BackgroundServer
from manylora.serving.server.serve import run

__all__ = ["BackgroundServer", "LoraModule", "RestartPolicy", "run"]
