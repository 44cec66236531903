"""Answers of a given form: masks of allowed tokens, by ``llguidance`` (the extra ``grammar``).

A request's matcher is a cache, not a state: it is rebuilt from the generated tokens when a sequence returns after
pre-emption, or on another engine. Masks take about 50 us per row and token. The slow parts happen once, on a thread
that runs no step and before the request is queued (``prepare``): the compilation of a constraint, and at the first the
conversion of the tokenizer (about a second for 128,000 tokens).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manylora.errors import RequestError
from manylora.execution.sampling.grammar_text import grammar_text
from manylora.types import Constraint

__all__ = ["Grammars", "check_constraint", "grammar_available"]

logger = logging.getLogger(__name__)

MAX_COMPILED = 1024
"""Compiled constraints to keep; the least recently used is dropped first. Only when as many others arrived between its
preparation and its first token does a step compile one."""

PARAM = "structured_outputs"

_NAMES = {
    "json": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}

LITERAL_TOKENS = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
"""A decoder that llguidance reads, for tokenizers whose tokens are the text itself."""


def grammar_available() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("llguidance") is not None


def check_constraint(constraint: Constraint) -> None:
    """Check that a constraint can be enforced, before its request is sent to an engine.

    Raises:
        RequestError: The extra is missing, the text is malformed, or a JSON schema's keyword cannot be enforced. A
            keyword that would be ignored is refused too, because the answer could then break the schema.
    """
    if not grammar_available():
        raise RequestError(
            f"{_NAMES[constraint.kind]}s need the extra 'grammar', which this installation lacks "
            "(pip install 'manylora[grammar]')",
            param=PARAM,
        )
    from llguidance import LLMatcher

    try:
        problem = LLMatcher.validate_grammar(grammar_text(constraint))
    except ValueError as error:
        problem = str(error)
    if problem:
        raise _refusal(constraint, problem)


def _refusal(constraint: Constraint, problem: str) -> RequestError:
    line = next(iter(problem.splitlines()), "")[:500]
    return RequestError(f"The {_NAMES[constraint.kind]} cannot be followed: {line}", param=PARAM)


@dataclass(slots=True)
class _Progress:
    """A sequence's matcher and the number of generated tokens that it has consumed."""

    matcher: Any
    num_seen: int = 0
    has_failed: bool = False


class Grammars:
    """Token masks for requests with a constraint: ``prepare`` is safe from any thread, the rest is for one.

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
        self._special: frozenset[str] = frozenset()
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # of ``_compiled``
        self._progress: dict[int, _Progress] = {}
        self._bits: NDArray[np.uint8] | None = None
        self._bits_address = 0

    def allowed(self, seq_id: int, constraint: Constraint, generated: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens may follow ``generated``, bool ``[vocab]``.

        Never raises, since one request must not end a step that others share. If a constraint fails here in spite of
        ``prepare`` (its limits can depend on the tokens), no token is allowed, which ends the row.
        """
        progress = self._progress.get(seq_id)
        if progress is None or progress.num_seen > len(generated):
            progress = self._progress[seq_id] = self._start(seq_id, constraint)
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

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint for requests that follow; blocks.

        Raises:
            RequestError: It cannot be enforced with this tokenizer.
        """
        try:
            matcher = self._compile(constraint)
        except ValueError as error:
            raise _refusal(constraint, str(error)) from None
        if matcher.is_error():
            raise _refusal(constraint, matcher.get_error())

    def _start(self, seq_id: int, constraint: Constraint) -> _Progress:
        try:
            return _Progress(self._compile(constraint).deep_copy())
        except Exception:  # missing extra, broken tokenizer or constraint: checked before; none may end the step
            logger.exception("grammar_failed seq_id=%d", seq_id)
            return _Progress(None, has_failed=True)

    def _compile(self, constraint: Constraint) -> Any:
        from llguidance import LLMatcher

        with self._lock:
            matcher = self._compiled.get(constraint)
            if matcher is not None:
                self._compiled.move_to_end(constraint)
                return matcher
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
        matcher = LLMatcher(self._tokenizer, grammar_text(constraint, self._special))
        with self._lock:
            self._compiled[constraint] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _load_tokenizer(self) -> Any:
        from llguidance import LLTokenizer
        from transformers import AutoTokenizer

        hf = AutoTokenizer.from_pretrained(self._source, revision=self._revision, trust_remote_code=False)
        description = json.loads(hf.backend_tokenizer.to_str())
        description["truncation"] = description["padding"] = None
        if description["decoder"] is None or description["decoder"]["type"] == "Fuse":
            description["decoder"] = LITERAL_TOKENS
        self._special = frozenset(token["content"] for token in description["added_tokens"] if token["special"])
        eos = self._eos or hf.eos_token_id
        return LLTokenizer(json.dumps(description), n_vocab=max(self._vocab_size, len(hf)), eos_token=eos)

    def _mask(self, matcher: Any) -> NDArray[np.bool_]:
        # One buffer and its address for all rows: a new one for each takes longer than the mask of a small vocabulary.
        if self._bits is None:
            self._bits = np.zeros(4 * -(-self._tokenizer.vocab_size // 32), dtype=np.uint8)
            self._bits_address = self._bits.ctypes.data
        matcher.unsafe_compute_mask_ptr(self._bits_address, self._bits.size)
        return np.unpackbits(self._bits, bitorder="little", count=self._vocab_size).view(np.bool_)

    def _only_eos(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        mask[self._eos] = True
        return mask
