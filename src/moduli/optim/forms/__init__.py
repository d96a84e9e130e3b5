"""How links meet the parameters of a step, a file for each form with the same four functions.

* `plain`: the parameters as they are;
* `members`: those of a population, for all members at once or one by one; `matrices` has the N x P matrices;
* `shards`: the local shards of parameters that several processes hold;
* `graph`: copies, in a step that autograd differentiates through.

`enter` returns the tensors that links see, `run` runs one link, `leave` comes back after the last, `describe` says what a link
works on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .graph import GraphForm
from .matrices import MemberMatrices, OtherPresenceError
from .members import MEMBERS_FORM
from .plain import PLAIN, StepForm
from .shards import ShardedParams

if TYPE_CHECKING:
    from .. import Module, Objective

__all__ = ["GraphForm", "MemberMatrices", "OtherPresenceError", "PLAIN", "StepForm", "ShardedParams", "find_form"]


def find_form(objective: "Objective", links: "Sequence[Module]", wide: bool) -> StepForm:
    """Return the form in which links see the parameters of an objective.

    Args:
        objective: The objective.
        links: The links that are to run.
        wide: Whether a differentiated step may leave an update of half precision in single precision.
    """
    if objective.differentiable:
        return GraphForm(links, wide)
    if objective.members is not None:
        return MEMBERS_FORM
    return PLAIN if objective.shards is None else objective.shards
