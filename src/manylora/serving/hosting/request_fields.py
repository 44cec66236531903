"""Requests on their way to an engine: the fields that several share are in the message once.

::

    prompts   p0 p1          answers   (id, p0, c0, seed)
    common    c0                       (id, p0, c0, seed)
                                       (id, p1, c0, seed)
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manylora.core.types import AdapterKey, Continuation, Request, SamplingParams

__all__ = ["RequestFields"]


class CommonFields(msgspec.Struct, frozen=True, array_like=True):
    """Fields of ``Request`` that all answers of one HTTP request share."""

    sampling: SamplingParams
    model: str
    tenant: str
    weight: float
    cache_salt: str
    priority: int
    default_max_tokens: int | None
    version: AdapterKey | None


class OwnFields(msgspec.Struct, frozen=True, array_like=True):
    """Fields of ``Request`` that differ between answers, and the indices of its prompt and its ``CommonFields``."""

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
    common: list[CommonFields]
    answers: list[OwnFields]
    each: bool

    @classmethod
    def of(cls, call: int, requests: Sequence[Request], each: bool) -> RequestFields:
        """Return the message with every shared field once."""
        # Prompts and sampling are shared by identity: to compare them would cost as much as to send them.
        prompt_at: dict[int, int] = {}
        common_at: dict[tuple[object, ...], int] = {}
        prompts: list[tuple[int, ...]] = []
        common: list[CommonFields] = []
        answers: list[OwnFields] = []
        for one in requests:
            if (prompt := prompt_at.setdefault(id(one.prompt), len(prompts))) == len(prompts):
                prompts.append(one.prompt)
            texts = (
                *(one.model, one.tenant, one.weight, one.cache_salt),
                *(one.priority, one.default_max_tokens, one.version),
            )
            if (shared := common_at.setdefault((id(one.sampling), *texts), len(common))) == len(common):
                common.append(CommonFields(one.sampling, *texts))
            answers.append(OwnFields(one.request_id, prompt, shared, one.seed, one.continuation))
        return cls(call, prompts, common, answers, each)

    def to_requests(self) -> list[Request]:
        """Return the requests, which share the fields."""
        requests = []
        for one in self.answers:
            common = self.common[one.common_at]
            requests.append(
                Request(
                    request_id=one.request_id,
                    prompt=self.prompts[one.prompt_at],
                    sampling=common.sampling,
                    model=common.model,
                    tenant=common.tenant,
                    weight=common.weight,
                    cache_salt=common.cache_salt,
                    priority=common.priority,
                    seed=one.seed,
                    continuation=one.continuation,
                    default_max_tokens=common.default_max_tokens,
                    version=common.version,
                )
            )
        return requests
