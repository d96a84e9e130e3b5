"""The race that is run when nothing is said: all of the library, within two minutes on two cores."""

from __future__ import annotations

from . import catalogue
from ._contender import Contender, contender
from ._grammar import ParsedChain, parse

DEFAULT_PROBLEMS = ("rosenbrock", "rastrigin", "kinked-valley", "noisy-20", "bands", "ground-state", "spirals")
"""The problems of the default race; none of them needs an extra."""

DEFAULT_BUDGET = 600
"""How many evaluations a run of the default race has."""

# Label, and chain, each with the setting that its page shows: first order, matrices, quasi-Newton, trust regions, without
# gradients, populations, the hybrid of both (docs/population-optimizers.md), and torch to compare with.
DEFAULT_FIELD = (
    ("gradient descent", "ClipNorm(1) | LR(0.02)"),
    ("Nesterov", "ClipNorm(1) | NAG(0.9) | LR(0.01)"),
    ("Adam", "Adam | LR(0.1)"),
    ("Lion", "Lion | LR(0.01)"),
    ("SOAP", "SOAP | LR(0.1)"),
    ("BFGS", "BFGS | StrongWolfe"),
    ("L-BFGS", "LBFGS | StrongWolfe"),
    ("trust region", "TrustCG(BFGS(inverse=False))"),
    ("CMA-ES", "CMAES(sigma=0.5)"),
    ("swarm", "Population(16, spread=0.5) | PSO"),
    (
        "Adam in a swarm",
        "Population(8, spread=0.5) | ClipNorm(1) | Adam | LR(0.1) | PSO(inertia=0.3, cognitive=0.1, social=0.1)",
    ),
    ("torch L-BFGS", "torch.LBFGS(line_search_fn='strong_wolfe')"),
)
"""The contenders of the default race: label, and chain."""


def default_field() -> list[Contender]:
    """The contenders of the default race. A chain with a link that is not in the catalogue is left out.

    >>> "Adam" in [entry.label for entry in default_field()]
    True
    """
    chains = [(label, parse(chain)) for label, chain in DEFAULT_FIELD]
    return [contender(chain, label=label) for label, chain in chains if _names(chain) <= catalogue.entries().keys()]


def _names(chain: ParsedChain) -> set[str]:
    found = {link.name for link in chain.links}
    for link in chain.links:
        for value in (*link.args, *(value for _, value in link.kwargs)):
            found |= _names(value) if isinstance(value, ParsedChain) else set()
    return found
