"""Log-probabilities of prompts: planned with the chunks of a prompt, and gathered until its first token.

::

    tokens      | prompt .......................................| first token
    chunks      |--- step 4 ---|--- step 5 ---|---- step 6 -----|
    reported    |..............|..............|...............|     every position but the last, which is sampled from
                                                              +---> one output, in the turn of the first token

A reported position must run, so prefix blocks are found only below the first one that was not reported yet
(``Sequence.num_reusable``). A pre-empted sequence keeps the rows that it has. Another engine that goes on with an
answer after its first token has nothing to report; before that token it begins again, and the client has none of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from manylora.core.plan import PromptRows, StepResult
from manylora.core.scheduling import Sequence
from manylora.core.types import Output, PromptLogprobs

__all__ = ["PromptReports"]


class PromptReports:
    """The sequences whose prompts are reported, until their first tokens; false if there are none."""

    def __init__(self) -> None:
        self._rows: dict[int, list[PromptLogprobs]] = {}  # by sequence, one per step so far

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, sequence: Sequence) -> None:
        """Learn of a new sequence, to report its prompt if that is asked for."""
        if sequence.has_unscored:
            self._rows[sequence.seq_id] = []

    def forget(self, sequence: Sequence) -> None:
        """Learn that a sequence ended."""
        self._rows.pop(sequence.seq_id, None)

    def again(self, sequence: Sequence) -> None:
        """Learn that a step which was to report a part of a prompt has given its sequence up."""
        if sequence.seq_id in self._rows:
            self._rows[sequence.seq_id] = []
            sequence.unscored()

    def plan(self, parts: Seq[tuple[Sequence, int]]) -> tuple[PromptRows, ...]:
        """Return the positions that a step reports; to be called before its sequences are launched."""
        planned = [sequence.scored(num) for sequence, num in parts if sequence.seq_id in self._rows]
        return tuple([rows for rows in planned if rows is not None])

    def take(self, result: StepResult, served: Seq[Sequence]) -> list[Output]:
        """Gather the rows of a step; return the reports of the sequences that it gave their first token."""
        for seq_id, rows in result.prompt_logprobs.items():
            if seq_id in self._rows:  # else it ended while the step ran
                self._rows[seq_id].append(rows)
        return [
            Output(
                request_id=sequence.request.request_id,
                num_cached_tokens=sequence.num_cached,
                adapter=sequence.adapter,
                prompt_logprobs=PromptLogprobs.join(self._rows.pop(sequence.seq_id)),
            )
            for sequence in served
            if sequence.seq_id in self._rows
        ]
