"""The usual optimizers by name: functions that return a chain of links and nothing else.

Example:
    >>> import torch, moduli as mo
    >>> from moduli import m, presets
    >>> net = torch.nn.Linear(2, 1)
    >>> mo.Optimizer(net, m.ClipNorm(1.0), presets.adamw(lr=1e-3)) is not None
    True
"""

from types import FunctionType as _FunctionType

from ._adaptive import *
from ._descent import *
from ._matrices import *
from ._memory import *
from ._moments import *
from ._second import *

__all__ = sorted(name for name, value in globals().items() if isinstance(value, _FunctionType))
