"""The eight edits, as particles see them: what brings a particle from one version to the next.

The particle that starts an edit gets the very objects; the others get copies of the values at the time of the edit. The
`text` of each tells the edit in words.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from ...particles.edits import ParticleEdit
from ...particles.mtype import ModuleDict, ModuleID, ParamDict, ParamID


class AddModuleParticleUpdater(ParticleEdit):
    """A module is assigned.

    Example:
        >>> from moduli.compat.nytorch import AddModuleParticleUpdater
        >>> edit = AddModuleParticleUpdater(0, "head", 1, OrderedDict([(1, nn.ReLU())]), OrderedDict(), set(), set())
        >>> edit.attr_name, list(edit.add_modules)
        ('head', [1])
    """

    def __init__(
        self,
        module_id: ModuleID,
        attr_name: str,
        add_module_id: ModuleID,
        add_modules: ModuleDict,
        add_params: ParamDict,
        remove_modules: set[ModuleID] | None = None,
        remove_params: set[ParamID] | None = None,
    ) -> None:
        super().__init__(module_id, attr_name, remove_modules or set(), remove_params or set())
        self.add_module_id = add_module_id
        self.add_modules = add_modules
        self.add_params = add_params


class AddParamParticleUpdater(ParticleEdit):
    """A parameter is assigned: a new one, or one that the particle has already under another name.

    Example:
        >>> from moduli.compat.nytorch import AddParamParticleUpdater
        >>> AddParamParticleUpdater(0, "w", 3, set(), set(), nn.Parameter(torch.zeros(2))).add_param.shape
        torch.Size([2])
    """

    def __init__(
        self,
        module_id: ModuleID,
        attr_name: str,
        add_param_id: ParamID,
        remove_modules: set[ModuleID] | None = None,
        remove_params: set[ParamID] | None = None,
        add_param: nn.Parameter | None = None,
    ) -> None:
        super().__init__(module_id, attr_name, remove_modules or set(), remove_params or set())
        self.add_param_id = add_param_id
        if add_param is not None:
            self.add_params = OrderedDict([(add_param_id, add_param)])

    @property
    def add_param(self) -> nn.Parameter | None:
        """The parameter, if it is new."""
        return self.add_params.get(self.add_param_id)


class RegisterBufferParticleUpdater(ParticleEdit):
    """A buffer is registered.

    Example:
        >>> from moduli.compat.nytorch import RegisterBufferParticleUpdater
        >>> RegisterBufferParticleUpdater(0, "mean", torch.zeros(2), False).persistent
        False
    """

    def __init__(
        self,
        module_id: ModuleID,
        attr_name: str,
        value: torch.Tensor | None,
        persistent: bool,
        remove_modules: set[ModuleID] | None = None,
        remove_params: set[ParamID] | None = None,
    ) -> None:
        super().__init__(module_id, attr_name, remove_modules or set(), remove_params or set())
        self.buffers = {(module_id, attr_name): value}
        self.persistent = persistent

    @property
    def value(self) -> torch.Tensor | None:
        """The buffer."""
        return self.buffers[self.module_id, self.attr_name]


class SetModuleNoneParticleUpdater(ParticleEdit):
    """A module becomes None.

    Example:
        >>> from moduli.compat.nytorch import SetModuleNoneParticleUpdater
        >>> SetModuleNoneParticleUpdater(0, "head", {1}, set()).remove_modules
        {1}
    """


class SetParamNoneParticleUpdater(ParticleEdit):
    """A parameter becomes None.

    Example:
        >>> from moduli.compat.nytorch import SetParamNoneParticleUpdater
        >>> SetParamNoneParticleUpdater(0, "w", set(), {1}).remove_params
        {1}
    """


class DelModuleParticleUpdater(ParticleEdit):
    """A module is deleted.

    Example:
        >>> from moduli.compat.nytorch import DelModuleParticleUpdater
        >>> DelModuleParticleUpdater(0, "head", {1}, set()).attr_name
        'head'
    """


class DelParamParticleUpdater(ParticleEdit):
    """A parameter is deleted.

    Example:
        >>> from moduli.compat.nytorch import DelParamParticleUpdater
        >>> DelParamParticleUpdater(0, "w", {1}).remove_params
        {1}
    """

    def __init__(self, module_id: ModuleID, attr_name: str, remove_params: set[ParamID] | None = None) -> None:
        super().__init__(module_id, attr_name, set(), remove_params or set())


class DelBufferParticleUpdater(ParticleEdit):
    """A buffer is deleted.

    Example:
        >>> from moduli.compat.nytorch import DelBufferParticleUpdater
        >>> DelBufferParticleUpdater(0, "mean").module_id
        0
    """

    def __init__(self, module_id: ModuleID, attr_name: str) -> None:
        super().__init__(module_id, attr_name)
