"""`functional.step` under `torch.vmap` and forward-mode differentiation, and `step_tensors` on plain tensors."""

import inspect
import math

import pytest
import torch
from torch.autograd import forward_ad

from moduli import Optimizer, m, presets
from moduli.optim import ChainError, TensorTransform, functional, maybe_chain

D = torch.float64
# `torch.func.jvp` warns when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def is_differentiable(make):
    if "lr" not in inspect.signature(make).parameters or make is presets.muonclip:
        return False
    return all(link.differentiable for _, link in maybe_chain(make(lr=0.1)).links())


PRESETS = {
    name: lambda rate, make=getattr(presets, name): make(lr=rate)
    for name in presets.__all__
    if is_differentiable(getattr(presets, name))
}
SETTINGS = {
    "Adam.beta1": lambda number: [m.Adam(beta1=number), m.LR(0.1)],
    "Adam.beta2": lambda number: [m.Adam(beta2=number, amsgrad=True), m.LR(0.1)],
    "HeavyBall.momentum": lambda number: [m.HeavyBall(number), m.LR(0.1)],
    "NAG.momentum": lambda number: [m.NAG(number), m.LR(0.1)],
    "RMSprop.smoothing": lambda number: [m.RMSprop(smoothing=number), m.LR(0.1)],
    "ClipNorm": lambda number: [m.ClipNorm(number), m.Adam(), m.LR(0.1)],
    "ClipValue": lambda number: [m.ClipValue(number), m.LR(0.1)],
    "Normalize": lambda number: [m.Normalize(number), m.LR(0.1)],
    "WeightDecay": lambda number: [m.WeightDecay(number), m.Adam(), m.LR(0.1)],
    "nested": lambda number: [[m.ClipNorm(1.0), m.HeavyBall(number)], m.WeightDecay(0.1), m.LR(number)],
}
CASES = {**PRESETS, **SETTINGS}
NUMBERS = torch.tensor([0.05, 0.1, 0.3], dtype=D)


def run(make, number, dtype=D, shift=0.0):
    """Return parameters with one, two and no axes after three pure steps, as one vector.

    Args:
        make: A function of a number that returns links.
        number: The number.
        dtype: The dtype of the parameters.
        shift: A number added to the parameters at the start.
    """
    sizes = [(3,), (2, 2), ()]
    params = [torch.linspace(-1.31, 1.17, math.prod(s), dtype=D).reshape(s).to(dtype) + shift for s in sizes]
    links = make(number)
    state = functional.init(links, params)
    for _ in range(3):
        params, state = functional.step(links, params, [torch.sin(p) + 0.3 * p for p in params], state)
    assert all(param.dtype == dtype for param in params)
    assert [param.shape for param in params] == [torch.Size(size) for size in sizes]
    return torch.cat([param.reshape(-1) for param in params])


class Scaled(TensorTransform):
    """Divides the update by a running mean of its size, one scalar per tensor."""

    def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
        state["size"] = torch.zeros((), dtype=tensor.dtype)

    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        state["size"] = 0.9 * state["size"] + tensor.abs().mean()
        self.global_state["last"] = state["size"]

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor / state["size"]

    differentiable = True


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_numbers_in_the_state_of_larger_tensors_keep_their_shape(dtype):
    def advance(x):
        links = [Scaled()]
        params, state = [x, x.sum()], functional.init(links, [x, x.sum()])
        for _ in range(3):
            params, state = functional.step(links, params, [p * 0.5 for p in params], state)
        own = state["links"][""]
        assert own["state"][0]["size"].shape == own["state"][1]["size"].shape == ()
        assert own["global"]["last"].dim() <= 1
        return params[0]

    x = torch.tensor([1.0, -2.0], dtype=dtype)
    tangent = torch.func.jvp(advance, (x,), (torch.ones_like(x),))[1]
    expected = torch.func.jacrev(advance)(x).sum(1)
    torch.testing.assert_close(tangent, expected)


def test_the_usual_presets_are_differentiable():
    assert {"adam", "adamw", "sgd", "momentum", "nesterov", "rmsprop", "adagrad", "lion", "lamb"} <= PRESETS.keys()


@pytest.mark.parametrize("name", CASES)
def test_vmap_over_a_setting_is_a_loop(name):
    make = CASES[name]
    expected = torch.stack([run(make, number) for number in NUMBERS])
    assert not torch.equal(expected[0], expected[1])
    torch.testing.assert_close(torch.vmap(lambda number: run(make, number))(NUMBERS), expected, rtol=1e-11, atol=1e-13)
    with torch.no_grad():
        result = torch.vmap(lambda number: run(make, number))(NUMBERS)
    torch.testing.assert_close(result, expected, rtol=1e-11, atol=1e-13)
    single = torch.vmap(lambda number: run(make, number, torch.float32))(NUMBERS.float())
    looped = torch.stack([run(make, number, torch.float32) for number in NUMBERS.float()])
    torch.testing.assert_close(single, looped, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_is_reverse_mode(name):
    make, number = CASES[name], NUMBERS[1]
    tangent = torch.func.jvp(lambda x: run(make, x), (number,), (torch.ones_like(number),))[1]
    expected = torch.func.jacrev(lambda x: run(make, x))(number)
    assert bool(expected.any())
    torch.testing.assert_close(tangent, expected, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        slope = (run(make, number + 1e-6) - run(make, number - 1e-6)) / 2e-6
        again = torch.func.jvp(lambda x: run(make, x), (number,), (torch.ones_like(number),))[1]
    torch.testing.assert_close(tangent, slope, rtol=1e-4, atol=1e-6)
    assert torch.equal(again, tangent)
    torch.testing.assert_close(torch.func.jacfwd(lambda x: run(make, x))(number), expected, rtol=1e-9, atol=1e-12)
    _, single = torch.func.jvp(lambda x: run(make, x, torch.float32), (number.float(),), (torch.tensor(1.0),))
    assert single.dtype == torch.float32


@pytest.mark.parametrize("name", ["adam", "momentum", *SETTINGS])
def test_transforms_compose_over_parameters_and_settings(name):
    make, shifts = CASES[name], torch.tensor([0.1, -0.2], dtype=D)

    def nested(number):
        return torch.vmap(lambda shift: run(make, number, shift=shift))(shifts)

    expected = torch.stack([torch.stack([run(make, n, shift=shift) for shift in shifts]) for n in NUMBERS])
    torch.testing.assert_close(torch.vmap(nested)(NUMBERS), expected, rtol=1e-11, atol=1e-13)
    slopes = torch.vmap(torch.func.grad(lambda number: run(make, number).sum()))(NUMBERS)
    looped = torch.stack([torch.func.grad(lambda number: run(make, number).sum())(n) for n in NUMBERS])
    torch.testing.assert_close(slopes, looped, rtol=1e-9, atol=1e-12)


def test_state_passes_into_and_out_of_a_transform():
    links, x = [m.Adam(), m.LR(0.1)], [torch.tensor(1.0), torch.ones(2)]
    x, state = functional.step(links, x, [torch.tensor(0.5), torch.ones(2)], functional.init(links, x))

    def advance(shift):
        moved, after = functional.step(links, x, [x[0] + shift, x[1] + shift], state)
        return moved, after["links"]["module_0.Adam"]["state"][0]["exp_avg"]

    (moved, average), tangents = torch.func.jvp(advance, (torch.tensor(0.2),), (torch.tensor(1.0),))
    expected, plain = advance(torch.tensor(0.2))
    torch.testing.assert_close((moved, average), (expected, plain))
    assert average.shape == ()
    assert all(t.dtype == torch.float32 for t in (*tangents[0], tangents[1]))


def test_a_tangent_without_torch_func_passes_without_grad_mode():
    with torch.no_grad(), forward_ad.dual_level():
        rate = forward_ad.make_dual(torch.tensor(0.1, dtype=D), torch.tensor(1.0, dtype=D))
        tangent = forward_ad.unpack_dual(run(lambda number: [m.LR(number)], rate)).tangent
    expected = torch.func.jacrev(lambda number: run(lambda n: [m.LR(n)], number))(torch.tensor(0.1, dtype=D))
    torch.testing.assert_close(tangent, expected)


def test_links_that_would_cut_tangents_are_refused():
    x = torch.ones(2, 2, dtype=D)

    def advance(x):
        links = [m.SOAP(), m.LR(0.1)]
        return functional.step(links, [x], [x], functional.init(links, [x]))[0][0]

    with pytest.raises(ChainError, match="SOAP can't be differentiated through"):
        torch.func.jvp(advance, (x,), (x,))
    advance(x)


def test_links_in_a_list_keep_their_step_counts_between_calls():
    gradients = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = Optimizer([w], m.Adam(), m.LR(0.1))
    links, placeholder = [m.Adam(), m.LR(0.1)], torch.zeros(3, dtype=torch.float64)
    for gradient in gradients:
        before = w.detach().clone()
        w.grad = gradient.clone()
        opt.step()
        update = functional.step_tensors(links, [gradient.clone()], [placeholder])[0]
        torch.testing.assert_close(update, before - w.detach(), rtol=1e-9, atol=1e-14)
