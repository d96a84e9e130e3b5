"""The eight kinds of edits, as particles see them, and several of them together."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import nn

from ._edits import ParticleEdit, Undo, put
from .base import ParticleDataImp, VersionDataImp, paired
from .errors import StructureError
from .mtype import ModuleDict, ModuleID, ParamDict, ParamID

__all__ = [
    "AddModule",
    "AddParam",
    "DelBuffer",
    "DelModule",
    "DelParam",
    "RegisterBuffer",
    "SetModuleNone",
    "SetParamNone",
    "Together",
]


class AddParam(ParticleEdit):
    """A parameter is assigned."""

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
        self.add_param = add_param
        # A copy of a parameter that was in the particle already, for those that removed it themselves.
        self.spare: nn.Parameter | None = None
        self.label: tuple[str, Any] | None = None

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        value = self.add_param
        if initiator and value is not None:
            pdata.params[self.add_param_id] = value
            nn.Module.__setattr__(module, self.attr_name, value)
            self.settle()
            return
        if self.add_param_id not in pdata.params:
            value = value if value is not None else self.spare
            if value is None:
                raise StructureError(_lost(self.attr_name, f"parameter {self.add_param_id}"))
            pdata.params[self.add_param_id] = copied(value)
        put(module, "_parameters", self.attr_name, pdata.params[self.add_param_id])
        if self.label is not None and "_labelled" in module.__dict__:
            module.__dict__["_labelled"][self.label[0]] = self.label[1]

    def settle(self) -> None:
        """Keep a copy of the value as it is now, instead of the parameter itself."""
        if self.add_param is not None:
            self.add_param = copied(self.add_param)
        if self.spare is not None:
            self.spare = copied(self.spare)

    def sentence(self, vdata: VersionDataImp) -> str:
        shape = "" if self.add_param is None else f" of shape {tuple(self.add_param.shape)}"
        return f"parameter {super().sentence(vdata)}{shape}"

    verb = "was assigned"


class SetParamNone(ParticleEdit):
    """A parameter becomes None."""

    verb = "became None"

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        put(module, "_parameters", self.attr_name, None)


class DelParam(ParticleEdit):
    """A parameter is deleted."""

    verb = "was deleted"

    def __init__(self, module_id: ModuleID, attr_name: str, remove_params: set[ParamID] | None = None) -> None:
        super().__init__(module_id, attr_name, None, remove_params)


class AddModule(ParticleEdit):
    """A module is assigned."""

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
        # A copy of a module that was in the particle already, for those that removed it themselves.
        self.spare: nn.Module | None = None

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        fresh = self.add_module_id in self.add_modules
        if not fresh and self.add_module_id in pdata.modules:
            # It was in the particle already, under another name.
            put(module, "_modules", self.attr_name, pdata.modules[self.add_module_id])
            return
        if initiator and fresh:
            value = self.add_modules[self.add_module_id]
            pdata.add_modules(self.add_modules)
            pdata.add_params(self.add_params)
            nn.Module.__setattr__(module, self.attr_name, value)
            self.settle()
            return
        meta = self.next_version_modules_meta
        if meta is None:
            raise StructureError("this edit has not been told the metadata of the next version")
        source = self.add_modules[self.add_module_id] if fresh else self.spare
        if source is None:
            raise StructureError(_lost(self.attr_name, f"module {self.add_module_id}"))
        # What the particle has already stays what it is; what it removed itself comes back as it was recorded.
        memo: dict[int, Any] = {}
        for key, each in paired(source, self.add_module_id, meta):
            if key not in self.add_modules and key in pdata.modules:
                memo[id(each)] = pdata.modules[key]
            for name, pid in meta[key].sub_params.items():
                if pid is not None and pid not in self.add_params and pid in pdata.params:
                    memo[id(each._parameters[name])] = pdata.params[pid]
        made = copy.deepcopy(source, memo)
        for key, each in paired(made, self.add_module_id, meta, partly=True):
            if key in self.add_modules or key not in pdata.modules:
                pdata.modules[key] = each
                for name, pid in meta[key].sub_params.items():
                    held = each._parameters.get(name)
                    if pid is not None and held is not None:
                        pdata.params.setdefault(pid, held)
        put(module, "_modules", self.attr_name, made)

    def settle(self) -> None:
        """Keep a copy of the modules as they are now, instead of the modules themselves."""
        meta = self.next_version_modules_meta
        if self.spare is not None:
            self.spare = copy.deepcopy(self.spare)
        if self.add_module_id in self.add_modules and meta is not None:
            twin = copy.deepcopy(self.add_modules[self.add_module_id])
            for key, each in paired(twin, self.add_module_id, meta):
                if key in self.add_modules:
                    self.add_modules[key] = each
                    for name, pid in meta[key].sub_params.items():
                        held = each._parameters[name]
                        if pid in self.add_params and pid is not None and held is not None:
                            self.add_params[pid] = held

    def sentence(self, vdata: VersionDataImp) -> str:
        value = self.add_modules.get(self.add_module_id)
        kind = "" if value is None else f" a {type(value).__name__}"
        return f"module {super().sentence(vdata)}{kind}"

    verb = "was assigned"


class SetModuleNone(ParticleEdit):
    """A module becomes None."""

    verb = "became None"

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        put(module, "_modules", self.attr_name, None)


class DelModule(ParticleEdit):
    """A module is deleted."""

    verb = "was deleted"


class RegisterBuffer(ParticleEdit):
    """A buffer is registered."""

    verb = "was registered as a buffer"

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
        self.value = value
        self.persistent = persistent
        self.label: tuple[str, Any] | None = None

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        value = self.value
        if initiator:
            self.settle()
        elif value is not None:
            value = value.detach().clone()
        put(module, "_buffers", self.attr_name, value, self.persistent)
        if self.label is not None and "_labelled" in module.__dict__:
            module.__dict__["_labelled"][self.label[0]] = self.label[1]

    def settle(self) -> None:
        """Keep a copy of the value as it is now, instead of the buffer itself."""
        if self.value is not None:
            self.value = self.value.detach().clone()


class DelBuffer(ParticleEdit):
    """A buffer is deleted."""

    verb = "was deleted"

    def __init__(self, module_id: ModuleID, attr_name: str) -> None:
        super().__init__(module_id, attr_name)


class Together(ParticleEdit):
    """Several edits that were noticed at once."""

    def __init__(self, edits: list[ParticleEdit], remove_modules: set[ModuleID], remove_params: set[ParamID]) -> None:
        super().__init__(0, "", remove_modules, remove_params)
        self.edits = edits

    def set_next_version_data(self, vdata: VersionDataImp) -> Self:
        """Receive the metadata of the version that particles go to."""
        for edit in self.edits:
            edit.set_next_version_data(vdata)
        return super().set_next_version_data(vdata)

    def run(self, pdata: ParticleDataImp) -> None:
        """Bring one particle to the next version, or raise and leave it as it was."""
        undo = Undo((), pdata)
        try:
            for edit in self.edits:
                if edit.module_id not in pdata.modules:
                    # This particle removed the module itself.
                    continue
                undo.note(pdata.modules[edit.module_id])
                edit.apply(pdata.modules[edit.module_id], pdata, False)
            pdata.remove_modules(self.remove_modules & set(pdata.modules))
            pdata.remove_params(self.remove_params & set(pdata.params))
            for edit in self.edits:
                if edit.module_id in pdata.modules:
                    edit.arrange(pdata.modules[edit.module_id])
        except BaseException:
            undo.restore()
            raise

    def sentence(self, vdata: VersionDataImp) -> str:
        """The edits in words."""
        return "; ".join(edit.sentence(vdata) for edit in self.edits)


def _lost(name: str, what: str) -> str:
    return (
        f"an edit of the species lets {name!r} refer to {what}, which this particle has removed itself; combine it as it "
        "is through detach(), or take its values over with moduli.particles.migrate"
    )


def copied(parameter: nn.Parameter) -> nn.Parameter:
    """An independent parameter with the same value."""
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
