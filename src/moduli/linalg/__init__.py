"""Linear operators and iterative solvers: curvature as a value, with no knowledge of who uses it.

An **operator** is a linear map known by what it does. Every kind is a pairing of what it stores with what that makes
cheap; everything else follows from the abstract `LinearOperator`:

* `Dense`: a matrix; `Diagonal`: its diagonal; `ScaledIdentity`: one number;
* `AtA`, `AAT`: a factor, whose product with its own adjoint is never formed (Gauss-Newton, Fisher);
* `Eigendecomposition`: eigenvalues and orthonormal vectors, all or a few; every shift by a number is free;
* `LowRankPlusDiagonal`: a diagonal, and a small matrix between tall ones;
* `LBFGSOperator`: pairs of steps and gradient differences, for the BFGS matrix and its inverse;
* `FunctionOperator`: a function that multiplies (a Hessian-vector product);
* `OperatorSum`, `OperatorProduct`, `Scaled`, `Adjoint`, `Transpose`, `Inverse`: other operators; written `A + B`, `A @ B`,
  `2 * A`, `A.H`, `A.T`, `A.inverse()`.

Operators may be batched: (*batch, m, n), one matrix per member, with vectors (..., n).

A **solver** is a function of an operator and a vector. It returns a frozen result with an **outcome**, which is a sentence:

* `cg` (positive definite), `minres` (symmetric), `lsqr` (any shape) return a `LinearSolution` of a linear system;
* `steihaug` (products only) and `trust_exact` (to working precision) return a `TrustRegionStep`.

What cannot be done is refused: `MissingAbilityError` for a question an operator has no means to answer, `SingularError`
for a system without a unique solution.

Example:
    >>> import torch
    >>> from moduli import linalg
    >>> G = linalg.AtA(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    >>> b = torch.tensor([1.0, 1.0])
    >>> torch.allclose(G.solve_plus_diag(b, 0.1), linalg.cg(G + 0.1, b).x, rtol=1e-3)
    True
"""

from .._deprecated import rename
from ._cg import cg
from ._checks import Callback
from ._derived import Adjoint, Inverse, OperatorProduct, OperatorSum, Scaled, Transpose
from ._function import FunctionOperator
from ._gram import AAT, AtA
from ._lbfgs import LBFGSOperator
from ._lowrank import Eigendecomposition, LowRankPlusDiagonal
from ._lsqr import lsqr
from ._matrices import Dense, Diagonal, ScaledIdentity
from ._minres import minres
from ._operator import LinearOperator
from ._results import LinearSolution, MissingAbilityError, Outcome, SingularError, TrustRegionStep
from ._trust_region import steihaug, trust_exact

__all__ = [
    "LinearOperator",
    "Dense",
    "Diagonal",
    "ScaledIdentity",
    "AtA",
    "AAT",
    "Eigendecomposition",
    "LowRankPlusDiagonal",
    "LBFGSOperator",
    "FunctionOperator",
    "OperatorSum",
    "OperatorProduct",
    "Scaled",
    "Adjoint",
    "Transpose",
    "Inverse",
    "cg",
    "minres",
    "lsqr",
    "steihaug",
    "trust_exact",
    "LinearSolution",
    "TrustRegionStep",
    "Outcome",
    "Callback",
    "MissingAbilityError",
    "SingularError",
]

__getattr__ = rename(__name__, {"Sum": "OperatorSum", "Product": "OperatorProduct", "Solution": "LinearSolution"})
