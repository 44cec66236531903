"""Answers that match a JSON schema: masks of allowed tokens, by ``llguidance`` (the extra ``grammar``).

A request's matcher is a cache, not a state: it is rebuilt from the generated tokens when a sequence returns after
pre-emption. Masks take about 50 us per row and token. The slow parts happen once: a schema's compilation (kept for
later requests) and the tokenizer's conversion (about a second for 128,000 tokens, at the first constrained request).
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manylora.errors import RequestError

__all__ = ["JsonGrammar", "check_schema", "grammar_available"]

logger = logging.getLogger(__name__)

MAX_COMPILED = 64
"""Compiled schemas to keep; the least recently used is dropped first."""

COMPILE_DEFAULTS = {"whitespace_pattern": r"[ \n\r\t]{0,16}"}
"""Whitespace between JSON tokens: bounded, else a model may write blanks to the end of its context."""

LITERAL_TOKENS = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
"""A decoder that llguidance reads, for tokenizers whose tokens are the text itself."""


def grammar_available() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("llguidance") is not None


def check_schema(schema: str) -> None:
    """Check that a JSON schema can be enforced, before its request is queued.

    Raises:
        RequestError: The extra is missing, the text is no schema, or a keyword cannot be enforced. A keyword that would
            be ignored is refused too, because the answer could then break the schema.
    """
    if not grammar_available():
        raise RequestError(
            "JSON schemas need the extra 'grammar', which this installation lacks (pip install 'manylora[grammar]')",
            param="json_schema",
        )
    from llguidance import LLMatcher

    try:
        problem = LLMatcher.validate_grammar(_grammar_text(schema))
    except ValueError as error:
        problem = str(error)
    if problem:
        raise RequestError(f"The JSON schema cannot be followed: {problem.splitlines()[0]}", param="json_schema")


def _grammar_text(schema: str) -> str:
    from llguidance import LLMatcher

    if schema.strip() == "true":  # any value; but only an object takes options
        schema = "{}"
    text: str = LLMatcher.grammar_from_json_schema(schema, COMPILE_DEFAULTS)
    return text


@dataclass(slots=True)
class _Progress:
    """A sequence's matcher and the number of generated tokens that it has consumed."""

    matcher: Any
    num_seen: int = 0
    has_failed: bool = False


class JsonGrammar:
    """Token masks for requests with a JSON schema; used by one thread.

    ``tokenizer``, a directory or name, is loaded on first use.
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int], *, revision: str | None = None
    ) -> None:
        self._source = tokenizer
        self._revision = revision
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._progress: dict[int, _Progress] = {}

    def allowed(self, seq_id: int, schema: str, generated: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens may follow ``generated``, bool ``[vocab]``.

        Never raises, since one request must not end a step that others share. If a schema fails here in spite of
        ``check_schema`` (its limits can depend on the tokens), no token is allowed, which ends the row.
        """
        progress = self._progress.get(seq_id)
        if progress is None or progress.num_seen > len(generated):
            progress = self._progress[seq_id] = self._start(seq_id, schema)
        if progress.has_failed:
            return np.zeros(self._vocab_size, dtype=np.bool_)
        matcher = progress.matcher
        new = list(generated[progress.num_seen :])
        progress.num_seen = len(generated)
        if new and not matcher.is_stopped():
            matcher.consume_tokens(new)
        if matcher.is_stopped() and not matcher.is_error():
            return self._only_eos()
        mask = None if matcher.is_error() else self._mask(matcher)
        if mask is None or matcher.is_error():
            logger.error("grammar_failed seq_id=%d error=%r", seq_id, matcher.get_error())
            progress.has_failed = True
            return np.zeros(self._vocab_size, dtype=np.bool_)
        return mask

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget these sequences."""
        for seq_id in seq_ids:
            self._progress.pop(seq_id, None)

    def _start(self, seq_id: int, schema: str) -> _Progress:
        try:
            return _Progress(self._compile(schema).deep_copy())
        except Exception:  # missing extra, broken tokenizer or schema: checked before; none may end the step
            logger.exception("grammar_failed seq_id=%d", seq_id)
            return _Progress(None, has_failed=True)

    def _compile(self, schema: str) -> Any:
        from llguidance import LLMatcher

        matcher = self._compiled.get(schema)
        if matcher is None:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            matcher = self._compiled[schema] = LLMatcher(self._tokenizer, _grammar_text(schema))
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(schema)
        return matcher

    def _load_tokenizer(self) -> Any:
        from llguidance import LLTokenizer
        from transformers import AutoTokenizer

        hf = AutoTokenizer.from_pretrained(self._source, revision=self._revision, trust_remote_code=False)
        description = json.loads(hf.backend_tokenizer.to_str())
        description["truncation"] = description["padding"] = None
        if description["decoder"] is None or description["decoder"]["type"] == "Fuse":
            description["decoder"] = LITERAL_TOKENS
        eos = self._eos or hf.eos_token_id
        return LLTokenizer(json.dumps(description), n_vocab=max(self._vocab_size, len(hf)), eos_token=eos)

    def _mask(self, matcher: Any) -> NDArray[np.bool_]:
        from llguidance.numpy import fill_next_token_bitmask

        bits = np.zeros((1, -(-self._tokenizer.vocab_size // 32)), dtype=np.int32)
        fill_next_token_bitmask(matcher, bits)
        flags = np.unpackbits(bits.view(np.uint8)[0], bitorder="little", count=self._vocab_size)
        return flags.astype(np.bool_)

    def _only_eos(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[self._eos] = True
        return mask
