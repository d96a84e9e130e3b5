"""Predictions of ensembles, their calibration, and modules made of populations."""

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
    prediction = pop.predict(x)
    with torch.no_grad():
        each = torch.stack([pop[at](x) for at in range(7)])
    torch.testing.assert_close(prediction.outputs, each, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prediction.mean, each.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(prediction.std, each.std(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prediction.quantile(0.5), each.median(0).values, rtol=1e-5, atol=1e-6)
    assert not prediction.outputs.requires_grad
    with pytest.raises(ValueError, match="classes=True"):
        prediction.votes


def test_classifiers_vote_and_disagree(pop):
    x = torch.randn(6, 3)
    prediction = pop.predict(x, classes=True)
    torch.testing.assert_close(prediction.mean.sum(-1), torch.ones(6))
    torch.testing.assert_close(prediction.votes.sum(-1), torch.ones(6))
    chosen = prediction.outputs.argmax(-1)
    assert prediction.votes[0, int(chosen[0, 0])].item() == pytest.approx(
        (chosen[:, 0] == chosen[0, 0]).double().mean().item()
    )
    assert bool((prediction.disagreement >= 0).all())
    same = EnsemblePrediction(prediction.outputs[:1].repeat(5, 1, 1), True)
    torch.testing.assert_close(same.disagreement, torch.zeros(6), atol=1e-6, rtol=0)
    # Two members that are certain of different classes disagree by one bit.
    sure = EnsemblePrediction(torch.tensor([[[90.0, 0.0]], [[0.0, 90.0]]]), True)
    assert sure.disagreement.item() == pytest.approx(math.log(2), rel=1e-5)


def test_calibration_of_a_calibrated_and_of_an_overconfident_classifier():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(20_000, generator=generator) * 0.5 + 0.5
    right = torch.rand(20_000, generator=generator) < p
    labels = (~right).long()
    calibrated = EnsemblePrediction(torch.stack([p.log(), (1 - p).log()], -1)[None], True).find_calibration(labels)
    assert float(((calibrated[:, 0] - calibrated[:, 1]).abs() * calibrated[:, 2]).sum()) < 0.02
    overconfident = EnsemblePrediction(torch.tensor([8.0, 0.0]).expand(1, 20_000, 2), True).find_calibration(labels)
    assert overconfident.shape == (1, 3)
    assert float(overconfident[0, 0] - overconfident[0, 1]) == pytest.approx(0.25, abs=0.02)
    with pytest.raises(ValueError, match="labels of shape"):
        EnsemblePrediction(torch.zeros(1, 4, 2), True).find_calibration(torch.zeros(3, dtype=torch.long))


def test_the_best_member_and_all_members_as_independent_modules(pop):
    best = pop.best(torch.tensor([3.0, math.nan, 0.5, 4.0, 1.0, 2.0, 9.0]))
    assert torch.equal(best[0].weight, pop[2][0].weight)
    with torch.no_grad():
        best[0].weight.zero_()
    assert bool(pop[2][0].weight.any())
    best.append(nn.Linear(4, 1))  # the copy can be edited, unlike a member
    modules = pop.to_modules()
    assert torch.equal(Population.from_modules(modules).matrix, pop.matrix)
    assert all(torch.equal(net[1].running_mean, pop[at][1].running_mean) for at, net in enumerate(modules))
    for wrong in (torch.ones(6), torch.full((7,), math.nan)):
        with pytest.raises(ValueError, match="one number for each of 7"):
            pop.best(wrong)


FORMS = [{}, {"mean": True}, {"mean": True, "classes": True}]


@pytest.mark.parametrize("form", FORMS)
def test_an_ensemble_is_exported(pop, form):
    x, other = torch.randn(6, 3), torch.randn(9, 3)
    whole = pop.to_ensemble(**form)
    exported = torch.export.export(whole, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},)).module()
    expected = pop.predict(other, classes="classes" in form)
    torch.testing.assert_close(exported(other), expected.mean if form else expected.outputs, rtol=1e-4, atol=1e-5)


def test_a_member_is_exported(pop):
    x = torch.randn(6, 3)
    best = pop.best(torch.arange(7.0).roll(3))
    torch.testing.assert_close(torch.export.export(best, (x,)).module()(x), pop[3](x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # the exporter warns about torch
@pytest.mark.parametrize("form", [{"mean": True, "classes": True}, None])
def test_an_ensemble_and_a_member_go_through_onnx(pop, form, tmp_path):
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed, reason="ONNX is no dependency: pip install onnx onnxscript onnxruntime")
    import onnxruntime

    net = pop.to_module(2).eval() if form is None else pop.to_ensemble(**form).eval()
    shapes = ({0: torch.export.Dim("rows")},)
    torch.onnx.export(net, (torch.randn(6, 3),), dynamo=True, dynamic_shapes=shapes, verbose=False).save(
        tmp_path / "net.onnx"
    )
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    x = torch.randn(9, 3)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(outputs), net(x), rtol=1e-4, atol=1e-5)


def test_the_calibration_error_is_the_mean_over_the_table():
    generator = torch.Generator().manual_seed(0)
    prediction = EnsemblePrediction(torch.randn(5, 400, 3, generator=generator), True)
    labels = torch.randint(3, (400,), generator=generator)
    p = prediction.outputs.softmax(-1).mean(0)
    expected = 0.0
    for low in range(8):
        inside = [i for i in range(400) if low / 8 <= float(p[i].max()) < (low + 1) / 8 + (low == 7)]
        if inside:
            confidence = sum(float(p[i].max()) for i in inside) / len(inside)
            accuracy = sum(int(p[i].argmax()) == int(labels[i]) for i in inside) / len(inside)
            expected += abs(confidence - accuracy) * len(inside) / 400
    assert prediction.find_calibration_error(labels, bins=8).item() == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(prediction.quantile(0.5), prediction.outputs.softmax(-1).median(0).values)
