"""Quasi-Newton links: curvature estimated from steps and changes of the gradient.

* `LBFGS`, `LSR1` store the last pairs; `QuasiNewton` and its rules (`BFGS`, `DFP`, `SR1`, ...) a matrix over all parameters;
  `DiagonalQuasiNewton` and its rules a vector.
* Each gives a direction, to be followed by a line search, and a Hessian (`get_H`), for a trust region.
"""

from .._publish import publish_links
from ._dense import *
from ._diagonal import *
from ._lbfgs import *
from ._pairs import *
from ._projected import *
from ._updates import *

publish_links(globals())
