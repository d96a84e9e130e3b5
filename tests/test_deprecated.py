"""Names that moved warn with their new name, and names removed in 0.3 are gone."""

import importlib

import pytest

MOVED = {
    "moduli.particles.base": (
        "moduli.compat.nytorch",
        "VersionDataImp ParticleDataImp ParticleKernelImp create_new_group",
    ),
    "moduli.particles.kernel": ("moduli.compat.nytorch", "VersionKernel ParticleKernel VersionData ParticleData"),
    "moduli.particles.module": ("moduli.compat.nytorch", "unary_lambda_wrapper binary_lambda_wrapper"),
    "moduli.particles.mtype": (
        "moduli.compat.nytorch",
        "ModuleMeta ModuleID ParamID ModuleDict ParamDict ROOT_MODULE_ID",
    ),
}


@pytest.mark.parametrize(
    ("module", "to", "name"), [(m, t, n) for m, (t, names) in MOVED.items() for n in names.split()]
)
def test_names_that_moved_warn(module, to, name):
    room = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is {to}.{name}"):
        assert getattr(room, name) is getattr(importlib.import_module(to), name)
    assert name not in getattr(room, "__all__", ())
    with pytest.raises(AttributeError, match="no attribute 'Quotient'"):
        _ = room.Quotient


@pytest.mark.parametrize(
    ("module", "name"),
    [("moduli.lab", "Chain"), ("moduli.linalg", "Sum"), ("moduli.particles", "ParticleModule")],
)
def test_names_removed_in_0_3_are_gone(module, name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
        getattr(importlib.import_module(module), name)
