"""Whole models as values, and the versions of their structure.

The nouns, and what is built from them:

* A **particle** is a module seen as one point of its species' parameter space: `Module` (which users import as
  `moduli.Module`), or any module after `adopt`. Particles are added, scaled and combined with operators and with the
  functions here (`norm`, `dot`, `lerp`, `where`, `map`, `randn`, ...); `only` scopes an operation to some names, and
  inside `differentiable` it keeps the graph.
* A **product** (`net.product()`) is the light form of a particle: its parameters without modules, for user-written operations.
* A **species** is all particles derived from each other. Its structure has **versions**: an edit makes a new one, and the
  other particles follow when they are touched or used next. `net.history` lists the edits, `rollback` goes back to a version,
  `diff` compares two models, `migrate` loads the values of an older version.
  If two particles were edited differently before they met, the later edit raises. `independent` moves a particle to its own
  species.
* `grow` and `shrink` give an axis of a model more or fewer units, wherever it occurs, `insert` and `remove` more or fewer layers;
  `GrowthError` says why that is not possible.
* A `ParamConfig` configures how operations treat a parameter, `buffer_policy` how results get their buffers.

Two particles can be combined when their structures agree, whether or not they share a history; otherwise a
`StructureError` names the first difference.
"""

import types as _types
import typing as _typing

from moduli.layout import public_name as public_name

from ._adopt import adopt as adopt
from ._arithmetic import Only as Only
from ._config import CONFIG_KEY as CONFIG_KEY
from ._config import POLICIES as POLICIES
from ._config import buffer_policy as buffer_policy
from ._config import keep_buffer as keep_buffer
from ._diff import ModelDiff as ModelDiff
from ._diff import TensorChange as TensorChange
from ._diff import diff as diff
from ._edit_list import EditHistory as EditHistory
from ._functions import axpy_ as axpy_
from ._functions import clamp as clamp
from ._functions import exp as exp
from ._functions import lerp as lerp
from ._functions import lerp_ as lerp_
from ._functions import map as map
from ._functions import rand as rand
from ._functions import randn as randn
from ._functions import sign as sign
from ._functions import sqrt as sqrt
from ._functions import where as where
from ._functions import zeros_like as zeros_like
from ._growth_check import GrowthError as GrowthError
from ._history import SpeciesView as SpeciesView
from ._history import copy_plain as copy_plain
from ._history import events_of as events_of
from ._history import has_version as has_version
from ._history import history as history
from ._history import independent as independent
from ._history import migrate as migrate
from ._history import species as species
from ._measures import cosine as cosine
from ._measures import distance as distance
from ._measures import dot as dot
from ._measures import from_vector as from_vector
from ._measures import norm as norm
from ._measures import only as only
from ._measures import vector as vector
from ._modes import differentiable as differentiable
from ._modes import is_differentiable as is_differentiable
from ._modes import refuse_graph as refuse_graph
from ._moves import FollowedNames as FollowedNames
from ._moves import find_events_since as find_events_since
from ._moves import follow_names as follow_names
from ._operand import buffer_policies as buffer_policies
from ._operand import check_kept as check_kept
from ._operand import inert_parameters as inert_parameters
from ._operand import read_number as read_number
from ._operators import InPlaceOperators as InPlaceOperators
from ._operators import Operators as Operators
from ._record import Event as Event
from ._record import pin as pin
from ._rollback import keep_removed as keep_removed
from ._rollback import rollback as rollback
from ._skeleton import POLICY as POLICY
from ._skeleton import copy_unwrapped as copy_unwrapped
from .depth import insert as insert
from .depth import remove as remove
from .errors import StructureError as StructureError
from .growth import grow as grow
from .growth import shrink as shrink
from .module import Module as Module
from .module import NytoModule as NytoModule
from .mtype import ParamConfig as ParamConfig

if not _typing.TYPE_CHECKING:  # type checkers take `import X as X` as public and reject a computed `__all__`
    __all__ = sorted(k for k, v in globals().items() if not (k.startswith("_") or isinstance(v, _types.ModuleType)))
