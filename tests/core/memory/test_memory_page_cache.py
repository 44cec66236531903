"""The page store under every eviction policy: what may be dropped, how much, and that everything adds up."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manylora.core.memory import (
    EVICTION_POLICIES,
    BlockTable,
    Depth,
    Owner,
    PageCache,
    ReloadCosts,
    make_eviction_policy,
)
from manylora.core.memory.eviction import IdleItem
from manylora.core.memory.eviction.ranking import Ranking
from manylora.core.types import AdapterKey

BLOCK = 4
KEYS = [AdapterKey(f"a{i}") for i in range(6)]


class StoreMachine(RuleBasedStateMachine):
    """Sequences and adapters come and go; a model beside the store knows what is in use and what is wanted."""

    page_cache: PageCache

    @initialize(num_pages=st.integers(6, 24), eviction=st.sampled_from(sorted(EVICTION_POLICIES)))
    def start(self, num_pages: int, eviction: str) -> None:
        self.now = 0.0
        self.dropped: list[AdapterKey] = []
        self.num_blocks_dropped = 0
        self.depths: dict[AdapterKey, Depth | None] = {}
        self.sizes: dict[AdapterKey, int] = {}
        self.tables: list[BlockTable] = []
        self.page_cache = PageCache(
            num_pages,
            BLOCK,
            policy=make_eviction_policy(eviction, ReloadCosts()),
            on_adapter_dropped=lambda key, now: self.dropped.append(key),
            on_prefix_dropped=self.count_blocks,
        )

    def count_blocks(self, num_blocks: int, now: float) -> None:
        self.num_blocks_dropped += num_blocks

    def claim(self, num_pages: int, depth: Depth, spare: AdapterKey | None, make) -> object:  # type: ignore[no-untyped-def]
        """Claim, and check that exactly what was needed went, and only what might."""
        allocator = self.page_cache.allocator
        self.dropped, self.num_blocks_dropped = [], 0
        num_free, num_idle_blocks = allocator.num_free, allocator.count(Owner.PREFIX)
        claimed = make()
        if claimed is None:
            assert not self.dropped and not self.num_blocks_dropped and allocator.num_free == num_free
            return None
        gained = self.num_blocks_dropped + sum(self.sizes[key] for key in self.dropped)
        assert allocator.num_free == num_free + gained - num_pages
        if gained:
            last = self.sizes[self.dropped[-1]] if self.dropped else 1
            assert allocator.num_free < max(last, 1), "more was dropped than needed"
        for key in self.dropped:
            assert self.depths[key] is not None, "in use"
            assert key != spare
            if self.depths[key] is Depth.WANTED:
                assert depth is Depth.WANTED
                left = [other for other, at in self.depths.items() if at is Depth.IDLE and other not in self.dropped]
                assert set(left) <= {spare}, "a wanted adapter went while an idle one was left"
                assert self.num_blocks_dropped == num_idle_blocks or allocator.count(Owner.PREFIX) == 0
        for key in self.dropped:
            del self.depths[key], self.sizes[key]
        return claimed

    @rule(seconds=st.floats(0.01, 400.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(length=st.integers(1, 24), salt=st.integers(0, 2), depth=st.sampled_from(Depth), computes=st.booleans())
    def run_sequence(self, length: int, salt: int, depth: Depth, computes: bool) -> None:
        tokens = list(range(length))
        table = BlockTable(bytes([salt]), BLOCK, adapter=KEYS[salt] if salt else None)
        shared = table.match(tokens, self.page_cache.prefix)
        num_missing = -(-length // BLOCK) - len(shared)
        num_idle = sum(self.page_cache.allocator.owner(page) is Owner.PREFIX for page in shared)
        fits = num_missing <= self.page_cache.num_claimable(depth) - num_idle
        # Shared pages leave the class of idle things without being free: they are not part of what is gained.
        pages = self.claim(
            num_missing, depth, None, lambda: self.page_cache.claim_kv(num_missing, self.now, depth, shared=shared)
        )
        assert (pages is not None) == fits
        if pages is None:
            return
        table.adopt(shared)
        table.pages.extend(pages)  # type: ignore[arg-type]
        if computes:
            table.index_computed(tokens, length, self.page_cache.prefix)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.page_cache.release_kv(table.clear(), self.now)

    @rule(
        key=st.sampled_from(KEYS),
        num_pages=st.integers(1, 6),
        depth=st.sampled_from(Depth),
        spare=st.none() | st.sampled_from(KEYS),
    )
    def load(self, key: AdapterKey, num_pages: int, depth: Depth, spare: AdapterKey | None) -> None:
        if key in self.depths:
            return
        fits = num_pages <= self.page_cache.num_claimable(depth, spare)
        pages = self.claim(
            num_pages,
            depth,
            spare,
            lambda: self.page_cache.claim_adapter(key, num_pages, self.now, depth, spare=spare),
        )
        assert (pages is not None) == fits
        if pages is not None:
            self.depths[key], self.sizes[key] = None, num_pages

    @rule(key=st.sampled_from(KEYS), depth=st.none() | st.sampled_from(Depth), read_bytes=st.sampled_from([0, 500]))
    def change(self, key: AdapterKey, depth: Depth | None, read_bytes: int) -> None:
        if key in self.depths:
            self.page_cache.set_adapter_depth(
                key, depth, self.now, copy_bytes=512 * self.sizes[key], read_bytes=read_bytes
            )
            self.depths[key] = depth

    @rule(key=st.sampled_from(KEYS))
    def use(self, key: AdapterKey) -> None:
        self.page_cache.adapter_used(key, self.now)

    @rule(key=st.sampled_from(KEYS))
    def unload(self, key: AdapterKey) -> None:
        if key in self.depths:
            self.page_cache.release_adapter(key)
            del self.depths[key], self.sizes[key]
        self.page_cache.forget_adapter(key, self.now)
        assert not self.page_cache.prefix.pages_of(key)

    @rule(num_pages=st.integers(1, 12), price=st.sampled_from([0.0, 1e-9, 1e-5, 1e-3, float("inf")]))
    def ask_what_could_be_displaced(self, num_pages: int, price: float) -> None:
        could = self.page_cache.can_displace(num_pages, price, self.now)
        if price == 0.0:
            assert could == (num_pages <= self.page_cache.allocator.num_free)
        if could:
            assert num_pages <= self.page_cache.num_claimable(Depth.IDLE)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "store"):
            self.page_cache.check_integrity()
            assert set(self.depths) == set(self.page_cache._adapter_pages)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=120, stateful_step_count=40)


class RankingMachine(RuleBasedStateMachine):
    """The ranking by groups against the plain minimum over all items."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.ranking = Ranking(self.worth)
        self.items: dict[int, IdleItem] = {}

    @staticmethod
    def worth(item: IdleItem, now: float) -> float:
        """Falls with age within a size, in steps; sizes change places as time passes."""
        return item.num_pages / (1.0 + (now - item.idle_since) // 4 * item.num_pages)

    @rule(key=st.integers(0, 12), num_pages=st.integers(1, 3), ago=st.integers(0, 30))
    def add(self, key: int, num_pages: int, ago: int) -> None:
        if key not in self.items:
            item = self.items[key] = IdleItem(key, num_pages, self.now - ago)
            self.ranking.add(item, num_pages, item.idle_since)

    @rule(key=st.integers(0, 12))
    def remove(self, key: int) -> None:
        if key in self.items:
            assert self.ranking.remove(key) == self.items.pop(key)

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(spare=st.none() | st.integers(0, 12))
    def ask(self, spare: int | None) -> None:
        found = self.ranking.least(self.now, spare)
        others = [item for key, item in self.items.items() if key != spare]
        assert (found is None) == (not others)
        if found is not None:
            assert found.key != spare and self.items[found.key] is found
            assert self.worth(found, self.now) == min(self.worth(item, self.now) for item in others)


TestRanking = RankingMachine.TestCase
TestRanking.settings = settings(max_examples=100, stateful_step_count=60)
