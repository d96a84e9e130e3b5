"""Problems to race optimizers on: each knows where to start and how low one can get.

A `Problem` is a model at a starting point, a loss, and the best value that is known. `get` finds one by name, `names`
lists them. A name with a number at its end, such as ``rosenbrock-100``, is a function of that many numbers.

* Functions of two numbers, which reports draw as maps: ``rosenbrock``, ``beale``, ``himmelblau``, ``goldstein-price``,
  ``camel``, ``styblinski-tang``, ``rastrigin``, ``ackley``, ``kinked-valley``.
* Functions of any number: ``sphere-10``, ``ellipsoid-10``, ``rosenbrock-20``, ``powell-8``, ``rastrigin-10``, ``ackley-10``,
  ``griewank-10``, ``levy-10``, ``styblinski-tang-10``, ``absolute-10``, ``maxq-10``, and ``noisy-20``, whose loss has
  another sample at each step.
* Data: ``least-squares``, ``logistic-ill``, ``digits-logistic``, ``digits-mlp``, ``mnist1d``, ``mnist1d-conv``,
  ``mnist1d-autoencoder``, ``spirals``, ``text``.
* NIST's 27 nonlinear regressions with certified values: ``nist-misra1a`` to ``nist-bennett5``.
* Physics, with labelled axes: ``bands``, ``ground-state``.
"""

from ._base import Point, Problem, SampledProblem
from ._data import DigitsLogistic, DigitsMLP, IllLogistic, LeastSquares, Spirals, TextTransformer
from ._functions import Function, NoisyQuadratic
from ._mnist1d import Mnist1D, Mnist1DAutoencoder, Mnist1DConv, make_mnist1d
from ._nist import NistData, NistFit, read_nist
from ._physics import Bands, GroundState
from ._registry import UnknownProblemError, get, names

__all__ = [
    "Problem",
    "SampledProblem",
    "Point",
    "Function",
    "NoisyQuadratic",
    "LeastSquares",
    "DigitsLogistic",
    "DigitsMLP",
    "IllLogistic",
    "Mnist1D",
    "Mnist1DConv",
    "Mnist1DAutoencoder",
    "make_mnist1d",
    "Spirals",
    "Bands",
    "GroundState",
    "NistData",
    "NistFit",
    "read_nist",
    "TextTransformer",
    "UnknownProblemError",
    "get",
    "names",
]
