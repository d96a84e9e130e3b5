"""The usual optimizers by name: functions that return a chain of links and nothing else.

Example:
    >>> import torch, moduli as mo
    >>> from moduli import m, presets
    >>> net = torch.nn.Linear(2, 1)
    >>> mo.Optimizer(net, m.ClipNorm(1.0), presets.adamw(lr=1e-3)) is not None
    True
"""

from ._adaptive import adagrad, adam, adamw, adan, lion, mars, rmsprop, rprop, sam
from ._descent import momentum, nesterov, sgd
from ._free import dadapt, prodigy, schedule_free
from ._matrices import muon, psgd, shampoo, soap
from ._second import (
    adahessian,
    bfgs,
    cg,
    gauss_newton,
    lbfgs,
    levenberg_marquardt,
    newton,
    newton_cg,
    sophia,
    spsa,
    trust_cg,
    trust_exact,
)

__all__ = [
    "adagrad",
    "adahessian",
    "adam",
    "adamw",
    "adan",
    "bfgs",
    "cg",
    "dadapt",
    "gauss_newton",
    "lbfgs",
    "levenberg_marquardt",
    "lion",
    "mars",
    "momentum",
    "muon",
    "nesterov",
    "newton",
    "newton_cg",
    "prodigy",
    "psgd",
    "rmsprop",
    "rprop",
    "sam",
    "schedule_free",
    "sgd",
    "shampoo",
    "soap",
    "sophia",
    "spsa",
    "trust_cg",
    "trust_exact",
]
