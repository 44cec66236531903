"""``truncate_prompt_tokens``: the last tokens of a prompt alone."""

from __future__ import annotations

from collections.abc import Sequence

from manylora.core.errors import RequestError
from manylora.serving.api.request import Context
from manylora.serving.api.schemas import SamplingFields
from manylora.serving.http.bounds import TOKENIZE_CONTEXTS
from manylora.serving.text import Tokenizer

__all__ = ["Truncation"]


class Truncation:
    """The cut of a request's prompts.

    Args:
        context: The server's parts.
        body: The request.
        max_tokens: Most tokens of the answer, for which ``truncate_prompt_tokens = -1`` leaves room.

    Raises:
        RequestError: The number is out of range.
    """

    def __init__(self, context: Context, body: SamplingFields, max_tokens: int | None) -> None:
        longest = context.fleet.engines.info.max_model_len
        asked = body.truncate_prompt_tokens
        if asked is not None and asked != -1 and not 1 <= asked < longest:
            raise RequestError(
                f"Got truncate_prompt_tokens = {asked}, expected -1 (all that fit) or 1 to {longest - 1}",
                param="truncate_prompt_tokens",
            )
        self._most = max(1, longest - max(1, max_tokens or 1)) if asked == -1 else asked
        self.limit = longest if asked is None else TOKENIZE_CONTEXTS * longest
        """A prompt has fewer tokens before the cut."""

    def cut(self, tokens: Sequence[int], tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
        """Return the last tokens of a prompt; with a tokenizer, special tokens at its begin are kept before them."""
        most = self._most
        if most is None or len(tokens) <= most:
            return tuple(tokens)
        special = tokenizer.encode("") if tokenizer is not None else []
        if not 0 < len(special) < most or list(tokens[: len(special)]) != special:
            special = []
        return (*special, *tokens[len(tokens) - most + len(special) :])
