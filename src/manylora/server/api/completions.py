"""``POST /v1/completions``."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.errors import RequestError
from manylora.server.api.answers import Piece
from manylora.server.api.json_body import decode_prompts
from manylora.server.api.request import Context, context_of, read_body
from manylora.server.api.respond import (
    LEAST_LOGPROB,
    NOTHING_ELSE,
    check_lengths,
    check_num_answers,
    respond,
)
from manylora.server.api.schemas import CompletionBody, check_token_ids, sampling_params
from manylora.server.bounds import INLINE_CHARS
from manylora.text import TokenLogprob

__all__ = ["completion_routes"]

DEFAULT_COMPLETION_TOKENS = 16

encode = msgspec.json.encode


class CompletionFormat:
    """JSON of completions.

    Args:
        echoes: Text to put before each answer: its prompt, or nothing.
        has_logprobs: Whether log-probabilities were requested.
    """

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, echoes: list[str], *, has_logprobs: bool) -> None:
        self._echoes = echoes
        self._has_logprobs = has_logprobs
        self._is_begun: set[int] = set()

    def chunk(self, piece: Piece) -> bytes | None:
        """Return the choice of a chunk."""
        if not (piece.text or piece.logprobs or piece.finish_reason):
            return None
        if piece.index in self._is_begun and piece.finish_reason is None and not self._has_logprobs:
            return b'{"index":%d,"text":%b%b' % (piece.index, encode(piece.text), NOTHING_ELSE)
        return encode(self._choice(piece, piece.logprobs, self._begin(piece) + piece.text))

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        text = "".join(self._begin(piece) + piece.text for piece in pieces)
        logprobs = tuple(logprob for piece in pieces for logprob in piece.logprobs)
        return self._choice(pieces[-1], logprobs, text)

    def _begin(self, piece: Piece) -> str:
        if piece.index in self._is_begun:
            return ""
        self._is_begun.add(piece.index)
        return self._echoes[piece.index]

    def _choice(self, piece: Piece, logprobs: tuple[TokenLogprob, ...], text: str) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": text,
            "logprobs": _logprobs(logprobs) if self._has_logprobs else None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


def _token_name(token: TokenLogprob) -> str:
    """Return a token as OpenAI names it: its text, or its bytes if they are not valid UTF-8."""
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


def _logprobs(tokens: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    return {
        "tokens": [_token_name(token) for token in tokens],
        "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in tokens],
        "top_logprobs": [
            {_token_name(other): max(other.logprob, LEAST_LOGPROB) for other in (token, *token.top)} for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }


async def _tokens(request: Request, context: Context, given: list[str] | list[list[int]]) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt.

    Raises:
        RequestError: A prompt does not fit, or a token id is out of range.
        ManyloraError: As of ``TextWork.run``.
    """
    info, tokenizer = context.fleet.info, context.tokenizer
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not texts:
        prompts = [tuple(prompt) for prompt in given if not isinstance(prompt, str)]
        check_lengths(context, prompts)
        for prompt in prompts:
            check_token_ids(prompt, info.vocab_size, "prompt")
        return prompts
    for text in texts:
        tokenizer.check_chars(len(text), info.max_model_len)

    def tokenize() -> list[tuple[int, ...]]:
        return [tuple(tokenizer.encode_within(text, info.max_model_len)) for text in texts]

    if sum(map(len, texts)) <= INLINE_CHARS:
        return tokenize()
    return await context.text_work.run(request, tokenize)


async def _echoes(
    request: Request,
    context: Context,
    body: CompletionBody,
    given: list[str] | list[list[int]],
    prompts: list[tuple[int, ...]],
) -> list[str]:
    num_answers = body.n or 1
    if not body.echo:
        return [""] * (len(prompts) * num_answers)
    if body.logprobs is not None:
        raise RequestError("echo with logprobs is not supported: prompts have no log-probabilities here", param="echo")
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not texts:
        decode = context.tokenizer.decode
        if sum(map(len, prompts)) <= INLINE_CHARS:
            texts = [decode(prompt) for prompt in prompts]
        else:
            texts = await context.text_work.run(request, lambda: [decode(prompt) for prompt in prompts])
    return [text for text in texts for _ in range(num_answers)]


async def create_completion(request: Request) -> Response:
    """``POST /v1/completions``."""
    context = context_of(request)
    tenant = context.gate.check_inference(request)
    context.fleet.check_room()
    body = await read_body(request, CompletionBody)
    settings = await context.settings.of(body.model)
    sampling = sampling_params(
        body,
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        vocab_size=context.fleet.info.vocab_size,
        defaults=settings.defaults,
    )
    most = context.engine_config.scheduler.max_waiting
    given = decode_prompts(body.prompt, most, context.fleet.info.max_model_len)
    check_num_answers(context, len(given), body.n or 1)
    prompts = await _tokens(request, context, given)
    echoes = await _echoes(request, context, body, given, prompts)
    form = CompletionFormat(echoes, has_logprobs=body.logprobs is not None)
    return await respond(context, body, prompts, sampling, form, settings=settings, tenant=tenant, id_prefix="cmpl-")


completion_routes = [Route("/v1/completions", create_completion, methods=["POST"])]
