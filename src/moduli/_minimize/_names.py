"""The names of methods, separate from the links of their chains, which take long to import."""

from __future__ import annotations

from ._direct import DIRECT

CHAINED = (
    "bfgs", "lbfgs", "cg", "newton", "damped-newton", "newton-cg", "trust-ncg", "trust-exact", "dogleg", "gn", "gd", "adam",
    "spsa",
)  # fmt: skip
"""The methods that are chains of links."""

PROJECTED = ("bfgs", "lbfgs", "cg", "gd", "adam", "damped-newton")
"""Those of them that stay within bounds by themselves; the others get theirs by a change of variables."""

BATCHED = ("bfgs", "lbfgs", "cg", "gd", "adam")
"""Those whose links take all members of a population at once."""

RESIDUALS = frozenset({"lm", "gn"})
VALUES_ONLY = frozenset({"spsa"})


# SciPy's names, and those of torchzero's classes; spelling, case and hyphens do not matter.
_ALIASES = {
    "lbfgsb": "lbfgs",
    "levenbergmarquardt": "lm",
    "gaussnewton": "gn",
    "trustcg": "trust-ncg",
    "leastsq": "lm",
    "slsqp": "sqp",
    "coordinatedescent": "cd",
    "gradientdescent": "gd",
    "polakribiere": "cg",
    "conjugategradient": "cg",
    "newtonexact": "newton",
}


# Methods of SciPy without a counterpart here, and the alternatives.
_INSTEAD = {
    "trustconstr": "sqp, or any method with constraints=",
    "cobyla": "nelder-mead with constraints=, or sqp where there are derivatives",
    "cobyqa": "nelder-mead with constraints=, or sqp where there are derivatives",
    "tnc": "lbfgs with bounds=",
    "trustkrylov": "trust-ncg",
    "trf": "lm, which takes bounds",
    "dogbox": "lm, which takes bounds",
}


def canonical(name: str) -> str:
    """Return the canonical name of a method; raise ValueError if there is none."""
    names = sorted({*CHAINED, *DIRECT, "lm", "sqp", "auto"})
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    spelled = {"".join(filter(str.isalnum, other)): other for other in names} | _ALIASES
    if plain in spelled:
        return spelled[plain]
    if plain in _INSTEAD:
        raise ValueError(f"minimize: there is no method {name!r}; use {_INSTEAD[plain]}")
    raise ValueError(f"minimize: there is no method {name!r}; use {', '.join(names)}, or a list of links")
