"""``POST /v1/completions``."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.serving.api.answers import TextPiece, WholeAnswer
from manylora.serving.api.json_body import decode_prompts
from manylora.serving.api.json_parts import JsonParts, encode_parts
from manylora.serving.api.prompt_part import Details, PromptPart, as_lists, logprob_items
from manylora.serving.api.request import Context, context_of, read_body
from manylora.serving.api.respond import NOTHING_ELSE, check_lengths, check_num_answers, respond
from manylora.serving.api.schemas import CompletionBody, check_token_ids, sampling_params
from manylora.serving.api.truncation import Truncation
from manylora.serving.http.bounds import INLINE_CHARS
from manylora.serving.http.turns import next_turn

__all__ = ["completion_routes"]

DEFAULT_COMPLETION_TOKENS = 16

CHARS_PER_PROMPT = 50
"""Characters of text that take as long as the calls for a prompt."""

PROMPTS_AT_ONCE = 256
"""Prompts of token ids that are checked at once."""

encode = msgspec.json.encode


class CompletionFormat:
    """JSON of completions.

    Args:
        echoes: Text to put before each answer: its prompt, or nothing.
        prompt: The prompts' part of the response.
        has_logprobs: Whether log-probabilities were requested.
    """

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, echoes: list[str], prompt: PromptPart, *, has_logprobs: bool) -> None:
        self.prompt = prompt
        self.repeats_prompt = prompt.details.has_token_ids or any(echoes)
        self._echoes = echoes
        self._has_logprobs = has_logprobs
        self._is_plain = not has_logprobs and not prompt.details.has_token_ids
        self._is_begun: set[int] = set()
        self._whole: dict[int, WholeAnswer[dict[str, bytes]]] = {}

    def head(self, *, is_chunk: bool) -> dict[str, Any]:
        """Return nothing: choices have all fields about their prompts."""
        return {}

    def chunk(self, piece: TextPiece) -> bytes | None:
        """Return the choice of a chunk; the first of an answer has the prompt."""
        if not (piece.text or piece.logprobs or piece.finish_reason or piece.token_ids):
            return None
        is_begun = piece.index in self._is_begun
        if is_begun and piece.finish_reason is None and self._is_plain:
            return b'{"index":%d,"text":%b%b' % (piece.index, encode(piece.text), NOTHING_ELSE)
        logprobs = self._logprobs(piece, has_begin=not is_begun)
        choice = self._choice(piece, piece.text, logprobs, has_begin=not is_begun)
        if self.prompt.details.has_token_ids:
            choice["token_ids"] = piece.token_ids
        if not is_begun:
            self._is_begun.add(piece.index)
            choice |= self.prompt.token_ids(piece.index)
        return encode(choice) if logprobs is None else b"".join(encode_parts(choice))

    def gather(self, piece: TextPiece) -> None:
        """Add a piece to its whole answer."""
        whole = self._whole.setdefault(piece.index, WholeAnswer())
        whole.add(piece, self._items(piece) if self._has_logprobs else None)

    def choice(self, index: int) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        whole = self._whole[index]
        logprobs = None
        if self._has_logprobs:
            logprobs = as_lists([*self._echoed(index), *whole.logprobs])
        choice = self._choice(whole.last, "".join(whole.texts), logprobs, has_begin=True)
        choice["token_ids"] = whole.token_ids if self.prompt.details.has_token_ids else None
        return choice | self.prompt.fields(index)

    def _choice(
        self, last: TextPiece, text: str, logprobs: dict[str, JsonParts] | None, *, has_begin: bool
    ) -> dict[str, Any]:
        return {
            "index": last.index,
            "text": self._echoes[last.index] + text if has_begin else text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }

    def _logprobs(self, piece: TextPiece, *, has_begin: bool) -> dict[str, JsonParts] | None:
        if not self._has_logprobs:
            return None
        return as_lists([*(self._echoed(piece.index) if has_begin else ()), self._items(piece)])

    def _items(self, piece: TextPiece) -> dict[str, bytes]:
        return logprob_items(piece.logprobs, num_chars_before=len(self._echoes[piece.index]))

    def _echoed(self, index: int) -> list[dict[str, bytes]]:
        return [] if self.prompt.details.num_echo_top is None else self.prompt.echo(index)


async def _tokens(
    request: Request,
    context: Context,
    given: list[str] | list[list[int]],
    truncation: Truncation,
    *,
    is_framed: bool,
) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt, with the model's special tokens around texts if ``is_framed``.

    Raises:
        RequestError: A prompt does not fit, or a token id is out of range.
        ManyloraError: As of ``FairWork.run``.
    """
    info, tokenizer = context.fleet.engines.info, context.tokenizer
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not texts:
        prompts = [truncation.cut(prompt) for prompt in given if not isinstance(prompt, str)]
        check_lengths(context, prompts)
        for index, prompt in enumerate(prompts, 1):
            check_token_ids(prompt, info.vocab_size, "prompt")
            if index % PROMPTS_AT_ONCE == 0:
                await next_turn()
        return prompts
    for text in texts:
        tokenizer.check_chars(len(text), truncation.limit)

    def tokenize() -> list[tuple[int, ...]]:
        encode = partial(tokenizer.encode_within, limit=truncation.limit, add_special_tokens=is_framed)
        return [truncation.cut(encode(text), tokenizer if is_framed else None) for text in texts]

    if sum(map(len, texts)) + CHARS_PER_PROMPT * len(texts) <= INLINE_CHARS:
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
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not texts or body.truncate_prompt_tokens is not None:
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
    context.check_room(tenant)
    body = await read_body(request, CompletionBody)
    settings = await context.settings.of(body.model)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    details = Details.of(
        body,
        num_echo_top=body.logprobs if body.echo else None,
        is_prompt_only=bool(body.echo) and max_tokens == 0,
    )
    sampling = sampling_params(
        body,
        max_tokens=1 if details.is_prompt_only else max_tokens,
        logprobs=body.logprobs,
        tokenizer=context.tokenizer,
        vocab_size=context.fleet.engines.info.vocab_size,
        prompt_logprobs=details.prompt_logprobs,
        defaults=settings.defaults,
    )
    truncation = Truncation(context, body, sampling.max_tokens)
    most = context.engine_config.scheduler.max_waiting
    given = await decode_prompts(body.prompt, most, truncation.limit)
    check_num_answers(context, len(given), body.n or 1)
    prompts = await _tokens(request, context, given, truncation, is_framed=body.add_special_tokens is not False)
    echoes = await _echoes(request, context, body, given, prompts)
    part = PromptPart(context.tokenizer, prompts, body.n or 1, details)
    form = CompletionFormat(echoes, part, has_logprobs=body.logprobs is not None)
    return await respond(
        request, context, body, prompts, sampling, form, settings=settings, tenant=tenant, id_prefix="cmpl-"
    )


completion_routes = [Route("/v1/completions", create_completion, methods=["POST"])]
