"""Step sizes: given, scheduled, or computed from the effect of earlier steps."""

from .._publish import publish_links
from ._adaptive import *
from ._lr import *

publish_links(globals())
