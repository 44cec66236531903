"""Synthetic contents: tokens, adapter versions, and prompts that are equal exactly where the workload shares prefixes.

Only the prefix cache reads prompts. It hashes blocks in a chain, so a block that differs in its first tokens changes
all that follow. So a prompt is filler, which costs one copy, behind a few tokens that identify the block or request::

    | name of block 7 | filler ........ | name of block 9 | filler ........ | own name | filler ....... |
      prefix_block_tokens                 prefix_block_tokens                 the rest

Adapter versions for a workload: sized by their real layout, without weights.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import replace
from zlib import crc32

from manylora.core.adapters.layout import AdapterLayout, lay_out, make_version
from manylora.core.adapters.shape import BaseShape
from manylora.core.errors import AdapterError
from manylora.core.plan import PlannedSequence, StepPlan
from manylora.core.types import AdapterKey, AdapterVersion, PromptLogprobs, SampledToken
from manylora.lab.workloads import AdapterSpec, RequestSpec

__all__ = ["PromptMaker", "adapter_versions", "synthetic_prompt_logprobs", "synthetic_token"]

FILLER = 0
SHARED, OWN = 1, 2
"""First token of a name: blocks and requests never share a name. ``OWN`` activates an adapter that waits for it."""


class PromptMaker:
    """Makes prompts of at most ``max_tokens`` tokens below ``vocab_size``, which is at least 16."""

    def __init__(self, vocab_size: int, max_tokens: int) -> None:
        assert vocab_size >= 16
        self._base = vocab_size
        self._filler = (FILLER,) * max_tokens

    def prompt(self, index: int, request: RequestSpec) -> tuple[int, ...]:
        """Return the prompt of request number ``index``."""
        num_tokens = request.num_prompt_tokens
        if not request.prefix:
            return self._named(OWN, index, num_tokens)
        parts: list[int] = []
        for name in request.prefix:
            parts += self._named(SHARED, name, min(request.prefix_block_tokens, num_tokens - len(parts)))
        return (*parts, *self._named(OWN, index, num_tokens - len(parts)))

    def _named(self, kind: int, number: int, num_tokens: int) -> tuple[int, ...]:
        """Return ``num_tokens`` tokens that begin with a name, which is cut if it is longer.

        A name is its kind and its digits, lowest first: filler of zeros behind it does not change the number.
        """
        name = [kind]
        while number:
            number, digit = divmod(number, self._base)
            name.append(digit)
        return tuple(name[:num_tokens]) + self._filler[: max(0, num_tokens - len(name))]


def synthetic_token(part: PlannedSequence, vocab_size: int, avoid: tuple[int, ...] = ()) -> SampledToken:
    """Return a token that depends only on adapter, seed and position, so that it can be computed again."""
    position = part.start + part.num_tokens
    draw = crc32(f"{part.adapter}/{part.seed if part.sampling.temperature else 0}/{position}".encode())
    token_id = draw % vocab_size
    while token_id in avoid:
        token_id = (token_id + 1) % vocab_size
    if part.sampling.logprobs is None:
        return SampledToken(token_id=token_id)
    others = part.sampling.logprob_token_ids or [
        (token_id + step) % vocab_size for step in range(part.sampling.logprobs)
    ]
    top = tuple((other, -0.1 - rank) for rank, other in enumerate(others))
    return SampledToken(token_id=token_id, logprob=-0.1, top=top)


def synthetic_prompt_logprobs(plan: StepPlan, vocab_size: int) -> dict[int, PromptLogprobs]:
    """Return rows that depend only on the tokens of the prompts, which are their own most likely ones."""
    found: dict[int, PromptLogprobs] = {}
    parts = {part.seq_id: part for part in plan.sequences} if plan.prompt_rows else {}
    for rows in plan.prompt_rows:
        if (part := parts.get(rows.seq_id)) is None:
            continue  # it failed in the step before
        assert part.start <= rows.start < rows.stop <= part.start + part.num_tokens, "reported but not run"
        targets = part.tokens[rows.start + 1 : rows.stop + 1]
        numbers = [(token + step) % vocab_size for token in targets for step in (0, *range(rows.num_top))]
        logprobs = [-0.1 - step for step in (0, *range(rows.num_top))] * len(targets)
        found[rows.seq_id] = PromptLogprobs(
            num_top=rows.num_top,
            token_ids=array("i", numbers).tobytes(),
            logprobs=array("f", logprobs).tobytes(),
            ranks=array("i", [1] * len(targets)).tobytes(),
        )
    return found


def adapter_versions(adapters: Iterable[AdapterSpec], base: BaseShape) -> dict[str, AdapterVersion]:
    """Return a version for every adapter, by name.

    Two of the same rank and targets have the same layout, but their own names and so their own identities.
    ``AdapterError`` if a rank is below 1, or no module of this base is a target.
    """
    sizes: dict[tuple[int, tuple[str, ...]], AdapterVersion] = {}
    versions = {}
    for spec in adapters:
        kind = spec.rank, spec.targets
        if kind not in sizes:
            sizes[kind] = make_version(_lay_out(spec, base), base.page, key="", source="")
        key = hashlib.blake2b(f"{base.fingerprint}/{spec.name}/{kind}".encode(), digest_size=16).hexdigest()
        invocation = (OWN,) if spec.is_activated else ()
        versions[spec.name] = replace(sizes[kind], key=AdapterKey(key), source=spec.name, invocation=invocation)
    return versions


def _lay_out(spec: AdapterSpec, base: BaseShape) -> AdapterLayout:
    targets = set(spec.targets)
    ranks = {one.name: spec.rank * one.num_experts for one in base.modules if one.name.rpartition(".")[2] in targets}
    if spec.rank < 1 or not ranks:
        raise AdapterError(
            spec.name, f"rank {spec.rank} on {', '.join(spec.targets)} applies to no module of {base.name}"
        )
    return lay_out(ranks, base)
