"""Prefix index: the pages that hold the KV of blocks of tokens.

A block is identified by a digest chained over all tokens before it. The chain starts from a *root*: the base model, the
adapter's content and the request's salt. Blocks of two tenants are therefore equal only if the same weights compute the
same KV, and a replaced adapter never reads KV of its previous version. Digests are cryptographic, so that a tenant
cannot craft a collision.

::

    root = H(base, adapter, salt)
    d0 = H(root, tokens[0:16])    d1 = H(d0, tokens[16:32])    ...      one digest per full block
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from manylora.core.types import AdapterKey

__all__ = ["PrefixIndex", "block_digests", "prefix_root"]

DIGEST_BYTES = 16


def prefix_root(fingerprint: str, adapter: AdapterKey | None, salt: str) -> bytes:
    """Return the digest that starts the chain of one (base, adapter version, salt)."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (fingerprint, adapter or "", salt):
        encoded = part.encode()
        # Lengths in front, so that different triples never have the same bytes.
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_digests(parent: bytes, tokens: Seq[int], start: int, stop: int, block_size: int) -> list[bytes]:
    """Return the digests of the full blocks in ``tokens[start:stop]``, chained from ``parent``.

    Args:
        parent: Digest of the block that ends at ``start``, or the root when ``start`` is 0.
        tokens: Token ids, each below 2**31.
        start: A multiple of ``block_size``.
        stop: End of the tokens; a last block that is not full is left out.
        block_size: Tokens per block.
    """
    digests: list[bytes] = []
    if stop - start < block_size:  # most steps of a sequence
        return digests
    ids = array("i", tokens[start:stop])
    stride = block_size * ids.itemsize
    blocks = ids.tobytes()
    for begin in range(0, len(blocks) - stride + 1, stride):
        parent = hashlib.blake2b(parent + blocks[begin : begin + stride], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


class PrefixIndex:
    """Maps digests to pages and back, and blocks to the blocks that follow them.

    A block is found only through those before it. Without its parent it is unreachable until the parent has been
    computed again, under the same digest.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._parent_of: dict[int, bytes] = {}
        self._children: dict[bytes, dict[int, None]] = {}  # digest -> indexed pages of the blocks that follow it

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        return page in self._digest_of

    def match(self, digests: Seq[bytes], max_blocks: int) -> list[int]:
        """Return the pages of the longest indexed run of blocks from the first, at most ``max_blocks``."""
        pages = []
        for digest in digests[:max_blocks]:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, digest: bytes, page: int, parent: bytes) -> None:
        """Index ``page`` under ``digest`` unless the block is indexed already (two requests computed it at once).

        ``parent`` is the digest of the block before it, or the root.
        """
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest
            self._parent_of[page] = parent
            siblings = self._children.get(parent)
            if siblings is None:
                self._children[parent] = {page: None}
            else:
                siblings[page] = None

    def remove(self, page: int) -> None:
        """Remove ``page`` from the index, before its contents change."""
        del self._page_of[self._digest_of.pop(page)]
        parent = self._parent_of.pop(page)
        siblings = self._children[parent]
        del siblings[page]
        if not siblings:
            del self._children[parent]

    def follow(self, chain: list[int], may_go: Callable[[int], bool]) -> None:
        """Extend a non-empty ``chain`` by blocks that follow its last one and may be dropped, up to the end."""
        while True:
            for child in self._children.get(self._digest_of[chain[-1]], ()):
                if may_go(child):
                    chain.append(child)
                    break
            else:
                return

    def pages(self) -> list[int]:
        """Return all indexed pages."""
        return list(self._digest_of)
