"""The axes of a whole model: which axis of which parameter is the same set of units.

* `trace`: the axes of a model, from one forward; `ModelAxes` is the value that it returns, `ModelAxis` one axis, `ParameterAxes`
  those of one parameter, with `Segments` where axes are concatenated.
* `INDEXED`: the reason why the rows of an embedding are fixed.
* `from_labels`: the axes of a module according to the labels of its tensors.
* `label`: labelled views of a plain module's parameters, by the names of its axes (`LabelledParameters`).
* `parse` reads the notation of einops for axes; `list_names`, `measure` and `locate_units` read the `Factors` of one axis of a
  parameter.
* `match_units`: maps from the units of a saved model to those of another one, by label or position.
* `check`: permutes every free axis and compares the outputs (`measure_difference`); `ModelAxesError` says which axis is not free.
* `find_step_scale`: the factor of a parameter's step in the maximal update parametrization; `check_base` checks its base width.
* `rule`: registers how an operation pairs the axes of its tensors, for operations without a built-in rule. A rule takes a
  `RuleCall` and the `Traced` axes of the operands.

Example:
    >>> import torch, moduli as mo
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> ax = mo.axes.trace(net, torch.zeros(1, 4))
    >>> [axis.name for axis in ax.free]
    ['0.out']
"""

from ._atoms import INDEXED as INDEXED
from ._check import ModelAxesError as ModelAxesError
from ._check import check as check
from ._check import measure_difference as measure_difference
from ._factors import Factors as Factors
from ._factors import Segments as Segments
from ._factors import list_names as list_names
from ._factors import locate_units as locate_units
from ._factors import measure as measure
from ._labelled import LabelledParameters as LabelledParameters
from ._labelled import label as label
from ._matching import match_units as match_units
from ._model_axes import ModelAxes as ModelAxes
from ._model_axes import ModelAxis as ModelAxis
from ._model_axes import ParameterAxes as ParameterAxes
from ._mup import check_base as check_base
from ._mup import find_step_scale as find_step_scale
from ._notation import parse as parse
from ._trace import from_labels as from_labels
from ._trace import trace as trace
from ._tracer import RuleCall as RuleCall
from ._tracer import Traced as Traced
from ._tracer import rule as rule

__all__ = [
    "INDEXED",
    "Factors",
    "LabelledParameters",
    "ModelAxes",
    "ModelAxesError",
    "ModelAxis",
    "ParameterAxes",
    "RuleCall",
    "Segments",
    "Traced",
    "check",
    "check_base",
    "find_step_scale",
    "from_labels",
    "label",
    "list_names",
    "locate_units",
    "match_units",
    "measure",
    "measure_difference",
    "parse",
    "rule",
    "trace",
]
