"""Memory: one pool of equal pages for KV, prefix blocks and adapters; page numbers only, no tensors."""

from manylora.core.memory.allocator import Owner, PageAllocator
from manylora.core.memory.blocks import BlockTable, num_blocks
from manylora.core.memory.cache import PageCache
from manylora.core.memory.eviction import (
    EVICTION_POLICIES,
    Depth,
    EvictionPolicy,
    IdleItem,
    ReloadCosts,
    make_eviction_policy,
)
from manylora.core.memory.prefix import PrefixIndex, block_digests, prefix_root

__all__ = [
    "EVICTION_POLICIES",
    "BlockTable",
    "Depth",
    "EvictionPolicy",
    "IdleItem",
    "Owner",
    "PageAllocator",
    "PageCache",
    "PrefixIndex",
    "ReloadCosts",
    "block_digests",
    "make_eviction_policy",
    "num_blocks",
    "prefix_root",
]
