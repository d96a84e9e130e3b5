"""Small links that fit nowhere else."""

from .._publish import publish_links
from ._curvature import *
from ._previous import *
from ._scaling import *

publish_links(globals())
