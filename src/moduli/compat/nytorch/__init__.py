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
from ...particles.base import *
from ...particles.kernel import *
from ...particles.module import *
from ...particles.mtype import *
from . import particle_module, particle_updater, utils, version_updater
from .particle_module import *
from .particle_updater import *
from .utils import *
from .version_updater import *

__all__ = [
    "base",
    "kernel",
    "module",
    "mtype",
    "particle_module",
    "particle_updater",
    "utils",
    "version_updater",
]
__all__ += base.__all__
__all__ += kernel.__all__
__all__ += module.__all__
__all__ += mtype.__all__
__all__ += particle_module.__all__
__all__ += particle_updater.__all__
__all__ += utils.__all__
__all__ += version_updater.__all__
