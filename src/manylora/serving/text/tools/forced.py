"""Calls that a grammar forces: the whole answer is JSON of a known form."""

from __future__ import annotations

from manylora.serving.text.tools.parser import Reading, ToolParser

__all__ = ["NamedCall", "RequiredCalls"]


class RequiredCalls(ToolParser):
    """Read an answer that is a list of ``{"name": "f", "parameters": {...}}``."""

    def _read(self) -> Reading:
        yield from self._attempt(self._list())
        yield from self._rest()

    def _list(self) -> Reading:
        yield from self._blank()
        yield from self._call_list()


class NamedCall(ToolParser):
    """Read an answer that is the arguments of one function, named by the request."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__({})

    def _read(self) -> Reading:
        self._start(self._name)
        while self._char:
            self._argue(self._char)
            self._char = yield
