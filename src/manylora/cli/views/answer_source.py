"""Greedy answers of any server with OpenAI's API, token by token, for `manylora check`."""

from __future__ import annotations

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from manylora.cli.options.values import parse_address
from manylora.cli.views.status_source import MAX_BYTES, MAX_MESSAGE, NoRedirects, printable
from manylora.core.errors import ConfigError, ManyloraError

__all__ = ["AnswerSource", "ServedAnswer", "ServerFault"]

TIMEOUT_S = 600.0
ID = "token_id:"
_ID = re.compile(rf"{ID}[0-9]{{1,9}}")

OWN_FIELDS = {"return_tokens_as_token_ids": True, "ignore_eos": True}
"""Fields of vLLM and of manylora; a server that refuses them is asked again without."""


Reply = TypeVar("Reply")


class ServerFault(ManyloraError):
    """The server does not answer, or not as OpenAI's API does."""


class ServedModel(msgspec.Struct):
    """An entry of ``/v1/models``."""

    id: str
    root: str | None = None


class ModelList(msgspec.Struct):
    """``/v1/models``."""

    data: list[ServedModel]


class ListedLogprobs(msgspec.Struct):
    """``logprobs`` of a completion."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []


class ServedAnswer(msgspec.Struct):
    """A choice of a completion: its text, and its tokens by name with their log-probabilities, if the server gave them.

    A name is ``token_id:5``, or the token's text.
    """

    text: str = ""
    logprobs: ListedLogprobs | None = None

    def token_ids(self) -> tuple[int, ...] | None:
        """Return the ids of the tokens; ``None`` if they are not named by id."""
        names = [] if self.logprobs is None else self.logprobs.tokens
        if not names or not all(_ID.fullmatch(name) for name in names):
            return None
        return tuple(int(name.removeprefix(ID)) for name in names)


class ServedCompletion(msgspec.Struct):
    """``/v1/completions``."""

    choices: list[ServedAnswer]


class AnswerSource:
    """A server with OpenAI's API, at an address that ``parse_address`` accepts; ``key`` is sent if given."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = parse_address(url)
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(NoRedirects())
        self._own_fields: dict[str, Any] = dict(OWN_FIELDS)

    def name_of(self, folder: str) -> str:
        """Return the name under which the server has an adapter's folder.

        ``ConfigError`` if it has none, or several; ``ServerFault`` if it does not answer.
        """
        models = self._get("/v1/models", ModelList).data
        real, last = os.path.realpath(folder), os.path.basename(os.path.normpath(folder))
        by_root = [one.id for one in models if one.root is not None and os.path.realpath(one.root) == real]
        found = by_root or [one.id for one in models if one.id == last]
        if len(found) != 1:
            names = ", ".join(one.id for one in models)[:MAX_MESSAGE]
            raise ConfigError(f"{self.url} has no adapter of {folder!r} or named {last!r}: give --name, one of {names}")
        return found[0]

    def answer(self, model: str, prompt: Sequence[int], max_tokens: int) -> ServedAnswer:
        """Return the greedy answer to a prompt of token ids; ``ServerFault`` if there is none."""
        asked = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "logprobs": 1}
        try:
            reply = self._get("/v1/completions", ServedCompletion, {**asked, **self._own_fields})
        except ServerFault:
            if not self._own_fields:
                raise
            self._own_fields = {}
            reply = self._get("/v1/completions", ServedCompletion, asked)
        if not reply.choices:
            raise ServerFault(f"{self.url} gave an answer without choices")
        return reply.choices[0]

    def _get(self, path: str, kind: type[Reply], body: dict[str, Any] | None = None) -> Reply:
        data = None if body is None else msgspec.json.encode(body)
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as reply:
                return msgspec.json.decode(reply.read(MAX_BYTES), type=kind)
        except urllib.error.HTTPError as error:
            text = printable(error.read(MAX_BYTES)[:MAX_MESSAGE].decode(errors="replace"))
            raise ServerFault(f"{self.url}{path} answered {error.code}: {text}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerFault(f"{self.url} does not answer: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerFault(f"{self.url}{path} gave no answer of OpenAI's API: {error}") from None
