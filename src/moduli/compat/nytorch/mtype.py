"""The types of metadata, and their names."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from torch import nn

from ...particles import ParamConfig as ParamConfig

ModuleID: TypeAlias = Annotated[int, "module"]
"""Identifies a module within its particle, the same in every particle of the species."""

ParamID: TypeAlias = Annotated[int, "parameter"]
"""Identifies a parameter within its particle, the same in every particle of the species."""

Module: TypeAlias = nn.Module
"""Any module of torch."""

ParamType: TypeAlias = nn.Parameter
"""A parameter of torch."""

ROOT_MODULE_ID: ModuleID = 0
"""The identifier of the module at the top of a particle."""


@dataclass
class ModuleMeta:
    """The identifiers of the parts to which the attributes of one module refer.

    Attributes:
        sub_modules: The identifier of the module under each name, or None for an empty place.
        sub_params: The identifier of the parameter under each name, or None for an empty place.
        sub_buffers: For each buffer, whether it is persistent.
        kind: The class of the module.

    Example:
        >>> from collections import OrderedDict
        >>> from moduli.compat.nytorch import ModuleMeta
        >>> meta = ModuleMeta(sub_modules=OrderedDict([("head", 1)]), sub_params=OrderedDict())
        >>> meta.copy() == meta, meta.copy() is meta
        (True, False)
    """

    sub_modules: OrderedDict[str, ModuleID | None]
    sub_params: OrderedDict[str, ParamID | None]
    sub_buffers: OrderedDict[str, bool] = field(default_factory=OrderedDict)
    kind: type[nn.Module] | None = None

    def copy(self) -> ModuleMeta:
        """Return a deep copy."""
        return ModuleMeta(
            OrderedDict(self.sub_modules), OrderedDict(self.sub_params), OrderedDict(self.sub_buffers), self.kind
        )


ModuleDict: TypeAlias = OrderedDict[int, nn.Module]
"""Modules by identifier."""

ParamDict: TypeAlias = OrderedDict[int, nn.Parameter]
"""Parameters by identifier."""

MetaDict: TypeAlias = OrderedDict[int, ModuleMeta]
"""Metadata of modules by identifier."""

ConfigDict: TypeAlias = OrderedDict[int, ParamConfig]
"""Configurations by identifier of the parameter."""
