"""The eight edits, for particles: each changes a particle from one version to the next.

The particle that starts an edit gets the very objects; the others get copies of the values at the time of the edit. The
`text` of each is the edit in words.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, Self

import torch
from torch import nn

from ...particles import StructureError
from .mtype import MetaDict, ModuleDict, ModuleID, ParamDict, ParamID
from .utils import clone_params, copy_modules, make_modules_ref


class ParticleEditView:
    """The edit of one attribute, for particles.

    Attributes:
        module_id: The module that is edited.
        attr_name: The attribute.
        remove_modules: The modules that are gone.
        remove_params: The parameters that are gone.
        add_modules: The modules that are new.
        add_params: The parameters that are new.
        buffers: The buffers that are new, by name.
    """

    def __init__(
        self,
        module_id: ModuleID,
        attr_name: str,
        remove_modules: set[ModuleID] | None = None,
        remove_params: set[ParamID] | None = None,
    ) -> None:
        self.module_id = module_id
        self.attr_name = attr_name
        self.remove_modules = remove_modules or set()
        self.remove_params = remove_params or set()
        self.add_modules: ModuleDict = OrderedDict()
        self.add_params: ParamDict = OrderedDict()
        self.buffers: dict[str, torch.Tensor | None] = {}
        self._meta: MetaDict | None = None
        self._owner: weakref.ref[Any] | None = None

    def set_version_data(self, vdata: Any) -> Self:
        """Receive the metadata of the version that particles come from."""
        return self

    def set_next_version_data(self, vdata: Any) -> Self:
        """Receive the metadata of the version that particles go to."""
        self._meta = vdata.meta
        return self

    def set_particle_data(self, pdata: Any) -> Self:
        """Receive the data of the particle that starts the edit."""
        self._owner = weakref.ref(pdata)
        return self

    def run(self, pdata: Any) -> None:
        """Change one particle to the next version; if this fails, the particle is not changed.

        Raises:
            StructureError: If the metadata of the next version was not received.
        """
        if self._meta is None:
            raise StructureError("this edit has not been told the metadata of the next version")
        starts = self._owner is not None and self._owner() is pdata
        modules = OrderedDict({**pdata.modules, **(self.add_modules if starts else copy_modules(self.add_modules))})
        params = OrderedDict({**pdata.params, **(self.add_params if starts else clone_params(self.add_params))})
        values = {n: value if starts or value is None else value.detach().clone() for n, value in self.buffers.items()}
        owner, kinds = modules[self.module_id], self._meta[self.module_id].sub_buffers
        buffers = {name: values[name] if name in values else owner._buffers[name] for name in kinds}
        make_modules_ref(modules, params, self._meta, {self.module_id, *self.add_modules})
        owner.__dict__["_buffers"] = buffers
        owner.__dict__["_non_persistent_buffers_set"] = {name for name, persistent in kinds.items() if not persistent}
        pdata.modules = OrderedDict((k, m) for k, m in modules.items() if k not in self.remove_modules)
        pdata.params = OrderedDict((k, p) for k, p in params.items() if k not in self.remove_params)


class AddModuleParticleUpdater(ParticleEditView):
    """The assignment of a module.

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
        super().__init__(module_id, attr_name, remove_modules, remove_params)
        self.add_module_id = add_module_id
        self.add_modules = add_modules
        self.add_params = add_params


class AddParamParticleUpdater(ParticleEditView):
    """The assignment of a parameter: a new one, or one that the particle has already under another name.

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
        super().__init__(module_id, attr_name, remove_modules, remove_params)
        self.add_param_id = add_param_id
        if add_param is not None:
            self.add_params = OrderedDict([(add_param_id, add_param)])

    @property
    def add_param(self) -> nn.Parameter | None:
        """The parameter, if it is new."""
        return self.add_params.get(self.add_param_id)


class RegisterBufferParticleUpdater(ParticleEditView):
    """The registration of a buffer.

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
        super().__init__(module_id, attr_name, remove_modules, remove_params)
        self.buffers = {attr_name: value}
        self.persistent = persistent

    @property
    def value(self) -> torch.Tensor | None:
        """The buffer."""
        return self.buffers[self.attr_name]


class SetModuleNoneParticleUpdater(ParticleEditView):
    """The replacement of a module by None.

    Example:
        >>> from moduli.compat.nytorch import SetModuleNoneParticleUpdater
        >>> SetModuleNoneParticleUpdater(0, "head", {1}, set()).remove_modules
        {1}
    """


class SetParamNoneParticleUpdater(ParticleEditView):
    """The replacement of a parameter by None.

    Example:
        >>> from moduli.compat.nytorch import SetParamNoneParticleUpdater
        >>> SetParamNoneParticleUpdater(0, "w", set(), {1}).remove_params
        {1}
    """


class DelModuleParticleUpdater(ParticleEditView):
    """The deletion of a module.

    Example:
        >>> from moduli.compat.nytorch import DelModuleParticleUpdater
        >>> DelModuleParticleUpdater(0, "head", {1}, set()).attr_name
        'head'
    """


class DelParamParticleUpdater(ParticleEditView):
    """The deletion of a parameter.

    Example:
        >>> from moduli.compat.nytorch import DelParamParticleUpdater
        >>> DelParamParticleUpdater(0, "w", {1}).remove_params
        {1}
    """

    def __init__(self, module_id: ModuleID, attr_name: str, remove_params: set[ParamID] | None = None) -> None:
        super().__init__(module_id, attr_name, None, remove_params)


class DelBufferParticleUpdater(ParticleEditView):
    """The deletion of a buffer.

    Example:
        >>> from moduli.compat.nytorch import DelBufferParticleUpdater
        >>> DelBufferParticleUpdater(0, "mean").module_id
        0
    """

    def __init__(self, module_id: ModuleID, attr_name: str) -> None:
        super().__init__(module_id, attr_name)
