"""Matrices of one shape are stacked: results equal those one by one, and the number of operations stays constant."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moduli as mo
from moduli import m, optim
from moduli.optim import alike
from moduli.optim.alike import join_rows, map_alike

LINKS = {
    "Orthogonalize": lambda: [m.EMA(0.9), m.Orthogonalize()],
    "Orthogonalize svd": lambda: [m.Orthogonalize(method="svd", dual_norm_correction=True)],
    "Orthogonalize qr": lambda: [m.Orthogonalize(method="qr", adjust_lr=True)],
    "LMO": lambda: [m.LMO("spectral")],
    "NeuronNormalize": lambda: [m.NeuronNormalize()],
    "SOAP": lambda: [m.SOAP(precond_freq=3, eps=0.1)],
    "SOAP inner": lambda: [m.SOAP(precond_freq=3, eps=0.1, inner=m.EMA(0.5))],
    "SOAP outside": lambda: [m.SOAP(precond_freq=1, eps=0.1, precondition_1d=False)],
    "Shampoo": lambda: [m.Shampoo(precond_freq=3)],
    "KLShampoo": lambda: [m.KLShampoo()],
    "SPlus": lambda: [m.SPlus(precond_freq=4)],
    "PSGDKronWhiten": lambda: [m.PSGDKronWhiten(damping=0.0, balance_probability=0.0)],
    "PSGDKronWhiten QUAD": lambda: [m.PSGDKronWhiten(damping=0.0, balance_probability=1.0, dQ="QUAD")],
    "Dion": lambda: [m.Dion(seed=0)],
    "Adafactor": lambda: [m.Adafactor(relative_step=True)],
    "CAME": lambda: [m.CAME()],
    "AdamMini": lambda: [m.AdamMini()],
    "SOAPBasis": lambda: [m.SOAPBasis(m.Adam(eps=0.1), precond_freq=3)],
    "PSGDKronNewton": lambda: [m.PSGDKronNewton(seed=0, balance_probability=0.0)],
}


@pytest.fixture
def stacked(monkeypatch):
    """Stack any two tensors of one shape, as on an accelerator."""
    monkeypatch.setattr(alike, "HOST_LEAST", 2)


def make(name, shapes, dtype=torch.float64, device="cpu"):
    noise = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=noise, dtype=dtype)) for shape in shapes]
    return params, mo.Optimizer(params, *LINKS[name](), m.LR(0.01))


def loss_of(params):
    return sum((1 + i / 10) * (p - p.detach().roll(1) / 3).pow(2).sum() + p.cos().sum() for i, p in enumerate(params))


def train(name, shapes, dtype=torch.float64, steps=5):
    params, opt = make(name, shapes, dtype)
    for _ in range(steps):
        opt.step(mo.closure(lambda: loss_of(params)))
    return params


class Count(TorchDispatchMode):
    """A dispatch mode that counts operations other than views and allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if not func.is_view and "empty" not in name and name not in ("detach", "_unsafe_view"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


SHAPES = [(5, 5), (5, 5), (4, 4), (5, 5), (3,), (3,), (2, 2, 2), (2, 2, 2), (4, 4), ()]


SINGLE = ("Orthogonalize", "SOAP", "Shampoo", "PSGDKronWhiten")  # one link of each kind in single precision
CASES = [(name, torch.float64, 1e-12) for name in LINKS] + [(name, torch.float32, 1e-6) for name in SINGLE]


@pytest.mark.parametrize(("name", "dtype", "tolerance"), CASES)
@pytest.mark.usefixtures("stacked")
def test_a_stack_equals_its_matrices_one_by_one(name, dtype, tolerance, monkeypatch):
    together = train(name, SHAPES, dtype)
    monkeypatch.setattr(alike, "HOST_LEAST", 1000)
    for one, other in zip(together, train(name, SHAPES, dtype), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


PRODUCTS = ("bmm", "baddbmm", "geqrf", "linalg_householder_product", "gather", "sort")


def count_operations(name, number):
    """Return the number of operations of the fifth step, without those of the closure."""
    params, opt = make(name, [(6, 4)] * number, torch.float32)
    for step in range(5):
        for i, p in enumerate(params):
            p.grad = torch.full_like(p, 0.01 * (i + 1)) + torch.eye(6, 4) * (step + 1)
        if step < 4:
            opt.step()
    with Count() as seen:
        opt.step()
    return sorted(seen.names)


@pytest.mark.parametrize("name", [name for name in LINKS if name != "PSGDKronNewton"])
def test_operations_do_not_grow_with_the_number_of_matrices(name, monkeypatch):
    alone, many = count_operations(name, 4), count_operations(name, 64)
    monkeypatch.setattr(alike, "HOST_LEAST", 2)  # as on an accelerator
    few = count_operations(name, 4)
    if name in ("SOAPBasis", "SOAP inner"):  # links inside are called for each tensor
        few, many = ([each for each in names if each in PRODUCTS] for names in (few, many))
    else:
        assert len(many) <= len(alone)
    assert few == many
    assert 0 < len(few) < 250


@pytest.mark.usefixtures("stacked")
def test_muon_and_soap_of_a_model_make_as_many_operations_for_more_layers():
    def count(make_links, layers):
        net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(layers)))
        opt = mo.Optimizer(net, *make_links())
        for step in range(3):
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            with Count() as seen:
                opt.step()
        return sorted(seen.names)

    for make_links in (mo.presets.muon, mo.presets.soap):
        links = lambda make_links=make_links: [make_links(lr=0.01)]  # noqa: E731
        assert count(links, 3) == count(links, 9)  # of fewer tensors of one shape none are stacked


@pytest.mark.usefixtures("stacked")
def test_tensors_are_stacked_only_if_all_but_their_values_agree():
    calls = []

    def look(i, item, state):
        calls.append(i)
        state["seen"] = item[0] * 2
        return item[0] + state["count"]

    items = [(torch.full((2, 2), float(i)),) for i in range(5)] + [(torch.ones(3),)]
    states = [{"count": int(i == 2)} for i in range(6)]
    settings = [{"lr": 0.2 if i == 1 else 0.1} for i in range(6)]
    out = map_alike(look, items, states, settings, ["a", "a", "a", "b", "a", "a"])
    assert calls == [0, 1, 2, 3, 5]
    for i, (result, state) in enumerate(zip(out, states, strict=True)):
        torch.testing.assert_close(result, items[i][0] + state["count"])
        torch.testing.assert_close(state["seen"], items[i][0] * 2)


@pytest.mark.usefixtures("stacked")
def test_state_is_in_rows_of_one_tensor_which_are_not_copied_again():
    link = m.SOAP(precond_freq=2)
    params = [torch.nn.Parameter(torch.eye(4) * (i + 1.0)) for i in range(3)]
    opt = mo.Optimizer(params, link, m.LR(0.01))
    for _ in range(3):
        opt.step(mo.closure(lambda: loss_of(params)))
    with torch.no_grad():
        _, copied = join_rows([link.state[p]["exp_avg"] for p in params])
        assert not copied
        _, copied = join_rows([link.state[params[i]]["exp_avg"] for i in (0, 2)])
        assert copied
    twin = copy.deepcopy(opt)
    saved = opt.state_dict()
    fresh = mo.Optimizer([p.detach().clone().requires_grad_() for p in params], m.SOAP(precond_freq=2), m.LR(0.01))
    fresh.load_state_dict(saved)
    ends = []
    for each in (opt, twin, fresh):
        own = each.list_params()
        for _ in range(3):
            each.step(mo.closure(lambda own=own: loss_of(own)))
        ends.append(torch.stack([p.detach() for p in own]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.usefixtures("stacked")
def test_gradients_are_not_written_though_they_are_rows_of_one_tensor():
    flat = torch.arange(1.0, 13.0).reshape(3, 2, 2)
    params = [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3)]
    for p, row in zip(params, flat, strict=True):
        p.grad = row
    before = flat.clone()
    mo.Optimizer(params, m.Shampoo(), m.Orthogonalize(method="svd"), m.LR(0.1)).step()
    assert torch.equal(flat, before)


@pytest.mark.usefixtures("stacked")
def test_parameters_without_a_gradient_have_separate_step_counts():
    params = [torch.nn.Parameter(torch.eye(3) * (i + 1.0)) for i in range(3)]
    link = m.Shampoo()
    opt = mo.Optimizer(params, link, m.LR(0.01))
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = None if i == 1 and step % 2 else p.detach().clone()
        opt.step()
    assert [link.state[p]["step"] for p in params] == [4, 2, 4]


@pytest.mark.usefixtures("stacked")
def test_a_link_that_reads_numbers_says_that_it_is_not_stacked():
    class Reads(optim.MatrixTransform):
        members = False

        def transform(self, tensor, state, setting):
            return tensor / max(float(tensor.abs().amax()), 1e-12)

    params = [torch.nn.Parameter(torch.eye(3) * (i + 2.0)) for i in range(2)]
    mo.Optimizer(params, Reads(), m.LR(1.0)).step(mo.closure(lambda: sum((p**2).sum() for p in params)))
    torch.testing.assert_close(params[1].detach(), torch.eye(3) * 2)

    class Stacked(Reads):
        members = "batched"

    with pytest.raises(RuntimeError, match="members = False"):
        mo.Optimizer(params, Stacked(), m.LR(1.0)).step(mo.closure(lambda: sum((p**2).sum() for p in params)))


def test_few_or_large_tensors_are_not_stacked_on_the_host():
    def count(number, size):
        calls = []
        items = [(torch.zeros(size),)] * number
        map_alike(lambda i, item, state: calls.append(i), items, [{} for _ in items], [{}] * number)
        return len(calls)

    assert (count(15, 4), count(16, 4)) == (15, 1)
    assert (count(16, 2**14 - 1), count(16, 2**14)) == (1, 16)
    assert count(80, 2**13) == 3


@pytest.mark.parametrize("link", [lambda: m.Orthogonalize(matrix="out in"), lambda: m.Shampoo(matrix="out in")])
def test_the_matrix_setting_holds_in_a_stack(link, monkeypatch):
    def run(least):
        monkeypatch.setattr(alike, "HOST_LEAST", least)
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))).double()
        x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
        opt = mo.Optimizer(net, link(), m.LR(0.01), axes=mo.axes.trace(net, x))
        for _ in range(3):
            opt.step(mo.closure(lambda: net(x).square().mean()))
        return [p.detach() for p in net.parameters()]

    for one, other in zip(run(2), run(1000), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["Orthogonalize", "SOAP", "PSGDKronWhiten"])
def test_matrices_of_a_population_are_stacked_over_members_and_layers(name, monkeypatch):
    def run(least):
        monkeypatch.setattr(alike, "HOST_LEAST", least)
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))).double()
        population = mo.Population.of(net, 3)
        with torch.no_grad():
            for leaf in population.parameters():
                leaf.add_(torch.randn(leaf.shape, dtype=leaf.dtype) * 0.1)
        opt = mo.Optimizer(population, *LINKS[name](), m.LR(0.01))
        x = torch.randn(5, 4, dtype=torch.float64)
        for _ in range(4):
            opt.step(mo.closure(lambda: population(x).square().mean((-2, -1))))
        return [p.detach().clone() for p in population.parameters()]

    for one, other in zip(run(2), run(1000), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_stack_in_half_precision_and_of_complex_numbers_equals_its_matrices(monkeypatch):
    def run(least, dtype):
        monkeypatch.setattr(alike, "HOST_LEAST", least)
        noise = torch.Generator().manual_seed(1)
        draw = torch.complex64 if dtype.is_complex else torch.float32
        params = [torch.nn.Parameter(torch.randn(4, 4, generator=noise, dtype=draw).to(dtype)) for _ in range(3)]
        opt = mo.Optimizer(params, m.Shampoo(), m.Orthogonalize(), m.LR(0.01))
        for _ in range(3):
            for p in params:
                p.grad = p.detach() * 0.5
            opt.step()
        return [p.detach() for p in params]

    for dtype in (torch.complex64, torch.bfloat16):
        for a, b in zip(run(2, dtype), run(1000, dtype), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
