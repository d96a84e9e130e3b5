"""How links meet the parameters of a step, a file for each form with the same four functions.

* `plain`: the parameters as they are;
* `members`: those of a population, for all members at once or one by one; `matrices` has the N x P matrices;
* `shards`: the local shards of parameters that several processes hold;
* `graph`: copies, in a step that autograd differentiates through.

`enter` returns the tensors that links see, `run` runs one link, `leave` comes back after the last, `describe` says what a link
works on.
"""

from .graph import GraphForm
from .matrices import MemberMatrices
from .members import MEMBERS_FORM
from .plain import PLAIN, StepForm
from .shards import ShardedParams

__all__ = ["GraphForm", "MEMBERS_FORM", "MemberMatrices", "PLAIN", "StepForm", "ShardedParams"]
