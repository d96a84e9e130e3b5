"""Ranges and types of settings, steps after one huge gradient, and least squares in half precision."""

import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn

import moduli as mo
from laws.registry import collect
from moduli import m, optim, presets

# -- scale_first ------------------------------------------------------------------------------------------------------

SCALED = [
    name
    for name in m.quasi_newton.__all__
    if name != "QuasiNewton" and "scale_first" in inspect.signature(getattr(m, name)).parameters
]


@pytest.mark.parametrize("init_scale", ["auto", 0.5, None])
@pytest.mark.parametrize("name", SCALED)
def test_scale_first_bounds_the_first_update(name, init_scale):
    """The first update has length one at most, whatever the initial matrix."""
    settings = {} if init_scale is None else {"init_scale": init_scale}
    if init_scale is not None and (name == "LBFGS" or (name == "LSR1" and init_scale == "auto")):
        pytest.skip("it has no such setting")
    for size in (0.1, 100.0):
        for scaled in (True, False):
            w = nn.Parameter(torch.full((4,), size, dtype=torch.float64))
            link = getattr(m, name)(scale_first=scaled, **settings)
            mo.Optimizer([w], link).step(lambda w=w: 0.5 * (w * w).sum())
            length = float((w.detach() - size).norm())
            matrix = 1.0 if init_scale in ("auto", None) else init_scale
            matrix = matrix if getattr(link, "inverse", True) else 1 / matrix
            assert length == pytest.approx(min(2 * size * matrix, 1.0) if scaled else 2 * size * matrix)


# -- ranges and kinds of settings -------------------------------------------------------------------------------------

LINKS = sorted(
    {
        value
        for value in vars(m).values()
        if isinstance(value, type) and issubclass(value, optim.Module) and value.__module__.startswith("moduli.m.")
    },
    key=lambda link: link.__name__,
)
MEMORIES = ("beta", "beta1", "beta2", "beta3", "momentum", "smoothing")
FLAGS = ("debias", "debiased", "beta_debias")
CORRECTED = [
    (link, key)
    for link in LINKS
    for key in MEMORIES
    if key in inspect.signature(link).parameters
    and (set(FLAGS) & set(inspect.signature(link).parameters) or link in (m.Debias, m.Debias2))
]


@pytest.mark.parametrize(("link", "key"), CORRECTED, ids=lambda value: getattr(value, "__name__", value))
def test_memories_of_one_are_refused_where_a_bias_is_corrected(link, key):
    """With beta = 1 the bias correction 1 - beta^t is zero, and dividing by it gives NaN."""
    parameters = inspect.signature(link).parameters
    flags = {flag: True for flag in FLAGS if flag in parameters}
    with pytest.raises(ValueError, match=rf"{key} is 1.0; give a number from 0 \(included\) to 1 \(excluded\)"):
        link(**flags, **{key: 1.0})
    w = nn.Parameter(torch.ones(2))
    if link not in (m.Debias, m.Debias2, m.ESGD):
        with pytest.raises(ValueError, match=f"{link.__name__}: {key} is 1.0"):
            mo.Optimizer([{"params": [w], key: 1.0}], link(**flags))


def list_numbers(call):
    """Return the names of arguments whose default is a number and whose annotation excludes strings."""
    parameters = inspect.signature(call).parameters.values()
    numbers = [p for p in parameters if isinstance(p.default, int | float) and not isinstance(p.default, bool)]
    return [p.name for p in numbers if not any(word in str(p.annotation) for word in ("str", "Literal", "Metric"))]


def list_required(call):
    """Return values for the required arguments, by name."""
    parameters = inspect.signature(call).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: m.BFGS() if "Chainable" in str(p.annotation) else 1 for p in required}


PRESETS = [presets.__dict__[name] for name in sorted(presets.__all__)]


@pytest.mark.parametrize("call", [*LINKS, *PRESETS], ids=lambda value: value.__name__)
def test_a_string_for_a_number_is_refused_where_it_is_given(call):
    for key in list_numbers(call):
        with pytest.raises(TypeError) as caught:
            call(**list_required(call), **{key: "0.1"})
        # A preset may pass its argument to a link under another name.
        named = rf"\w+: {key if call in LINKS else '[a-z_0-9]+'} is '0.1'(, a string)?; give "
        assert re.match(named, str(caught.value)), f"{key}: {caught.value}"


def test_a_string_for_a_number_names_the_number():
    with pytest.raises(TypeError, match="LR: lr is '1e-3', a string; give the number 0.001, without quotes"):
        presets.adamw("1e-3")
    with pytest.raises(TypeError, match="LR: lr is 'fast', a string; give a number"):
        m.LR("fast")
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="LR: lr is '1e-3', a string"):
        mo.Optimizer([{"params": [w], "lr": "1e-3"}], m.LR(0.1))
    with pytest.raises(TypeError, match="Adam: beta1 is '0.9', a string"):
        m.Adam().set_param_groups([{"params": [w], "betas": ("0.9", 0.99)}])


STEPPING = [preset for preset in PRESETS if "lr" in inspect.signature(preset).parameters]


@pytest.mark.parametrize("preset", STEPPING, ids=lambda value: value.__name__)
def test_a_negative_step_size_is_refused(preset):
    with pytest.raises(ValueError, match="(lr|gamma|alpha) is -0.1; give a number"):
        preset(**list_required(preset), lr=-0.1)


def test_a_negative_step_size_is_refused_with_a_remedy():
    remedy = (
        "give a number that is not negative; to ascend, make the optimizer with maximize=True, or multiply by m.Mul"
    )
    w = nn.Parameter(torch.ones(3))
    for make in (
        lambda: m.LR(-1),
        lambda: m.LR(torch.tensor([0.1, -0.1])),
        lambda: m.StepSize(-0.1),
        lambda: mo.Optimizer([{"params": [w], "lr": -0.1}], m.LR(0.1)),
        lambda: m.LR(0.1).set_param_groups([{"params": [w], "lr": -0.1}]),
    ):
        with pytest.raises(ValueError, match=remedy):
            make()
    for lr in (0, 0.0, np.float32(0.1), torch.tensor(0.1), lambda step: 0.1):
        m.LR(lr)
    opt = mo.Optimizer([w], m.LR(0.5), maximize=True)
    opt.step(lambda: w.sum())
    assert torch.equal(w.detach(), torch.full((3,), 1.5))


def test_a_schedule_refuses_a_string():
    for make in (
        lambda: optim.schedules.Cosine("1e-3", steps=10),
        lambda: optim.schedules.WSD(1e-3, steps=10, floor="0"),
        lambda: optim.schedules.After(1, "1e-3"),
    ):
        with pytest.raises(TypeError, match="a string; give the number"):
            make()


# -- one huge gradient ------------------------------------------------------------------------------------------------

# These multiply whole gradients; the product overflows to inf, and has no eigenvectors or inverse.
MATRICES = ("SOAP", "GGT", "PSGD", "FullMatrixAdagrad")
ROWS = [
    row
    for row in collect()
    if not row.members and not row.closure and row.target == "bowl" and not row.name.startswith(MATRICES)
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_one_huge_gradient_leaves_no_nan(row):
    """The square of one entry overflows to inf in float32; the steps after it stay finite."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    w = nn.Parameter(torch.ones(4, 3))
    opt = mo.Optimizer([w], *row.links())
    for step in range(6):
        w.grad = torch.randn(4, 3, generator=generator)
        if step == 2:
            w.grad[0, 0] = 1e30
        opt.step()
        if step == 2:
            w.data.fill_(1.0)
    assert bool(torch.isfinite(w).all())


# -- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("preset", [presets.gauss_newton, presets.levenberg_marquardt])
def test_least_squares_in_half_precision(preset, rows, dtype):
    w = nn.Parameter(torch.tensor([3.0, 1.0, 2.0], dtype=dtype))
    A = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    opt = mo.Optimizer([w], *preset())
    for _ in range(8):
        opt.step(mo.closure(lambda: A @ w))
    assert w.dtype is dtype
    assert float((A @ w).detach().norm()) < 0.05
