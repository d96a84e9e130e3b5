"""`self.state[param]` and `self.settings[param]` are the `state` and `setting` arguments, in every form of a hook."""

import sys

import pytest
import torch

import moduli as mo
from moduli import m
from moduli.optim import TensorTransform

FORMS = ["multi", "single", "pointwise", "vector"]


class ByArgument(TensorTransform):
    """Momentum with the `state` argument."""

    def __init__(self, form, *, beta=0.9):
        super().__init__({"beta": beta}, concat_params=form == "vector")
        self.form = form
        self.elementwise = form == "pointwise"

    def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
        state["b"] = torch.zeros_like(tensor)

    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        state["b"].mul_(setting["beta"]).add_(tensor)

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return state["b"].clone()


class ByParam(ByArgument):
    """The same momentum with `self.state[param]` and `self.settings[param]`."""

    def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
        self.state[param]["b"] = torch.zeros_like(tensor)

    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        self.state[param]["b"].mul_(self.settings[param]["beta"]).add_(tensor)

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return self.state[param]["b"].clone()


class ByGetState(TensorTransform):
    """The same momentum with `get_state`, which creates missing state."""

    def __init__(self, form, *, beta=0.9):
        super().__init__({"beta": beta}, concat_params=form == "vector")
        self.elementwise = form == "pointwise"

    def multi_tensor_update(self, tensors, params, grads, loss, states, settings):
        for b, t, beta in zip(self.get_state(params, "b"), tensors, self.get_settings(params, "beta"), strict=True):
            b.mul_(beta).add_(t)

    def multi_tensor_apply(self, tensors, params, grads, loss, states, settings):
        return [b.clone() for b in self.get_state(params, "b")]


class LazyPointwise(ByArgument):
    """Creates its state at first use, in a pointwise hook."""

    def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
        pass

    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        (b,) = self.get_state([param], "b")
        b.mul_(setting["beta"]).add_(tensor)


def trajectory(link, dtype, fuse, groups=False):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((3, 2), (4,), ())]
    param_groups = params
    if groups:
        param_groups = [{"params": params[:1]}, {"params": params[1:], "beta": 0.5}]
    opt = mo.Optimizer(param_groups, link, m.LR(0.1), fuse=fuse)
    for _ in range(4):
        opt.step(mo.closure(lambda: sum((p.abs() ** 2).sum() for p in params)))
    keys = len(link.state)
    return params, keys


@pytest.mark.parametrize("fuse", ["auto", False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex128], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [ByParam, ByGetState, LazyPointwise], ids=lambda kind: kind.__name__)
def test_state_by_parameter_is_the_state_argument(kind, form, dtype, fuse):
    for groups in (False, True) if form != "vector" else (False,):
        expected, _ = trajectory(ByArgument(form), dtype, fuse, groups)
        params, keys = trajectory(kind(form), dtype, fuse, groups)
        # Hooks on lists get half-precision tensors unmodified; pointwise hooks get them in single precision.
        tolerance = 2e-3 if dtype is torch.float16 else 1e-12
        for a, b in zip(params, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        assert keys == 3


def test_momentum_accumulates_as_computed_by_hand():
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    opt = mo.Optimizer([w], ByGetState("multi"), m.LR(0.1))
    seen = []
    for _ in range(3):
        w.grad = torch.ones_like(w)
        opt.step()
        seen.append(w.item())
    assert seen == pytest.approx([0.9, 0.71, 0.439])


def test_hooks_are_given_the_parameters_themselves():
    seen = []

    class Looks(TensorTransform):
        def multi_tensor_apply(self, tensors, params, grads, loss, states, settings):
            seen.extend(params)
            return tensors

    w = torch.nn.Parameter(torch.ones(2))
    opt = mo.Optimizer([w], Looks())
    w.grad = torch.ones(2)
    opt.step()
    assert seen[0] is w


def count_python_calls(tensors):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.ones(3)
    opt = mo.Optimizer(params, m.Adam(), m.LR(0.1))
    for _ in range(3):
        opt.step()
    seen = []
    sys.setprofile(lambda frame, event, arg: seen.append(event) if event == "call" else None)
    try:
        opt.step()
    finally:
        sys.setprofile(None)
    return len(seen)


def test_a_fused_step_calls_no_python_for_each_tensor():
    assert count_python_calls(300) < count_python_calls(30) + 100
