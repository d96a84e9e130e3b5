"""Search without gradients: ask for members, tell their fitness, on one machine or many.

Everything is minimised. Four nouns:

* a **Search** proposes members (`ask`: one per row of an N x P tensor) and learns from their fitness (`tell`: one number per
  row). Its state is a dict of tensors and numbers, so that it can be stopped and resumed at any point, bit for bit;
* a **Reason** is the sentence that says why a search should stop;
* an **executor** evaluates the members: in this process, in a pool of processes that share memory (`Pool`), on Ray (`Ray`),
  or on the ranks of `torch.distributed` (`Ranks`), with the same results;
* `search` does all of it for chosen parameters of a module, in one line.

The methods: `PSO`, `DE`, `GA` and `CEM` keep a population. `OpenES`, `PGPE`, `ARS` and `GuidedES` estimate a gradient, `SNES`,
`XNES` and `CMAES` adapt a distribution; these draw their noise again from seeds instead of storing it, but for the full
covariances of `XNES` and `CMAES`.
"""

from .._searches._ars import ARS
from .._searches._base import Search
from .._searches._cem import CEM
from .._searches._cmaes import CMAES
from .._searches._coordinates import Bounds
from .._searches._de import DE
from .._searches._ga import GA
from .._searches._guided_es import GuidedES
from .._searches._open_es import OpenES
from .._searches._pgpe import PGPE
from .._searches._pso import PSO
from .._searches._reason import Reason
from .._searches._snes import SNES
from .._searches._xnes import XNES
from ._executor import EvaluationError, EvaluationWarning, Executor, InProcess
from ._pool import Pool
from ._rank import Ranks
from ._ray import Ray
from ._search import SearchResult, search

__all__ = [
    "search",
    "SearchResult",
    "Search",
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
    "Executor",
    "InProcess",
    "Pool",
    "Ray",
    "Ranks",
    "EvaluationWarning",
    "EvaluationError",
]
