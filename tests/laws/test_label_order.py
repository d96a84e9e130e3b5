"""State loads into parameters with another order of labels, reordered, or is refused; for all links."""

import copy
import re

import pytest
import torch

import moduli as mo
from laws.registry import collect
from moduli import m

D = torch.float64
# Links that need residuals, and links whose steps depend on the order of coordinates.
OTHERS = re.compile("GaussNewton|NaturalGradient|^CD$|LaplacianSmoothing")
ROWS = [row for row in collect() if not row.members and not row.random and not OTHERS.search(row.name)]
FIRST = (["r", "g", "b"], ["x", "y", "z", "t"])
SECOND = (["b", "r", "g"], ["t", "z", "x", "y"])


class Net(mo.Module):
    """A labelled matrix and a labelled vector with the same value for a label in any order."""

    def __init__(self, labels):
        super().__init__()
        rows, columns = labels
        value = mo.tensor(torch.linspace(-1, 1, 12, dtype=D).view(3, 4).sin(), row=FIRST[0], column=FIRST[1])
        self.w = value.sel(row=rows, column=columns).attach()
        self.v = mo.tensor(torch.tensor([0.3, -0.4, 0.9], dtype=D), row=FIRST[0]).sel(row=rows).attach()


TARGET = mo.tensor(torch.arange(12, dtype=D).view(3, 4).cos(), row=FIRST[0], column=FIRST[1])
SCALE = mo.tensor(torch.tensor([0.5, 1.0, 2.0], dtype=D), row=FIRST[0])
# Every entry has a different curvature: with only three, projections converge in three pairs and then depend on rounding.
WEIGHT = SCALE * mo.tensor(torch.tensor([1.0, 1.3, 0.7, 1.6], dtype=D), column=FIRST[1])


def train(net, opt, steps):
    def loss():
        far = (net.w - TARGET) * WEIGHT
        return ((far * far).sum() + ((net.v - 0.1) ** 2 * SCALE).sum()).data

    for _ in range(steps):
        opt.step(mo.closure(loss))


def read(net):
    return {name: getattr(net, name).sel(row=FIRST[0]).data.detach().clone() for name in ("v",)} | {
        "w": net.w.sel(row=FIRST[0], column=FIRST[1]).data.detach().clone()
    }


def load(opt, state):
    """Load a state; return the error if it is refused, else None."""
    try:
        opt.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_state_follows_labels_or_is_refused(row):
    torch.manual_seed(0)
    first, second = Net(FIRST), Net(SECOND)
    opt = mo.Optimizer(first, *row.make())
    train(first, opt, 3)
    state = copy.deepcopy(opt.state_dict())
    with torch.no_grad():
        second.w.copy_(first.w)
        second.v.copy_(first.v)
    other = mo.Optimizer(second, *row.make())
    if (reason := load(other, state)) is not None:
        assert re.search(
            "labels have another order here, but .*(follows its parameter|makes of parameters|can read)", reason
        )
        assert not any(link.rows for _, link in other._links)  # no state was loaded
        return
    train(first, opt, 3)
    train(second, other, 3)
    for name, value in read(first).items():
        torch.testing.assert_close(read(second)[name], value, rtol=1e-6, atol=1e-8)


def test_states_that_are_reordered_and_one_that_is_refused():
    """Pointwise, vector, factored and Kronecker states are reordered; those of links inside projections are refused."""

    def is_refused(make):
        opt = mo.Optimizer(Net(FIRST), *make())
        train(opt.model, opt, 2)
        return load(mo.Optimizer(Net(SECOND), *make()), opt.state_dict()) is not None

    for make in (
        lambda: [m.Adam()],
        lambda: [m.LBFGS()],
        lambda: [m.Adafactor()],
        lambda: [m.Shampoo()],
        lambda: [m.SOAP()],
        lambda: [m.PSGDKronWhiten()],
        lambda: [m.BFGS()],
    ):
        assert not is_refused(make)
    assert is_refused(lambda: [m.GaLore(m.Adam(), rank=1)])


def test_state_of_a_population_in_a_file_follows_labels(tmp_path):
    def run(labels, save, load):
        pop = mo.Population.from_modules([Net(labels) for _ in range(3)])
        opt = mo.Optimizer(pop, m.HeavyBall(0.9), m.LR(0.1))
        if load:
            mo.load(tmp_path / "run.safetensors", population=pop, optimizer=opt)
        for _ in range(2):
            opt.step(mo.closure(lambda: pop.losses(lambda f: ((f.w - TARGET) ** 2 * SCALE).sum())))
        if save:
            mo.save(tmp_path / "run.safetensors", population=pop, optimizer=opt)
        return pop, opt

    pop, opt = run(FIRST, True, False)
    for _ in range(2):
        opt.step(mo.closure(lambda: pop.losses(lambda f: ((f.w - TARGET) ** 2 * SCALE).sum())))
    other, _ = run(SECOND, False, True)
    torch.testing.assert_close(read(other[1])["w"], read(pop[1])["w"])


def test_momentum_of_a_file_moves_the_right_labels(tmp_path):
    """Momentum saved with labels r, g, b is loaded into b, g, r by label."""

    class Gain(mo.Module):
        def __init__(self, labels):
            super().__init__()
            self.w = mo.tensor([1.0, 2.0, 3.0], ch=["r", "g", "b"]).sel(ch=labels).attach()

    scale = mo.tensor([1.0, 10.0, 100.0], ch=["r", "g", "b"])

    def step(net, opt, count):
        for _ in range(count):
            opt.step(mo.closure(lambda: (net.w * scale).sum().data))

    a, b = Gain(["r", "g", "b"]), Gain(["b", "g", "r"])
    one, two = (mo.Optimizer(net, m.HeavyBall(0.9), m.LR(1e-3)) for net in (a, b))
    step(a, one, 4)
    mo.save(tmp_path / "a.safetensors", module=a, optimizer=one)
    mo.load(tmp_path / "a.safetensors", module=b, optimizer=two)
    step(a, one, 5)
    step(b, two, 5)
    for label in "rgb":
        torch.testing.assert_close(b.w.sel(ch=label).data, a.w.sel(ch=label).data)
