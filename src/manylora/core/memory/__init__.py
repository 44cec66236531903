"""Memory: one pool of equal pages for KV, prefix blocks and adapters; page numbers only, no tensors."""

from manylora.core.memory.allocator import Owner, PageAllocator
from manylora.core.memory.blocks import BlockTable, fork_mark, num_blocks, prefix_root
from manylora.core.memory.cache import PageCache
from manylora.core.memory.eviction import (
    EVICTION_POLICIES,
    Depth,
    EvictionPolicy,
    IdleItem,
    KeyedEviction,
    ReloadCosts,
    make_eviction_policy,
)

__all__ = [
    "EVICTION_POLICIES",
    "BlockTable",
    "Depth",
    "EvictionPolicy",
    "IdleItem",
    "KeyedEviction",
    "Owner",
    "PageAllocator",
    "PageCache",
    "ReloadCosts",
    "fork_mark",
    "make_eviction_policy",
    "num_blocks",
    "prefix_root",
]
