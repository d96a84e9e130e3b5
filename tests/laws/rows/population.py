"""Links that decide for each member of a population, also as N separate optimizers.

Links that move members relative to each other (PSO, DE, GA, CEM, PBT) have no form for one model, which is what laws are
about; `tests/m/test_population.py` has laws of their own for them.
"""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]

ROWS = [
    Row("Backtracking, of members too", lambda: [m.Backtracking(init=2.0)], closure=True),
    Row("LBFGS, Backtracking, of members too", lambda: [m.LBFGS(history_size=5), m.Backtracking()], closure=True),
]
