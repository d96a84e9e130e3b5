"""Solutions of quadratic programs meet the KKT conditions, and infeasible programs are reported."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moduli._minimize._quadratic import solve_quadratic


def random_program(seed, n, equalities, inequalities):
    """Return a strictly convex program with a feasible point at which some inequalities are active.

    Args:
        seed: The seed.
        n: The number of variables.
        equalities: The number of equations.
        inequalities: The number of inequalities.
    """
    rng = np.random.default_rng(seed)
    M = rng.normal(size=(n, n))
    H = M @ M.T + 0.1 * np.eye(n)
    g, inside = 3 * rng.normal(size=n), rng.normal(size=n)
    A = rng.normal(size=(equalities + inequalities, n))
    b = A @ inside
    b[equalities:] -= rng.random(inequalities) * (rng.random(inequalities) < 0.7)
    return H, g, A, b


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(0, 3), st.integers(0, 10))
def test_the_conditions_of_karush_kuhn_and_tucker_hold(seed, n, equalities, inequalities):
    equalities = min(equalities, n - 1)
    H, g, A, b = random_program(seed, n, equalities, inequalities)
    solution = solve_quadratic(np.linalg.cholesky(H), g, A, b, equalities)
    assert solution is not None
    x, multipliers = solution
    slack, size = A @ x - b, 1 + np.abs(multipliers).max(initial=0.0)
    np.testing.assert_allclose(H @ x + g, A.T @ multipliers, atol=1e-8 * size)
    np.testing.assert_allclose(slack[:equalities], 0, atol=1e-8)
    assert slack[equalities:].min(initial=0.0) >= -1e-8
    assert multipliers[equalities:].min(initial=0.0) >= 0
    np.testing.assert_allclose(multipliers[equalities:] * slack[equalities:], 0, atol=1e-8 * size)


@pytest.mark.parametrize("equalities", [0, 2])
def test_constraints_that_contradict_each_other_have_no_solution(equalities):
    A, b = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.array([1.0, 1.0])
    assert solve_quadratic(np.eye(2), np.zeros(2), A, b, equalities) is None


def test_without_constraints_it_is_a_linear_system():
    H, g, _, _ = random_program(0, 5, 0, 0)
    x, multipliers = solve_quadratic(np.linalg.cholesky(H), g, np.zeros((0, 5)), np.zeros(0), 0)
    np.testing.assert_allclose(x, -np.linalg.solve(H, g), rtol=1e-10)
    assert multipliers.shape == (0,)
