"""The answer to a prompt, and the job that produces it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from manylora.core.types import FinishReason, Output, PromptLogprobs, Request
from manylora.serving.text import Detokenizer, Tokenizer, TokenLogprob, describe_prompt

__all__ = ["Generation", "Job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one prompt.

    Args:
        prompt: The prompt; of a conversation, the text of its template.
        text: The answer.
        token_ids: Its tokens, with the stop token.
        finish_reason: ``stop``, ``length`` or ``error``.
        stop_reason: The stop string or requested stop token that ended it, if any.
        adapter: The adapter that answered; ``None`` is the base.
        logprobs: One entry per token, if requested.
        prompt_logprobs: One entry per token of the prompt, if requested; the first is ``None``.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Prompt tokens whose KV was in the prefix cache.
        error: The reason, if ``finish_reason`` is ``error``.
    """

    prompt: str | tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    adapter: str | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class Job:
    """A prompt and its answer so far; ``finish_reason`` is set at the end."""

    prompt: str | tuple[int, ...]
    adapter: str | None
    request: Request
    detokenizer: Detokenizer
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

    def generation(self, tokenizer: Tokenizer) -> Generation:
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
            prompt_logprobs=self._describe_prompt(tokenizer),
            num_prompt_tokens=len(self.request.prompt),
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )

    def _describe_prompt(self, tokenizer: Tokenizer) -> tuple[TokenLogprob | None, ...] | None:
        if self.request.sampling.prompt_logprobs is None or self.error is not None:
            return None
        if self.prompt_logprobs is None:  # a prompt of one token
            return (None,)
        return (None, *describe_prompt(tokenizer, self.request.prompt, self.prompt_logprobs))

    def _add(self, output: Output, text: str, num_tokens: int, logprobs: Sequence[TokenLogprob]) -> None:
        self.text.append(text)
        self.token_ids.extend(token.token_id for token in output.tokens[:num_tokens])
        self.logprobs.extend(logprobs)
