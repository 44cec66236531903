"""The benchmark of updates: a few versions under a few streams, with every answer checked against PEFT."""

from __future__ import annotations

import pytest
from updates import MOST_DIFFERENCE, growth, parse, run_updates

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT's


def test_no_answer_is_lost_or_mixed_and_each_is_of_the_version_that_it_states() -> None:
    figures, text = run_updates(parse(["--quick"]))
    assert (figures["outcomes"]["lost"], figures["outcomes"]["mixed"], figures["faults"]) == (0, 0, [])
    assert figures["outcomes"]["whole"] >= 8
    assert figures["largest_difference"] <= MOST_DIFFERENCE
    assert len(figures["first_tokens_s"]) == 5
    assert "python bench/updates.py --quick" in text


def test_growth_compares_the_last_quarter_with_the_second() -> None:
    assert round(growth([9, 9, 10, 10, 10, 10, 11, 11]), 6) == 0.1
    assert growth([1]) == 0.0
