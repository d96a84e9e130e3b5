"""Every search in every variant that the laws are checked for, by name."""

from functools import partial

from moduli.evolve import ARS, CEM, CMAES, DE, GA, PGPE, PSO, SNES, XNES, GuidedES, OpenES

PBEST = "current-to-pbest/1"

SEARCHES = {
    "PSO": PSO,
    "PSO ring": partial(PSO, topology="ring"),
    "PSO informed": partial(PSO, topology="informed", radius=2),
    "DE rand/1": DE,
    "DE best/1": partial(DE, strategy="best/1"),
    "DE pbest": partial(DE, strategy=PBEST),
    "JADE": partial(DE, strategy=PBEST, adapt="jade"),
    "SHADE": partial(DE, strategy=PBEST, adapt="shade"),
    "GA": GA,
    "CEM": partial(CEM, elites=0.4, smoothing=0.5),
    "OpenES": OpenES,
    "OpenES sgd": partial(OpenES, optimizer="sgd", momentum=0.9, shape="standardize"),
    "OpenES plain": partial(OpenES, antithetic=False, shape="raw", optimizer="sgd", lr=0.01),
    "PGPE": PGPE,
    "ARS": ARS,
    "GuidedES": GuidedES,
    "SNES": SNES,
    "SNES mirrored": partial(SNES, antithetic=True),
    "XNES": XNES,
    "CMAES": partial(CMAES, factor="eigen"),
    "CMAES cholesky": partial(CMAES, factor="cholesky"),
    "CMAES separable": partial(CMAES, covariance="separable"),
    "CMAES ipop": partial(CMAES, restarts="ipop"),
    "CMAES bipop": partial(CMAES, restarts="bipop"),
}

INTEGER = ["PSO", "PSO ring", "DE rand/1", "SHADE", "GA", "CEM"]
CATEGORICAL = ["GA", "CEM"]


def find_least_population(name):
    """Return the smallest population that a search takes."""
    if name.startswith(("DE", "JADE", "SHADE")):
        return 4
    return 2 if name.startswith(("CMAES", "ARS")) else 1


def sphere(x):
    return x.double().square().sum(1)
