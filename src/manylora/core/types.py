"""Types shared by all packages: requests, outputs and adapter versions.

A *request* is the user's; a *sequence* (``core/scheduling/sequence.py``) is its state in the engine. An *adapter
version* is LoRA weights by content. Names point to versions: replacing an adapter in place creates another version, so
KV, prefix blocks and pages, which are keyed by version, never mix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, NewType

import msgspec

from manylora.core.errors import RequestError

__all__ = [
    "MAX_LOGPROBS",
    "MAX_LOGPROB_TOKEN_IDS",
    "MAX_TENANT_CHARS",
    "USUAL_LOGPROBS",
    "WEIGHTS",
    "AdapterKey",
    "AdapterVersion",
    "ColdStart",
    "Constraint",
    "Continuation",
    "FinishReason",
    "Output",
    "PromptLogprobs",
    "PromptToken",
    "Request",
    "SampledToken",
    "SamplingParams",
    "Tier",
]

USUAL_LOGPROBS = 20
"""Most log-probabilities of a token in OpenAI's API, and from a server that is not told to give more."""
MAX_LOGPROBS = 1024  # most log-probabilities of a token: so many take a millisecond to become JSON
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 4096
MAX_SHOWN_CHARS = 300  # characters of a wrong value in a message

AdapterKey = NewType("AdapterKey", str)
"""Identifies a version: the content hash of an adapter's weights and effective configuration, or a provisional key.

A provisional key stands for weights that were not read yet (``core/adapters/identity.py``).
"""


class Tier(Enum):
    """Where adapter weights are; each tier is loaded from the one before it."""

    DISK = "disk"
    HOST = "host"
    DEVICE = "device"


class ColdStart(Enum):
    """How a request starts whose adapter is not on the device."""

    WAIT = "wait"  # it is admitted when all weights are on the device
    ASSIST = "assist"  # it is computed from the image in host memory while that is copied to the device
    LAYERS = "layers"  # it runs while the weights arrive; each step waits at each layer until that layer is there


class FinishReason(Enum):
    """Why a request ended, by OpenAI's names where there is one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


CONSTRAINT_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")
MAX_CONSTRAINT_CHARS = 256 * 1024


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form that an answer must have."""

    # ``json``: the text is a JSON schema, ``"{}"`` for any JSON value; ``regex``; ``choice``: a JSON list of strings,
    # one of which is the answer; ``grammar``: in Lark's or GBNF's notation; ``structural_tag``: a JSON object with
    # ``structures`` and ``triggers``, as vLLM takes it.
    kind: str
    text: str  # the schema, pattern, choices, grammar or tags
    # The tenant that it is kept for once it is compiled: tenants share none, or timing would show theirs.
    tenant: str = ""

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINT_KINDS:
            raise RequestError(
                f"Got the constraint {self.kind[:50]!r}, expected one of {', '.join(CONSTRAINT_KINDS)}",
                param="structured_outputs",
            )
        if len(self.text) > MAX_CONSTRAINT_CHARS:
            raise RequestError(
                f"Got a constraint of {len(self.text)} characters, expected at most {MAX_CONSTRAINT_CHARS}",
                param="structured_outputs",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, by OpenAI's and vLLM's names.

    With a seed the tokens depend only on the request: position *i* draws from a counter-based generator keyed by
    ``(seed, i)``, independent of the batch and of pre-emptions.
    """

    max_tokens: int | None = None  # most tokens to generate; ``None`` means as many as fit
    min_tokens: int = 0  # end-of-sequence and stop tokens are masked until so many are generated
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # nucleus mass in (0, 1]
    top_k: int = 0  # number of candidates; 0 means all
    min_p: float = 0.0  # least probability relative to the most likely token
    presence_penalty: float = 0.0  # subtracted once from logits of generated tokens, in [-2, 2]
    frequency_penalty: float = 0.0  # subtracted per occurrence, in [-2, 2]
    # Divides (multiplies) positive (negative) logits of seen tokens, prompt included; > 0.
    repetition_penalty: float = 1.0
    seed: int | None = None  # seed of this request; ``None`` lets the engine draw one
    stop: tuple[str, ...] = ()  # strings that end the text (applied by the detokenizer, not in the engine core)
    stop_token_ids: tuple[int, ...] = ()  # tokens that end the sequence, beside the model's own
    include_stop_str_in_output: bool = False  # whether the matched stop string stays in the text
    ignore_eos: bool = False  # continue after end-of-sequence tokens, for load generators
    # Number of most likely tokens to report per position; ``None`` reports none, 0 only the chosen one.
    logprobs: int | None = None
    # As ``logprobs``, for the positions of the prompt. All its tokens are then computed: none is served from the prefix
    # cache.
    prompt_logprobs: int | None = None
    # Tokens to report at each position in place of the most likely ones, in this order; needs ``logprobs``, whose
    # number is then without effect.
    logprob_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True  # leave special tokens out of the text
    constraint: Constraint | None = None  # the form that the answer must have
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of token id and additive bias in [-100, 100]
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that may be generated; empty for all
    # Runs of tokens that are not generated (``text.bad_words_token_ids`` makes them of words).
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str) -> None:
            if not ok:
                got = f"{getattr(self, name)!r:.{MAX_SHOWN_CHARS}}"
                raise RequestError(f"Got {name} = {got}, expected {expected}", param=name)

        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        check(self.min_tokens >= 0, "min_tokens", "at least 0")
        check(self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "no more than max_tokens")
        check(0.0 <= self.temperature <= 100.0, "temperature", "a number from 0 to 100")
        check(0.0 < self.top_p <= 1.0, "top_p", "a number in (0, 1]")
        check(self.top_k >= 0, "top_k", "0 (all) or more")
        check(0.0 <= self.min_p <= 1.0, "min_p", "a number from 0 to 1")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "a number from -2 to 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "a number from -2 to 2")
        check(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "a number above 0, at most 100")
        check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            most = getattr(self, name)
            check(most is None or 0 <= most <= MAX_LOGPROBS, name, f"a number from 0 to {MAX_LOGPROBS}")
        check(
            len(self.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS and all(t >= 0 for t in self.logprob_token_ids),
            "logprob_token_ids",
            f"at most {MAX_LOGPROB_TOKEN_IDS} token ids",
        )
        check(not self.logprob_token_ids or self.logprobs is not None, "logprob_token_ids", "logprobs beside it")
        check(len(self.stop) <= MAX_STOPS and all(self.stop), "stop", f"at most {MAX_STOPS} strings, none empty")
        for stop in self.stop:
            check(len(stop) <= MAX_STOP_CHARS, "stop", f"strings of at most {MAX_STOP_CHARS} characters")
        check(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids of 0 or more")
        check(
            len(self.logit_bias) <= 1024 and all(t >= 0 and -100.0 <= b <= 100.0 for t, b in self.logit_bias),
            "logit_bias",
            "at most 1024 token ids with a bias from -100 to 100",
        )
        check(
            len(self.allowed_token_ids) <= 65536 and all(t >= 0 for t in self.allowed_token_ids),
            "allowed_token_ids",
            "at most 65536 token ids",
        )
        check(
            len(self.bad_words_token_ids) <= MAX_BAD_WORDS
            and all(run and min(run) >= 0 for run in self.bad_words_token_ids),
            "bad_words_token_ids",
            f"at most {MAX_BAD_WORDS} runs of token ids, none of them empty",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The answer so far of a request that another engine began; the next engine goes on after it."""

    # Tokens that the client has; they count as generated. None if no token had come yet.
    tokens: tuple[int, ...] = ()
    adapter: AdapterKey | None = None  # the adapter version that they are from, ``None`` for the base


MAX_TENANT_CHARS = 128
WEIGHTS = (1e-3, 1e3)  # least and largest weight of a tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A user's request."""

    request_id: str  # unique among requests in flight
    prompt: tuple[int, ...]  # token ids
    sampling: SamplingParams = field(default_factory=SamplingParams)  # sampling parameters
    model: str = ""  # name of the base or of an adapter; resolved to a version on arrival, before any later replacement
    tenant: str = ""  # the user, for fairness and accounting; at most ``MAX_TENANT_CHARS`` characters
    # The tenant's share of the engine beside others' weights, in ``WEIGHTS``, for policies that divide it.
    weight: float = 1.0
    cache_salt: str = ""  # prefix blocks are shared only between equal salts
    priority: int = 0  # lower is sooner, for policies that use it
    # Seed of this request in place of the seed in ``sampling``, which several requests may share: of one of ``n``
    # answers, or drawn, so that every engine continues it alike. ``None`` leaves the seed to ``sampling``.
    seed: int | None = None
    continuation: Continuation | None = None  # the answer so far, if another engine began it
    # Most tokens of the answer if ``sampling`` has no ``max_tokens``; fewer where fewer fit.
    default_max_tokens: int | None = None
    least_room: int = 0  # tokens of an answer that the memory must have room for, where other requests go on with it
    # The version of the adapter that answers, under whatever name an engine knows it; ``None`` for the version that
    # ``model`` has on arrival.
    version: AdapterKey | None = None


class SampledToken(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generated token. A struct, like ``Output``: creating a frozen dataclass takes ten times as long."""

    token_id: int  # the token
    # Its log-probability by softmax of the raw logits, without temperature; ``None`` if not requested.
    logprob: float | None = None
    # The most likely tokens as (token id, log-probability), most likely first; empty if not requested.
    top: tuple[tuple[int, float], ...] = ()


class PromptToken(NamedTuple):
    """The log-probability of one token of a prompt, after the tokens before it."""

    token_id: int  # the token
    logprob: float  # its log-probability by softmax of the raw logits
    rank: int  # 1 if no token is more likely
    top: tuple[tuple[int, float], ...]  # the most likely tokens as (token id, log-probability), most likely first


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Log-probabilities of a prompt's tokens, from its second on: packed, since a long prompt has a million numbers.

    ::

        token_ids, logprobs   | token | most likely | second | ... |    num_top + 1 columns, a row per token
        ranks                 | rank of the token |
    """

    num_top: int  # number of most likely tokens of each row
    token_ids: bytes  # ``[rows, num_top + 1]`` int32
    logprobs: bytes  # ``[rows, num_top + 1]`` float32
    ranks: bytes  # ``[rows]`` int32

    @classmethod
    def join(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """Return the rows of one or more parts of a prompt, in their order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            num_top=parts[0].num_top,
            token_ids=b"".join([part.token_ids for part in parts]),
            logprobs=b"".join([part.logprobs for part in parts]),
            ranks=b"".join([part.ranks for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[PromptToken]:
        """Yield the tokens of rows ``[start, stop)``."""
        width = self.num_top + 1
        token_ids, logprobs = memoryview(self.token_ids).cast("i"), memoryview(self.logprobs).cast("f")
        ranks = memoryview(self.ranks).cast("i")
        for row in range(start, len(ranks) if stop is None else min(stop, len(ranks))):
            first = row * width
            top = zip(token_ids[first + 1 : first + width], logprobs[first + 1 : first + width], strict=True)
            yield PromptToken(token_ids[first], logprobs[first], ranks[row], tuple(top))


class Output(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """A request's new tokens since its last output, and its end when ``finish`` is set."""

    request_id: str  # the request
    tokens: tuple[SampledToken, ...] = ()  # new tokens in order; may be empty on the last output
    finish: FinishReason | None = None  # set on the last output
    # The token that ended the sequence, if one did: the last of ``tokens``, counted in usage; its text is part of the
    # answer only with ``include_stop_str_in_output``.
    stop_token: int | None = None
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    adapter: AdapterKey | None = None  # the version that answered, ``None`` for the base
    error: str | None = None  # the reason, if ``finish`` is ``ERROR``
    is_refused: bool = False  # whether the request is at fault for the error: the form of its answer
    # Log-probabilities of the whole prompt, if requested; in an output without tokens, before the first token.
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """Identity and sizes of LoRA weights, for the scheduler."""

    key: AdapterKey  # content hash, or a provisional key
    source: str  # directory from which it is read, and read again
    rank: int  # largest rank over its modules
    num_modules: int  # modules it changes
    target_modules: tuple[str, ...]  # their distinct last names, sorted (``q_proj``, ``down_proj`` ...)
    num_pages: int  # its device pages
    weight_bytes: int  # its weights at device precision, without padding
    host_bytes: int  # size of its host copy
    disk_bytes: int  # size of its weight file
    dtype: str | None = None  # type of its packed weights; ``None`` for a version without weights (simulated)
    # Digests of its layers' weights, one behind the other, in the order in which layers arrive; empty where they are
    # not known. ``key`` is the hash over them.
    layer_digests: bytes = b""
    # Identity of the files that it was registered from (``core/adapters/identity.py``); empty without one.
    file_key: str = field(default="", compare=False)
    # Whether no layer of its image may be used before the whole file was read: its content is not known yet and is not
    # vouched for by a server.
    is_whole: bool = False
    # Tokens that activate it (aLoRA): it applies from their last occurrence in a prompt on, and rows before it are the
    # base's. Empty for an adapter that is always active.
    invocation: tuple[int, ...] = ()
