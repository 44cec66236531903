"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import RequestError
from manylora.serving.api.chat_prompt import chat_tokens, log_once, template_of, tool_parser
from manylora.serving.api.formats import ChatFormat, message_readers
from manylora.serving.api.prompt_part import Details, PromptPart
from manylora.serving.api.request import read_call
from manylora.serving.api.respond import respond
from manylora.serving.api.sampling import sampling_params
from manylora.serving.api.schemas import ChatBody
from manylora.serving.api.submit import Truncation
from manylora.serving.api.tools import NO_TOOLS, read_tool_use

__all__ = ["chat_routes"]


async def create_chat_completion(request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    call = await read_call(request, ChatBody)
    context, body = call.context, call.body
    if body.echo:
        raise RequestError("echo is not supported for chats", param="echo")
    details = Details.of(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = sampling_params(
        call, max_tokens=max_tokens, logprobs=_num_logprobs(body), prompt_logprobs=details.prompt_logprobs
    )
    template = template_of(context, call.settings, body)
    use = NO_TOOLS
    if body.tools or body.tool_choice is not None:
        parser = tool_parser(context, template.text)
        use = await read_tool_use(call.http, context, body.tools, body.tool_choice, body.parallel_tool_calls, parser)
        sampling = use.constrain(sampling)
    effort = _effort(body.reasoning_effort, template.text or context.tokenizer.chat_template or "")
    template = replace(template, variables={**effort, **template.variables, **use.template_variables})
    truncation = Truncation(context, body, sampling.max_tokens)
    prompt = truncation.cut(await chat_tokens(request, context, body.messages, template, limit=truncation.limit))
    make_reader = message_readers(context, use, prompt, is_constrained=sampling.constraint is not None)
    part = PromptPart(context.tokenizer, [prompt], body.n or 1, details)
    form = ChatFormat(part, use, make_reader, has_logprobs=sampling.logprobs is not None)
    form_field = None if use.json_schema is None else "tools"
    return await respond(call, [prompt], sampling, form, id_prefix="chatcmpl-", form_field=form_field)


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs = true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise RequestError(f"Got top_logprobs = {body.top_logprobs}, expected 0 to 20", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _effort(effort: str | None, template: str) -> Mapping[str, str]:
    """Return the template's variable of ``reasoning_effort``, if it was given and the template reads it."""
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    log_once("reasoning_effort_ignored: the chat template does not read it")
    return {}


chat_routes = [Route("/v1/chat/completions", create_chat_completion, methods=["POST"])]
