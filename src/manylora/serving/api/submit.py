"""The submission of a request for answers: its prompts, cut and checked, become requests of the engine."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manylora.core.errors import ContextExceeded, ModelNotFound, RequestError
from manylora.core.types import USUAL_LOGPROBS, Request, SamplingParams
from manylora.serving.api.answers import RequestAnswers
from manylora.serving.api.beam_search import begin_search
from manylora.serving.api.prompt_part import NO_DETAILS, Details
from manylora.serving.api.request import AnswerCall, Context
from manylora.serving.api.sampling import constraint_field
from manylora.serving.api.schemas import TOKENIZE_CONTEXTS, SamplingFields
from manylora.serving.hosting.fleet.versions import NumberedVersion
from manylora.serving.http.room import room_of_engine
from manylora.serving.http.traces import TRACE
from manylora.serving.http.turns import next_turn
from manylora.serving.text import Tokenizer

__all__ = ["Truncation", "check_lengths", "check_num_answers", "submit"]

MAX_SALT_CHARS = 1024  # characters of ``cache_salt``, which an engine hashes for each answer

MAX_ANSWER_LOGPROBS = 1 << 22
"""Log-probabilities of the answers of a request, or as many as an answer of the whole context has, if that is more."""

REQUESTS_AT_ONCE = 256  # requests of the engine that are made at once, in a millisecond or two


class Truncation:
    """The cut of a request's prompts by ``truncate_prompt_tokens``: their last tokens alone, or their first.

    With ``truncation_side`` right the first ones are kept. With -1 there is room for an answer of ``max_tokens``; a
    number out of range raises ``RequestError``.
    """

    def __init__(self, context: Context, body: SamplingFields, max_tokens: int | None) -> None:
        longest = context.max_model_len
        asked = body.truncate_prompt_tokens
        if asked is not None and asked != -1 and not 1 <= asked < longest:
            raise RequestError(
                f"Got truncate_prompt_tokens = {asked}, expected -1 (all that fit) or 1 to {longest - 1}",
                param="truncate_prompt_tokens",
            )
        self._keeps_first = body.truncation_side == "right"
        self._most = max(1, longest - max(1, max_tokens or 1)) if asked == -1 else asked
        self.limit = longest if asked is None else TOKENIZE_CONTEXTS * longest
        """A prompt has fewer tokens before the cut."""

    def cut(self, tokens: Sequence[int], tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
        """Return the tokens that are kept; with a tokenizer, special tokens at the begin come before the last ones."""
        most = self._most
        if most is None or len(tokens) <= most:
            return tuple(tokens)
        if self._keeps_first:
            return tuple(tokens[:most])
        special = tokenizer.encode("") if tokenizer is not None else []
        if not 0 < len(special) < most or list(tokens[: len(special)]) != special:
            special = []
        return (*special, *tokens[len(tokens) - most + len(special) :])


async def submit(
    call: AnswerCall[Any],
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    *,
    id_prefix: str,
    form_field: str | None = None,
    details: Details = NO_DETAILS,
) -> tuple[RequestAnswers, dict[str, Any]]:
    """Submit the prompts; return their answers, and the id, time and model of the response.

    The id begins with ``id_prefix``. ``form_field`` is the field that gave the form of the answers, if none of the
    usual ones.

    Errors are those of ``FleetRequests.submit`` and of the check of a form; ``CapacityError`` if the caller has too
    many answers under way as well.
    """
    context, body = call.context, call.body
    num_answers = body.n or 1
    check_num_answers(context, len(prompts), num_answers)
    check_lengths(context, prompts)
    if not body.model:  # to the engine, an empty name is the base
        raise ModelNotFound("Got an empty model name, which does not exist", param="model")
    _check_logprobs(call, sampling, prompts)
    begin = begin_search(call, sampling) if getattr(body, "use_beam_search", False) else None
    if (form := sampling.constraint) is None:
        form_field = None
    else:
        form_field = form_field or constraint_field(body)
        form = replace(form, tenant="" if context.config.shared_prefixes else call.tenant)
        sampling = replace(sampling, constraint=form)
        try:
            await context.forms.check(call.http, form)
        except RequestError as error:
            raise RequestError(str(error), param=form_field) from None
    answer_id = id_prefix + uuid.uuid4().hex
    places = None
    if context.gate.tells_tenants:
        num_tokens, adapter = sum(map(len, prompts)), None if body.model == context.fleet.served_name else body.model
        places = context.callers.take(call.tenant, len(prompts) * num_answers, num_tokens=num_tokens, adapter=adapter)
    # From here on the name may move, and the version may not be freed.
    version = None if body.model == context.fleet.served_name else context.fleet.adapters.take(body.model)
    answers = RequestAnswers(
        context=context,
        sampling=sampling,
        num_answers=num_answers,
        form_field=form_field,
        details=details,
        places=places,
        version=version,
        begin=begin,
    )
    if (trace := call.http.scope.get(TRACE)) is not None:
        trace.submitted(answer_id, sampling, model=body.model, num_prompts=len(prompts), num_answers=num_answers)
    await answers.start(_requests(call, prompts, sampling, answer_id, version))
    head = {"id": answer_id, "created": int(context.epoch_s()), "model": body.model}
    return answers, head if version is None else {**head, "adapter_version": version.label}


async def _requests(
    call: AnswerCall[Any],
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    answer_id: str,
    version: NumberedVersion | None,
) -> list[Request]:
    """Return the requests of the engine, ``n`` for each prompt."""
    body: SamplingFields = call.body
    num_answers = body.n or 1
    sampling = replace(sampling, stop=()) if sampling.stop else sampling  # no engine looks for stop strings
    salt, tenant = _salt(call), call.context.gate.tenant(call.tenant)
    weight = 1.0 if tenant is None else tenant.weight
    requests: list[Request] = []
    for prompt in prompts:
        requests += [
            Request(
                request_id=f"{answer_id}-{len(requests) + choice}",
                prompt=prompt,
                sampling=sampling,
                model=body.model if version is None else version.name,
                version=None if version is None else version.key,
                tenant=call.tenant,
                weight=weight,
                cache_salt=salt,
                priority=body.priority or 0,
                # With one seed all answers would be equal; the others' stands beside the shared sampling.
                seed=None if sampling.seed is None or choice == 0 else (sampling.seed + choice) % 2**63,
                default_max_tokens=call.settings.defaults.max_new_tokens,
            )
            for choice in range(num_answers)
        ]
        if len(requests) % REQUESTS_AT_ONCE < num_answers:
            await next_turn()
    return requests


def check_num_answers(context: Context, num_prompts: int, num_answers: int) -> None:
    """Raise ``RequestError`` unless a request's answers fit into the queue, and into a caller's part of it."""
    scheduler = context.engine_config.scheduler
    most = scheduler.max_waiting
    if context.gate.tells_tenants:
        most = min(most, room_of_engine(scheduler))
    if num_prompts * num_answers > most:
        raise RequestError(
            f"Got {num_prompts} prompts with n = {num_answers}, expected at most {most} answers in one request",
            param="prompt" if num_prompts > 1 else "n",
        )


def check_lengths(context: Context, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ``ContextExceeded`` for a prompt without room for an answer, before it is copied for each of ``n``."""
    limit = context.max_model_len
    longest = max(map(len, prompts))
    if longest >= limit:
        raise ContextExceeded.of_prompt(longest, limit)


def _check_logprobs(call: AnswerCall[Any], sampling: SamplingParams, prompts: Sequence[Sequence[int]]) -> None:
    """Raise ``RequestError`` for more log-probabilities of all answers than are kept."""
    if sampling.logprobs is None:
        return
    limit = call.context.max_model_len
    longest = sampling.max_tokens or call.settings.defaults.max_new_tokens or limit
    num_tokens = sum(min(longest, limit - len(prompt)) for prompt in prompts) * (call.body.n or 1)
    most = max(MAX_ANSWER_LOGPROBS, limit * (1 + USUAL_LOGPROBS))  # one answer may always be as long as the context
    num_of_each = 1 + (len(sampling.logprob_token_ids) or sampling.logprobs)
    if num_tokens * num_of_each > most:
        raise RequestError(
            f"The answers may have {num_tokens} tokens with {num_of_each} log-probabilities each, expected "
            f"at most {most} log-probabilities in one request: set max_tokens, or ask for fewer answers at a time",
            param="logprobs",
        )


def _salt(call: AnswerCall[Any]) -> str:
    """Return the salt of cached prefixes: callers with different API keys share none, or timing would show theirs."""
    given: str = call.body.cache_salt or ""
    if len(given) > MAX_SALT_CHARS:
        raise RequestError(
            f"Got a cache_salt of {len(given)} characters, expected at most {MAX_SALT_CHARS}", param="cache_salt"
        )
    return given if call.context.config.shared_prefixes or not call.tenant else f"{call.tenant} {given}"
