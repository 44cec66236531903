"""Requests on their way to an engine: the fields that several share are in the message once.

::

    prompts   p0 p1          answers   (id, p0, c0, seed)
    common    c0                       (id, p0, c0, seed)
                                       (id, p1, c0, seed)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import msgspec

from manylora.core.types import Continuation, Request

__all__ = ["RequestFields"]

_common = attrgetter("model", "tenant", "weight", "cache_salt", "priority", "default_max_tokens", "version")
"""Fields that all answers of one HTTP request share, beside the sampling."""


class OwnFields(msgspec.Struct, frozen=True, array_like=True):
    """Fields of ``Request`` that differ between answers, and the indices of its prompt and of what it shares."""

    request_id: str
    prompt_at: int
    common_at: int
    seed: int | None
    continuation: Continuation | None


class RequestFields(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """``AddRequests`` of several requests on the wire: fields that they share, as answers of ``n`` do, are sent once.

    Two thousand answers may share 64 Ki token ids or a grammar of 256 KiB, so the message is of the size of the HTTP
    request, not of its product with the number of answers.
    """

    call: int
    prompts: list[tuple[int, ...]]
    common: list[Request]  # without the fields of ``answers``
    answers: list[OwnFields]
    each: bool

    @classmethod
    def of(cls, call: int, requests: Sequence[Request], each: bool) -> RequestFields:
        """Return the message with every shared field once."""
        # Prompts and sampling are shared by identity: to compare them would cost as much as to send them.
        prompt_at: dict[int, int] = {}
        common_at: dict[tuple[object, ...], int] = {}
        prompts: list[tuple[int, ...]] = []
        common: list[Request] = []
        answers: list[OwnFields] = []
        for one in requests:
            if (prompt := prompt_at.setdefault(id(one.prompt), len(prompts))) == len(prompts):
                prompts.append(one.prompt)
            if (shared := common_at.setdefault((id(one.sampling), *_common(one)), len(common))) == len(common):
                common.append(replace(one, request_id="", prompt=(), seed=None, continuation=None))
            answers.append(OwnFields(one.request_id, prompt, shared, one.seed, one.continuation))
        return cls(call, prompts, common, answers, each)

    def to_requests(self) -> list[Request]:
        """Return the requests, which share the fields."""
        return [
            replace(
                self.common[one.common_at],
                request_id=one.request_id,
                prompt=self.prompts[one.prompt_at],
                seed=one.seed,
                continuation=one.continuation,
            )
            for one in self.answers
        ]
