"""The format of Llama 3.2 and 4 and of ToolACE: a Python list of function calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator

from manylora.serving.text.tools.parser import NotACall, Reading, ToolParser

__all__ = ["PythonicParser"]

MAX_LITERAL_CHARS = 100_000  # longest value that is handed to Python's parser

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """Read ``[f(x="a", y=1), g()]``, if the answer begins with it.

    A call is reported with its first complete argument, and each later argument when it is complete. Values are Python
    literals, or JSON's ``true``, ``false`` and ``null``.
    """

    def _read(self) -> Reading:
        yield from self._attempt(self._call_list(self._call))
        yield from self._rest()

    def _call(self) -> Reading:
        name = yield from self._identifier()
        yield from self._literal("(")
        separator = "{"
        while True:
            yield from self._blank()
            if self._char == ")":
                break
            key = yield from self._identifier()
            yield from self._blank()
            yield from self._literal("=")
            value = _to_json((yield from self._value()))
            if separator == "{":
                self._start(name)
            self._argue(f"{separator}{json.dumps(key)}: {value}")
            separator = ", "
            if self._char == ",":
                yield from self._advance()
        if separator == "{":
            self._start(name)
        self._argue("{}" if separator == "{" else "}")
        yield from self._advance()

    def _identifier(self) -> Generator[None, str, str]:
        chars: list[str] = []
        while self._char.isalnum() or self._char in ("_", ".", "-"):
            chars.append(self._char)
            yield from self._advance()
        if not chars:
            raise NotACall
        return "".join(chars)

    def _value(self) -> Generator[None, str, str]:
        """Take a value up to the ``,`` or ``)`` after it."""
        chars: list[str] = []
        depth, quote, is_escaped = 0, "", False
        while char := self._char:
            if quote:
                if is_escaped:
                    is_escaped = False
                elif char == "\\":
                    is_escaped = True
                elif char == quote:
                    quote = ""
            elif char in "'\"":
                quote = char
            elif not depth and char in ",)":
                return "".join(chars)
            elif char in "([{":
                depth += 1
            elif char in ")]}":
                depth -= 1
            chars.append(char)
            yield from self._advance()
        raise NotACall


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's ``true``, ``false`` and ``null``, also inside lists and objects."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant of a name, if it is one."""
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _to_json(text: str) -> str:
    text = text.strip()
    if len(text) > MAX_LITERAL_CHARS:
        raise NotACall
    try:
        # Python warns of an escape that it does not know, and keeps its backslash.
        known = _ESCAPE.sub(lambda one: one[0] if one[1] in "\\'\"abfnrtvxuUN01234567\n" else "\\" + one[0], text)
        tree = _JsonNames().visit(ast.parse(known, mode="eval"))
        return json.dumps(ast.literal_eval(tree), allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise NotACall from None
