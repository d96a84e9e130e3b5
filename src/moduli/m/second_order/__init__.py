"""Second-order links: Newton's method and its relatives, with the Hessian or products with it.

* `Newton` solves with the Hessian, `NewtonCG` with products, `SubspaceNewton` and the Nystrom links with a part of it.
* `AdaHessian`, `SophiaH`, `ESGD` estimate its diagonal from random products; `NaturalGradient` uses the Fisher matrix.
* `PSGDDenseNewton`, `PSGDKronNewton`, `PSGDLRANewton` fit a preconditioner to products.
"""

from .._publish import publish_links
from ._diagonal import *
from ._multipoint import *
from ._newton import *
from ._newton_cg import *
from ._psgd import *
from ._subspace import *

publish_links(globals())
