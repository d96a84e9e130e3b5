"""Modules that own labelled tensors and derive virtual ones.

The nouns, and what is built from them:

* A **Module** is a `torch.nn.Module` whose labelled tensors are attributes: assigned by value, registered with torch,
  read as views of the live storage. `nograd_tensors` declares those that are buffers, `tie` makes two names one tensor,
  `TensorList` and `TensorDict` hold many, `labels_of` tells their axes. `export` and `export_all` (a `FrozenDict`) give
  independent values.
* A **virtual** tensor is an attribute that is derived, not stored: `virtual` decorates the method that computes it.
  It is computed when it is read; inside `cached` reads share one computation, until `invalidate`. `VirtualTensor` is
  the form made at run time, with a dtype and device of its own.
* A **Functional** acts on an object in a way chosen by the object's type and by its own class. A Module is one: a call
  runs the action registered for its argument, or `forward`.
* A **Device** is where tensors live; a Module is **DeviceBounded**: it knows where it is and moves in place.
"""

from moduli.device import Device, DeviceBounded

from ._containers import TensorDict, TensorList
from ._frozen import FrozenDict
from ._functional import Functional
from ._module import Module, ModuleType
from ._nograd import nograd_tensors
from ._ownership import TENSOR_BUFFER_PREFIX, TENSOR_PARAM_PREFIX
from ._scope import cached, invalidate
from ._state import align_labels, labels_of, load_all_or_nothing
from ._tie import tie
from ._virtual import virtual
from ._virtual_tensor import VirtualTensor, VirtualTensorAttributes

__all__ = [
    "Module",
    "nograd_tensors",
    "ModuleType",
    "TENSOR_PARAM_PREFIX",
    "TENSOR_BUFFER_PREFIX",
    "tie",
    "labels_of",
    "align_labels",
    "TensorList",
    "TensorDict",
    "FrozenDict",
    "virtual",
    "cached",
    "invalidate",
    "VirtualTensor",
    "VirtualTensorAttributes",
    "Functional",
    "Device",
    "DeviceBounded",
    "load_all_or_nothing",
]
