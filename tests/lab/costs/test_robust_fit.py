"""The robust fit: never negative, whatever the matrix, and not moved by single bad measurements."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from manylora.lab.costs.calibrate import fit_robustly


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 30),
    num_columns=st.integers(1, 12),
    num_equal=st.integers(0, 3),
    num_empty=st.integers(0, 2),
)
def test_no_coefficient_is_negative_and_an_exact_fit_is_found(
    seed: int, num_rows: int, num_columns: int, num_equal: int, num_empty: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(0.0, 1.0, (num_rows, num_columns)) * 10.0 ** rng.integers(-4, 5, num_columns)
    matrix[:, rng.permutation(num_columns)[:num_equal]] = matrix[:, :1]  # no fit can tell these apart
    matrix[:, rng.permutation(num_columns)[:num_empty]] = 0.0
    truth = rng.uniform(0.0, 1.0, num_columns) * (rng.random(num_columns) < 0.7)
    seconds = matrix @ truth + 1e-3
    found = fit_robustly(np.column_stack([np.ones(num_rows), matrix]), seconds)
    assert (found >= 0).all()
    assert np.isfinite(found).all()
    assert np.abs((found[0] + matrix @ found[1:]) / seconds - 1).max() < 1e-6


def test_single_bad_measurements_hardly_move_a_robust_fit() -> None:
    rng = np.random.default_rng(0)
    matrix = np.column_stack([np.ones(200), rng.uniform(0, 100, 200)])
    truth = np.array([5.0, 0.3])
    seconds = matrix @ truth * rng.uniform(0.98, 1.02, 200)
    seconds[::10] *= 4.0
    assert np.abs(fit_robustly(matrix, seconds) / truth - 1).max() < 0.03
