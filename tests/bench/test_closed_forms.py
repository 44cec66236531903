"""The engine as a queue with one server: it adds nothing to Lindley's recursion, and means are the formula's."""

from __future__ import annotations

import pytest
from closed_forms import LAWS, compare


@pytest.mark.parametrize("law", sorted(LAWS))
def test_waits_are_those_of_a_queue_with_one_server(law):
    row = compare(law, load=0.5, count=4_000, seed=0)
    assert row.largest_difference_s < 1e-6
    assert abs(row.mean_s - row.expected_s) < 2.0 * row.interval_s, "beyond four standard errors"
    assert row.interval_s < 0.2 * row.expected_s, "the bound above means nothing"
