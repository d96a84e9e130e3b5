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

import typing as _typing

from ._checks import Callback as Callback
from ._derived import Adjoint as Adjoint
from ._derived import Inverse as Inverse
from ._derived import OperatorProduct as OperatorProduct
from ._derived import OperatorSum as OperatorSum
from ._derived import Scaled as Scaled
from ._derived import Transpose as Transpose
from ._lbfgs import LBFGSOperator as LBFGSOperator
from ._lowrank import AAT as AAT
from ._lowrank import AtA as AtA
from ._lowrank import Eigendecomposition as Eigendecomposition
from ._lowrank import LowRankPlusDiagonal as LowRankPlusDiagonal
from ._matrices import Dense as Dense
from ._matrices import Diagonal as Diagonal
from ._matrices import FunctionOperator as FunctionOperator
from ._matrices import ScaledIdentity as ScaledIdentity
from ._operator import LinearOperator as LinearOperator
from ._results import LinearSolution as LinearSolution
from ._results import MissingAbilityError as MissingAbilityError
from ._results import Outcome as Outcome
from ._results import SingularError as SingularError
from ._results import TrustRegionStep as TrustRegionStep
from ._solvers import cg as cg
from ._solvers import lsqr as lsqr
from ._solvers import minres as minres
from ._trust_region import steihaug as steihaug
from ._trust_region import trust_exact as trust_exact

if not _typing.TYPE_CHECKING:  # which takes a name that is imported as itself for public
    __all__ = sorted(name for name in globals() if not name.startswith("_"))
