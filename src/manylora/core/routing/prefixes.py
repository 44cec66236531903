"""The beginnings of prompts that each replica's prefix cache is likely to hold: those that were sent there.

A prompt is cut into blocks, which grow with their distance from its beginning. A block's hash is chained over those
before it, so one look per block finds the longest beginning that a replica has seen::

    bytes     0 .. 4 KiB | .. 32 KiB      | .. 128 KiB      | beyond: not looked at
    blocks    16 of 256  | 28 of 1,024    | 24 of 4,096     | at most 68 hashes, whatever a tenant sends

    root      hash(model, salt): prompts of two adapters, or under two salts, have no block in common

Each replica's blocks are kept in order of use, up to as many bytes as its KV has room for, as its own cache does; a
block is used with all blocks before it, so the end of a prompt ages out before its beginning. The account is a guess:
answers, and prompts that other routers sent, are not in it, and a replica may have dropped a block. A wrong guess costs
time, never content: engines look for prefixes themselves, by digests that are cryptographic. So a process's own hashes
are enough here; a tenant that crafts equal ones finds them under its own root alone.

Source: SGLang's cache-aware router keeps such an account as a radix tree over text, and llm-d keeps one of vLLM's block
hashes by events; blocks that grow bound the work for a prompt and the memory of a prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

from manylora.core.routing.view import ReplicaView

__all__ = ["BYTES_PER_TOKEN", "MOST_BYTES", "PromptBlocks", "SentPrefixes", "text_blocks", "token_blocks"]

BYTES_PER_TOKEN = 4  # of text, on average; token ids are cut as if they were text
SIZES = (256,) * 16 + (1024,) * 28 + (4096,) * 24  # bytes of each block
EDGES = tuple(accumulate(SIZES, initial=0))
TOKEN_EDGES = tuple(edge // BYTES_PER_TOKEN for edge in EDGES)
MOST_BYTES = EDGES[-1]

MOST_BLOCKS = 2**18  # blocks that are kept for all replicas together, which take 64 MiB at most
MOST_BLOCKS_EACH = 4096
USUAL_KV_TOKENS = 2**18  # tokens that a replica's cache is taken to hold if it does not report them


class PromptBlocks(NamedTuple):
    """The blocks of one prompt."""

    hashes: list[int]
    tokens_per_byte: float
    num_tokens: int


def text_blocks(model: str, salt: bytes, beginning: bytes, num_bytes: int, num_tokens: int) -> PromptBlocks:
    """Return the blocks of a prompt of ``num_bytes``, shared only under equal salts.

    ``beginning`` is its first ``MOST_BYTES``; a last block that is not full is left out.
    """
    return PromptBlocks(_hashes((model, salt), beginning, EDGES), num_tokens / max(1, num_bytes), num_tokens)


def token_blocks(model: str, salt: str, tokens: tuple[int, ...]) -> PromptBlocks:
    """Return the blocks of a prompt of token ids."""
    return PromptBlocks(_hashes((model, salt), tokens, TOKEN_EDGES), 1 / BYTES_PER_TOKEN, len(tokens))


def _hashes(root: tuple[str, str | bytes], content: bytes | tuple[int, ...], edges: Seq[int]) -> list[int]:
    hashes, chained = [], hash(root)
    for place in range(1, bisect_right(edges, len(content))):
        chained = hash((chained, content[edges[place - 1] : edges[place]]))
        hashes.append(chained)
    return hashes


class _ReplicaBlocks:
    """The blocks of one replica in order of use, and their bytes; ``bit`` stands for it among holders of a block."""

    __slots__ = ("bit", "blocks", "num_bytes", "view")

    def __init__(self, view: ReplicaView, bit: int) -> None:
        self.view, self.bit = view, bit
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.num_bytes = 0


class SentPrefixes:
    """Which replicas hold which blocks."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # bits of the replicas that hold a block
        self._held: dict[ReplicaView, _ReplicaBlocks] = {}
        self._by_place: list[_ReplicaBlocks | None] = []  # by the place of the bit
        self._expecting: list[ReplicaView] = []
        self._most_each = MOST_BLOCKS_EACH

    def join(self, view: ReplicaView) -> None:
        """Take in a replica, which holds nothing yet."""
        place = self._by_place.index(None) if None in self._by_place else len(self._by_place)
        if place == len(self._by_place):
            self._by_place.append(None)
        self._held[view] = self._by_place[place] = _ReplicaBlocks(view, 1 << place)
        self._most_each = min(MOST_BLOCKS_EACH, MOST_BLOCKS // len(self._held))
        for held in self._held.values():
            while len(held.blocks) > self._most_each:
                self._drop_oldest(held)

    def leave(self, view: ReplicaView) -> None:
        """Remove a replica."""
        self.forget(view)
        self._by_place[self._held.pop(view).bit.bit_length() - 1] = None

    def forget(self, view: ReplicaView) -> None:
        """Assume that a replica holds nothing any more."""
        held = self._held[view]
        while held.blocks:
            self._drop_oldest(held)

    def expect(self, blocks: PromptBlocks) -> None:
        """Set the ``cached_tokens`` of every view to the tokens of a prompt that its replica is likely to hold."""
        for view in self._expecting:
            view.cached_tokens = 0
        self._expecting.clear()
        get, holding, depth = self._holders.get, 0, 0  # bits of the replicas that hold all blocks up to this depth
        for block in blocks.hashes:
            holders = get(block, 0)
            if depth:
                if lost := holding & ~holders:
                    self._set(lost, depth, blocks)
                holders &= holding
            holding = holders
            if not holding:
                return
            depth += 1
        if depth:
            self._set(holding, depth, blocks)

    def note(self, view: ReplicaView, blocks: PromptBlocks) -> None:
        """Learn that a prompt was sent to a replica: the oldest blocks there make room for it."""
        held, holders = self._held[view], self._holders
        used, depth = held.blocks, len(blocks.hashes)
        for block in reversed(blocks.hashes):
            depth -= 1
            if block in used:
                used.move_to_end(block)
            else:
                used[block] = SIZES[depth]
                held.num_bytes += SIZES[depth]
                holders[block] = holders.get(block, 0) | held.bit
        most_bytes = BYTES_PER_TOKEN * (USUAL_KV_TOKENS if view.kv_tokens is None else view.kv_tokens)
        while len(used) > self._most_each or held.num_bytes > most_bytes:
            self._drop_oldest(held)

    def _set(self, bits: int, depth: int, blocks: PromptBlocks) -> None:
        # The last token is always computed: the next block is drawn from its logits.
        num_tokens = min(blocks.num_tokens - 1, int(EDGES[depth] * blocks.tokens_per_byte))
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            held = self._by_place[lowest.bit_length() - 1]
            assert held is not None
            held.view.cached_tokens = num_tokens
            self._expecting.append(held.view)

    def _drop_oldest(self, held: _ReplicaBlocks) -> None:
        block, num_bytes = held.blocks.popitem(last=False)
        held.num_bytes -= num_bytes
        if rest := self._holders[block] & ~held.bit:
            self._holders[block] = rest
        else:
            del self._holders[block]
