"""Every fused chain of the law book, in Triton's interpreter as in `plain`."""

import pytest
import torch

from laws.registry import collect
from moduli import Optimizer, Population, kernels, m

SHAPES = [(3, 2), (4,), (), (0,), (33,)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
ROWS = [row for row in collect() if not row.members and not row.closure]
ROWS = [row for row in ROWS if any(getattr(link, "elementwise", False) for link in row.links())]


def run(row, dtype, form, monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", form)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES
    ]
    optimizer = Optimizer(params, *row.links())
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.step()
    return params


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_chain(row, dtype, monkeypatch):
    with kernels.watch_launches() as seen:
        mine = run(row, dtype, "triton", monkeypatch)
    assert any(launch.name == "fused" for launch in seen)
    theirs = run(row, dtype, "plain", monkeypatch)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype], equal_nan=True)


def test_clip_adam_decay_and_lr_are_three_launches(monkeypatch):
    for count in (4, 40):
        params = [torch.nn.Parameter(torch.ones(5)) for _ in range(count)]
        optimizer = Optimizer(params, m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3))
        for _ in range(2):
            for param in params:
                param.grad = torch.ones(5)
            with kernels.watch_launches() as seen:
                optimizer.step()
        assert [launch.name for launch in seen] == ["squares", "fused"]


def test_the_step_number_moves_on_without_another_kernel(monkeypatch):
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = Optimizer([param], m.Adam(), m.LR(1e-2))
    reference = torch.nn.Parameter(torch.ones(5))
    other = torch.optim.Adam([reference], lr=1e-2)
    from moduli.kernels import _triton

    for step in range(6):
        for each in (param, reference):
            each.grad = torch.linspace(-1, 1, 5) * (step + 1)
        optimizer.step()
        other.step()
        if step == 1:
            before = len(_triton._built)
    assert len(_triton._built) == before
    torch.testing.assert_close(param, reference)


def test_groups_frozen_parameters_and_lost_gradients_make_the_table_again_and_nothing_else():
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(4)]
    optimizer = Optimizer(params[:3], m.Adam(), m.LR(1e-2))
    references = [torch.nn.Parameter(torch.ones(5)) for _ in range(4)]
    other = torch.optim.Adam(references[:3], lr=1e-2)
    from moduli.kernels import _triton

    def step(missing=()):
        for every in (params, references):
            for i, param in enumerate(every):
                param.grad = None if i in missing else torch.full((5,), 1.0 + i)
        optimizer.step()
        other.step()

    step()
    step()
    built = len(_triton._built)
    step(missing=(1,))
    for every in (params, references):
        every[2].requires_grad_(False)
    step(missing=(2,))
    for every in (params, references):
        every[2].requires_grad_(True)
    step()
    optimizer.add_param_group({"params": [params[3]]})
    other.add_param_group({"params": [references[3]]})
    step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    step()
    assert len(_triton._built) == built
    for mine, theirs in zip(params, references, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_populations_particles_and_merges_run_there_too(monkeypatch):
    import moduli as mo

    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))

    def population():
        torch.manual_seed(0)
        members = Population.of(net, 3)
        x = torch.ones(2, 3)
        optimizer = Optimizer(members, m.Adam(), m.LR(0.1))
        for _ in range(2):
            optimizer.step(mo.closure(lambda: members.losses(lambda model: (model(x) ** 2).mean())))
        return list(members.parameters())

    def particle():
        torch.manual_seed(0)
        a, b = mo.adopt(torch.nn.Linear(3, 2)), mo.adopt(torch.nn.Linear(3, 2))
        return list((a + 0.5 * (b - a)).parameters())

    for work in (population, particle):
        monkeypatch.setenv("MODULI_KERNELS", "triton")
        with kernels.watch_launches() as seen:
            mine = work()
        assert seen or work is particle  # on the CPU sums of models are foreach calls
        monkeypatch.setenv("MODULI_KERNELS", "plain")
        for got, expected in zip(mine, work(), strict=True):
            torch.testing.assert_close(got, expected)
