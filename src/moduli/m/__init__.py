"""The catalogue of links, by family; each family's `__all__` is what it adds to `moduli.m`.

First order:

* `momentum`: running means and sums of updates, averaging, caution, lookahead;
* `adaptive`: steps scaled by statistics of earlier updates, element by element (`Adam`) or of matrices (`SOAP`, `Orthogonalize`);
* `step_size`: given, scheduled, or computed from the effect of earlier steps;
* `clipping`: the size of updates; `weight_decay`: regularisation; `variance_reduction`: less noise from batches.

Curvature and globalisation:

* `second_order`: Newton's method and its relatives; `quasi_newton`: curvature estimated from differences of gradients;
* `conjugate_gradient`: nonlinear conjugate gradients; `least_squares`: for closures that return residuals;
* `line_search` and `trust_region`: the length of a step along an update, or the radius in which a model of the loss is trusted;
* `constraints`: the method of multipliers, for losses under conditions; `proximal`: penalties without a gradient, and sets.

Without gradients:

* `grad_approximation`: gradients from values; `smoothing`: of updates, or of the loss over a neighbourhood;
* `evolution`: search distributions around one model; `population`: members of a population that learn from each other.

Around other links:

* `ops`: pointwise functions, sources, and operations on the results of several chains;
* `meta`: links that drive other links; `projections`: links run in another basis, shape or dtype;
* `half_precision`: updates of half-precision parameters that are smaller than their rounding;
* `restarts` and `termination`: resetting state, and stopping; `misc`: printing, homotopies, measurements.
"""

from types import ModuleType as _ModuleType

from .adaptive import *
from .clipping import *
from .conjugate_gradient import *
from .constraints import *
from .evolution import *
from .grad_approximation import *
from .half_precision import *
from .least_squares import *
from .line_search import *
from .meta import *
from .misc import *
from .momentum import *
from .ops import *
from .population import *
from .projections import *
from .proximal import *
from .quasi_newton import *
from .restarts import *
from .second_order import *
from .smoothing import *
from .step_size import *
from .termination import *
from .trust_region import *
from .variance_reduction import *
from .weight_decay import *

__all__ = [name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _ModuleType)]
