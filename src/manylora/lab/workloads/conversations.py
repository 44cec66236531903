"""Conversations: every arrival opens one, and each turn's prompt is all that was said before and a new question.

::

    turn 1   question | answer
    turn 2   question . answer . question | answer          the prompt begins with that of turn 1
             ------------------ pause ---> time

All turns of a conversation are for one adapter, so that the KV of its earlier turns and the adapter are worth keeping
for the same pause. Simulated answers have tokens of their own, so that of an earlier turn its prompt is found again in
the prefix cache and its answer is not.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from manylora.core.options import CheckedOptions, option
from manylora.lab.workloads.lengths import Distribution, Lengths
from manylora.lab.workloads.workload import RequestSpec

__all__ = ["Conversations"]

MOST_BLOCKS = 1 << 16  # names of blocks that a conversation has to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations(CheckedOptions):
    """Turns of a conversation, and the pauses between them. Lengths of the workload are those of a turn."""

    turns: Distribution  # of a conversation, rounded up
    pause_s: Distribution  # from the arrival of a turn to that of the next, in seconds
    max_tokens: int = option(
        2048, at_least=2, at_most=MOST_BLOCKS, unit="tokens", help="Prompt and answer of the last turn at most."
    )
    block_tokens: int = option(16, at_least=8, unit="tokens", help="Tokens of a block that prompts share.")

    def unfold(
        self, opened: Seq[RequestSpec], lengths: Lengths, rng: np.random.Generator, duration_s: float | None
    ) -> tuple[RequestSpec, ...]:
        """Return all turns in order of arrival, those after ``duration_s`` left out; ``opened`` are the first turns.

        A conversation ends before the turn that would exceed ``max_tokens``.
        """
        num_turns = np.ceil(self.turns.draw(len(opened), rng)).astype(np.int64).clip(1)
        num_later = int(num_turns.sum()) - len(opened)
        drawn, pauses = lengths.draw(num_later, rng), self.pause_s.draw(num_later, rng)
        later = zip(drawn.prompt.tolist(), drawn.output.tolist(), pauses.tolist(), strict=True)
        found: list[RequestSpec] = []
        for number, (first, num) in enumerate(zip(opened, num_turns.tolist(), strict=True)):
            opening = first.num_prompt_tokens, first.num_output_tokens, 0.0
            said, at = 0, first.arrival_s
            for question, answer, pause_s in (opening, *islice(later, num - 1)):
                at, said = at + pause_s, said + question
                if said + answer > self.max_tokens or (duration_s is not None and at >= duration_s):
                    break
                found.append(self._turn(first, number, at, said, answer))
                said += answer
        return tuple(sorted(found, key=lambda one: one.arrival_s))

    def _turn(self, first: RequestSpec, number: int, at: float, num_prompt: int, num_output: int) -> RequestSpec:
        begin = number * MOST_BLOCKS
        return replace(
            first,
            arrival_s=at,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            prefix=tuple(range(begin, begin - (-num_prompt // self.block_tokens))),
            prefix_block_tokens=self.block_tokens,
        )
