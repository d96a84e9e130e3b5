"""Clipping and normalisation: the size of updates."""

from .._publish import publish_links
from ._clip_norm import *
from ._growth import *

publish_links(globals())
