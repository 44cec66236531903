"""The prompts of one call and their answers: a window of them is in the engine at a time, the others wait here."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from manylora.core.errors import CapacityError
from manylora.core.types import FinishReason, Output, PromptLogprobs, Request
from manylora.serving.hosting.fleet.requests import FleetRequests
from manylora.serving.hosting.links.in_flight import Flush, OutputStream
from manylora.serving.text import Detokenizer, Tokenizer, TokenLogprob, describe_prompt

__all__ = ["Batch", "Generation", "Job"]

RETRY_S = 0.05  # seconds until requests that found the queue full are submitted again


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one prompt."""

    prompt: str | tuple[int, ...]  # the prompt; of a conversation, the text of its template
    text: str  # the answer
    token_ids: tuple[int, ...]  # its tokens, with the stop token
    finish_reason: str  # ``stop``, ``length`` or ``error``
    adapter: str | None  # the adapter that answered; ``None`` is the base
    stop_reason: str | int | None = None  # the stop string or requested stop token that ended it, if any
    logprobs: tuple[TokenLogprob, ...] | None = None  # one entry per token, if requested
    # One entry per token of the prompt, if requested; the first is ``None``.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_prompt_tokens: int = 0  # tokens of the prompt
    num_cached_tokens: int = 0  # prompt tokens whose KV was in the prefix cache
    error: str | None = None  # the reason, if ``finish_reason`` is ``error``


@dataclass(slots=True)
class Job:
    """A prompt and its answer so far; ``finish_reason`` is set at the end."""

    prompt: str | tuple[int, ...]
    adapter: str | None
    request: Request
    tokenizer: Tokenizer
    detokenizer: Detokenizer | None = None  # from its first output on: the engine checks the prompt
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def add(self, output: Output) -> None:
        """Add an output; sets ``finish_reason`` at the end of the answer."""
        self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        if self.detokenizer is None:
            self.detokenizer = Detokenizer(self.tokenizer, self.request.prompt, self.request.sampling)
        delta = self.detokenizer.push(output.tokens, stop_token=output.stop_token)
        self._add(output, delta.text, delta.num_tokens, delta.logprobs)
        if not delta.finished and output.finish is not None:
            delta = self.detokenizer.finish()
            self._add(output, delta.text, 0, ())
        if delta.stop_reason is not None:
            self.stop_reason = delta.stop_reason
        if isinstance(delta.stop_reason, str):
            self.finish_reason = FinishReason.STOP.value
        elif output.finish is not None:
            self.finish_reason = output.finish.value
            self.error = output.error

    def fail(self, error: str) -> None:
        """End the job with an error."""
        self.finish_reason, self.error = FinishReason.ERROR.value, error

    def generation(self) -> Generation:
        """Return the answer."""
        assert self.finish_reason is not None
        return Generation(
            prompt=self.prompt,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            adapter=self.adapter,
            logprobs=None if self.request.sampling.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=self._describe_prompt(),
            num_prompt_tokens=len(self.request.prompt),
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )

    def _describe_prompt(self) -> tuple[TokenLogprob | None, ...] | None:
        if self.request.sampling.prompt_logprobs is None or self.error is not None:
            return None
        if self.prompt_logprobs is None:  # a prompt of one token
            return (None,)
        return (None, *describe_prompt(self.tokenizer, self.request.prompt, self.prompt_logprobs))

    def _add(self, output: Output, text: str, num_tokens: int, logprobs: Sequence[TokenLogprob]) -> None:
        self.text.append(text)
        self.token_ids.extend(token.token_id for token in output.tokens[:num_tokens])
        self.logprobs.extend(logprobs)


@dataclass(eq=False, kw_only=True)
class Batch:
    """Jobs that share one stream. For the event loop's thread alone, where tokens become text as they arrive."""

    requests: FleetRequests  # takes the requests of the jobs
    waiting: deque[Job]
    window: int  # most jobs in the engine at a time
    on_ended: Callable[[int], None]  # called with the number of jobs that have just ended
    _running: dict[str, Job] = field(default_factory=dict)
    _stream: OutputStream = field(default_factory=OutputStream)

    async def run(self) -> None:
        """Run every job to its end; on an exception, such as ``EngineDead``, cancel the jobs in the engine."""
        try:
            await self._fill()
            await self._stream.deliver(self._consume)
        finally:
            self.requests.cancel(list(self._running))

    async def _fill(self) -> None:
        """Submit as many jobs as the window and the engine's queue have room for; at least one, if any waits."""
        while self.waiting and len(self._running) < self.window:
            num_new = min(len(self.waiting), self.window - len(self._running))
            if not await self._submit([self.waiting.popleft() for _ in range(num_new)]):
                if self._running:
                    break  # tried again when one of them ends
                await asyncio.sleep(RETRY_S)
        if not self._running:
            self._stream.close()

    async def _submit(self, jobs: Sequence[Job]) -> bool:
        """Submit jobs; end those that are invalid. Return whether the queue had room for the others."""
        by_id = {job.request.request_id: job for job in jobs}
        self._running |= by_id  # first, so that an exception cancels them
        errors = await self.requests.submit_each([job.request for job in jobs], self._stream)
        for request_id in errors:
            del self._running[request_id]
        full = [request_id for request_id, error in errors.items() if isinstance(error, CapacityError)]
        self.waiting.extendleft(by_id[request_id] for request_id in reversed(full))
        for request_id, error in errors.items():
            if not isinstance(error, CapacityError):
                by_id[request_id].fail(str(error))
        if len(errors) > len(full):
            self.on_ended(len(errors) - len(full))
        return not full

    def _consume(self, outputs: list[Output]) -> Flush | None:
        """Give outputs to their jobs; refill the window when some have ended."""
        running = self._running
        num_before = len(running)
        stopped: list[str] = []
        for output in outputs:
            job = running.get(output.request_id)
            if job is None:
                continue  # more of an answer that a stop string ended
            job.add(output)
            if job.finish_reason is not None:
                del running[output.request_id]
                if output.finish is None:
                    stopped.append(output.request_id)  # by a stop string, which the engine does not check
        if stopped:
            self.requests.cancel(stopped, stopped=True)
        if len(running) < num_before:
            self.on_ended(num_before - len(running))
            if self.waiting:
                return self._fill
        if not running:
            self._stream.close()
        return None
