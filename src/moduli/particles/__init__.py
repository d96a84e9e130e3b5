"""Whole models as values, and the versions of their structure.

The nouns, and what is built from them:

* A **particle** is a module seen as one point of its species' parameter space: `NytoModule` (which users import as
  `moduli.Module`), or any module after `adopt`. Particles are added, scaled and combined with operators and with the
  functions here (`norm`, `dot`, `lerp`, `where`, `map`, `randn`, ...); `only` scopes an operation to some names, and
  inside `differentiable` it keeps the graph.
* A **product** (`net.product()`) is the light form of a particle, for chains of operations of one's own.
* A **species** is all particles derived from each other. Its structure has **versions**: an edit makes a new one, and the
  other particles follow when they are touched or used next. `history` tells the edits, `migrate` brings older values in.
  Where two particles were edited differently before they met, the later edit is refused. `independent` lets a particle
  go its own way.
* A `ParamConfig` says how operations treat a parameter, `buffer_policy` what becomes of buffers.

Two particles can be combined when their structures agree, whether or not they share a history; otherwise a
`StructureError` names the first difference.
"""

from .._deprecated import move
from ._adopt import adopt
from ._config import CONFIG_KEY, POLICIES, buffer_policy, keep_buffer, public_name
from ._functions import (
    axpy_,
    clamp,
    exp,
    lerp,
    lerp_,
    map,
    rand,
    randn,
    sign,
    sqrt,
    where,
    zeros_like,
)
from ._history import SpeciesView, events_of, history, independent, migrate, species
from ._measures import Only, cosine, distance, dot, from_vector, norm, only, vector
from ._mode import differentiable, is_differentiable, refuse_graph
from ._operand import buffer_policies, check_kept, inert_parameters, matching_values, read_number
from ._operators import InPlaceOperators, count_operand, is_temporary
from ._record import Event
from ._skeleton import POLICY, copy_unwrapped
from .errors import StructureError
from .module import NytoModule
from .mtype import ParamConfig

__all__ = [
    "NytoModule",
    "adopt",
    "StructureError",
    "norm",
    "dot",
    "cosine",
    "distance",
    "lerp",
    "lerp_",
    "axpy_",
    "sign",
    "sqrt",
    "exp",
    "clamp",
    "where",
    "map",
    "rand",
    "randn",
    "zeros_like",
    "vector",
    "from_vector",
    "only",
    "Only",
    "differentiable",
    "species",
    "SpeciesView",
    "history",
    "independent",
    "migrate",
    "ParamConfig",
    "buffer_policy",
    # For the rooms that build on this one.
    "Event",
    "events_of",
    "POLICIES",
    "POLICY",
    "CONFIG_KEY",
    "public_name",
    "copy_unwrapped",
    "check_kept",
    "keep_buffer",
    "read_number",
    "count_operand",
    "is_temporary",
    "InPlaceOperators",
    "buffer_policies",
    "inert_parameters",
    "is_differentiable",
    "matching_values",
    "refuse_graph",
]

__getattr__ = move(
    __name__,
    "moduli.compat.nytorch",
    (
        "ParticleModule",
        "GetNytoModule",
        "ParamProduct",
        "particle_module",
        "particle_updater",
        "utils",
        "version_updater",
    ),
)
