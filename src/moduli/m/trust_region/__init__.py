"""Trust regions: a quadratic model of any link's Hessian, minimised within a radius in which it predicts well.

A trust region takes a link that gives a Hessian, `m.TrustCG(m.LBFGS())`, and is an optimizer by itself.
"""

from .._publish import publish_links
from ._base import *
from ._regions import *

publish_links(globals())
