"""Answers of a given form: masks of allowed tokens, by ``llguidance`` (the extra ``grammar``).

A request's matcher is a cache, not a state: it is rebuilt from the generated tokens when a sequence returns after
pre-emption, or on another engine. The masks of a step take 20 to 100 us per row. They are computed outside the
interpreter's lock while the model runs: they depend on the tokens before. The library bounds the items of a mask, not
the time that an ambiguous grammar takes for each, so rows have a budget of time (``row_work``). The slow parts happen
once, on a thread that runs no step and before the request is queued (``prepare``): the compilation of a constraint, and
at the first the conversion of the tokenizer (about a second for 128,000 tokens).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manylora.core.errors import RequestError
from manylora.core.plan import PlannedSequence
from manylora.core.types import Constraint
from manylora.execution.checkpoint.files import find_gguf, is_gguf
from manylora.execution.sampling.grammar_text import GrammarTokenizer, grammar_text
from manylora.execution.sampling.row_work import RowWork, TimeAccount

__all__ = ["Grammars", "check_available", "check_constraint", "refusal", "try_constraint"]

logger = logging.getLogger(__name__)

MAX_COMPILED = 1024
"""Compiled constraints to keep; the least recently used is dropped first. Only when as many others arrived between its
preparation and its first token does a step compile one."""

MAX_COMPILED_CHARS = 2 << 20
"""Characters of the constraints that are kept, a measure of their memory: the largest take 150 bytes for each."""

MAX_GRAMMAR_SYMBOLS = 200_000
MAX_LEXER_STATES = 50_000  # states of a grammar's lexer, one or two kB each
MAX_STEP_FUEL = 50_000  # work of the lexer on a mask; a ms is 14,000
MAX_STEP_ITEMS = 20_000  # items of the parser on a mask; a ms is 20,000
NUM_TRIED = 3  # tokens of an answer that are tried when a constraint is compiled

PARAM = "structured_outputs"

_NAMES = {
    "json": "JSON schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural tag",
}


def check_available(constraint: Constraint) -> None:
    """Raise ``RequestError`` if the extra is missing."""
    if importlib.util.find_spec("llguidance") is None:
        raise RequestError(
            f"{_NAMES[constraint.kind]}s need the extra 'grammar', which this installation lacks "
            "(pip install 'manylora[grammar]')",
            param=PARAM,
        )


def check_constraint(constraint: Constraint) -> None:
    """Check that a constraint can be enforced, before its request is sent to an engine.

    ``RequestError`` if the extra is missing, the text is malformed, or a JSON schema's keyword cannot be enforced. A
    keyword that would be ignored is refused too, because the answer could then break the schema.
    """
    check_available(constraint)
    from llguidance import LLMatcher

    try:
        problem = LLMatcher.validate_grammar(grammar_text(constraint), limits=_limits())
    except ValueError as error:
        problem = str(error)
    if problem:
        raise refusal(constraint, problem)


def try_constraint(constraint: Constraint, tokenizer: GrammarTokenizer) -> None:
    """Check a constraint, compile it and follow it for a few tokens: all that an engine does before its first step.

    It may take any time and memory, so a stranger's constraint is tried in a process of its own. ``RequestError`` if
    the extra is missing, the constraint is malformed, or it cannot be enforced with this tokenizer.
    """
    check_constraint(constraint)
    try:
        matcher = _make_matcher(constraint, tokenizer)
    except ValueError as error:
        raise refusal(constraint, str(error)) from None
    _begin_answer(constraint, matcher)


def _make_matcher(constraint: Constraint, tokenizer: GrammarTokenizer) -> Any:
    from llguidance import LLMatcher

    return LLMatcher(tokenizer.tokens, grammar_text(constraint, tokenizer.special), limits=_limits())


def _begin_answer(constraint: Constraint, matcher: Any) -> None:
    """Follow a form for a few tokens: one that is too ambiguous fails here, in no step that others share.

    ``RequestError`` if the form is too ambiguous, or fails otherwise.
    """
    for _ in range(NUM_TRIED):
        if matcher.is_error():
            raise refusal(constraint, matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        if matcher.is_error() or matcher.is_stopped() or not allowed.size:
            break
        matcher.consume_token(int(allowed[-1]))
    if matcher.is_error():
        raise refusal(constraint, matcher.get_error())


@functools.cache
def _limits() -> Any:
    """Return the limits of a grammar: fewer than by default in a step, which other sequences wait for."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=MAX_GRAMMAR_SYMBOLS,
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=MAX_STEP_FUEL,
        step_max_items=MAX_STEP_ITEMS,
        verbose_errors=False,
    )


def refusal(constraint: Constraint, problem: str) -> RequestError:
    """Return the error for a constraint that cannot be enforced."""
    line = next(iter(problem.splitlines()), "")[:500]
    return RequestError(f"The {_NAMES[constraint.kind]} cannot be followed: {line}", param=PARAM)


@dataclass(slots=True)
class _MatcherProgress:
    """A sequence's matcher, ``None`` if it failed; the number of generated tokens that it has consumed; its budget.

    While ``begin``'s work runs, and once ``account.is_over``, the matcher belongs to the thread of that work.
    """

    matcher: Any
    num_seen: int = 0
    account: TimeAccount = field(default_factory=TimeAccount)

    def follow(self, tokens: Sequence[int], mask: NDArray[np.uint8]) -> None:
        """Consume tokens and write the mask of the next, as long as the matcher has not failed."""
        if tokens and not self.matcher.is_stopped():
            self.matcher.consume_tokens(tokens)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


class Grammars:
    """Token masks for requests with a constraint: ``prepare`` is safe from any thread, the rest is for one.

    ::

        step's thread    begin | model ............ | masks   sample
        masks' threads         |- one row each -|

    ``tokenizer``, a directory or name, is loaded on first use.
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_token_ids: Sequence[int], *, revision: str | None = None
    ) -> None:
        self._source = tokenizer
        self._revision = revision
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._tokenizer: GrammarTokenizer | None = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._num_chars = 0  # of all texts in ``_compiled``
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # of ``_compiled``
        self._progress: dict[int, _MatcherProgress] = {}
        self._work = RowWork()
        self._begun: dict[tuple[int, int], int] = {}  # rows of ``_bits``
        self._bits = np.zeros((0, 0), dtype=np.uint8)

    def begin(self, sequences: Sequence[PlannedSequence]) -> None:
        """Begin to compute the masks of these sequences, which have constraints; ``masks`` returns them.

        The masks depend only on the tokens so far, so the model can run meanwhile. Never raises, since one request
        must not end a step that others share. A sequence whose constraint fails in spite of ``prepare`` (limits can
        depend on the tokens) may have no further token.
        """
        self._work.finish()
        rows = [self._advance(sequence) for sequence in sequences]
        # New in every step: a row that was left behind may still write its own.
        vocab_size = self._vocab_size if self._tokenizer is None else self._tokenizer.tokens.vocab_size
        self._bits = np.zeros((len(rows), 4 * -(-vocab_size // 32)), dtype=np.uint8)
        self._begun = {_place(sequence): index for index, sequence in enumerate(sequences)}
        self._work.begin(
            [
                (partial(progress.follow, tokens, mask), progress.account, max(1, len(tokens)))
                for (progress, tokens), mask in zip(rows, self._bits, strict=True)
                if progress.matcher is not None and not progress.account.is_over
            ]
        )

    def masks(self, sequences: Sequence[PlannedSequence]) -> NDArray[np.uint8]:
        """Return which tokens may follow each of these sequences, all or some of the sequences of ``begin``.

        Returns:
            Bits ``[n, width]``: token ``t`` is bit ``t % 8``, the lowest first, of byte ``t // 8``.
        """
        if any(_place(sequence) not in self._begun for sequence in sequences):
            self.begin(sequences)
        self._work.finish()
        bits: NDArray[np.uint8] = self._bits[[self._begun[_place(sequence)] for sequence in sequences]]
        for mask, sequence in zip(bits, sequences, strict=True):
            progress = self._progress[sequence.seq_id]
            if progress.account.is_over:
                progress.matcher = None
            elif progress.matcher is not None and progress.matcher.is_error():
                logger.error("grammar_failed seq_id=%d error=%r", sequence.seq_id, progress.matcher.get_error())
                progress.matcher = None
            if progress.matcher is None:
                mask[:] = 0
        return bits

    def is_over(self, seq_id: int) -> bool:
        """Return whether a sequence has used up its budget of time; its mask is empty."""
        progress = self._progress.get(seq_id)
        return progress is not None and progress.account.is_over

    def _advance(self, sequence: PlannedSequence) -> tuple[_MatcherProgress, list[int]]:
        """Return the progress of a sequence, and its tokens that are still to be consumed."""
        progress = self._progress.get(sequence.seq_id)
        first, (_, stop) = sequence.num_prompt_tokens, _place(sequence)
        if progress is None or progress.num_seen > stop - first:
            progress = self._progress[sequence.seq_id] = self._start(sequence)
        start = first + progress.num_seen
        progress.num_seen = stop - first
        return progress, list(sequence.tokens[start:stop])

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget these sequences."""
        for seq_id in seq_ids:
            self._progress.pop(seq_id, None)

    def prepare(self, constraint: Constraint) -> None:
        """Compile a constraint for requests that follow; blocks.

        ``RequestError`` if the constraint cannot be enforced with this tokenizer.
        """
        try:
            matcher = self._compile(constraint)
        except ValueError as error:
            raise refusal(constraint, str(error)) from None
        _begin_answer(constraint, matcher.deep_copy())

    def _start(self, sequence: PlannedSequence) -> _MatcherProgress:
        assert sequence.sampling.constraint is not None
        try:
            return _MatcherProgress(self._compile(sequence.sampling.constraint).deep_copy())
        except Exception:  # missing extra, broken tokenizer or constraint: checked before; none may end the step
            logger.exception("grammar_failed seq_id=%d", sequence.seq_id)
            return _MatcherProgress(None)

    def _compile(self, constraint: Constraint) -> Any:
        with self._lock:
            matcher = self._compiled.get(constraint)
            if matcher is not None:
                self._compiled.move_to_end(constraint)
                return matcher
        matcher = _make_matcher(constraint, self._load())
        with self._lock:
            if constraint not in self._compiled:  # another thread's
                self._num_chars += len(constraint.text)
            self._compiled[constraint] = matcher
            while len(self._compiled) > MAX_COMPILED or self._num_chars > MAX_COMPILED_CHARS:
                dropped, _ = self._compiled.popitem(last=False)
                self._num_chars -= len(dropped.text)
        return matcher

    def _load(self) -> GrammarTokenizer:
        with self._loading:
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                source: dict[str, Any] = {"pretrained_model_name_or_path": self._source, "revision": self._revision}
                if is_gguf(self._source):
                    file = find_gguf(self._source, self._revision)
                    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
                hf = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
                self._tokenizer = GrammarTokenizer.of(hf, vocab_size=self._vocab_size, eos=self._eos)
            return self._tokenizer


def _place(sequence: PlannedSequence) -> tuple[int, int]:
    """Return a sequence and the number of its tokens so far, which decide its mask."""
    return sequence.seq_id, sequence.start + sequence.num_tokens
