"""The usual optimizers by name: functions that return a chain of links and nothing else.

Example:
    >>> import torch, moduli as mo
    >>> from moduli import m, presets
    >>> net = torch.nn.Linear(2, 1)
    >>> mo.Optimizer(net, m.ClipNorm(1.0), presets.adamw(lr=1e-3)) is not None
    True
"""

from ._adaptive import adagrad, adam, adamw, adan, lamb, lars, lion, mars, rmsprop, rprop, sam
from ._descent import dadapt, momentum, nesterov, prodigy, schedule_free, schedule_free_sgd, sgd
from ._matrices import dion, kl_shampoo, muon, muonclip, normuon, psgd, scion, shampoo, soap, splus
from ._memory import adafactor, adam8bit, apollo, came, fira, galore
from ._moments import adabelief, adadelta, adam_mini, adamax, ademamix, adopt, laprop, nadam, radam
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
    "adabelief",
    "adadelta",
    "adafactor",
    "adagrad",
    "adahessian",
    "adam",
    "adam8bit",
    "adam_mini",
    "adamax",
    "adamw",
    "adan",
    "ademamix",
    "adopt",
    "apollo",
    "bfgs",
    "came",
    "cg",
    "dadapt",
    "dion",
    "fira",
    "galore",
    "gauss_newton",
    "kl_shampoo",
    "lamb",
    "laprop",
    "lars",
    "lbfgs",
    "levenberg_marquardt",
    "lion",
    "mars",
    "momentum",
    "muon",
    "muonclip",
    "nadam",
    "nesterov",
    "newton",
    "newton_cg",
    "normuon",
    "prodigy",
    "psgd",
    "radam",
    "rmsprop",
    "rprop",
    "sam",
    "schedule_free",
    "schedule_free_sgd",
    "scion",
    "sgd",
    "shampoo",
    "soap",
    "sophia",
    "splus",
    "spsa",
    "trust_cg",
    "trust_exact",
]
