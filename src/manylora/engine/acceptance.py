"""Acceptance: a request becomes a sequence that has not run yet, or is refused with the reason.

::

    Request --> adapter version --> limits --> room in the queue --> Sequence
                     |                |               |
               ModelNotFound    RequestError    CapacityError

The core gives the sequence to the parts that wait for it; this file changes none of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from manylora.adapters.registry import NamedAdapter
from manylora.adapters.shape import BaseShape
from manylora.config import SchedulerConfig
from manylora.engine.adapters.catalog import AdapterCatalog
from manylora.engine.limits import RequestLimits
from manylora.events import RequestArrived
from manylora.memory import BlockTable, prefix_root
from manylora.scheduling import Sequence
from manylora.types import Request

__all__ = ["Acceptance", "arrival_of"]


class Acceptance:
    """Makes the sequences of requests, numbered in the order of arrival.

    Args:
        base: Shape of the base model.
        served_name: Name of the base model in requests.
        adapters: Resolves the names of models to adapter versions.
        check_room: Raises ``CapacityError`` if the queue takes no more requests.
        num_pages: Pages in the pool.
        block_size: Tokens of KV in a page.
        scheduler: Says whether sequences reserve the pages of their longest answers.
        seed: Seeds the sampling of requests without a seed.
    """

    def __init__(
        self,
        *,
        base: BaseShape,
        served_name: str,
        adapters: AdapterCatalog,
        check_room: Callable[[float], None],
        num_pages: int,
        block_size: int,
        scheduler: SchedulerConfig,
        seed: int,
    ) -> None:
        self._base = base
        self._served_name = served_name
        self._adapters = adapters
        self._limits = RequestLimits(
            base=base, num_pages=num_pages, block_size=block_size, num_pinned_pages=adapters.num_pinned_pages
        )
        self._check_room = check_room
        self._block_size = block_size
        self._reserves_output = scheduler.reserve_output == "whole"
        self._rng = random.Random(seed)
        self._next_seq_id = 0

    def accept(self, request: Request, now: float) -> tuple[Sequence, NamedAdapter | None]:
        """Return the sequence of a request, and its adapter, ``None`` for the base.

        Raises:
            ModelNotFound: Neither the base nor an adapter has that name.
            AdapterReplaced: It is the rest of an answer of an adapter version that is not here.
            RequestError: It can never be served: empty, unknown tokens, or too long for the model or the pool.
            CapacityError: Too many requests wait, or it would wait for too long (429).
        """
        begun = request.continuation
        if begun is not None and begun.tokens:
            named = self._adapters.resolve_version(request.model, self._served_name, begun.adapter)
        else:
            named = self._adapters.resolve(request.model, self._served_name)
        version = named.version if named else None
        max_tokens = self._limits.check(request, version)
        if begun is None:  # else it was accepted once already
            self._check_room(now)
        sampling = request.sampling
        given = sampling.seed if request.seed is None else request.seed
        root = prefix_root(self._base.fingerprint, version.key if version else None, request.cache_salt)
        eos = () if sampling.ignore_eos else self._base.eos_token_ids
        sequence = Sequence(
            seq_id=self._next_seq_id,
            request=request,
            version=version,
            name=named.name if named else "",
            table=BlockTable(root, self._block_size),
            max_tokens=max_tokens,
            stop_token_ids=frozenset((*eos, *sampling.stop_token_ids)),
            seed=self._rng.getrandbits(63) if given is None else given & (2**64 - 1),
            arrived_at=now,
            reserves_output=self._reserves_output,
        )
        self._next_seq_id += 1
        return sequence, named


def arrival_of(sequence: Sequence) -> RequestArrived:
    """Return the event of a sequence that was accepted."""
    request = sequence.request
    return RequestArrived(
        sequence.arrived_at,
        request.request_id,
        sequence.adapter,
        sequence.num_prompt_tokens,
        sequence.name,
        request.sampling.max_tokens,
        sequence.max_tokens,
        request.sampling.temperature,
        request.sampling.constraint is not None,
        sequence.num_answered,
    )
