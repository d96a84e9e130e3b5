"""Links that drive other links."""

from .._publish import publish_links
from ._multistep import *
from ._quantized import *
from ._split import *
from ._wrap import *

publish_links(globals())
