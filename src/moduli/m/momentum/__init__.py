"""Momentum and averaging: updates of several steps as one."""

from .._publish import publish_links
from ._averaging import *
from ._cautious import *
from ._ema import *

publish_links(globals())
