"""Every name of nytorch in one place, with the behaviour that its documentation describes.

A program that says `from nytorch import NytoModule` says `from moduli.compat.nytorch import NytoModule`. Of that package's
modules `particle_module`, `particle_updater`, `utils` and `version_updater` are here; `base`, `kernel`, `module` and `mtype`
are those of `moduli.particles`. Where moduli means something else, `docs/from-nytorch.md` says what, and how to write the
old meaning.

Example:
    >>> import torch
    >>> from moduli.compat.nytorch import NytoModule
    >>> class Net(NytoModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.my_param = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))
    >>> (2 * Net()).my_param.tolist()
    [0.0, 2.0, 4.0]
"""

from ...particles import base, kernel, module, mtype
from ...particles.base import (
    NytoModuleBase,
    ParticleDataImp,
    ParticleKernelImp,
    VersionDataImp,
    VersionKernelImp,
    create_new_group,
)
from ...particles.kernel import (
    Particle,
    ParticleData,
    ParticleKernel,
    ParticleUpdater,
    Product,
    VersionData,
    VersionKernel,
    VersionUpdater,
)
from ...particles.module import (
    NytoModule,
    ParamProduct,
    binary_lambda_wrapper,
    module_to_product,
    product_assign_to_module,
    product_to_module,
    unary_lambda_wrapper,
)
from ...particles.mtype import (
    ROOT_MODULE_ID,
    ConfigDict,
    MetaDict,
    Module,
    ModuleDict,
    ModuleID,
    ModuleMeta,
    ParamConfig,
    ParamDict,
    ParamID,
    ParamType,
)
from . import particle_module, particle_updater, utils, version_updater
from .particle_module import GetNytoModule, ParticleModule, PMProduct
from .particle_updater import (
    AddModuleParticleUpdater,
    AddParamParticleUpdater,
    DelBufferParticleUpdater,
    DelModuleParticleUpdater,
    DelParamParticleUpdater,
    RegisterBufferParticleUpdater,
    SetModuleNoneParticleUpdater,
    SetParamNoneParticleUpdater,
)
from .utils import clone_param, clone_params, copy_module, copy_modules, make_modules_ref
from .version_updater import (
    AddModuleVersionUpdater,
    AddParamVersionUpdater,
    DelBufferVersionUpdater,
    DelModuleVersionUpdater,
    DelParamVersionUpdater,
    RegisterBufferVersionUpdater,
    SetModuleNoneVersionUpdater,
    SetParamNoneVersionUpdater,
)

__all__ = [
    "base",
    "kernel",
    "module",
    "mtype",
    "particle_module",
    "particle_updater",
    "utils",
    "version_updater",
    "NytoModule",
    "NytoModuleBase",
    "ParamProduct",
    "ParticleModule",
    "PMProduct",
    "GetNytoModule",
    "ParamConfig",
    "ModuleMeta",
    "ROOT_MODULE_ID",
    "ModuleID",
    "ParamID",
    "Module",
    "ParamType",
    "ModuleDict",
    "ParamDict",
    "MetaDict",
    "ConfigDict",
    "module_to_product",
    "product_to_module",
    "product_assign_to_module",
    "unary_lambda_wrapper",
    "binary_lambda_wrapper",
    "clone_param",
    "clone_params",
    "copy_module",
    "copy_modules",
    "make_modules_ref",
    "VersionData",
    "ParticleData",
    "VersionUpdater",
    "ParticleUpdater",
    "VersionKernel",
    "ParticleKernel",
    "Product",
    "Particle",
    "VersionDataImp",
    "ParticleDataImp",
    "VersionKernelImp",
    "ParticleKernelImp",
    "create_new_group",
    "AddModuleVersionUpdater",
    "AddParamVersionUpdater",
    "RegisterBufferVersionUpdater",
    "SetModuleNoneVersionUpdater",
    "SetParamNoneVersionUpdater",
    "DelModuleVersionUpdater",
    "DelParamVersionUpdater",
    "DelBufferVersionUpdater",
    "AddModuleParticleUpdater",
    "AddParamParticleUpdater",
    "RegisterBufferParticleUpdater",
    "SetModuleNoneParticleUpdater",
    "SetParamNoneParticleUpdater",
    "DelModuleParticleUpdater",
    "DelParamParticleUpdater",
    "DelBufferParticleUpdater",
]
