"""Blocks of tokens: the pages of one sequence's positions, and the index of pages by the tokens whose KV they hold.

::

    tokens   0 .. 15 | 16 .. 31 | 32 .. 40
    pages      p7    |    p2    |    p9          position i lies in pages[i // block_size]
    digests    d0    |    d1    |                full blocks only; d0, d1 are in the prefix index once computed

A block is identified by a digest chained over all tokens before it. The chain starts from a *root*: the base model, the
adapter's content and the request's salt. Blocks of two tenants are therefore equal only if the same weights compute the
same KV, and a replaced adapter never reads KV of its previous version. Digests are cryptographic, so that a tenant
cannot craft a collision.

::

    root = H(base, adapter, salt)
    d0 = H(root, tokens[0:16])    d1 = H(d0, tokens[16:32])    ...      one digest per full block

An adapter that is activated inside a prompt (aLoRA) shares the blocks before with the base, and with every other such
adapter: its chain starts from the base's root and *forks* in the block of its first row, which is its own::

    tokens   0 .. 15 | 16 .. 31 | 32 .. 47                    activated at 20
    root     base    | H(d0, fork), fork = H(adapter, 20) ...
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from manylora.core.types import AdapterKey

__all__ = ["BlockTable", "PrefixIndex", "block_digests", "fork_mark", "num_blocks", "prefix_root"]

DIGEST_BYTES = 16


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Return the number of pages for ``num_tokens`` positions."""
    return -(-num_tokens // block_size)


def prefix_root(fingerprint: str, adapter: AdapterKey | None, salt: str) -> bytes:
    """Return the digest that starts the chain of a (base, adapter version, salt)."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (fingerprint, adapter or "", salt):
        encoded = part.encode()
        # Lengths in front, so that different triples never have the same bytes.
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def fork_mark(adapter: AdapterKey, position: int) -> bytes:
    """Return the digest that sets the blocks of an adapter apart from the base's, from its first row on.

    The position counts: in two prompts with the same tokens so far, the last occurrence may be another one.
    """
    return hashlib.blake2b(f"{position}:{adapter}".encode(), digest_size=DIGEST_BYTES).digest()


def block_digests(parent: bytes, tokens: Seq[int], start: int, stop: int, block_size: int) -> list[bytes]:
    """Return the digests of the full blocks in ``tokens[start:stop]``, chained from ``parent``.

    That is the digest of the block that ends at ``start``, a multiple of ``block_size``, or the root. Token ids are
    below 2**31.
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
    """Maps digests to pages and back, blocks to the blocks that follow them, and adapters to their blocks.

    A block is found only through those before it. Without its parent it is unreachable until the parent has been
    computed again, under the same digest. An adapter that was forgotten leaves blocks that no request asks for.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._parent_of: dict[int, bytes] = {}
        self._children: dict[bytes, dict[int, None]] = {}  # digest -> indexed pages of the blocks that follow it
        self._adapter_of: dict[int, AdapterKey] = {}
        self._pages_of: dict[AdapterKey, dict[int, None]] = {}

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

    def insert(self, digest: bytes, page: int, parent: bytes, adapter: AdapterKey | None = None) -> None:
        """Index ``page`` under ``digest`` unless the block is indexed already (two requests computed it at once).

        ``parent`` is the digest of the block before it, or the root; ``adapter`` has computed it, if not the base.
        """
        if digest not in self._page_of and page not in self._digest_of:
            if adapter is not None:
                self._adapter_of[page] = adapter
                self._pages_of.setdefault(adapter, {})[page] = None
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
        if (adapter := self._adapter_of.pop(page, None)) is not None:
            of_adapter = self._pages_of[adapter]
            del of_adapter[page]
            if not of_adapter:
                del self._pages_of[adapter]

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

    def adapter_of(self, page: int) -> AdapterKey | None:
        """Return the adapter that computed an indexed page; ``None`` for the base."""
        return self._adapter_of.get(page)

    def pages_of(self, adapter: AdapterKey) -> list[int]:
        """Return the indexed pages that an adapter has computed, those of the base before its activation left out."""
        return list(self._pages_of.get(adapter, ()))


class BlockTable:
    """Pages of ``block_size`` tokens and block digests of one sequence, chained from ``root`` (``prefix_root``).

    With a ``fork``, a position and its ``fork_mark``, the block of that position and those behind it are set apart.
    They are the ``adapter``'s then; without one, all blocks are.
    """

    __slots__ = ("_adapter", "_digests", "_fork", "_root", "block_size", "full_at", "pages")

    def __init__(
        self, root: bytes, block_size: int, fork: tuple[int, bytes] | None = None, adapter: AdapterKey | None = None
    ) -> None:
        self.pages: list[int] = []
        self._root = root
        self._adapter = adapter
        self._fork = fork
        self.block_size = block_size
        self._digests: list[bytes] = []
        self.full_at = block_size  # number of computed tokens from which on there is a block to index

    def match(self, tokens: Seq[int], index: PrefixIndex, most: int | None = None) -> list[int]:
        """Return pages that hold the longest computed prefix of ``tokens``, at most ``most`` tokens of it.

        By default all but the last token, which is always run: the next token is drawn from its logits.
        """
        self._extend_digests(tokens, len(tokens))
        return index.match(self._digests, (len(tokens) - 1 if most is None else most) // self.block_size)

    def adopt(self, pages: Seq[int]) -> None:
        """Start from shared pages."""
        assert not self.pages
        self.pages.extend(pages)
        self.full_at = (len(pages) + 1) * self.block_size

    def grow(self, pages: Seq[int]) -> None:
        """Add pages for further positions."""
        self.pages.extend(pages)

    def index_computed(self, tokens: Seq[int], num_computed: int, index: PrefixIndex) -> None:
        """Put every full block below ``num_computed`` into the index."""
        if num_computed < self.full_at:
            return
        num_full, num_indexed = num_computed // self.block_size, self.full_at // self.block_size - 1
        self._extend_digests(tokens, num_computed)
        num_of_base = 0 if self._fork is None else self._fork[0] // self.block_size
        for block in range(num_indexed, num_full):
            parent = self._digests[block - 1] if block else self._root
            adapter = None if block < num_of_base else self._adapter
            index.insert(self._digests[block], self.pages[block], parent, adapter)
        self.full_at = (num_full + 1) * self.block_size

    def clear(self) -> list[int]:
        """Remove and return the pages; digests stay, because the tokens stay.

        The list is not changed, because a step in flight may still read it: the table starts another.
        """
        pages, self.pages = self.pages, []
        self.full_at = self.block_size
        return pages

    def _extend_digests(self, tokens: Seq[int], stop: int) -> None:
        block_size, start = self.block_size, len(self._digests) * self.block_size
        parent = self._digests[-1] if self._digests else self._root
        if self._fork is not None:
            position, mark = self._fork
            forks_at = position - position % block_size
            if start <= forks_at < stop:
                self._digests += block_digests(parent, tokens, start, forks_at, block_size)
                before = self._digests[-1] if self._digests else self._root
                # ``person`` keeps the digest apart from those of tokens, whatever they are.
                parent = hashlib.blake2b(before + mark, digest_size=DIGEST_BYTES, person=b"fork").digest()
                start = forks_at
        self._digests += block_digests(parent, tokens, start, stop, block_size)
