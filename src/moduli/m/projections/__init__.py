"""Links that pass the tensors to other links in another form: another shape, dtype or basis."""

from .._publish import publish_links
from ._bases import *
from ._low_rank import *
from ._projection import *

publish_links(globals())
