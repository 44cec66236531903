"""``POST /invocations``: SageMaker's one route, for chats and completions; a header may name the adapter."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from manylora.core.errors import RequestError
from manylora.serving.api.chat import answer_chat
from manylora.serving.api.completions import answer_completion
from manylora.serving.api.json_body import NULL, decode, raw_field
from manylora.serving.api.request import read_call
from manylora.serving.api.schemas import ChatBody, CompletionBody

__all__ = ["invocation_routes"]

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"


class InvokedChat(ChatBody, kw_only=True):
    """A chat, of the base if neither it nor the header names a model."""

    needs_model: ClassVar[bool] = False
    model: str = ""


class InvokedCompletion(CompletionBody, kw_only=True):
    """A completion, likewise."""

    needs_model: ClassVar[bool] = False
    model: str = ""


class InvokedFields(msgspec.Struct):
    """The fields by which the two are told apart."""

    messages: msgspec.Raw = raw_field()
    prompt: msgspec.Raw = raw_field()


def _kind_of(data: bytes) -> type[Any]:
    found = decode(data, InvokedFields)
    if found.messages is not NULL:
        return InvokedChat
    if found.prompt is not NULL:
        return InvokedCompletion
    raise RequestError("Cannot find suitable handler for request: expected messages of a chat, or a prompt")


async def invoke(request: Request) -> Response:
    """``POST /invocations``: a chat or a completion, by its fields."""
    call = await read_call(request, _kind_of, model=request.headers.get(ADAPTER_HEADER, ""))
    return await (answer_chat(call) if isinstance(call.body, ChatBody) else answer_completion(call))


invocation_routes = [Route("/invocations", invoke, methods=["POST"])]
