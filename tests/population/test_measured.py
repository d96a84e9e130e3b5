"""Measurements choose between forms of a product, which give equal results up to rounding."""

import pytest
import torch
from torch import nn

from moduli.population import Population, _measured, _sequences, _stacked

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch):
    """Start every test without stored measurements."""
    monkeypatch.setattr(_measured, "_choices", {})
    monkeypatch.setattr(_measured, "_costs", {})
    monkeypatch.setattr(_measured, "_block_sizes", {})
    monkeypatch.setattr(_sequences, "_blocks", {})


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_every_form_of_a_product_is_a_loop(shared, biased):
    torch.manual_seed(0)
    matrix = torch.randn(5, 26, dtype=DOUBLE, requires_grad=True)
    x = torch.randn(*((6, 3) if shared else (5, 6, 3)), dtype=DOUBLE, requires_grad=True)

    def run(form):
        w, b = matrix[:, :12].view(5, 4, 3), matrix[:, 12:16] if biased else None
        outputs = form(x, w, b)
        return outputs, *torch.autograd.grad(outputs.square().sum(), (matrix, x))

    def one_by_one(x, w, b):
        rows = [x if shared else x[i] for i in range(5)]
        return torch.stack([nn.functional.linear(rows[i], w[i], None if b is None else b[i]) for i in range(5)])

    expected = run(one_by_one)
    forms = _stacked._SHARED_FORMS if shared else _stacked._OWN_FORMS
    assert {_measured.choose_first(1, 2), _measured.choose_first(2, 1)} <= set(forms)
    for form in forms.values():
        for ours, theirs in zip(run(form), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def wide():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.mark.parametrize("form", ["left", "right", "side by side"])
def test_losses_are_a_loop_whatever_form_is_chosen(form, monkeypatch):
    seen = []

    def pretend(kind, biased, forms):
        seen.append(kind)
        return (form if form in forms else "right"), dict.fromkeys(forms, 1.0)

    monkeypatch.setattr(_measured, "_measure_forms", pretend)
    pop, x = Population.of(wide, 40).to(DOUBLE), torch.randn(64, 64, dtype=DOUBLE)
    losses = pop.losses(lambda net: net(x).square().mean())
    losses.sum().backward()
    for i in (0, 39):
        net = pop.to_module(i)
        net.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        torch.testing.assert_close(losses[i], loss, rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(pop.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(ours.grad[i], theirs.grad, rtol=1e-10, atol=1e-12)
    assert {(kind.shared, kind.rows, kind.out, kind.into, kind.trained) for kind in seen} == {
        (True, 64, 64, 64, True),
        (False, 64, 10, 64, True),
    }


@pytest.mark.parametrize("form", ["left", "right"])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_of_any_size_give_the_same_outputs(block, form, monkeypatch):
    pop, x = Population.of(wide, 33).to(DOUBLE), torch.randn(60, 64, dtype=DOUBLE)
    monkeypatch.setattr(_sequences, "_measure_blocks", lambda *args: (block, form))
    with torch.no_grad():
        expected = torch.stack([net(x) for net in pop])
        torch.testing.assert_close(pop(x), expected, rtol=1e-12, atol=1e-12)
    assert list(_sequences._blocks.values()) == [(block, form)]


def test_a_choice_is_made_once_and_explained():
    pop, x = Population.of(wide, 64), torch.randn(64, 64)
    with torch.no_grad():
        first = pop(x)
        assert torch.equal(pop(x), first)
        assert torch.equal(Population.from_modules(pop.to_modules())(x), first)
        lines = pop.explain(x).splitlines()
    assert lines[0].startswith("sequence")
    assert "64 - 64 - 10 on up to 64 rows" in lines[1]
    pop.losses(lambda net: net(x).square().mean())
    choices = dict(_measured._choices)
    assert len(choices) == 2
    pop.losses(lambda net: net(x[:50]).square().mean())  # 50 rows are rounded up to 64
    assert choices == _measured._choices
    assert "10 x 64 on 64 rows of each member, with gradients: " in pop.explain(x)


def test_deterministic_algorithms_are_not_chosen_by_measurement():
    pop, x = Population.of(wide, 64), torch.randn(64, 64)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        pop.losses(lambda net: net(x).square().mean())
        with torch.no_grad():
            pop(x)
            pop.losses(lambda net: net(x).square().mean())
    finally:
        torch.use_deterministic_algorithms(before)
    assert [_measured._choices, _measured._costs, _sequences._blocks] == [{}, {}, {}]
