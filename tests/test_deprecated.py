"""Old names give what they gave, and say what they are called now."""

import importlib

import pytest

RENAMED = {
    "moduli.lab": {"Chain": "ParsedChain", "ChainError": "ChainSyntaxError", "Reason": "RunReason"},
    "moduli.linalg": {"Sum": "OperatorSum", "Product": "OperatorProduct", "Solution": "LinearSolution"},
}


@pytest.mark.parametrize(
    ("module", "old", "now"), [(m, o, n) for m, names in RENAMED.items() for o, n in names.items()]
)
def test_old_names_warn(module, old, now):
    room = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is called {module}.{now}"):
        assert getattr(room, old) is getattr(room, now)
    assert old not in room.__all__
    assert now in room.__all__


MOVED = {
    "moduli.particles": (
        "moduli.compat.nytorch",
        "GetNytoModule ParamProduct ParticleModule particle_module particle_updater utils version_updater",
    ),
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


def test_unknown_names_are_unknown():
    with pytest.raises(AttributeError, match="no attribute 'Quotient'"):
        _ = importlib.import_module("moduli.linalg").Quotient
