"""The mathematics of evolution: functions on tensors, one file per algorithm, without state of their own.

The rows of an N x P matrix are members; fitness is one number per member and is minimised. Whoever keeps the state (an
`ask()`/`tell()` search of `moduli.evolve`, a link of an optimizer) calls these functions with it and with random
numbers from its own generator, so that both walk the same path.
"""

from . import (
    _ars,
    _bounds,
    _cem,
    _cmaes,
    _de,
    _ga,
    _guided,
    _noise,
    _open_es,
    _pgpe,
    _pso,
    _ranks,
    _restarts,
    _rule,
    _sep_cmaes,
    _snes,
    _xnes,
)

__all__ = [
    "_ars",
    "_bounds",
    "_cem",
    "_cmaes",
    "_de",
    "_ga",
    "_guided",
    "_noise",
    "_open_es",
    "_pgpe",
    "_pso",
    "_ranks",
    "_restarts",
    "_rule",
    "_sep_cmaes",
    "_snes",
    "_xnes",
]
