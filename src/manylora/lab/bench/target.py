"""The server under load: its address, its models, the bodies of requests and their prompts.

The API is OpenAI's ``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions`` with streaming, as vLLM, SGLang and
others serve it. Prompts are for servers that really read them: random, of the right length, equal where a workload says
they are. Prompts of token ids arrive exactly as long as they were meant. Prompts of text are for chats and for servers
that accept no ids: random tokens decoded by the model's tokenizer (reading the text back may give a few tokens more or
less), or without a tokenizer random short words, about a token each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.workloads import RequestSpec

__all__ = ["ModelNames", "Target", "TextPrompts", "TokenPrompts", "aiohttp_or_fail", "discover_models"]

LEAST_TOKEN = 10  # ids below are left out: many vocabularies begin with tokens that mean something to the server

WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they")

SHARED, OWN = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How to ask."""

    url: str  # address of the server, without ``/v1``
    is_chat: bool = False  # ask for chat completions instead of completions
    api_key: str | None = None  # sent as a bearer token
    ignore_eos: bool = True  # ask for answers of exactly the length wanted, an extension that vLLM, SGLang and we know
    extra: dict[str, Any] | None = None  # further fields of every body

    @property
    def path(self) -> str:
        """Return where requests go."""
        return self.url.rstrip("/") + ("/v1/chat/completions" if self.is_chat else "/v1/completions")

    @property
    def headers(self) -> dict[str, str]:
        """Return what every request carries."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **key}

    def body(self, model: str, request: RequestSpec, prompt: str | list[int]) -> bytes:
        """Return the body of a request."""
        content: dict[str, Any] = {
            "model": model,
            "max_tokens": request.num_output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            content["messages"] = [{"role": "user", "content": prompt}]
        else:
            content["prompt"] = prompt
        if self.ignore_eos:
            content["ignore_eos"] = True
        return msgspec.json.encode({**content, **(self.extra or {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """The names of a server's models."""

    base: str
    adapters: tuple[str, ...]


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _ModelCards(msgspec.Struct):
    data: list[_Card]


async def discover_models(target: Target) -> ModelNames:
    """Ask a server what it serves: what has a parent is an adapter, what has none is the base.

    ``ConfigError`` if the server does not answer, or not as expected.
    """
    aiohttp = aiohttp_or_fail()
    url = target.url.rstrip("/") + "/v1/models"
    try:
        async with aiohttp.ClientSession(headers=target.headers) as session, session.get(url) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise ConfigError(f"Got HTTP {answer.status} from {url}: {content[:200].decode(errors='replace')}")
            cards = msgspec.json.decode(content, type=_ModelCards).data
    except (aiohttp.ClientError, OSError) as error:
        raise ConfigError(f"Got no answer from {url}: {error}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"Got something else than a list of models from {url}: {error}") from None
    bases = [card.id for card in cards if card.parent is None]
    if not bases:
        raise ConfigError(f"Got no base model from {url}, expected one without a parent")
    return ModelNames(base=bases[0], adapters=tuple(card.id for card in cards if card.parent is not None))


def aiohttp_or_fail() -> Any:
    """Return aiohttp; ``ConfigError`` if aiohttp is not installed."""
    try:
        import aiohttp
    except ImportError:
        raise ConfigError("Load generation needs aiohttp: pip install 'manylora[bench]'") from None
    return aiohttp


class TokenPrompts:
    """Prompts as token ids; two runs with one seed send the same prompts."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._shared = cache(partial(self._draw, SHARED))  # the tokens of a block, by name and size

    def make(self, index: int, request: RequestSpec) -> list[int]:
        """Return the prompt of request number ``index``; blocks of one name are the same in every prompt."""
        left = request.num_prompt_tokens
        tokens: list[int] = []
        for name in request.prefix:
            size = min(request.prefix_block_tokens, left - len(tokens))
            tokens += self._shared(name, request.prefix_block_tokens)[:size]
        return tokens + self._draw(OWN, index, left - len(tokens))

    def _draw(self, kind: int, number: int, count: int) -> list[int]:
        rng = np.random.default_rng([self._seed, kind, number])
        drawn: list[int] = rng.integers(LEAST_TOKEN, self._vocab_size, count).tolist()
        return drawn


class TextPrompts:
    """Prompts as text; without ``decode`` each id is a word."""

    def __init__(self, tokens: TokenPrompts, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self._tokens = tokens
        self._decode = decode or (lambda ids: " ".join(WORDS[token % len(WORDS)] for token in ids))

    def make(self, index: int, request: RequestSpec) -> str:
        """Return the prompt of request number ``index``."""
        return self._decode(self._tokens.make(index, request))
