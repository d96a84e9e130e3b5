"""Ensembles: what members say together, and modules made of them."""

import math

import pytest
import torch
from torch import nn

from moduli.population import EnsemblePrediction, Population


@pytest.fixture
def pop():
    torch.manual_seed(0)
    return Population.of(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)), 7
    ).eval()


def test_a_prediction_is_that_of_the_members(pop):
    x = torch.randn(6, 3)
    told = pop.predict(x)
    with torch.no_grad():
        each = torch.stack([pop[at](x) for at in range(7)])
    torch.testing.assert_close(told.outputs, each, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(told.mean, each.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(told.std, each.std(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(told.quantile(0.5), each.median(0).values, rtol=1e-5, atol=1e-6)
    assert not told.outputs.requires_grad
    with pytest.raises(ValueError, match="classes=True"):
        told.votes


def test_classifiers_vote_and_disagree(pop):
    x = torch.randn(6, 3)
    told = pop.predict(x, classes=True)
    torch.testing.assert_close(told.mean.sum(-1), torch.ones(6))
    torch.testing.assert_close(told.votes.sum(-1), torch.ones(6))
    chosen = told.outputs.argmax(-1)
    assert told.votes[0, int(chosen[0, 0])].item() == pytest.approx(
        (chosen[:, 0] == chosen[0, 0]).double().mean().item()
    )
    assert bool((told.disagreement >= 0).all())
    same = EnsemblePrediction(told.outputs[:1].repeat(5, 1, 1), True)
    torch.testing.assert_close(same.disagreement, torch.zeros(6), atol=1e-6, rtol=0)
    # Two members that are sure of different classes: one bit.
    sure = EnsemblePrediction(torch.tensor([[[90.0, 0.0]], [[0.0, 90.0]]]), True)
    assert sure.disagreement.item() == pytest.approx(math.log(2), rel=1e-5)


def test_calibration_of_a_fair_and_of_a_boastful_classifier():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(20_000, generator=generator) * 0.5 + 0.5
    right = torch.rand(20_000, generator=generator) < p
    labels = (~right).long()
    fair = EnsemblePrediction(torch.stack([p.log(), (1 - p).log()], -1)[None], True).find_calibration(labels)
    assert float(((fair[:, 0] - fair[:, 1]).abs() * fair[:, 2]).sum()) < 0.02
    boast = EnsemblePrediction(torch.tensor([8.0, 0.0]).expand(1, 20_000, 2), True).find_calibration(labels)
    assert boast.shape == (1, 3)
    assert float(boast[0, 0] - boast[0, 1]) == pytest.approx(0.25, abs=0.02)
    with pytest.raises(ValueError, match="labels of shape"):
        EnsemblePrediction(torch.zeros(1, 4, 2), True).find_calibration(torch.zeros(3, dtype=torch.long))


def test_the_best_member_and_all_of_them_are_modules_of_their_own(pop):
    best = pop.best(torch.tensor([3.0, math.nan, 0.5, 4.0, 1.0, 2.0, 9.0]))
    assert torch.equal(best[0].weight, pop[2][0].weight)
    with torch.no_grad():
        best[0].weight.zero_()
    assert bool(pop[2][0].weight.any())
    best.append(nn.Linear(4, 1))  # members can't be edited, copies can
    modules = pop.to_modules()
    assert torch.equal(Population.from_modules(modules).matrix, pop.matrix)
    assert all(torch.equal(net[1].running_mean, pop[at][1].running_mean) for at, net in enumerate(modules))
    for wrong in (torch.ones(6), torch.full((7,), math.nan)):
        with pytest.raises(ValueError, match="one number for each of 7"):
            pop.best(wrong)


@pytest.mark.parametrize("mean", [False, True])
def test_an_ensemble_is_exported(pop, mean):
    x = torch.randn(6, 3)
    whole = pop.to_ensemble(mean)
    exported = torch.export.export(whole, (x,)).module()
    expected = pop.predict(x)
    torch.testing.assert_close(exported(x), expected.mean if mean else expected.outputs, rtol=1e-4, atol=1e-5)
