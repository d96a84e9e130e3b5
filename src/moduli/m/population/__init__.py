"""Links over the members of a population."""

from .._publish import publish_links
from ._pbt import *
from ._pso import *

publish_links(globals())
