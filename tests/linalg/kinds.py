"""Every kind of operator, as a function of a seed, a size, a rank, a scale, a dtype and a batch shape.

Each entry of `KINDS` returns the operator and its dense matrix. A new entry is tested by every law of `test_laws.py`.
"""

import torch

from moduli.linalg import (
    AAT,
    Adjoint,
    AtA,
    Dense,
    Diagonal,
    Eigendecomposition,
    FunctionOperator,
    Inverse,
    LBFGSOperator,
    LowRankPlusDiagonal,
    OperatorProduct,
    OperatorSum,
    Scaled,
    ScaledIdentity,
    Transpose,
)

REAL_ONLY = {"lbfgs", "lbfgs slots", "lbfgs inverse"}
RECTANGULAR = {"rectangle", "rectangle adjoint", "rectangle product"}
MATRIX_FREE = {"function", "function vectorized", "function sum", "function adjoint"}
SINGULAR = {"gram wide", "outer tall", "eigen few"}


class Draw:
    """A source of reproducible random tensors."""

    def __init__(self, seed, dtype, batch):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.batch = dtype, batch

    def __call__(self, *shape, dtype=None):
        dtype = dtype or self.dtype
        return (
            torch.randn(*self.batch, *shape, generator=self.generator, dtype=torch.complex128).real.to(dtype)
            if not (dtype.is_complex)
            else torch.randn(*self.batch, *shape, generator=self.generator, dtype=dtype)
        )

    def real(self, *shape):
        return self(*shape, dtype=torch.empty(0, dtype=self.dtype).real.dtype)

    def regular(self, n):
        """Return a well-conditioned square matrix."""
        return self(n, n) / max(n, 1) ** 0.5 + 3 * torch.eye(n, dtype=self.dtype)

    def hermitian(self, n):
        """Return an indefinite, well-conditioned Hermitian matrix."""
        values = self.real(n).sign() * (1 + self.real(n).abs())
        values = torch.where(values == 0, torch.ones_like(values), values)
        Q = self.orthonormal(n, n)
        A = (Q * values.unsqueeze(-2)) @ Q.mH
        return (A + A.mH) / 2

    def orthonormal(self, n, k):
        return torch.linalg.qr(self(n, k))[0]


def eye(n, dtype):
    return torch.eye(n, dtype=dtype)


def diag(d, dtype):
    return d.to(dtype).diag_embed()


def explicit_bfgs(s, y, sigma):
    """Return the BFGS matrix by the recursion B - (B s)(B s)ᵀ / sᵀ B s + y yᵀ / yᵀ s over the pairs.

    Args:
        s: The steps, of shape (..., m, n).
        y: The differences of gradients, of the same shape.
        sigma: The scale of the initial matrix.
    """
    B = sigma[..., None, None] * torch.eye(s.shape[-1], dtype=s.dtype)
    for i in range(s.shape[-2]):
        si, yi = s[..., i, :, None], y[..., i, :, None]
        if not bool(si.any()):
            continue
        Bs = B @ si
        B = B - (Bs @ Bs.mT) / (si.mT @ Bs) + (yi @ yi.mT) / (yi.mT @ si)
    return B


def make_pairs(draw, n, m):
    """Return at most `m` pairs (s, y) of a convex quadratic, so that every sᵀy is positive.

    Args:
        draw: The source of random tensors.
        n: The number of variables.
        m: The number of pairs.
    """
    m = min(m, n)
    root = draw(n, n) / max(n, 1) ** 0.5
    H = root.mT @ root + eye(n, draw.dtype)
    s = draw(m, n)
    return s, s @ H


def lbfgs(draw, n, k, scale):
    s, y = make_pairs(draw, n, k)
    sigma = torch.full(draw.batch, 1.7, dtype=draw.dtype)
    return LBFGSOperator(s * scale, y * scale, scale=1.7), explicit_bfgs(s, y, sigma)


def lbfgs_slots(draw, n, k, scale):
    s, y = make_pairs(draw, n, k)
    zero = torch.zeros(*draw.batch, 2, n, dtype=draw.dtype)
    padded = [torch.cat([zero, part[..., :1, :], zero, part[..., 1:, :], zero], -2) for part in (s, y)]
    operator = LBFGSOperator(*padded)
    plain = LBFGSOperator(s, y)
    torch.testing.assert_close(operator.initial, plain.initial)
    return operator, explicit_bfgs(s, y, plain.initial)


def lbfgs_inverse(draw, n, k, scale):
    operator, dense = lbfgs(draw, n, k, 1.0)
    return operator.inverse(), torch.linalg.inv(dense)


def low_rank(sign):
    def make(draw, n, k, scale):
        d, U = 1 + draw.real(n).abs(), draw(n, k)
        if sign == "mixed":
            d = d * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).to(d.dtype)
        elif sign == "negative":
            d = -d
        elif sign == "zero":
            d = d * (torch.arange(n) > (0 if k else -1))
        C = 0.1 * draw(k, k) / max(k, 1)
        C = (C + C.mH) / 2 + (0.5 * eye(k, draw.dtype) if sign != "negative" else -0.5 * eye(k, draw.dtype))
        return LowRankPlusDiagonal(scale * d, U, scale * C), scale * (diag(d, draw.dtype) + U @ C @ U.mH)

    return make


def low_rank_diagonal_core(draw, n, k, scale):
    d, U, c = 1 + draw.real(n).abs(), draw(n, k), draw.real(k).abs()
    return LowRankPlusDiagonal(scale * d, U, scale * c.to(draw.dtype)), scale * (
        diag(d, draw.dtype) + (U * c.unsqueeze(-2)) @ U.mH
    )


def low_rank_plain(draw, n, k, scale):
    d, U = 1 + draw.real(n).abs(), draw(n, k)
    return LowRankPlusDiagonal(d, U), diag(d, draw.dtype) + U @ U.mH


def gram(rows):
    def make(draw, n, k, scale):
        m = n + 1 if rows == "tall" else max(n - 1, 0)
        J = draw(m, n)
        if m > n:
            J = J / n**0.5 + 2 * torch.eye(m, n, dtype=draw.dtype) if n else J
        J = J * scale
        return AtA(J), J.mH @ J

    return make


def outer(columns):
    def make(draw, n, k, scale):
        operator, dense = gram("tall" if columns == "wide" else "wide")(draw, n, k, scale)
        return AAT(operator._factor.H), dense

    return make


def eigen(few):
    def make(draw, n, k, scale):
        k = max(n - 1, 0) if few else n
        Q = draw.orthonormal(n, k)
        values = scale * (1 + draw.real(k).abs()) * torch.where(torch.arange(k) % 3 == 1, -1.0, 1.0)
        values = values.to(draw.real(1).dtype)
        return Eigendecomposition(values, Q), (Q * values.unsqueeze(-2)) @ Q.mH

    return make


def multiply_rows_by(A):
    """Return a function that multiplies vectors of shape (..., n) by A."""
    return lambda x: (A @ x.unsqueeze(-1)).squeeze(-1)


def function(draw, n, k, scale):
    A = scale * draw.regular(n)
    if draw.batch:
        return function_vectorized_of(draw, A), A
    return FunctionOperator(lambda x: A @ x, n, rmatvec=lambda y: A.mH @ y, dtype=A.dtype), A


def function_vectorized_of(draw, A):
    m, n = A.shape[-2:]
    return FunctionOperator(
        multiply_rows_by(A), n, rows=m, rmatvec=multiply_rows_by(A.mH), dtype=A.dtype, vectorized=True, batch=draw.batch
    )


def function_vectorized(draw, n, k, scale):
    A = scale * draw.regular(n)
    return function_vectorized_of(draw, A), A


def function_sum(draw, n, k, scale):
    operator, A = function(draw, n, k, scale)
    d = draw(n)
    return operator + Diagonal(d), A + d.diag_embed()


def function_adjoint(draw, n, k, scale):
    operator, A = function(draw, n, k, scale)
    return Adjoint(operator), A.mH


def dense(draw, n, k, scale):
    A = scale * draw.regular(n)
    return Dense(A), A


def symmetric(draw, n, k, scale):
    A = scale * draw.hermitian(n)
    return Dense(A, symmetric=True), A


def positive(draw, n, k, scale):
    root = draw.regular(n)
    A = scale * (root @ root.mH)
    return Dense(A, positive_semidefinite=True), A


def diagonal(draw, n, k, scale):
    d = draw(n)
    d = scale * torch.where(d.abs() < 0.5, torch.ones_like(d), d)
    return Diagonal(d), d.diag_embed()


def identity(draw, n, k, scale):
    value = scale * (2 + draw.real(1).abs())[..., 0].to(draw.dtype)
    return ScaledIdentity(n, value), value[..., None, None] * eye(n, draw.dtype)


def scaled(draw, n, k, scale):
    operator, A = gram("tall")(draw, n, k, 1.0)
    return Scaled(operator, -scale), -scale * A


def total(draw, n, k, scale):
    one, A = gram("tall")(draw, n, k, 1.0)
    two, B = low_rank_plain(draw, n, k, 1.0)
    three, C = diagonal(draw, n, k, 1.0)
    return OperatorSum(one, two, three) * scale, scale * (A + B + C)


def total_diagonal(draw, n, k, scale):
    one, A = gram("wide")(draw, n, k, 1.0)
    d = 1 + draw.real(n).abs().to(draw.dtype)
    return one.add_diagonal(d) + 0.5, A + d.diag_embed() + 0.5 * eye(n, draw.dtype)


def product(draw, n, k, scale):
    one, A = dense(draw, n, k, scale)
    two, B = diagonal(draw, n, k, 1.0)
    three, C = positive(draw, n, k, 1.0)
    return one @ two @ three, A @ B @ C


def product_inner(draw, n, k, scale):
    wide = draw(n, n + 2) + 3 * torch.eye(n, n + 2, dtype=draw.dtype)
    return scale * OperatorProduct(Dense(wide), Dense(wide.mH)), scale * wide @ wide.mH


def inverse(draw, n, k, scale):
    operator, A = dense(draw, n, k, scale)
    return Inverse(operator), torch.linalg.inv(A)


def transpose(draw, n, k, scale):
    operator, A = dense(draw, n, k, scale)
    return Transpose(operator), A.mT


def rectangle(draw, n, k, scale):
    A = scale * draw(k, n)
    return Dense(A), A


def rectangle_adjoint(draw, n, k, scale):
    A = scale * draw(k, n)
    return Adjoint(Dense(A)), A.mH


def rectangle_product(draw, n, k, scale):
    A, B = draw(k, n), draw(n)
    return Dense(A) @ Diagonal(B), A * B.unsqueeze(-2)


KINDS = {
    "dense": dense,
    "symmetric": symmetric,
    "positive": positive,
    "diagonal": diagonal,
    "identity": identity,
    "gram tall": gram("tall"),
    "gram wide": gram("wide"),
    "outer wide": outer("wide"),
    "outer tall": outer("tall"),
    "eigen all": eigen(False),
    "eigen few": eigen(True),
    "low rank positive": low_rank("positive"),
    "low rank negative": low_rank("negative"),
    "low rank mixed": low_rank("mixed"),
    "low rank zero": low_rank("zero"),
    "low rank diagonal core": low_rank_diagonal_core,
    "low rank plain": low_rank_plain,
    "lbfgs": lbfgs,
    "lbfgs slots": lbfgs_slots,
    "lbfgs inverse": lbfgs_inverse,
    "function": function,
    "function vectorized": function_vectorized,
    "function sum": function_sum,
    "function adjoint": function_adjoint,
    "scaled": scaled,
    "sum": total,
    "sum diagonal": total_diagonal,
    "product": product,
    "product inner": product_inner,
    "inverse": inverse,
    "transpose": transpose,
    "rectangle": rectangle,
    "rectangle adjoint": rectangle_adjoint,
    "rectangle product": rectangle_product,
}


def make(name, *, seed=0, n=4, k=2, scale=1.0, dtype=torch.float64, batch=()):
    """Return an operator of a kind and its dense matrix.

    Args:
        name: The kind.
        seed: The seed of the values.
        n: The size.
        k: The rank, or the number of pairs.
        scale: A factor of the matrix.
        dtype: The dtype.
        batch: The batch shape.
    """
    return KINDS[name](Draw(seed, dtype, batch), n, k, scale)
