"""An optimizer is a chain of links.

* An `Objective` is the record of one step: parameters, loss and gradient (evaluated once, when first needed), and the
  **update**, which in the end is subtracted from the parameters.
* A link (the class is `Module`) reads the objective and replaces its update. Its `update` learns and its `apply` transforms, so
  that a link can call the two of another link separately. The hooks of a `Transform` get states and settings as lists; those
  of a `TensorTransform` are functions of tensors. If they are pointwise (`elementwise = True`), neighbours are fused into one
  pass over all parameters.
* A `Chain` is several links as one; a `Reformulation` replaces the loss by another objective.
* An `Optimizer` is a `torch.optim.Optimizer` made of links, for parameters, a module or a population.
* `closure` makes the function that a step evaluates from a plain loss. Links declare what they require of it (`Need`): a chain
  that can't work raises `ChainError` when it is built, a missing closure raises `ClosureError` at the step.

The links themselves are in `moduli.m`, finished chains in `moduli.presets`.

Functions for authors of links: `as_real` and `restore_complex` for complex parameters, `to_vector` and `from_vector` for all
parameters as one vector, `sample_like` for random directions, `is_sharded` to detect sharded parameters, `StandIns` for children
that work on other tensors, `step` and `step_tensors` to run links inside links.
"""

from .._search_ranges import SearchRange, find_search_ranges
from ..layout import is_sharded
from . import functional as functional
from . import modular as modular
from . import ranges as ranges
from . import schedules as schedules
from ._closure import Closure, Evaluator, closure
from ._curvature import HESSIAN_METHODS
from ._fusion import FusedRun
from ._hooks import SettingsList, States, Tensors
from ._label_order import Follows
from ._matrix_link import MatrixLink
from ._needs import Across, ChainError, ClosureError, Need, keeps_graph
from ._settings import Schedule, Setting
from ._vectors import as_real, from_vector, restore_complex, sample_like, to_vector
from .alike import map_alike
from .chain import Chain, flatten, maybe_chain
from .declared import Ranges, make_constructor
from .functional import step, step_tensors
from .master_weights import MasterWeights, RoundingTransform
from .matrix_view import MatrixView, matrix_view
from .module import Chainable, Module
from .objective import Objective
from .optimizer import Optimizer
from .reformulation import Reformulation
from .slots import describe_params
from .state import StandIns
from .state_encoding import MemberValues
from .trainer_class import bind
from .transform import TensorTransform, Transform
from .transforms import (
    BufferTransform,
    DeclaredLink,
    ListTransform,
    MatrixTransform,
    UpdateTransform,
    transform_buffers,
)
from .watch import Watch

__all__ = [
    "SearchRange",
    "find_search_ranges",
    "make_constructor",
    "Ranges",
    "transform_buffers",
    "UpdateTransform",
    "Watch",
    "Tensors",
    "States",
    "SettingsList",
    "MasterWeights",
    "RoundingTransform",
    "MatrixLink",
    "MatrixTransform",
    "MatrixView",
    "ListTransform",
    "DeclaredLink",
    "BufferTransform",
    "Chain",
    "bind",
    "Across",
    "ChainError",
    "Chainable",
    "Closure",
    "ClosureError",
    "Evaluator",
    "Follows",
    "FusedRun",
    "HESSIAN_METHODS",
    "MemberValues",
    "Module",
    "Need",
    "Objective",
    "Optimizer",
    "Reformulation",
    "Schedule",
    "Setting",
    "StandIns",
    "TensorTransform",
    "Transform",
    "as_real",
    "closure",
    "describe_params",
    "flatten",
    "from_vector",
    "is_sharded",
    "keeps_graph",
    "map_alike",
    "matrix_view",
    "maybe_chain",
    "restore_complex",
    "sample_like",
    "step",
    "step_tensors",
    "to_vector",
]
