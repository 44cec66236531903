"""Log-probabilities of tokens, by softmax of the raw logits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manylora.core.types import PromptLogprobs
from manylora.execution.device import DeviceOps

__all__ = ["TokenReport", "finite", "most_likely", "most_likely_by_keys", "report_tokens", "reportable"]

_TOKENS = 2**31 - 1  # no token has a larger number

LEAST_LOGPROB = -9999.0  # log-probability reported for a token of probability zero, as by vLLM: JSON has no infinity


def reportable(logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return numbers that JSON has; a NaN, of a row without any finite logit, is the least."""
    return np.where(logprobs > LEAST_LOGPROB, logprobs, np.float32(LEAST_LOGPROB))


def finite(logits: Tensor) -> Tensor:
    """Return logits without NaN and plus infinity."""
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)


def most_likely(logits: Tensor, totals: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the ``num_tokens`` most likely tokens of each row and their log-probabilities, both ``[n, num_tokens]``.

    Most likely first, equal ones in the order of their ids. ``logits`` are ``[n, vocab]`` without NaN, and ``totals``
    ``[n]`` their ``logsumexp``. There are no more columns than tokens.
    """
    num_tokens = min(num_tokens, logits.shape[1])
    if not num_tokens:
        return torch.empty((len(logits), 0), dtype=torch.int64), torch.empty((len(logits), 0))
    if logits.device.type != "cpu":
        return most_likely_by_keys(logits, totals, num_tokens)
    least = logits.topk(num_tokens, dim=-1).values[:, -1:]
    found = (logits >= least).nonzero()  # at least as many per row, more where equals straddle the cut
    values = (logits[found[:, 0], found[:, 1]] - totals[found[:, 0]]).numpy()
    rows, ids = found.numpy().T
    order = np.lexsort((ids, -values, rows))
    firsts = np.searchsorted(rows, np.arange(len(logits)))  # found is in the order of rows
    chosen = order[firsts[:, None] + np.arange(num_tokens)]
    return torch.from_numpy(ids[chosen]), torch.from_numpy(values[chosen])


def most_likely_by_keys(logits: Tensor, totals: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the same without reading a value of the device: no equals are looked for.

    A token's key is the bits of its logit, ordered as an integer, and the token below.
    """
    bits = (logits + 0.0).view(torch.int32)  # of both zeros one
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    keys = (ordered << 32) + (_TOKENS - torch.arange(logits.shape[1], device=logits.device))
    tokens = _TOKENS - keys.topk(num_tokens, dim=-1).values.bitwise_and(_TOKENS)
    return tokens, logits.gather(1, tokens) - totals[:, None]


class TokenReport(NamedTuple):
    """Log-probabilities of one given token per row, and of the most likely ones, as arrays.

    ``token_ids`` and ``logprobs`` are ``[n, 1 + most]``, the given token first, and ``ranks`` ``[n]`` of the given one.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]

    def pack(self, start: int, stop: int, num_top: int) -> PromptLogprobs:
        """Return rows ``[start, stop)`` with ``num_top`` most likely tokens, or all there are."""
        token_ids = self.token_ids[start:stop, : num_top + 1]
        return PromptLogprobs(
            num_top=token_ids.shape[1] - 1,
            token_ids=token_ids.tobytes(),
            logprobs=self.logprobs[start:stop, : num_top + 1].tobytes(),
            ranks=self.ranks[start:stop].tobytes(),
        )


def report_tokens(logits: Tensor, tokens: NDArray[np.int64], most: int, ops: DeviceOps) -> TokenReport:
    """Report ``tokens`` ``[n]`` and the ``most`` most likely ones under ``logits`` ``[n, vocab]`` float32.

    Equals of a token do not lower its rank.
    """
    logits = finite(logits)
    totals = logits.logsumexp(dim=-1)
    own = logits.gather(1, ops.upload(tokens)[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    found = ops.read(own[:, 0] - totals, ranks, *most_likely(logits, totals, most))
    logprobs, ranks_read, top_ids, top = found
    return TokenReport(
        token_ids=np.concatenate((tokens[:, None], top_ids), axis=1).astype(np.int32),
        logprobs=reportable(np.concatenate((logprobs[:, None], top), axis=1)),
        ranks=ranks_read.astype(np.int32),
    )
