"""The race that is run when nothing is said: all of the library, within two minutes on two cores."""

from __future__ import annotations

from ._contender import Contender, contender

__all__ = ["DEFAULT_FIELD", "DEFAULT_PROBLEMS", "default_field"]

DEFAULT_PROBLEMS = ("rosenbrock", "rastrigin", "kinked-valley", "noisy-20", "bands", "ground-state", "spirals")

# Label, and chain.
DEFAULT_FIELD = (
    ("SGD", "torch.SGD(lr=0.001)"),
    ("Adam", "torch.Adam(lr=0.05)"),
    ("L-BFGS", "torch.LBFGS(line_search_fn='strong_wolfe')"),
)


def default_field() -> list[Contender]:
    """The contenders of the default race.

    >>> default_field()[0].label
    'SGD'
    """
    return [contender(chain, label=label) for label, chain in DEFAULT_FIELD]
