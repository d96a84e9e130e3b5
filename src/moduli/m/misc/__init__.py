"""Links that belong to no other family."""

from .._publish import publish_links
from ._curvature import *
from ._previous import *
from ._scaling import *

publish_links(globals())
