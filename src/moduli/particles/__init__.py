"""Whole models as values, and the versions of their structure.

The nouns, and what is built from them:

* A **particle** is a module seen as one point of its species' parameter space: `NytoModule` (which users import as
  `moduli.Module`), or any module after `adopt`. Particles are added, scaled and combined with operators and with the
  functions here (`norm`, `dot`, `lerp`, `where`, `map`, `randn`, ...); `only` scopes an operation to some names, and
  inside `differentiable` it keeps the graph.
* A **product** (`ParamProduct`) is the light form of a particle, for chains of operations of one's own.
* A **species** is all particles derived from each other. Its structure has **versions**: an edit makes a new one, and the
  other particles follow when they are touched or used next. `history` tells the edits, `migrate` brings older values in.
  Where two particles edited the same plain child before they met, the edit that was recorded first wins: what the other
  one removed comes back with the recorded values, sequences are numbered without gaps again, and what is left of its own
  edit is recorded next.
* A `ParamConfig` says how operations treat a parameter, `buffer_policy` what becomes of buffers.
* `merge` holds recipes that make one model of several.
* A `ParticleModule` wraps a particle as a plain `torch.nn.Module`.

Two particles can be combined when their structures agree, whether or not they share a history; otherwise a
`StructureError` names the first difference.
"""

from . import base, kernel, merge, module, mtype, particle_module, particle_updater, utils, version_updater
from ._adopt import adopt
from ._buffers import POLICIES, buffer_policy
from ._config import CONFIG_KEY
from ._history import SpeciesView, events_of, history, independent, migrate, species
from ._measures import cosine, distance, dot, from_vector, norm, vector
from ._only import Only, only
from ._operand import (
    buffer_policies,
    differentiable,
    inert_parameters,
    is_differentiable,
    matching_values,
    refuse_graph,
)
from ._record import Event
from ._skeleton import POLICY
from .base import NytoModuleBase, ParticleDataImp, ParticleKernelImp, VersionDataImp, VersionKernelImp, create_new_group
from .errors import StructureError
from .functions import (
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
from .kernel import (
    Particle,
    ParticleData,
    ParticleKernel,
    ParticleUpdater,
    Product,
    VersionData,
    VersionKernel,
    VersionUpdater,
)
from .module import (
    NytoModule,
    ParamProduct,
    binary_lambda_wrapper,
    module_to_product,
    product_assign_to_module,
    product_to_module,
    unary_lambda_wrapper,
)
from .mtype import ROOT_MODULE_ID, ModuleMeta, ParamConfig
from .particle_module import GetNytoModule, ParticleModule, PMProduct
from .utils import clone_param, clone_params, copy_module, copy_modules, make_modules_ref

__all__ = [
    "merge",
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
    "is_differentiable",
    "refuse_graph",
    "species",
    "SpeciesView",
    "Event",
    "events_of",
    "independent",
    "history",
    "migrate",
    "buffer_policy",
    "buffer_policies",
    "POLICIES",
    "POLICY",
    "CONFIG_KEY",
    "inert_parameters",
    "matching_values",
    "ParamConfig",
    "ModuleMeta",
    "ROOT_MODULE_ID",
    "ParamProduct",
    "module_to_product",
    "product_to_module",
    "product_assign_to_module",
    "unary_lambda_wrapper",
    "binary_lambda_wrapper",
    "ParticleModule",
    "PMProduct",
    "GetNytoModule",
    "NytoModuleBase",
    "VersionDataImp",
    "ParticleDataImp",
    "VersionKernelImp",
    "ParticleKernelImp",
    "create_new_group",
    "VersionData",
    "ParticleData",
    "VersionUpdater",
    "ParticleUpdater",
    "VersionKernel",
    "ParticleKernel",
    "Product",
    "Particle",
    "clone_param",
    "clone_params",
    "copy_module",
    "copy_modules",
    "make_modules_ref",
    "base",
    "kernel",
    "module",
    "mtype",
    "particle_module",
    "particle_updater",
    "utils",
    "version_updater",
]
