"""The quick ways of memory against plain ones: the same blocks go, in the same order, and the same is learnt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Container

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manylora.core.memory import (
    EVICTION_POLICIES,
    BlockTable,
    Depth,
    EvictionPolicy,
    IdleItem,
    PageCache,
    ReloadCosts,
    make_eviction_policy,
)
from manylora.core.memory.blocks import block_digests
from manylora.core.memory.eviction.policy import ItemKey
from manylora.core.memory.eviction.price import FIRST_AGE, NUM_AGES, ReuseModel
from manylora.core.types import AdapterKey

BLOCK = 1
KEYS = [AdapterKey(f"a{i}") for i in range(3)]


class Arbitrary:
    """An eviction policy that cares for nothing: it names blocks in the middle of chains as often as at their ends."""

    keeps_idle_adapters = True

    def __init__(self) -> None:
        self._items: dict[ItemKey, tuple[IdleItem, Depth]] = {}

    def used(self, key: ItemKey, now: float) -> None: ...

    def forget(self, key: AdapterKey, now: float) -> None: ...

    def add(self, item: IdleItem, depth: Depth) -> None:
        self._items[item.key] = item, depth

    def remove(self, key: ItemKey) -> None:
        del self._items[key]

    def evict(self, key: ItemKey, now: float) -> None:
        del self._items[key]

    def victim(self, depth: Depth, now: float, spare: AdapterKey | None = None) -> IdleItem | None:
        items = [item for item, at in self._items.values() if at is depth and item.key != spare]
        return min(items, key=lambda item: item.key * 29 % 31 if isinstance(item.key, int) else 15, default=None)

    def price(self, item: IdleItem, now: float) -> float:
        return 1e-6


class PlainStore(PageCache):
    """Walks from the block that the policy named to the end of its chain each time, and remembers no way."""

    def _victim(
        self, depth: Depth, now: float, spare: AdapterKey | None, taken: Container[ItemKey] = ()
    ) -> IdleItem | None:
        victim = self._policy.victim(depth, now, spare)
        if victim is None or isinstance(victim.key, str):
            return victim
        page, prefix = victim.key, self.prefix
        while following := [
            child
            for child in prefix._children.get(prefix._digest_of[page], ())
            if child in self._droppable and child not in taken
        ]:
            page = following[0]
        return self._droppable[page][0]


def make_store(kind: type[PageCache], num_pages: int, policy: EvictionPolicy) -> PageCache:
    return kind(
        num_pages,
        BLOCK,
        policy=policy,
        on_adapter_dropped=lambda key, now: None,
        on_prefix_dropped=lambda num_pages, now: None,
    )


def test_the_way_down_is_looked_for_again_when_another_block_goes_idle() -> None:
    """Blocks 1 and 2 follow block 0, and 3 follows 2; 1 was there before 2, and goes idle when 3 has gone."""

    def dropped(kind: type[PageCache]) -> list[int]:
        page_cache = make_store(kind, 7, Arbitrary())

        def run(tokens: list[int]) -> BlockTable:
            table = BlockTable(b"root", BLOCK)
            shared = table.match(tokens, page_cache.prefix)
            table.adopt(shared)
            table.pages.extend(page_cache.claim_kv(len(tokens) - len(shared), 0.0, Depth.IDLE, shared=shared) or ())
            return table

        first, other = run([0]), run([0, 1])  # neither has computed anything yet: each has a block 0 of its own
        first.index_computed([0], 1, page_cache.prefix)
        other.index_computed([0, 1], 2, page_cache.prefix)
        third = run([0, 2, 3])
        third.index_computed([0, 2, 3], 3, page_cache.prefix)
        for table in (first, third):
            page_cache.release_kv(table.clear(), 0.0)
        gone = []
        for num_pages in (3, 1, 1):
            before = page_cache.prefix.pages()
            page_cache.claim_kv(num_pages, 0.0, Depth.IDLE)
            page_cache.check_integrity()
            gone += [page for page in before if page not in page_cache.prefix]
            if num_pages == 3:
                page_cache.release_kv(other.clear(), 0.0)
        return gone

    assert dropped(PageCache) == dropped(PlainStore) != []


class TwinStores(RuleBasedStateMachine):
    """Prompts that branch, on two stores with one life; whatever one is asked, the other is."""

    @initialize(num_pages=st.integers(8, 24), eviction=st.sampled_from(["arbitrary"] * 6 + sorted(EVICTION_POLICIES)))
    def start(self, num_pages: int, eviction: str) -> None:
        self.now = 0.0
        self.stores = [
            make_store(
                kind,
                num_pages,
                Arbitrary() if eviction == "arbitrary" else make_eviction_policy(eviction, ReloadCosts()),
            )
            for kind in (PageCache, PlainStore)
        ]
        self.running: list[tuple[list[int], list[BlockTable]]] = []

    def both(self, ask: Callable[[PageCache], object]) -> object:
        answer, plain = (ask(page_cache) for page_cache in self.stores)
        assert answer == plain
        return answer

    @rule(seconds=st.floats(0.01, 200.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def run_sequence(self, tokens: list[int]) -> None:
        tables = [BlockTable(b"root", BLOCK) for _ in self.stores]

        def run(page_cache: PageCache) -> object:
            table = tables[self.stores.index(page_cache)]
            shared = table.match(tokens, page_cache.prefix)
            pages = page_cache.claim_kv(-(-len(tokens) // BLOCK) - len(shared), self.now, Depth.IDLE, shared=shared)
            if pages is not None:
                table.adopt(shared)
                table.pages.extend(pages)
            return shared, pages

        _, pages = self.both(run)  # type: ignore[misc]
        if pages is not None:
            self.running.append((tokens, tables))

    # Later than its start: so several compute the same blocks, and one's may follow those of another that has ended.
    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        tokens, tables = data.draw(st.sampled_from(self.running))
        for page_cache, table in zip(self.stores, tables, strict=True):
            table.index_computed(tokens, len(tokens), page_cache.prefix)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_sequence(self, data: st.DataObject) -> None:
        _, tables = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for page_cache, table in zip(self.stores, tables, strict=True):
            page_cache.release_kv(table.clear(), self.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_pages=st.integers(1, 6))
    def grow(self, data: st.DataObject, num_pages: int) -> None:
        _, tables = data.draw(st.sampled_from(self.running))
        pages = self.both(lambda page_cache: page_cache.claim_kv(num_pages, self.now, Depth.WANTED))
        for table in tables:
            table.pages.extend(pages or ())  # type: ignore[call-overload]

    @rule(key=st.sampled_from(KEYS), num_pages=st.integers(1, 4), depth=st.sampled_from(Depth))
    def load(self, key: AdapterKey, num_pages: int, depth: Depth) -> None:
        if key in self.stores[0]._adapter_pages:
            return
        if self.both(lambda page_cache: page_cache.claim_adapter(key, num_pages, self.now, Depth.IDLE)) is not None:
            for page_cache in self.stores:
                page_cache.adapter_used(key, self.now)
                page_cache.set_adapter_depth(key, depth, self.now, copy_bytes=512 * num_pages)

    @rule(num_pages=st.integers(1, 12), price=st.sampled_from([1e-7, 1e-5, 1e-3, float("inf")]))
    def ask_what_could_be_displaced(self, num_pages: int, price: float) -> None:
        self.both(lambda page_cache: page_cache.can_displace(num_pages, price, self.now))

    @invariant()
    def are_alike(self) -> None:
        if hasattr(self, "stores"):
            self.both(
                lambda page_cache: (page_cache.prefix.pages(), page_cache.allocator._free, list(page_cache._droppable))
            )
            self.stores[0].check_integrity()


TestTwinStores = TwinStores.TestCase
TestTwinStores.settings = settings(max_examples=60, stateful_step_count=60)

AGES = st.floats(0.0, 1e9) | st.sampled_from([2.0**power for power in range(-12, 30)])


@given(st.lists(st.tuples(AGES, AGES), max_size=6))
@settings(max_examples=200)
def test_time_at_risk_is_booked_as_bucket_by_bucket(gaps: list[tuple[float, float]]) -> None:
    def bucket_of(age: float) -> int:
        return next((b for b in range(NUM_AGES - 1) if age < 2.0 ** (FIRST_AGE + b)), NUM_AGES - 1)

    model: ReuseModel[str] = ReuseModel()
    plain = [0.0] * NUM_AGES
    for number, (first, second) in enumerate(gaps):
        model.idle(str(number), 0.0)
        history, begin = model._histories[str(number)], 0.0
        for age in sorted((first, second)):
            model._book(history, age)
            for bucket in range(bucket_of(begin), bucket_of(age)):
                end = 2.0 ** (FIRST_AGE + bucket)
                plain[bucket] += end - begin
                begin = end
            plain[bucket_of(age)] += max(0.0, age - begin)
            begin = age
    assert model._at_risk[0] == plain, "to the last bit"


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 7), st.integers(0, 3), st.integers(0, 45))
def test_digests_are_those_of_each_block_by_itself(tokens: list[int], size: int, first: int, stop: int) -> None:
    plain, parent = [], b"parent"
    for begin in range(first * size, min(stop, len(tokens)) - size + 1, size):
        block = array("i", tokens[begin : begin + size])
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest()
        plain.append(parent)
    assert block_digests(b"parent", tokens, first * size, min(stop, len(tokens)), size) == plain
