"""Non-negative least squares against scipy's, on any matrix."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from manylora.costs.least_squares import fit_nonnegative, fit_robustly


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_rows=st.integers(1, 30),
    num_columns=st.integers(1, 12),
    num_equal=st.integers(0, 3),
    num_empty=st.integers(0, 2),
)
def test_it_is_the_least_of_all_that_is_not_negative(
    seed: int, num_rows: int, num_columns: int, num_equal: int, num_empty: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((num_rows, num_columns)) * 10.0 ** rng.integers(-4, 5, num_columns)
    matrix[:, rng.permutation(num_columns)[:num_equal]] = matrix[:, :1]  # what no fit can tell apart
    matrix[:, rng.permutation(num_columns)[:num_empty]] = 0.0
    target = rng.standard_normal(num_rows) * 10.0 ** rng.integers(-3, 3)
    ours = fit_nonnegative(matrix, target)
    assert (ours >= 0).all()
    assert np.isfinite(ours).all()
    # Columns of one size for scipy too: its stopping rule is absolute.
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    theirs = nnls(matrix / scale, target)[1]
    assert np.linalg.norm(matrix @ ours - target) <= theirs * (1 + 1e-6) + 1e-9 * np.linalg.norm(target)


def test_single_bad_measurements_hardly_move_a_robust_fit() -> None:
    rng = np.random.default_rng(0)
    matrix = np.column_stack([np.ones(200), rng.uniform(0, 100, 200)])
    truth = np.array([5.0, 0.3])
    seconds = matrix @ truth * rng.uniform(0.98, 1.02, 200)
    seconds[::10] *= 4.0
    assert np.abs(fit_robustly(matrix, seconds) / truth - 1).max() < 0.03
