"""Linear operators: what structure saves over the matrix, and what a solver costs beside its products.

Every ratio is against plain torch on the same numbers: the two-loop recursion for L-BFGS, Cholesky of the damped normal
equations for Gauss-Newton, a hand-written loop of conjugate gradients with the same number of iterations.
"""

import torch

from _timing import interleaved
from moduli.linalg import AtA, Dense, Eigendecomposition, LBFGSOperator, cg, trust_exact


def two_loop(s, y, gamma, b):
    rho, alphas = [1 / (si @ yi) for si, yi in zip(s, y, strict=True)], []
    q = b.clone()
    for i in reversed(range(len(s))):
        alphas.append(rho[i] * (s[i] @ q))
        q -= alphas[-1] * y[i]
    q *= gamma
    for i, alpha in zip(range(len(s)), reversed(alphas), strict=True):
        q += (alpha - rho[i] * (y[i] @ q)) * s[i]
    return q


def plain_cg(A, b, iterations):
    x, r = torch.zeros_like(b), b.clone()
    p, rr = r.clone(), r @ r
    for _ in range(iterations):
        Ap = A @ p
        alpha = rr / (p @ Ap)
        x, r = x + alpha * p, r - alpha * Ap
        new = r @ r
        p, rr = r + new / rr * p, new
    return x


def ratio(name, times, ours, reference, bar):
    value = times[ours] / times[reference]
    return {"name": name, "value": value, "bar": bar, "unit": "x", "ok": value <= bar}


def table():
    generator = torch.Generator().manual_seed(0)
    rows = []
    n, m = 100_000, 10
    s = torch.randn(m, n, generator=generator, dtype=torch.float64)
    y = s * torch.linspace(1, 3, n, dtype=torch.float64)
    b = torch.randn(n, generator=generator, dtype=torch.float64)
    sy, ss, yy = s @ y.T, s @ s.T, y @ y.T
    gamma = float(sy[-1, -1] / yy[-1, -1])
    times = interleaved(
        {
            "operator": lambda: LBFGSOperator(s, y, scale=1 / gamma, sy=sy, ss=ss, yy=yy).solve(b),
            "loop": lambda: two_loop(s, y, gamma, b),
        }
    )
    rows.append(ratio("L-BFGS direction, 10 pairs of 100 000, Gram matrices kept", times, "operator", "loop", 1.0))

    J = torch.randn(50, 2000, generator=generator, dtype=torch.float64)
    r = torch.randn(2000, generator=generator, dtype=torch.float64)
    eye = torch.eye(2000, dtype=torch.float64)
    times = interleaved(
        {
            "operator": lambda: AtA(J).solve_plus_diag(r, 0.1),
            "matrix": lambda: torch.cholesky_solve(r[:, None], torch.linalg.cholesky(J.T @ J + 0.1 * eye)),
        },
        rounds=5,
    )
    rows.append(ratio("Levenberg-Marquardt system, 50 residuals of 2000", times, "operator", "matrix", 0.2))

    root = torch.randn(300, 300, generator=generator, dtype=torch.float64) / 300**0.5
    A = root @ root.T + torch.eye(300, dtype=torch.float64)
    c = torch.randn(300, generator=generator, dtype=torch.float64)
    operator = Dense(A, positive_semidefinite=True)
    iterations = cg(operator, c).iterations
    times = interleaved({"cg": lambda: cg(operator, c), "plain": lambda: plain_cg(A, c, iterations)})
    rows.append(ratio(f"conjugate gradients, {iterations} iterations of 300", times, "cg", "plain", 2.0))

    decomposition = Eigendecomposition.of(A - 2 * torch.eye(300, dtype=torch.float64))
    matrix = decomposition.to_dense()
    times = interleaved(
        {"again": lambda: trust_exact(decomposition, c, 1.0), "first": lambda: trust_exact(matrix, c, 1.0)}, rounds=5
    )
    rows.append(ratio("exact trust-region step of 300 at another radius", times, "again", "first", 0.2))
    return rows


if __name__ == "__main__":
    for row in table():
        print(row)
