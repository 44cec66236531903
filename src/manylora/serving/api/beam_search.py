"""Beam search: the most likely answers to a prompt, as transformers' ``generate`` finds them with ``num_beams``.

::

    round 0   prompt ------------> its most likely next tokens
    round 1   prompt + a --------> a request for one more token for every beam that goes on
              prompt + b -------->
    ...       a beam that ends competes with all that ended before; the rest goes on while one of them could still win

No scheduler knows of it. A beam is a request that goes on after its tokens so far, as one does whose engine was lost:
it is admitted, pre-empted and counted like any other, keeps its adapter's version, waits in the queue without a place
of its own, and finds its KV among the prefixes, but for the last block of each.

Source: transformers, ``GenerationMixin._beam_search`` with ``early_stopping=False``: of the likeliest continuations,
``1 + end tokens`` for each beam, only the first ``width`` may end, with the score ``sum / length ** length_penalty``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from manylora.core.errors import ContextExceeded, ManyloraError, RequestError
from manylora.core.types import (
    MAX_LOGPROBS,
    AdapterKey,
    Continuation,
    FinishReason,
    Output,
    Request,
    SampledToken,
    SamplingParams,
)
from manylora.serving.api.answers import BeginAnswers, raise_failure
from manylora.serving.api.request import AnswerCall
from manylora.serving.hosting.links.in_flight import Consume, OutputStream
from manylora.serving.ports import RequestsPort

__all__ = ["Beam", "BeamSearch", "BeamStream", "begin_search"]

MAX_BEAMS = 32
"""Beams of all prompts of a request: so many, of 2,000 tokens each, take a millisecond or two of every round."""

MAX_PENALTY = 10.0  # most of ``length_penalty``, and least, below zero

NEUTRAL = SamplingParams()
FIELDS = {"bad_words_token_ids": "bad_words", "constraint": "response_format"}  # fields of a body by parameter
_CHANGED = ("stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids", "constraint")
_ALSO_CHANGED = ("bad_words_token_ids", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")
REFUSED = (*_CHANGED, *_ALSO_CHANGED, "prompt_logprobs")
"""Parameters that change what is likely, or where an answer ends, without which beams are compared."""


class Beam(NamedTuple):
    """An answer, or the begin of one."""

    tokens: tuple[int, ...] = ()
    reports: tuple[SampledToken, ...] = ()  # the tokens with their log-probabilities, if those are reported
    score: float = 0.0  # the sum of its log-probabilities; of one that ended, over its length to a power
    end: int | None = None  # the end token that it ends with, if it does


@dataclass(eq=False)
class BeamSearch:
    """The beams of one prompt. It neither asks the engine nor waits."""

    width: int  # beams that go on, and answers
    max_tokens: int  # tokens of the longest answer
    length_penalty: float  # power of the length by which a sum of log-probabilities is divided
    end_tokens: frozenset[int]  # tokens that end an answer
    num_top: int | None = None  # most likely tokens to report beside each token; ``None`` for no report
    running: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)  # the best ones, best first
    is_over: bool = False

    def __post_init__(self) -> None:
        self.num_candidates = max(2, 1 + len(self.end_tokens)) * self.width

    def advance(self, found: Sequence[SampledToken]) -> None:
        """Add a token to the beams: ``top`` of the token found for each has its ``num_candidates`` most likely ones."""
        length = len(self.running[0].tokens) + 1
        is_last = length == self.max_tokens
        likely = sorted(
            (
                (beam.score + logprob, index, token, logprob)
                for index, (beam, one) in enumerate(zip(self.running, found, strict=True))
                for token, logprob in one.top
            ),
            key=lambda candidate: -candidate[0],
        )[: self.num_candidates]
        before, self.running = self.running, []
        scale = length**self.length_penalty
        for rank, (score, index, token, logprob) in enumerate(likely):
            is_end = token in self.end_tokens
            if not (is_end or is_last) and len(self.running) == self.width:
                continue
            tokens = (*before[index].tokens, token)
            reports: tuple[SampledToken, ...] = ()
            if self.num_top is not None:
                report = SampledToken(token_id=token, logprob=logprob, top=found[index].top[: self.num_top])
                reports = (*before[index].reports, report)
            if not (is_end or is_last):
                self.running.append(Beam(tokens, reports, score))
            elif rank < self.width:
                self.ended.append(Beam(tokens, reports, score / scale, token if is_end else None))
        self.ended = sorted(self.ended, key=lambda beam: -beam.score)[: self.width]
        is_full = len(self.ended) == self.width
        self.is_over = not self.running or (is_full and self.running[0].score / scale <= self.ended[-1].score)


@dataclass(eq=False)
class _Search:
    """A prompt, the requests of its answers, and the search for them."""

    requests: Sequence[Request]
    search: BeamSearch
    least_room: int  # tokens of an answer that the memory must have room for
    adapter: AdapterKey | None = None
    num_cached_tokens: int = 0

    def round(self, num_top: int) -> list[Request]:
        """Return a request for each running beam, for one more token and ``num_top`` most likely ones at least."""
        first, beams = self.requests[0], self.search.running
        length = len(beams[0].tokens)
        num_top = max(num_top, self.search.num_candidates)
        sampling = SamplingParams(max_tokens=length + 1, temperature=0.0, logprobs=num_top, ignore_eos=True)
        return [
            replace(
                first,
                request_id=f"{first.request_id}-{length}-{index}",
                sampling=sampling,
                continuation=Continuation(tokens=beam.tokens, adapter=self.adapter) if length else None,
                least_room=0 if length else self.least_room,
            )
            for index, beam in enumerate(beams)
        ]

    def take(self, outputs: Sequence[Output]) -> None:
        """Take the tokens of a round."""
        if not self.search.running[0].tokens:
            self.adapter, self.num_cached_tokens = outputs[0].adapter, outputs[0].num_cached_tokens
        self.search.advance([output.tokens[0] for output in outputs])

    def outputs(self) -> list[Output]:
        """Return the answers; with log-probabilities token by token, since each takes time to become JSON."""
        made: list[Output] = []
        for request, beam in zip(self.requests, self.search.ended, strict=True):
            tokens = tuple([SampledToken(token_id=token) for token in beam.tokens])
            shares: list[tuple[SampledToken, ...]] = [(report,) for report in beam.reports]
            shares = shares or [tokens]
            for index, share in enumerate(shares, 1):
                ends = index == len(shares)
                reason = FinishReason.LENGTH if beam.end is None else FinishReason.STOP
                made.append(
                    Output(
                        request_id=request.request_id,
                        tokens=share,
                        finish=reason if ends else None,
                        stop_token=beam.end if ends else None,
                        num_cached_tokens=self.num_cached_tokens,
                        adapter=self.adapter,
                    )
                )
        return made


class BeamStream(OutputStream):
    """The answers of beam searches, which all come at their end."""

    def __init__(self, fleet: RequestsPort, prompts: Sequence[_Search], num_top: int | None) -> None:
        super().__init__()
        self._fleet = fleet
        self._prompts = prompts
        self._num_top = num_top
        self._round: OutputStream | None = None

    async def advance(self) -> None:
        """Add a token to all beams that go on; errors as of ``RequestAnswers.deliver``."""
        searching = [prompt for prompt in self._prompts if not prompt.search.is_over]
        rounds = [prompt.round(self._num_top or 0) for prompt in searching]
        requests = [request for one in rounds for request in one]
        found: dict[str, Output] = {}
        stream = await self._fleet.submit(requests)

        def gather(outputs: list[Output]) -> None:
            for output in outputs:
                raise_failure(output, None)
                if output.tokens:
                    found[output.request_id] = output
            if len(found) == len(requests):
                stream.close()

        try:
            if self._error is not None:
                raise self._error
            self._round = stream
            await stream.deliver(gather)
        finally:
            self._round = None
            if len(found) < len(requests):
                self._fleet.cancel([one.request_id for one in requests if one.request_id not in found])
        for prompt, asked in zip(searching, rounds, strict=True):
            prompt.take([found[request.request_id] for request in asked])

    async def deliver(self, consume: Consume) -> None:
        """Search to the end, then deliver the answers."""
        while any(not prompt.search.is_over for prompt in self._prompts):
            if self._error is not None:
                raise self._error
            await self.advance()
        for prompt in self._prompts:
            for output in prompt.outputs():
                self.push(output)
        await super().deliver(consume)

    def fail(self, error: ManyloraError) -> None:
        """End the search: ``deliver`` raises ``error``."""
        if self._round is not None:
            self._round.fail(error)
        super().fail(error)


def begin_search(call: AnswerCall[Any], sampling: SamplingParams) -> BeginAnswers:
    """Return the start of the beam searches that a body asks for.

    ``RequestError`` if it asks for beams with something that cannot be had with them, or for too many.
    """
    body = call.body
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    info, width, num_top = call.context.fleet.engines.info, body.n or 1, sampling.logprobs
    end_tokens = info.eos_token_ids or call.context.tokenizer.eos_token_ids
    ends = frozenset(() if sampling.ignore_eos else end_tokens)
    _check(body, sampling, width=width, most=min(MAX_BEAMS, MAX_LOGPROBS // max(2, 1 + len(ends)), info.vocab_size))
    if not -MAX_PENALTY <= penalty <= MAX_PENALTY:
        raise RequestError(
            f"Got length_penalty = {penalty}, expected -{MAX_PENALTY} to {MAX_PENALTY}", param="length_penalty"
        )
    longest = sampling.max_tokens or call.settings.defaults.max_new_tokens or info.max_model_len

    async def begin(requests: Sequence[Request]) -> OutputStream:
        if len(requests) > MAX_BEAMS:
            raise RequestError(f"Got {len(requests)} beams of all prompts, expected at most {MAX_BEAMS}", param="n")
        prompts = []
        for first in range(0, len(requests), width):
            answers = requests[first : first + width]
            num_free = info.max_model_len - len(answers[0].prompt)
            if (sampling.max_tokens or 1) > num_free:
                raise ContextExceeded.of_answer(len(answers[0].prompt), sampling.max_tokens or 1, info.max_model_len)
            search = BeamSearch(width, min(longest, num_free), penalty, ends, num_top)
            prompts.append(_Search(answers, search, sampling.max_tokens or 0))
        stream = BeamStream(call.context.fleet.requests, prompts, num_top)
        await stream.advance()  # a refusal comes before the response begins
        return stream

    return begin


def _check(body: Any, sampling: SamplingParams, *, width: int, most: int) -> None:
    if body.stream:
        raise RequestError("Streaming is not currently supported with beam search", param="stream")
    if width > most:
        raise RequestError(f"Got n = {width} beams, expected at most {most}", param="n")
    for name in REFUSED:
        if (value := getattr(sampling, name)) != getattr(NEUTRAL, name):
            field = FIELDS.get(name, name)
            shown = f" = {value}" if isinstance(value, float) else ""
            raise RequestError(f"`{field}`{shown} is not supported with beam search.", param=field)
