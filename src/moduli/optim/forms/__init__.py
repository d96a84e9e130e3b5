"""The forms in which links get the parameters of a step, a file for each form with the same four functions.

* `plain`: the parameters themselves;
* `members`: those of a population, for all members at once or one by one; `matrices` has the N x P matrices;
* `shards`: the local shards of sharded parameters;
* `graph`: copies, in a step that autograd differentiates through.

`enter` returns the tensors for links, `run` runs one link, `leave` converts back after the last, `describe` names the tensors
that a link works on.
"""

from .graph import GraphForm
from .matrices import MemberMatrices
from .members import MEMBERS_FORM
from .plain import PLAIN, StepForm
from .shards import ShardedParams

__all__ = ["GraphForm", "MEMBERS_FORM", "MemberMatrices", "PLAIN", "StepForm", "ShardedParams"]
