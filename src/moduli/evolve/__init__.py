"""Search without gradients: ask for members, tell their fitness, on one machine or many.

Fitness is minimised. Four nouns:

* a **Search** proposes members (`ask`: one per row of an N x P tensor) and updates its state from their fitness (`tell`: one
  number per row). The state is a dict of tensors and numbers, so that a search can be stopped and resumed at any point, bit
  for bit;
* a **Reason** is the sentence that says why a search should stop;
* an **executor** evaluates the members: in this process, in a pool of processes that share memory (`Pool`), on Ray (`Ray`),
  or on the ranks of `torch.distributed` (`Ranks`), with the same results;
* `search` runs a search over chosen parameters of a module in one call. `problems` has fitness functions: `problems.gym` is
  the return of a policy in an environment of Gymnasium.

The methods: `PSO`, `DE`, `GA` and `CEM` keep a population. `OpenES`, `PGPE`, `ARS` and `GuidedES` estimate a gradient, `SNES`,
`XNES` and `CMAES` adapt a distribution; these draw their noise again from seeds instead of storing it, except for the full
covariances of `XNES` and `CMAES`. `NSGA2` searches for the front of several objectives, and `MAPElites` for the best member of
each kind, by descriptors that `tell` takes beside the fitness. `Polish` refines an optimum to the last digits.

Each method is one file, with its mathematics in the order of its paper. The links of `moduli.m` with the same names wrap these
searches, and have the same settings.
"""

from __future__ import annotations

from . import problems
from ._base import Search
from ._distribution import Distribution, GradientSearch
from ._executor import EvaluationError, EvaluationWarning, Executor, InProcess, Ranks
from ._module_fitness import evaluate_low_rank
from ._pool import Pool
from ._problem import Bounds, Reason
from ._ray import Ray
from ._search import SearchResult, search
from .ars import ARS
from .cem import CEM
from .cmaes import CMAES
from .de import DE
from .ga import GA
from .guided_es import GuidedES
from .map_elites import MAPElites
from .nsga2 import NSGA2, ParetoFront
from .open_es import OpenES
from .pgpe import PGPE
from .polish import Polish
from .pso import PSO, informed_velocity, neighbourhood_best, remember_best, swarm_velocity
from .snes import SNES
from .xnes import XNES

__all__ = [
    "search",
    "SearchResult",
    "Search",
    "Distribution",
    "GradientSearch",
    "Reason",
    "Bounds",
    "PSO",
    "DE",
    "GA",
    "CEM",
    "OpenES",
    "PGPE",
    "ARS",
    "GuidedES",
    "SNES",
    "XNES",
    "CMAES",
    "NSGA2",
    "ParetoFront",
    "MAPElites",
    "Polish",
    "Executor",
    "InProcess",
    "Pool",
    "Ray",
    "Ranks",
    "swarm_velocity",
    "informed_velocity",
    "neighbourhood_best",
    "remember_best",
    "evaluate_low_rank",
    "EvaluationWarning",
    "EvaluationError",
    "problems",
]
