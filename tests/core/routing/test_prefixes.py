"""The account of prompts that were sent to replicas, and the choice by it."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.core.routing import Dispatcher, ReplicaView
from manylora.core.routing import prefixes as account
from manylora.core.routing.auto import AutoRouter
from manylora.core.routing.prefixes import EDGES, SIZES, SentPrefixes, text_blocks, token_blocks
from manylora.core.types import Request

BLOCK = SIZES[0] // 4
"""Tokens of the first blocks."""

prompts = st.lists(st.integers(0, 1), max_size=4).map(
    lambda names: (*(name for name in names for _ in range(BLOCK)), 9)
)
steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 2), prompts, st.sampled_from("xy")),
    st.tuples(st.just("forget"), st.integers(0, 2)),
    st.tuples(st.just("replace"), st.integers(0, 2)),
)


class Naive:
    """The same account as a list of prefixes for each replica, the last used at its end."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, []

    def note(self, salt, prompt):
        whole = [(salt, prompt[: end * BLOCK]) for end in range(1, len(prompt) // BLOCK + 1)]
        self.held = [one for one in self.held if one not in whole] + whole[::-1]
        self.held = self.held[-self.most :]

    def cached(self, salt, prompt):
        depth = 0
        while (depth + 1) * BLOCK <= len(prompt) and (salt, prompt[: (depth + 1) * BLOCK]) in self.held:
            depth += 1
        return min(depth * BLOCK, len(prompt) - 1)


@settings(deadline=None)
@given(events=st.lists(steps, max_size=30), most=st.integers(1, 6))
def test_the_account_is_that_of_a_list_of_prefixes_for_each_replica(events: list, most: int) -> None:
    views, naive, sent = (
        [ReplicaView(kv_tokens=most * BLOCK) for _ in range(3)],
        [Naive(most) for _ in range(3)],
        SentPrefixes(),
    )
    for view in views:
        sent.join(view)
    for event in events:
        match event:
            case ("send", place, prompt, salt):
                blocks = token_blocks("model", salt, prompt)
                sent.expect(blocks)
                assert [view.cached_tokens for view in views] == [one.cached(salt, prompt) for one in naive]
                sent.note(views[place], blocks)
                naive[place].note(salt, prompt)
            case ("forget", place):
                sent.forget(views[place])
                naive[place] = Naive(most)
            case ("replace", place):
                sent.leave(views[place])
                views[place], naive[place] = ReplicaView(kv_tokens=most * BLOCK), Naive(most)
                sent.join(views[place])
        assert num_blocks(sent) == sum(len(one.held) for one in naive)
    for view in views:
        sent.leave(view)
    assert not sent._holders


def test_blocks_of_two_tenants_or_adapters_have_nothing_in_common_and_are_bounded() -> None:
    prompt = bytes(2**20)
    roots = [("a", b"x"), ("a", b"y"), ("b", b"x"), ("a ", b"x"), ("", b"ax")]
    hashes = [text_blocks(*root, prompt, len(prompt), 2**18).hashes for root in roots]
    assert len({one for chain in hashes for one in chain}) == len(roots) * len(SIZES)
    assert text_blocks(*roots[0], prompt[: EDGES[20] + 7], EDGES[20] + 7, 99).hashes == hashes[0][:20]
    assert len(token_blocks("a", "x", (0,) * 2**18).hashes) == len(SIZES)


def num_blocks(sent: SentPrefixes) -> int:
    """Blocks over all replicas."""
    return sum(len(held.blocks) for held in sent._held.values())


def test_a_tenant_that_sends_ever_new_prompts_does_not_grow_the_account(monkeypatch) -> None:
    monkeypatch.setattr(account, "MOST_BLOCKS", 64)
    sent, views, rng = SentPrefixes(), [ReplicaView() for _ in range(4)], Random(1)
    for view in views:
        sent.join(view)
    for _ in range(100):
        blocks = text_blocks("a", b"", rng.randbytes(10_000), 10_000, 2500)
        sent.expect(blocks)
        sent.note(rng.choice(views), blocks)
        assert num_blocks(sent) <= 64
    sent.join(ReplicaView())
    assert num_blocks(sent) <= 64 * 4 / 5
    assert len(sent._holders) <= num_blocks(sent)


def request(number: int, prompt: tuple[int, ...], model: str = "a") -> Request:
    return Request(request_id=str(number), prompt=prompt, model=model)


def test_a_conversation_stays_and_a_hot_prefix_spreads_evenly() -> None:
    """A prompt that all have in common is on every replica in the end; what one replica alone has, draws to it."""
    for model in ("a", "base"):
        dispatcher = Dispatcher(AutoRouter({"a": 16}, max_num_seqs=64), 4, {"a": 16})
        system = tuple(range(4096))
        places = [dispatcher.dispatch(request(number, (*system, number), model)) for number in range(100)]
        loads = [view.load for view in dispatcher.views]
        assert max(loads) <= 1.25 * min(loads), (model, loads)
        for number in range(100):
            dispatcher.ended(str(number))
        talk = (*system, *range(5000, 7000))
        home = dispatcher.dispatch(request(200, talk, model))
        dispatcher.ended("200")
        for turn in range(3):
            assert dispatcher.dispatch(request(201 + turn, (*talk, *range(turn * 300)), model)) == home
            dispatcher.ended(str(201 + turn))
        assert home in places


def test_replicas_with_queues_or_full_memory_get_fewer_requests() -> None:
    for is_queue in (True, False):
        dispatcher = Dispatcher(AutoRouter({}, max_num_seqs=256), 2)
        for number in range(8):
            dispatcher.dispatch(request(number, (1,) * 100))
        full, free = dispatcher.views
        for view in dispatcher.views:
            view.load_then = view.load
        if is_queue:
            full.num_queued = 4
        else:
            full.kv_usage, free.kv_usage = 1.0, 0.1
        assert [dispatcher.dispatch(request(number, (2,) * 100)) for number in (10, 11, 12)] == [1, 1, 1]
