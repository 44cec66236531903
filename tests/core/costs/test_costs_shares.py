"""The division of a step's assisted rows among workers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from manylora.core.costs.shares import RowCost, split_rows


@given(
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1e-3), st.floats(1e-6, 1e-3)), min_size=1, max_size=6),
    st.integers(1, 16),
)
def test_shares_cover_all_rows_at_about_equal_cost(segments: list[tuple[int, float, float]], num_workers: int) -> None:
    costs = [(num_rows, RowCost(fixed_s, row_s)) for num_rows, fixed_s, row_s in segments]
    firsts = split_rows(costs, num_workers)
    total = sum(num_rows for num_rows, _ in costs)
    assert firsts[0] == 0 and firsts[-1] == total and firsts == sorted(set(firsts))
    assert len(firsts) - 1 <= num_workers
    by_row = [cost.fixed_s / num_rows + cost.row_s for num_rows, cost in costs for _ in range(num_rows)]
    fair = sum(by_row) / (len(firsts) - 1)
    for first, last in pairwise(firsts):
        assert sum(by_row[first:last]) <= fair + 2 * max(by_row) + 1e-9 or last - first == 1


def test_few_rows_take_one_core() -> None:
    cost = RowCost(fixed_s=1e-3, row_s=1e-4)
    assert [len(split_rows([(n, cost)], 8)) - 1 for n in (1, 10, 11, 40, 400)] == [1, 1, 2, 4, 8]
    slow = RowCost(fixed_s=1e-3, row_s=1e-4, handoff_s=1e-3)
    assert [len(split_rows([(n, slow)], 8)) - 1 for n in (1, 10, 40, 90, 1000)] == [1, 1, 2, 3, 8]
