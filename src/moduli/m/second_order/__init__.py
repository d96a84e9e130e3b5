"""Second-order links: Newton's method and its relatives, with the Hessian or products with it.

* `Newton` solves with the Hessian, `NewtonCG` with products, `SubspaceNewton` and the Nystrom links with a part of it.
* `AdaHessian`, `SophiaH`, `ESGD` estimate its diagonal from random products; `NaturalGradient` uses the Fisher matrix.
* `PSGDDenseNewton`, `PSGDKronNewton`, `PSGDLRANewton` fit a preconditioner to products.
"""

from ._adahessian import AdaHessian
from ._esgd import ESGD
from ._inverse_free import InverseFreeNewton
from ._matrix_momentum import MatrixMomentum
from ._multipoint import MultipointNewton, SixthOrder3P, SixthOrder3PM2, SixthOrder5P, TwoPointNewton
from ._natural_gradient import NaturalGradient
from ._newton import Newton
from ._newton_cg import NewtonCG, NewtonCGSteihaug
from ._nystrom import NystromPCG, NystromSketchAndSolve
from ._psgd import PSGDDenseNewton, PSGDKronNewton, PSGDLRANewton
from ._sophia import SophiaH
from ._subspace import SubspaceNewton

__all__ = [
    "AdaHessian",
    "ESGD",
    "InverseFreeNewton",
    "MatrixMomentum",
    "MultipointNewton",
    "NaturalGradient",
    "Newton",
    "NewtonCG",
    "NewtonCGSteihaug",
    "NystromPCG",
    "NystromSketchAndSolve",
    "PSGDDenseNewton",
    "PSGDKronNewton",
    "PSGDLRANewton",
    "SixthOrder3P",
    "SixthOrder3PM2",
    "SixthOrder5P",
    "SophiaH",
    "SubspaceNewton",
    "TwoPointNewton",
]
