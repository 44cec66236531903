"""Admission checks: a request that could never be served is refused on arrival, with the reason."""

from __future__ import annotations

from collections.abc import Callable

from manylora.adapters.shape import BaseShape
from manylora.errors import ContextExceeded, RequestError
from manylora.types import AdapterVersion, Request

__all__ = ["RequestLimits"]


class RequestLimits:
    """The limits of the base model and of the pool.

    Args:
        num_pages: Pages in the pool.
        block_size: Tokens of KV in a page.
        num_pinned_pages: Pages that pinned adapters other than the given version hold.
    """

    def __init__(
        self,
        *,
        base: BaseShape,
        num_pages: int,
        block_size: int,
        num_pinned_pages: Callable[[AdapterVersion | None], int],
    ) -> None:
        self._base = base
        self._num_pages = num_pages
        self._block_size = block_size
        self._num_pinned_pages = num_pinned_pages

    def check(self, request: Request, version: AdapterVersion | None) -> int:
        """Return how many tokens a request may generate with an adapter.

        Raises:
            RequestError: It is empty, has unknown tokens, is too long for the model or the pool, or its answer has all
                tokens already.
        """
        self._check_tokens(request)
        num_prompt, asked = len(request.prompt), request.sampling.max_tokens
        limit = self._base.max_model_len
        if num_prompt >= limit:
            raise ContextExceeded(
                f"The prompt has {num_prompt} tokens; this model's context is {limit}, one of them at least to answer",
                param="prompt",
            )
        if asked is not None and num_prompt + asked > limit:
            raise ContextExceeded(
                f"The prompt has {num_prompt} tokens and max_tokens is {asked}, "
                f"together more than this model's context of {limit}",
                param="max_tokens",
            )
        # It must fit beside the pinned adapters alone, else it could wait for ever. The last token needs no KV.
        num_free = self._num_pages - self._num_pinned_pages(version)
        num_kv_pages = num_free - (version.num_pages if version else 0)
        room = num_kv_pages * self._block_size + 1 - num_prompt
        if room < 1 or (asked is not None and asked > room):
            raise RequestError(
                f"The request needs KV for {num_prompt + (asked or 1) - 1} tokens; "
                f"the memory left beside its adapter and pinned ones holds {max(0, room + num_prompt - 1)}",
                param="prompt" if room < 1 else "max_tokens",
            )
        longest = asked
        if longest is None:
            fitting = min(limit - num_prompt, room)
            longest = fitting if request.default_max_tokens is None else min(fitting, request.default_max_tokens)
        num_answered = len(request.continuation.tokens) if request.continuation is not None else 0
        if num_answered >= longest:
            raise RequestError(f"Got {num_answered} tokens of the answer already, expected fewer than {longest}")
        return longest

    def _check_tokens(self, request: Request) -> None:
        if not request.prompt:
            raise RequestError("The prompt has no tokens", param="prompt")
        vocab_size = self._base.vocab_size
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab_size:
            raise RequestError(f"The prompt has token ids outside [0, {vocab_size})", param="prompt")
        for param, token_ids in (
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("allowed_token_ids", request.sampling.allowed_token_ids),
            ("logit_bias", [token_id for token_id, _ in request.sampling.logit_bias]),
        ):
            if max(token_ids, default=0) >= vocab_size:
                raise RequestError(f"{param} has token ids outside [0, {vocab_size})", param=param)
