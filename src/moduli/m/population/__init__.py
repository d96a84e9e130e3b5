"""Links over the members of a population."""

from .._transforms import publish_links
from ._pbt import *
from ._pso import *

publish_links(globals())
