"""Adaptive first-order links: steps scaled by statistics of earlier updates."""

from .._publish import publish_links
from ._adafactor import *
from ._adagrad import *
from ._adam import *
from ._adan import *
from ._full_matrix import *
from ._orthogonalize import *
from ._prodigy import *
from ._psgd import *
from ._rprop import *
from ._sam import *
from ._shampoo import *

publish_links(globals())
