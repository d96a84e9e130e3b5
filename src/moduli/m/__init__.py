"""The catalogue of links, by family; each family's `__all__` is what it adds to `moduli.m`.

First order:

* `momentum`: running means and sums of updates, averaging, caution, lookahead;
* `adaptive`: steps scaled by what updates were like so far, of numbers (`Adam`) or of matrices (`SOAP`, `Orthogonalize`);
* `step_size`: given, scheduled, or found from what the steps do;
* `clipping`: the size of updates; `weight_decay`: regularisation; `variance_reduction`: less noise from batches.

Curvature and globalisation:

* `second_order`: Newton's method and its relatives; `quasi_newton`: curvature learnt from differences of gradients;
* `conjugate_gradient`: nonlinear conjugate gradients; `least_squares`: for closures that return residuals;
* `line_search` and `trust_region`: how far to go along an update, or how far to trust a model of the loss;
* `constraints`: the method of multipliers, for losses under conditions.

Without gradients:

* `grad_approximation`: gradients from values; `smoothing`: of updates, or of the loss over a neighbourhood;
* `evolution`: search distributions around one model; `population`: members of a population that learn from each other.

Around other links:

* `ops`: pointwise functions, sources, and operations on the results of several chains;
* `meta`: links that drive other links; `projections`: links run in another basis, shape or dtype;
* `restarts` and `termination`: forgetting, and stopping; `misc`: printing, homotopies, measurements.
"""

from . import (
    adaptive,
    clipping,
    conjugate_gradient,
    constraints,
    evolution,
    grad_approximation,
    least_squares,
    line_search,
    meta,
    misc,
    momentum,
    ops,
    population,
    projections,
    quasi_newton,
    restarts,
    second_order,
    smoothing,
    step_size,
    termination,
    trust_region,
    variance_reduction,
    weight_decay,
)
from .adaptive import *
from .clipping import *
from .conjugate_gradient import *
from .constraints import *
from .evolution import *
from .grad_approximation import *
from .least_squares import *
from .line_search import *
from .meta import *
from .misc import *
from .momentum import *
from .ops import *
from .population import *
from .projections import *
from .quasi_newton import *
from .restarts import *
from .second_order import *
from .smoothing import *
from .step_size import *
from .termination import *
from .trust_region import *
from .variance_reduction import *
from .weight_decay import *

__all__: list[str] = []
__all__ += adaptive.__all__
__all__ += clipping.__all__
__all__ += conjugate_gradient.__all__
__all__ += constraints.__all__
__all__ += evolution.__all__
__all__ += grad_approximation.__all__
__all__ += least_squares.__all__
__all__ += line_search.__all__
__all__ += meta.__all__
__all__ += misc.__all__
__all__ += momentum.__all__
__all__ += ops.__all__
__all__ += population.__all__
__all__ += projections.__all__
__all__ += quasi_newton.__all__
__all__ += restarts.__all__
__all__ += second_order.__all__
__all__ += smoothing.__all__
__all__ += step_size.__all__
__all__ += termination.__all__
__all__ += trust_region.__all__
__all__ += variance_reduction.__all__
__all__ += weight_decay.__all__
