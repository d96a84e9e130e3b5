"""Every name of nytorch in one place, with the behaviour that its documentation describes.

Programs replace `from nytorch import NytoModule` by `from moduli.compat.nytorch import NytoModule`; the modules of nytorch are
here, too. Where moduli differs, `docs/from-nytorch.md` describes the difference, and how to write the old meaning.

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

import types as _types
import typing as _typing

from . import base as base
from . import kernel as kernel
from . import module as module
from . import mtype as mtype
from . import particle_module as particle_module
from . import particle_updater as particle_updater
from . import utils as utils
from . import version_updater as version_updater
from .base import NytoModuleBase as NytoModuleBase
from .base import ParticleDataImp as ParticleDataImp
from .base import ParticleKernelImp as ParticleKernelImp
from .base import VersionDataImp as VersionDataImp
from .base import VersionKernelImp as VersionKernelImp
from .base import create_new_group as create_new_group
from .kernel import Particle as Particle
from .kernel import ParticleData as ParticleData
from .kernel import ParticleKernel as ParticleKernel
from .kernel import ParticleUpdater as ParticleUpdater
from .kernel import Product as Product
from .kernel import VersionData as VersionData
from .kernel import VersionKernel as VersionKernel
from .kernel import VersionUpdater as VersionUpdater
from .module import NytoModule as NytoModule
from .module import ParamProduct as ParamProduct
from .module import binary_lambda_wrapper as binary_lambda_wrapper
from .module import module_to_product as module_to_product
from .module import product_assign_to_module as product_assign_to_module
from .module import product_to_module as product_to_module
from .module import unary_lambda_wrapper as unary_lambda_wrapper
from .mtype import ROOT_MODULE_ID as ROOT_MODULE_ID
from .mtype import ConfigDict as ConfigDict
from .mtype import MetaDict as MetaDict
from .mtype import Module as Module
from .mtype import ModuleDict as ModuleDict
from .mtype import ModuleID as ModuleID
from .mtype import ModuleMeta as ModuleMeta
from .mtype import ParamConfig as ParamConfig
from .mtype import ParamDict as ParamDict
from .mtype import ParamID as ParamID
from .mtype import ParamType as ParamType
from .particle_module import GetNytoModule as GetNytoModule
from .particle_module import ParticleModule as ParticleModule
from .particle_module import PMProduct as PMProduct
from .particle_updater import AddModuleParticleUpdater as AddModuleParticleUpdater
from .particle_updater import AddParamParticleUpdater as AddParamParticleUpdater
from .particle_updater import DelBufferParticleUpdater as DelBufferParticleUpdater
from .particle_updater import DelModuleParticleUpdater as DelModuleParticleUpdater
from .particle_updater import DelParamParticleUpdater as DelParamParticleUpdater
from .particle_updater import RegisterBufferParticleUpdater as RegisterBufferParticleUpdater
from .particle_updater import SetModuleNoneParticleUpdater as SetModuleNoneParticleUpdater
from .particle_updater import SetParamNoneParticleUpdater as SetParamNoneParticleUpdater
from .utils import clone_param as clone_param
from .utils import clone_params as clone_params
from .utils import copy_module as copy_module
from .utils import copy_modules as copy_modules
from .utils import make_modules_ref as make_modules_ref
from .version_updater import AddModuleVersionUpdater as AddModuleVersionUpdater
from .version_updater import AddParamVersionUpdater as AddParamVersionUpdater
from .version_updater import DelBufferVersionUpdater as DelBufferVersionUpdater
from .version_updater import DelModuleVersionUpdater as DelModuleVersionUpdater
from .version_updater import DelParamVersionUpdater as DelParamVersionUpdater
from .version_updater import RegisterBufferVersionUpdater as RegisterBufferVersionUpdater
from .version_updater import SetModuleNoneVersionUpdater as SetModuleNoneVersionUpdater
from .version_updater import SetParamNoneVersionUpdater as SetParamNoneVersionUpdater

if not _typing.TYPE_CHECKING:  # which takes a name that is imported as itself for public
    __all__ = sorted(k for k, v in globals().items() if not (k.startswith("_") or isinstance(v, _types.ModuleType)))
