"""Line searches: the length of a step along the update.

A line search multiplies the update by a length that it finds by evaluating the closure at trial points. It follows the link
that gives the direction: `m.LBFGS(), m.StrongWolfe()`.
"""

from .._publish import publish_links
from ._backtracking import *
from ._base import *
from ._strong_wolfe import *

publish_links(globals())
