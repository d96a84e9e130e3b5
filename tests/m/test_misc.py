"""Small links."""

import pytest
import torch

import moduli as mo
from m.first_order import close, run
from moduli import m, optim


def through(link, *values):
    param = torch.zeros(len(values[0]))
    return [optim.step_tensors(link, [torch.tensor(v)], [param])[0].tolist() for v in values]


def test_later_links_cannot_change_the_history_of_previous():
    """Scaling the result in place must not scale the stored history."""
    link, p = m.Previous(2), torch.zeros(1)
    values = []
    for x in (1.0, 2.0, 3.0, 4.0):
        out = optim.step_tensors(link, [torch.tensor([x])], [p])[0]
        values.append(out.item())
        out.mul_(100.0)
    assert values == [1.0, 1.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="at least 1"):
        m.Previous(0)


def test_last_ratio_of_a_previous_update():
    assert through(m.LastRatio(numerator="prev"), [2.0], [4.0]) == [[0.5], [0.5]]
    with pytest.raises(ValueError, match="'cur' or 'prev'"):
        m.LastRatio(numerator="next")


def test_signs_are_compositions():
    close(
        run(lambda p: [m.Adam(), m.GradSign(), m.LR(0.1)]), run(lambda p: [m.Adam(), m.CopySign(m.Grad()), m.LR(0.1)])
    )
    close(
        run(lambda p: [m.Adam(), m.UpdateSign(), m.LR(0.1)]),
        run(lambda p: [m.Adam(), m.RCopySign(m.Grad()), m.LR(0.1)]),
    )


def test_homotopy_transforms_gradients_by_the_chain_rule_and_the_loss():
    w = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    seen = []
    opt = mo.Optimizer([w], m.LogHomotopy(), m.PrintLoss(print_fn=seen.append), m.LR(0.1))
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert float(seen[0].removeprefix("loss = ")) == pytest.approx(1.3862943611)
    assert w.item() == pytest.approx(2.0 - 0.1 * 2 / 2.0)


@pytest.mark.parametrize("link", [m.SquareHomotopy, m.SqrtHomotopy, m.ExpHomotopy, m.LogHomotopy])
def test_monotone_functions_keep_the_minimum(link):
    x = torch.nn.Parameter(torch.tensor([0.5, 0.3], dtype=torch.float64))
    opt = mo.Optimizer([x], link(), m.LBFGS(), m.StrongWolfe())
    for _ in range(30):
        opt.step(mo.closure(lambda: ((x - 1) ** 2).sum() + 0.1))
    assert float(((x.detach() - 1) ** 2).sum()) < 1e-6


def test_escape_finds_a_lower_point_and_only_when_stuck():
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = mo.Optimizer([w], m.EscapeAnnealing(n_tol=3, seed=0), m.LR(0.1))
    count = []
    for _ in range(6):
        before = opt.num_evaluations
        opt.step(mo.closure(lambda: (w**4 - w**2).sum()))
        count.append(opt.num_evaluations - before)
    assert count[:3] == [1, 1, 1]
    assert count[3] > 1
    assert float((w.detach() ** 4 - w.detach() ** 2).sum()) < 0
    with pytest.raises(ValueError, match="max_region"):
        m.EscapeAnnealing(max_region=0.0)


def test_escape_stays_at_a_minimum():
    w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    opt = mo.Optimizer([w], m.EscapeAnnealing(n_tol=1, max_iter=5, seed=0), m.LR(0.1))
    for _ in range(3):
        opt.step(mo.closure(lambda: (w**2).sum()))
    assert w.tolist() == [0.0, 0.0]


def test_printing_links_print_loss_params_shapes_and_update():
    seen = []
    w = torch.nn.Parameter(torch.tensor([2.0]))
    links = [cls(print_fn=seen.append) for cls in (m.PrintLoss, m.PrintParams, m.PrintShape, m.PrintUpdate)]
    mo.Optimizer([w], *links, m.LR(0.1)).step(mo.closure(lambda: (w**2).sum()))
    assert seen == ["loss = 4.0", "params = [[2.0]]", "shapes = [(1,)]", "update = [[4.0]]"]
    seen.clear()
    opt = mo.Optimizer([w], m.PrintLoss("f: ", print_fn=seen.append), m.LR(0.1))
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert seen[0].startswith("f: ")
