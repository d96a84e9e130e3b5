"""Trust regions: a quadratic model of any link's Hessian, followed as far as it proves true.

A trust region takes a link that gives a Hessian, `m.TrustCG(m.LBFGS())`, and is an optimizer by itself.
"""

from .._publish import publish_links
from ._base import *
from ._regions import *

publish_links(globals())
