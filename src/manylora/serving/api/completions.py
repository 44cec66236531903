"""``POST /v1/completions``."""

from __future__ import annotations

import re
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import ContextExceeded, RequestError
from manylora.serving.api.formats import CompletionFormat
from manylora.serving.api.json_body import SLICE_BYTES, decode, decode_integers, decode_items, split
from manylora.serving.api.prompt_part import Details, PromptPart
from manylora.serving.api.request import AnswerCall, Context, read_call
from manylora.serving.api.respond import respond
from manylora.serving.api.sampling import check_token_ids, count_logprobs, sampling_params
from manylora.serving.api.schemas import INLINE_CHARS, CompletionBody
from manylora.serving.api.submit import Truncation, check_lengths, check_num_answers
from manylora.serving.http.turns import next_turn

__all__ = ["answer_completion", "completion_routes", "decode_prompts"]

DEFAULT_COMPLETION_TOKENS = 16

CHARS_PER_PROMPT = 50  # characters of text that take as long as the calls for a prompt

_FIRST_ITEM = re.compile(rb"\[\s*(.)", re.DOTALL)

PROMPTS_AT_ONCE = 256  # prompts of token ids that are checked at once


async def decode_prompts(raw: msgspec.Raw, most: int, limit: int) -> list[str] | list[list[int]]:
    """Read the ``prompt`` of a completion: a text, token ids, or a list of either.

    The first item decides the type of the others. Items and numbers are counted before they are decoded: at most
    ``most`` prompts, each with fewer tokens than ``limit``.

    ``ContextExceeded`` if one has more; ``RequestError`` for another type, no prompt, several kinds, or too many items.
    """
    data = bytes(memoryview(raw))
    if data == b"null":
        raise RequestError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if not data.startswith(b"["):
        return [decode(data, str, "prompt")]
    item = _FIRST_ITEM.match(data)
    first = item.group(1) if item else b"]"
    if first == b"]":
        raise RequestError("Got an empty list, expected at least one prompt", param="prompt")
    if first in b"-0123456789":
        return [await _decode_ids(data, limit, "prompt")]
    if first not in b'["':
        raise RequestError("Expected a text, texts, token ids, or lists of token ids", param="prompt")
    items = split(raw, most, "prompt")
    if len(data) > SLICE_BYTES:
        await next_turn()
    if first == b"[":
        return [await _decode_ids(bytes(memoryview(one)), limit, f"prompt[{index}]") for index, one in enumerate(items)]
    try:
        return await decode_items(items, str, "prompt")
    except RequestError:
        raise RequestError(
            "Got a list of different kinds, expected texts, token ids, or lists of token ids", param="prompt"
        ) from None


async def _decode_ids(data: bytes, limit: int, at: str) -> list[int]:
    num_tokens = data.count(b",") + 1
    if num_tokens > limit:
        raise ContextExceeded.of_prompt(num_tokens, limit)
    return await decode_integers(data, at)


async def _tokens(
    request: Request, context: Context, given: list[str] | list[list[int]], truncation: Truncation, *, is_framed: bool
) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt, with the model's special tokens around texts if ``is_framed``.

    ``RequestError`` if one does not fit, or a token id is out of range; other errors are those of ``FairWork.run``.
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
    return await answer_completion(await read_call(request, CompletionBody))


async def answer_completion(call: AnswerCall[CompletionBody]) -> Response:
    """Return the response to a request for completions; errors as of ``respond``."""
    context, body = call.context, call.body
    count_logprobs(call)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    details = Details.of(
        body, num_echo_top=body.logprobs if body.echo else None, is_prompt_only=bool(body.echo) and max_tokens == 0
    )
    if details.is_prompt_only and body.logprob_token_ids:
        raise RequestError(
            "`logprob_token_ids` is not supported when `echo=True` and `max_tokens=0` because no output tokens are "
            "generated",
            param="logprob_token_ids",
        )
    sampling = sampling_params(
        call,
        max_tokens=1 if details.is_prompt_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=details.prompt_logprobs,
    )
    truncation = Truncation(context, body, sampling.max_tokens)
    given = await decode_prompts(body.prompt, context.engine_config.scheduler.max_waiting, truncation.limit)
    check_num_answers(context, len(given), body.n or 1)
    prompts = await _tokens(call.http, context, given, truncation, is_framed=body.add_special_tokens is not False)
    echoes = await _echoes(call.http, context, body, given, prompts)
    part = PromptPart(context.tokenizer, prompts, body.n or 1, details)
    form = CompletionFormat(echoes, part, has_logprobs=body.logprobs is not None)
    return await respond(call, prompts, sampling, form, id_prefix="cmpl-")


completion_routes = [Route("/v1/completions", create_completion, methods=["POST"])]
