"""Operations on updates: pointwise functions and sources."""

from .._publish import publish_links
from ._accumulate import *
from ._binary import *
from ._graft import *
from ._operations import *
from ._sources import *
from ._unary import *

publish_links(globals())
