"""Modules that own labelled tensors and derive virtual ones.

The nouns, and what is built from them:

* A **Module** is a `torch.nn.Module` whose labelled tensors are attributes: assigned by value, registered with torch,
  read as views of the live storage. `nograd_tensors` declares those that are buffers, `tie` makes two names one tensor,
  `TensorList` and `TensorDict` hold many, `labels_of` returns their axes, `AveragedModel` averages by label.
  `export` and `export_all` (a `FrozenDict`) give independent values.
* A **virtual** tensor is an attribute that is derived, not stored: `virtual` decorates the method that computes it.
  It is computed when it is read; inside `cached` reads share one computation, until `invalidate`. `VirtualTensor` is
  the form made at run time, with a dtype and device of its own.
* A **Functional** dispatches on the type of an object and on its own class. A Module is one: a call
  runs the action registered for its argument, or `forward`.
* A **Device** is where tensors live; a Module is **DeviceBounded**: it knows where it is and moves in place.
"""

import typing as _typing

from moduli.device import Device as Device
from moduli.device import DeviceBounded as DeviceBounded
from moduli.layout import TENSOR_BUFFER_PREFIX as TENSOR_BUFFER_PREFIX
from moduli.layout import TENSOR_PARAM_PREFIX as TENSOR_PARAM_PREFIX

from ._averaged import AveragedModel as AveragedModel
from ._containers import TensorDict as TensorDict
from ._containers import TensorList as TensorList
from ._declarations import nograd_tensors as nograd_tensors
from ._declarations import tie as tie
from ._frozen import FrozenDict as FrozenDict
from ._functional import Functional as Functional
from ._load import align_state_dict as align_state_dict
from ._load import load_all_or_nothing as load_all_or_nothing
from ._module import Module as Module
from ._module import ModuleType as ModuleType
from ._ownership import updates_value as updates_value
from ._scope import cached as cached
from ._scope import invalidate as invalidate
from ._state import align_saved as align_saved
from ._state import decode_axes as decode_axes
from ._state import encode_axes as encode_axes
from ._state import find_saved_axes as find_saved_axes
from ._state import labels_of as labels_of
from ._state import read_saved_axes as read_saved_axes
from ._virtual import virtual as virtual
from ._virtual_tensor import VirtualTensor as VirtualTensor
from ._virtual_tensor import VirtualTensorAttributes as VirtualTensorAttributes

if not _typing.TYPE_CHECKING:  # type checkers take `import X as X` as public and reject a computed `__all__`
    __all__ = sorted(name for name in globals() if not name.startswith("_"))
