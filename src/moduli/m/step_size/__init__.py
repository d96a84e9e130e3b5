"""Step sizes: given, scheduled, or found from what the steps do."""

from .._publish import publish_links
from ._adaptive import *
from ._lr import *

publish_links(globals())
