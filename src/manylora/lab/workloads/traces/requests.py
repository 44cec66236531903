"""Traces of language-model requests in one form, whichever file they come from.

The file's first line tells its family, so that a workload names a file and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from manylora.core.errors import ConfigError
from manylora.lab.workloads.traces.rows import header_of, read_csv, read_json_lines
from manylora.lab.workloads.workload import FloatArray, IntArray

__all__ = ["RequestLengths", "RequestTrace", "read_azure_llm", "read_length_pairs", "read_mooncake", "read_requests"]


@dataclass(frozen=True, slots=True, eq=False)
class RequestLengths:
    """Lengths of requests, in order of arrival."""

    prompt: IntArray  # prompt tokens
    output: IntArray  # answer tokens
    # Names of the blocks each prompt begins with, the last one perhaps in part, where a trace tells; shared names are
    # shared tokens.
    prefix: tuple[tuple[int, ...], ...] | None = None
    prefix_block_tokens: int = 512  # tokens in each of those blocks
    tenants: tuple[str, ...] | None = None  # tenant of each, where a trace tells, by a column ``tenant``

    def __len__(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestTrace(RequestLengths):
    """Requests in order of arrival (or, without times, of the file)."""

    arrival_s: FloatArray | None  # seconds since the first request; ``None`` in a trace that has only lengths


def read_azure_llm(file: Path) -> RequestTrace:
    """Read `AzureLLMInferenceTrace_*.csv`: times to 100 ns, prompt and answer tokens (Splitwise, ISCA '24)."""
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    times, prompt, output, tenants = [], [], [], []
    for row in read_csv(file, columns):
        times.append(row.time_s("TIMESTAMP"))
        prompt.append(row.whole("ContextTokens"))
        output.append(row.whole("GeneratedTokens"))
        tenants.append(row.tenant())
    return _in_order(file, times, prompt, output, tenants=tenants)


def read_mooncake(file: Path) -> RequestTrace:
    """Read `mooncake_*_trace.jsonl`: times in ms, lengths, and the 512-token blocks of each prompt (FAST '25)."""
    times, prompt, output, prefix, tenants = [], [], [], [], []
    for row in read_json_lines(file):
        times.append(row.number("timestamp", least=0) / 1000)
        prompt.append(row.whole("input_length"))
        output.append(row.whole("output_length"))
        prefix.append(row.wholes("hash_ids"))
        tenants.append(row.tenant())
    return _in_order(file, times, prompt, output, prefix, tenants)


def read_length_pairs(file: Path) -> RequestTrace:
    """Read a data set of lengths without times, as Vidur and Etalon ship them."""
    prompt, output = [], []
    for row in read_csv(file, ("num_prefill_tokens", "num_decode_tokens")):
        prompt.append(row.whole("num_prefill_tokens"))
        output.append(row.whole("num_decode_tokens"))
    return _in_order(file, None, prompt, output)


@lru_cache(maxsize=8)
def read_requests(file: Path) -> RequestTrace:
    """Read a trace of requests of any known family; the same file is read once.

    ``ConfigError`` if the file cannot be read, is of no known family, or holds a wrong value.
    """
    header = header_of(file)
    for sign, read in _FAMILIES.items():
        if sign in header:
            return read(file)
    raise ConfigError(
        f"{file}: expected a trace with one of {', '.join(_FAMILIES)} in its first line, got {header[:80]!r}"
    )


_FAMILIES: dict[str, Callable[[Path], RequestTrace]] = {
    "ContextTokens": read_azure_llm,
    "input_length": read_mooncake,
    "num_prefill_tokens": read_length_pairs,
}


def _in_order(
    file: Path,
    times: list[float] | None,
    prompt: list[int],
    output: list[int],
    prefix: list[tuple[int, ...]] | None = None,
    tenants: list[str] | None = None,
) -> RequestTrace:
    if not prompt:
        raise ConfigError(f"{file}: expected at least one request, got none")
    prompts, outputs = np.asarray(prompt, dtype=np.int64), np.asarray(output, dtype=np.int64)
    if times is None:
        return RequestTrace(arrival_s=None, prompt=prompts, output=outputs)
    arrival_s = np.asarray(times, dtype=np.float64)
    order = np.argsort(arrival_s, kind="stable")
    arrival_s = arrival_s[order] - arrival_s[order[0]]
    blocks = None if prefix is None else tuple(prefix[index] for index in order.tolist())
    named = None if tenants is None or not any(tenants) else tuple(tenants[index] for index in order.tolist())
    return RequestTrace(arrival_s=arrival_s, prompt=prompts[order], output=outputs[order], prefix=blocks, tenants=named)
