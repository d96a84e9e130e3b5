"""Gradients from values of the loss alone: finite differences along coordinates, or along random directions.

Each replaces the gradient for the links that follow it, wherever they evaluate: `m.SPSA(), m.Adam(), m.LR(1e-2)`.
"""

from .._publish import publish_links
from ._fdm import *
from ._randomized import *

publish_links(globals())
