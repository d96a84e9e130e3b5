"""The axes of a whole model: which axis of which parameter is the same set of units.

* `trace`: the axes of a model, from one forward; `ModelAxes` is the value that it returns, `ModelAxis` one axis, `ParameterAxes`
  those of one parameter, with `Segments` where axes are concatenated.
* `label`: labelled views of a plain module's parameters, by the names of its axes (`LabelledParameters`).
* `check`: permutes every free axis and compares the outputs; `ModelAxesError` says which axis is not free.
* `rule`: how an operation pairs the axes of its tensors, for operations that `trace` does not know. A rule takes a `RuleCall` and
  the `Traced` axes of the operands.

Example:
    >>> import torch, moduli as mo
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> ax = mo.axes.trace(net, torch.zeros(1, 4))
    >>> [axis.name for axis in ax.free]
    ['0.out']
"""

from ._check import ModelAxesError as ModelAxesError
from ._check import check as check
from ._labelled import LabelledParameters as LabelledParameters
from ._labelled import label as label
from ._model_axes import ModelAxes as ModelAxes
from ._model_axes import ModelAxis as ModelAxis
from ._model_axes import ParameterAxes as ParameterAxes
from ._model_axes import Segments as Segments
from ._trace import trace as trace
from ._tracer import RuleCall as RuleCall
from ._tracer import Traced as Traced
from ._tracer import rule as rule

__all__ = [
    "LabelledParameters",
    "ModelAxes",
    "ModelAxesError",
    "ModelAxis",
    "ParameterAxes",
    "RuleCall",
    "Segments",
    "Traced",
    "check",
    "label",
    "rule",
    "trace",
]
