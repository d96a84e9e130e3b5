"""An optimizer is a chain of links.

* An `Objective` is the record of one step: parameters, loss and gradient (evaluated once, when first needed), and the
  **update**, which in the end is subtracted from the parameters.
* A link (the class is `Module`) reads the objective and replaces its update. `update` learns, `apply` transforms, so that
  links can drive other links. A `Transform` keeps its state in lists; a `TensorTransform` is written as functions of
  tensors, and where they are pointwise (`elementwise = True`) neighbours are fused into one pass over all parameters.
* A `Chain` is several links as one; a `Reformulation` puts another objective in place of the loss.
* An `Optimizer` is a `torch.optim.Optimizer` made of links, for parameters, a module or a population.
* `closure` makes the function that a step evaluates from a plain loss. What a link has to know of it is typed (`Need`):
  a chain that can't work is refused when it is built (`ChainError`), a missing closure at the step (`ClosureError`).

The links themselves are in `moduli.m`, finished chains in `moduli.presets`.
"""

from . import chain, functional, modular, module, objective, reformulation, transform
from ._closure import Closure, closure
from ._needs import ChainError, ClosureError, Need
from .chain import Chain, maybe_chain
from .functional import step, step_tensors
from .modular import Optimizer
from .module import Chainable, Module
from .objective import Objective
from .reformulation import Reformulation
from .transform import TensorTransform, Transform

__all__ = [
    "Chain",
    "ChainError",
    "Chainable",
    "Closure",
    "ClosureError",
    "Module",
    "Need",
    "Objective",
    "Optimizer",
    "Reformulation",
    "TensorTransform",
    "Transform",
    "chain",
    "closure",
    "functional",
    "maybe_chain",
    "modular",
    "module",
    "objective",
    "reformulation",
    "step",
    "step_tensors",
    "transform",
]
