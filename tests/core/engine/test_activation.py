"""Adapters that are activated inside a prompt (aLoRA): rows and blocks before that are the base's."""

from __future__ import annotations

import random
from dataclasses import replace

from harness import Rig, make_rig, request
from hypothesis import given
from hypothesis import strategies as st

from manylora.core.engine.acceptance import find_last
from manylora.core.memory import BlockTable, fork_mark, prefix_root
from manylora.core.memory.blocks import PrefixIndex
from manylora.core.types import AdapterKey

INVOCATION = (900, 901)
Rows = list[tuple[int, AdapterKey | None]]
"""The tokens of a sequence, each with the adapter that computed its KV."""


def ask(rig: Rig, name: str, prompt: tuple[int, ...], model: str = "", max_tokens: int = 3) -> None:
    rig.add(replace(request(name, 1, max_tokens, model), prompt=prompt))


def chunks(rig: Rig) -> list[tuple[str | None, int, int]]:
    """Return adapter, first token and number of tokens of all that runs, until no request is left."""
    ran: list[tuple[str | None, int, int]] = []
    rig.turn()
    while rig.core.has_pending_work:
        if rig.executor.plan is not None:
            parts = rig.executor.plan.sequences
            assert all((part.rank > 0) is (part.adapter is not None) for part in parts)
            ran += [(part.adapter, part.start, part.num_tokens) for part in parts]
        rig.step()
        rig.core.check_integrity()
    return ran


@given(tokens=st.lists(st.integers(0, 2), max_size=40), run=st.lists(st.integers(0, 2), min_size=1, max_size=6))
def test_the_last_occurrence_is_found(tokens: list[int], run: list[int]) -> None:
    starts = [start for start in range(len(tokens)) if tokens[start : start + len(run)] == run]
    assert find_last(tokens, run) == (starts[-1] if starts else None)


def test_a_step_runs_rows_of_the_base_or_of_the_adapter() -> None:
    """Whole prompts are cut there as well; the last occurrence counts, and generated tokens do not."""
    for composition in ("mixed", "whole-prompts"):
        rig = make_rig(max_num_batched_tokens=6, step_composition=composition)
        rig.register("a", invocation=INVOCATION)
        ask(rig, "r", (*INVOCATION, *range(6), *INVOCATION, 7), "a")
        ran = chunks(rig)
        key = "key-a"
        before = [(None, 0, 6), (None, 6, 2)] if composition == "mixed" else [(None, 0, 8)]
        assert ran == [*before, (key, 8, 3), (key, 11, 1), (key, 12, 1)]


def test_a_prompt_without_the_tokens_is_the_base_s() -> None:
    rig = make_rig()
    rig.register("a", invocation=INVOCATION)
    ask(rig, "base", tuple(range(9)))
    ask(rig, "r", (*range(8), INVOCATION[0]), "a")
    assert {adapter for adapter, _, _ in chunks(rig)} == {None}
    assert rig.tokens("r") == rig.tokens("base")
    assert rig.outputs["r"][-1].adapter == "key-a"
    assert rig.core.stats().num_not_activated == 1


def test_requests_in_a_chain_share_what_is_before() -> None:
    """One context, by the base and by adapters in turn: it is computed once, and its blocks are there once."""
    rig = make_rig(block_size=4)
    context = tuple(range(30))
    ask(rig, "base", (*context, 31))
    rig.drain()
    for name in "abc":
        rig.register(name, invocation=INVOCATION)
        ask(rig, name, (*context, *INVOCATION), name)
        before = rig.core.stats().num_prefix_pages
        assert chunks(rig)[:2] == [(None, 28, 2), (f"key-{name}", 30, 2)]
        assert rig.outputs[name][-1].num_cached_tokens == 28
        assert rig.core.stats().num_prefix_pages == before + 1  # its own block, in which it begins
    rig.register("plain")
    ask(rig, "plain", (*context, *INVOCATION), "plain")
    assert chunks(rig)[0] == ("key-plain", 0, 32)


def test_a_pre_empted_sequence_finds_both_parts_again() -> None:
    rig = make_rig(num_pages=13, block_size=4, max_num_batched_tokens=7)
    rig.register("a", 2, invocation=INVOCATION)
    ask(rig, "old", tuple(range(100, 109)), max_tokens=20)
    ask(rig, "r", (*range(9), *INVOCATION, 9), "a", max_tokens=16)
    ran = chunks(rig)
    assert rig.core.stats().num_preemptions > 0
    assert all(start >= 9 for adapter, start, _ in ran if adapter is not None)
    alone = make_rig(block_size=4)
    alone.register("a", 2, invocation=INVOCATION)
    ask(alone, "r", (*range(9), *INVOCATION, 9), "a", max_tokens=16)
    alone.drain()
    assert rig.tokens("r") == alone.tokens("r")


@given(data=st.data())
def test_blocks_are_shared_exactly_where_the_same_weights_computed_the_same_tokens(data: st.DataObject) -> None:
    """Every pair of sequences shares the leading full blocks of equal tokens whose rows are equal, and no others."""
    block_size = data.draw(st.integers(1, 4))
    keys = [None, AdapterKey("p"), AdapterKey("q"), AdapterKey("a"), AdapterKey("b")]  # the base, plain, activated
    rng = random.Random(data.draw(st.integers(0, 2**20)))
    index, pages = PrefixIndex(), 0
    seen: list[Rows] = []
    for _ in range(8):
        key, tokens = rng.choice(keys), [rng.choice((0, 0, 0, 1)) for _ in range(rng.randint(1, 12))]
        is_activated = key in keys[3:]
        position = rng.randint(0, len(tokens)) if is_activated else 0
        owner, fork = (None, (position, fork_mark(key, position))) if is_activated and key else (key, None)
        table = BlockTable(prefix_root("f", owner, ""), block_size, fork, key)
        rows = [(token, key if at >= position else None) for at, token in enumerate(tokens)]
        found = table.match(tokens, index, len(tokens))
        shared = max((num_equal(rows, other) // block_size for other in seen), default=0)
        assert len(found) == shared
        table.adopt(found)
        more = len(tokens) // block_size - len(found)
        table.grow(range(pages, pages + more))
        pages += more
        table.index_computed(tokens, len(tokens), index)
        seen.append(rows)
    blocks = {tuple(rows[:stop]) for rows in seen for stop in range(block_size, len(rows) + 1, block_size)}
    for key in keys[1:]:  # those that go with an adapter: each in which it computed a row
        assert len(index.pages_of(key)) == sum(block[-1][1] == key for block in blocks)


def num_equal(rows: Rows, others: Rows) -> int:
    """Return how many leading rows are equal."""
    pairs = enumerate(zip(rows, others, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(rows), len(others)))
