"""From a checked body to an answer on its way: what completions and chat completions share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import Response

from manylora.errors import ModelNotFound, RequestError
from manylora.execution.sampling.grammar import check_schema
from manylora.server.api.answer import AnswerFormat, EventStream, Whole
from manylora.server.api.context import Context
from manylora.server.api.generation import Generation
from manylora.server.api.schemas import SamplingFields
from manylora.server.errors import error_response
from manylora.types import Request, SamplingParams

__all__ = ["LONG_TEXT", "respond"]

LONG_TEXT = 20_000
"""Characters beyond which text is tokenized on a thread: a millisecond or more that others would wait for."""


async def respond(
    context: Context,
    body: SamplingFields,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    form: AnswerFormat,
    *,
    tenant: str,
    id_prefix: str,
) -> Response:
    """Submit the prompts and return the response that will carry the answers.

    Raises:
        RequestError: The engine refuses one of them.
        CapacityError: No room, or no engine.
    """
    num_answers = body.n or 1
    most = context.engine_config.scheduler.max_waiting
    if len(prompts) * num_answers > most:
        raise RequestError(
            f"Got {len(prompts)} prompts with n = {num_answers}, expected at most {most} answers in one request",
            param="prompt" if len(prompts) > 1 else "n",
        )
    if not body.model:  # the engine would take it for the base
        raise ModelNotFound("Got an empty model name, which does not exist", param="model")
    if sampling.json_schema is not None:
        await _check_schema(sampling.json_schema)
    answer_id = id_prefix + uuid.uuid4().hex
    requests = [
        Request(
            request_id=f"{answer_id}-{index * num_answers + choice}",
            prompt=prompt,
            sampling=_of_choice(sampling, choice),
            model=body.model,
            tenant=tenant,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(num_answers)
    ]
    generation = Generation(context.supervisor, context.tokenizer, requests, num_answers=num_answers)
    await generation.start()
    head = {"id": answer_id, "created": int(context.epoch_s()), "model": body.model}
    if body.stream:
        return EventStream(generation, form, head=head, fingerprint=context.fingerprint, options=body.stream_options)
    return Whole(generation, form, head=head, fingerprint=context.fingerprint, on_failure=error_response)


async def _check_schema(schema: str) -> None:
    try:
        await asyncio.to_thread(check_schema, schema)  # some take milliseconds
    except RequestError as error:
        raise RequestError(str(error), param="response_format") from None


def _of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Give each of ``n`` answers a seed of its own, or they would all be the same."""
    if sampling.seed is None or choice == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + choice) % 2**63)
