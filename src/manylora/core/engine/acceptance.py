"""Acceptance: a request becomes a sequence that has not run yet, or is refused with the reason.

::

    Request --> adapter version --> limits --> room in the queue --> Sequence
                     |                |               |
               ModelNotFound    RequestError    CapacityError

A request that could never be served is refused on arrival, with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

from manylora.core.config import EngineConfig
from manylora.core.engine.adapters.catalog import AdapterCatalog
from manylora.core.engine.queue_wait import QueueWait
from manylora.core.errors import ContextExceeded, RequestError
from manylora.core.events import RequestArrived
from manylora.core.memory import BlockTable, fork_mark, prefix_root
from manylora.core.ports import CoreParts
from manylora.core.scheduling import Sequence
from manylora.core.types import MAX_TENANT_CHARS, WEIGHTS, AdapterVersion, Request

__all__ = ["Acceptance", "arrival_of", "find_last"]


class Acceptance:
    """Makes the sequences of requests, numbered in the order of arrival.

    The configuration says whether sequences reserve the pages of their longest answers, and seeds requests without a
    seed.
    """

    def __init__(self, parts: CoreParts, config: EngineConfig, adapters: AdapterCatalog, queue_wait: QueueWait) -> None:
        self._base = parts.base
        self._num_pages = parts.num_pages
        self._has_kv = parts.has_kv
        self._num_state_pages = parts.base.num_state_pages
        self._block_size = config.memory.block_size
        self._reserves_output = config.scheduler.reserve_output == "whole"
        self._adapters = adapters
        self._queue_wait = queue_wait
        self._rng = random.Random(config.seed)
        self._next_seq_id = 0

    def accept(self, request: Request, now: float) -> Sequence:
        """Return the sequence of a request; raises as ``EngineCore.add_request`` does."""
        begun = request.continuation
        if begun is not None and begun.tokens:
            name, version = self._adapters.resolve_version(request.model, begun.adapter)
        else:
            name, version = self._adapters.resolve(request.model, request.version)
        max_tokens = self._check_limits(request, version)
        if begun is None and not self._queue_wait.has_room():  # else it was accepted once already
            raise self._queue_wait.no_room(now)
        sampling = request.sampling
        given = sampling.seed if request.seed is None else request.seed
        # A prompt without the tokens that activate its adapter is the base's, and so is its answer, as in PEFT.
        activates_at, fork, owner = 0, None, None if version is None else version.key
        if version is not None and version.invocation:
            found, owner = find_last(request.prompt, version.invocation), None
            activates_at = len(request.prompt) + max_tokens if found is None else found
            fork = activates_at, fork_mark(version.key, activates_at)
        root = prefix_root(self._base.fingerprint, owner, request.cache_salt)
        eos = () if sampling.ignore_eos else self._base.eos_token_ids
        sequence = Sequence(
            seq_id=self._next_seq_id,
            request=request,
            version=version,
            name=name,
            table=BlockTable(root, self._block_size, fork, None if version is None else version.key),
            max_tokens=max_tokens,
            stop_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
            seed=self._rng.getrandbits(63) if given is None else given & (2**64 - 1),
            arrived_at=now,
            reserves_output=self._reserves_output,
            has_kv=self._has_kv,
            state_tokens=self._num_state_pages * self._block_size,
            activates_at=activates_at,
        )
        self._next_seq_id += 1
        return sequence

    def _check_limits(self, request: Request, version: AdapterVersion | None) -> int:
        """Return how many tokens a request may generate with an adapter.

        ``RequestError`` if the request is empty, has unknown tokens, is too long for the model or the pool, or its
        answer has all tokens already.
        """
        self._check_tokens(request)
        num_prompt, asked = len(request.prompt), request.sampling.max_tokens
        limit = self._base.max_model_len
        if num_prompt >= limit:
            raise ContextExceeded.of_prompt(num_prompt, limit)
        if asked is not None and num_prompt + asked > limit:
            raise ContextExceeded.of_answer(num_prompt, asked, limit)
        # It must fit beside the pinned adapters, without other requests, else it could wait for ever. The last token
        # needs no KV.
        num_free = self._num_pages - self._adapters.num_pinned_pages(version)
        num_kv_pages = num_free - (version.num_pages if version else 0) - self._num_state_pages
        room = num_kv_pages * self._block_size + 1 - num_prompt if self._has_kv else limit
        if room < (least := max(asked or 1, request.least_room)):
            raise RequestError(
                f"The request needs KV for {num_prompt + least - 1} tokens; "
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
        if len(request.tenant) > MAX_TENANT_CHARS or not WEIGHTS[0] <= request.weight <= WEIGHTS[1]:
            raise RequestError(
                f"Got a tenant of {len(request.tenant)} characters and weight {request.weight:g}, expected at most "
                f"{MAX_TENANT_CHARS} and {WEIGHTS[0]:g} to {WEIGHTS[1]:g}"
            )
        if not request.prompt:
            raise RequestError("The prompt has no tokens", param="prompt")
        vocab_size = self._base.vocab_size
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocab_size:
            raise RequestError(f"The prompt has token ids outside [0, {vocab_size})", param="prompt")
        for param, token_ids in (
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("allowed_token_ids", request.sampling.allowed_token_ids),
            ("logprob_token_ids", request.sampling.logprob_token_ids),
            ("logit_bias", [token_id for token_id, _ in request.sampling.logit_bias]),
        ):
            if max(token_ids, default=0) >= vocab_size:
                raise RequestError(f"{param} has token ids outside [0, {vocab_size})", param=param)


def find_last(tokens: Seq[int], run: Seq[int]) -> int | None:
    """Return the position of the last occurrence of a non-empty ``run`` in ``tokens``, ``None`` without one.

    Backwards, since it is at the end as a rule, and never twice over a token, whatever a tenant sends.

    Source: Knuth, Morris and Pratt.
    """
    wanted = run[::-1]
    shorter = [0] * len(wanted)  # the longest proper prefix of ``wanted[: i + 1]`` that it ends with
    length = 0
    for index in range(1, len(wanted)):
        while length and wanted[index] != wanted[length]:
            length = shorter[length - 1]
        length += wanted[index] == wanted[length]
        shorter[index] = length
    length = 0
    for position in range(len(tokens) - 1, -1, -1):
        token = tokens[position]
        while length and token != wanted[length]:
            length = shorter[length - 1]
        length += token == wanted[length]
        if length == len(wanted):
            return position
    return None


def arrival_of(sequence: Sequence) -> RequestArrived:
    """Return the event of a sequence that was accepted."""
    request = sequence.request
    return RequestArrived(
        sequence.arrived_at,
        request.request_id,
        sequence.adapter,
        sequence.num_prompt_tokens,
        sequence.name,
        sequence.max_tokens,
        sequence.num_answered,
        request.tenant,
    )
