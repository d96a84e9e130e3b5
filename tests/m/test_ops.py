"""Operations: what their formulas say where other libraries' do not, and what they refuse."""

import pickle

import pytest
import torch

import moduli as mo
from laws.helpers import halved
from m.first_order import close, run
from moduli import m, optim


def through(link, *values, param=None):
    """The outputs of one link for a series of updates."""
    param = torch.zeros(len(values[0])) if param is None else param
    return [optim.step_tensors(link, [torch.tensor(v)], [param])[0].tolist() for v in values]


def test_custom_operation_is_a_tensor_method():
    assert through(m.CustomUnaryOperation("square"), [3.0, -2.0]) == [[9.0, 4.0]]
    with pytest.raises(ValueError, match="no method 'no_such'"):
        m.CustomUnaryOperation("no_such")


def test_functions_must_keep_shapes_and_optimizers_with_them_pickle():
    with pytest.raises(ValueError, match="same shape"):
        optim.step_tensors(m.UnaryLambda(lambda tensors: [t[:1] for t in tensors]), [torch.ones(2)])
    w = torch.nn.Parameter(torch.ones(2))
    opt = mo.Optimizer([w], m.UnaryLambda(halved), m.LR(0.1))
    again = pickle.loads(pickle.dumps(opt))
    assert again.modules[0].fn is halved


def test_variance_is_a_variance():
    for kind in ("normal", "uniform", "rademacher", "sphere"):
        link = m.RandomSample(distribution=kind, variance=4.0, seed=0)
        drawn = optim.step_tensors(link, [torch.zeros(20000)])[0]
        assert float(drawn.var()) == pytest.approx(4.0, rel=0.05), kind
    with pytest.raises(ValueError, match="distribution is 'cauchy'"):
        m.RandomSample(distribution="cauchy")
    with pytest.raises(ValueError, match="variance"):
        m.RandomSample(variance=-1.0)


def test_gram_schmidt_is_a_projection():
    u, o = torch.randn(3, 2), torch.randn(3, 2)
    w = torch.zeros(3, 2)
    out = optim.step_tensors(m.GramSchmidt([m.Zeros(), m.Add(m.UnaryLambda(lambda _: [o]))]), [u.clone()], [w])[0]
    assert float((out * o).sum()) == pytest.approx(0.0, abs=1e-5)
    again = optim.step_tensors(m.GramSchmidt([m.Zeros(), m.Add(m.UnaryLambda(lambda _: [o]))]), [out.clone()], [w])[0]
    torch.testing.assert_close(again, out)


def test_gram_schmidt_takes_parameters_of_one_number_and_of_none_in_a_population():
    class Scaled(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))
            self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64) * value)
            self.none = torch.nn.Parameter(torch.zeros(0, dtype=torch.float64))

        def forward(self):
            return (self.scale * self.weight - 1).square().sum() + self.none.sum()

    nets = [Scaled(1.3), Scaled(0.7)]
    pop = mo.Population.from_modules(nets)
    links = lambda: [m.GramSchmidt(m.Sign()), m.LR(0.1)]  # noqa: E731
    opt = mo.Optimizer(pop, *links())
    alone = [mo.Optimizer(net, *links()) for net in nets]
    for _ in range(3):
        opt.step(mo.closure(lambda net: net()))
        for net, own in zip(nets, alone, strict=True):
            own.step(mo.closure(net))
    for i, net in enumerate(nets):
        torch.testing.assert_close(pop[i].scale, net.scale)
        torch.testing.assert_close(pop[i].weight, net.weight)


def test_powers_are_powers():
    assert through(m.PowModules(m.Mul(2.0), m.Fill(3.0)), [1.0, 2.0]) == [[8.0, 64.0]]


def test_an_int_may_come_first():
    assert through(m.Sum(1, m.Identity()), [1.0, 2.0]) == [[2.0, 3.0]]


def test_weighted_mean_divides_by_the_weights():
    assert through(m.WeightedMean(m.Identity(), m.Mul(3.0), weights=[1.0, 3.0]), [2.0]) == [[5.0]]
    with pytest.raises(ValueError, match="add up to 0"):
        m.WeightedMean(m.Identity(), m.Negate(), weights=[1.0, -1.0])
    with pytest.raises(ValueError, match="2 inputs and 1 weights"):
        m.WeightedSum(m.Identity(), m.Negate(), weights=[1.0])
    with pytest.raises(ValueError, match="at least one"):
        m.Sum()


def test_decay_forgets():
    assert through(m.AccumulateSum(decay=0.5), [1.0], [0.0], [0.0]) == [[1.0], [0.5], [0.25]]
    assert through(m.AccumulateMaximum(decay=0.5), [4.0], [1.0], [0.5]) == [[4.0], [2.0], [1.0]]


def test_accumulators_begin_with_the_first_update():
    assert through(m.AccumulateProduct(), [2.0], [3.0]) == [[2.0], [6.0]]
    assert through(m.AccumulateMaximum(), [-2.0], [-3.0]) == [[-2.0], [-2.0]]
    assert through(m.AccumulateMinimum(), [2.0], [3.0]) == [[2.0], [2.0]]
    assert through(m.AccumulateMean(), [2.0], [4.0]) == [[2.0], [3.0]]


def test_centred_maximum_is_taken_once():
    # The maximum is over variances: taken over mean squares first, it would not fall to that of the second step.
    values = [3.0, 3.0, 3.0, 0.0]
    m1 = v1 = best = 0.0
    expected = []
    for u in values:
        m1, v1 = 0.5 * m1 + 0.5 * u, 0.5 * v1 + 0.5 * u * u
        best = max(best, v1 - m1 * m1)
        expected.append([pytest.approx(best)])
    assert through(m.CenteredEMASquared(beta=0.5, amsgrad=True), *([v] for v in values)) == expected


def test_adam_is_a_composition():
    """EMA and the root of squares, divided, is Adam."""
    adam = m.DivModules(
        [m.EMA(0.9), m.Debias(beta1=0.9)],
        [m.SqrtEMASquared(beta=0.999), m.Debias2(beta=0.999), m.Add(1e-8)],
    )
    close(run(lambda p: [adam, m.LR(0.05)]), run(lambda p: torch.optim.Adam(p, 0.05)))


def test_grafting_onto_parameters_moves_those_at_zero():
    w = torch.nn.Parameter(torch.zeros(2))
    mo.Optimizer([w], m.GraftToParams(eps=0.5)).step(mo.closure(lambda: (w * torch.tensor([3.0, 4.0])).sum()))
    torch.testing.assert_close(w.data, torch.tensor([-0.3, -0.4]))


def test_graft_measures():
    u = torch.tensor([3.0, 4.0])
    for ord, size in ((1, 14.0), (float("inf"), 8.0), ("mad", 7.0)):
        out = optim.step_tensors(m.Graft(m.Sign(), m.Mul(2.0), ord=ord, eps=0.0), [u.clone()])[0]
        own = {1: 2.0, float("inf"): 1.0, "mad": 1.0}[ord]
        torch.testing.assert_close(out, torch.full((2,), size / own))
    with pytest.raises(ValueError, match="Graft: ord is"):
        m.Graft(m.Sign(), m.Mul(2.0), ord="nonsense")


def test_strength_interpolates():
    u = torch.tensor([3.0, 4.0])
    out = optim.step_tensors(m.Graft(m.Identity(), m.Mul(3.0), strength=0.5, eps=0.0), [u.clone()])[0]
    torch.testing.assert_close(out, 2 * u)


def test_operands_do_not_disturb_each_other():
    """A link in one operand that changes tensors in place leaves the others' input as it is."""
    u = torch.tensor([2.0, -4.0])
    out = optim.step_tensors(m.Sum(m.ClipValue(1.0), m.Identity(), m.Grad()), [u.clone()])[0]
    assert out.tolist() == [5.0, -9.0]


def test_operands_learn_under_a_link_that_drives_them():
    """`update` and `apply` apart are the step."""
    make = lambda: m.Add(m.EMA(0.5))  # noqa: E731
    a, b = make(), make()
    p = torch.nn.Parameter(torch.zeros(2))
    for value in ([1.0, 2.0], [3.0, -1.0]):
        objective = optim.Objective([p])
        objective.grads = [torch.tensor(value)]
        b.update(objective)
        apart = b.apply(objective).updates[0]
        torch.testing.assert_close(optim.step_tensors(a, [torch.tensor(value)], [p])[0], apart)


def test_state_of_operands_is_saved():
    def make():
        w = torch.nn.Parameter(torch.ones(2))
        return w, mo.Optimizer([w], m.Mul([m.EMA(0.9), m.Abs()]), m.LR(0.1))

    w, opt = make()
    for _ in range(3):
        opt.step(mo.closure(lambda: (w**2).sum()))
    v, other = make()
    v.data.copy_(w.data)
    other.load_state_dict(opt.state_dict())
    opt.step(mo.closure(lambda: (w**2).sum()))
    other.step(mo.closure(lambda: (v**2).sum()))
    assert torch.equal(v, w)


def test_comparisons_see_complex_numbers_as_pairs():
    u = torch.tensor([1.0 - 2.0j])
    assert optim.step_tensors(m.Maximum(0.0), [u.clone()])[0].tolist() == [1.0 + 0.0j]
    assert optim.step_tensors(m.ClipModules(m.Identity(), min=-1.0, max=0.5), [u.clone()])[0].tolist() == [0.5 - 1.0j]


def test_a_forgotten_gradient_is_evaluated_again():
    w = torch.nn.Parameter(torch.ones(1))
    opt = mo.Optimizer([w], m.Clone(), m.GradToNone(), m.Add(m.Grad()), m.LR(0.1))
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert opt.num_evaluations == 2
    assert float(w.detach()) == pytest.approx(0.6)
