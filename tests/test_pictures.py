"""HTML representations are escaped and well-formed, and plots are returned as figures."""

import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import lab, m, particles
from moduli.population import EnsemblePrediction

ODD = "<b>&\"'"


def make_optimizer():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return mo.Optimizer(net, m.ClipNorm(1.0), m.Adam(), m.LR(0.1)), mo.closure(
        lambda f: f(torch.ones(4, 2)).square().mean()
    )


def parse_html(thing):
    """Return the HTML of an object as a tree and as text; assert that it is well-formed and has no scripts."""
    page = thing._repr_html_()
    tree = ElementTree.fromstring(f"<div>{page.replace('&rarr;', '-')}</div>")
    assert tree.find(".//script") is None
    assert tree.find(".//b[.='&']") is None
    return tree, " ".join(tree.itertext())


def test_an_optimizer_shows_its_chain_and_the_size_of_its_state():
    opt, loss = make_optimizer()
    assert " 0 bytes of state" in parse_html(opt)[1]
    opt.step(loss)
    tree, text = parse_html(opt)
    assert [each.text for each in tree.iter("b")] == ["ClipNorm", "Adam", "LR"]
    assert "beta1=0.9" in text
    assert f"{2 * 4 * 13} bytes of state, step 1" in text  # two moments of thirteen float32 elements


def test_a_population_shows_the_norms_of_its_members():
    pop = mo.Population.of(nn.Linear(2, 1), 5, init=0.3)
    tree, text = parse_html(pop)
    norms = pop.norm()
    assert all(f"{float(each):.4g}" in text for each in (norms.min(), norms.double().mean(), norms.max()))
    assert len(tree.find(".//polyline").get("points").split()) == 5


def test_results_spaces_axes_and_differences_show_tables():
    fit = mo.minimize(lambda p: (p["<b>&"] - 3.0).square().sum(), {"<b>&": torch.zeros(2)})
    tree, text = parse_html(fit)
    assert fit.reason in text
    assert "<b>&[1]" in text
    assert len(tree.find(".//polyline").get("points").split()) == len(fit.history)
    assert repr(ODD) in parse_html(mo.Space([ODD, "c"], name="x"))[1]
    assert "9 labels" in parse_html(mo.Space(range(3, 12)))[1]
    assert "BROADCAST" in parse_html(mo.BROADCAST)[1]
    left = {ODD: torch.zeros(2), "same": torch.ones(1)}
    tree, text = parse_html(particles.diff(left, {"same": torch.ones(1), "new": torch.ones(1)}))
    assert "2 tensors differ, 1 equal" in text
    assert [each.text for each in tree.iter("th")][6:] == [ODD, "new"]
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert "0.weight" in parse_html(mo.axes.trace(net, torch.ones(1, 2)))[1]
    assert "u" in parse_html(mo.tensor([[1.0]], r=["u"], c=[ODD]))[1]
    race = lab.race(["sphere-10"], [lab.contender("torch.SGD(lr=0.1)", label=ODD)], seeds=1, budget=20, workers=0)
    _, text = parse_html(race)
    assert "1 of 1 runs" in text
    assert "sphere-10" in text


def test_a_watch_stores_every_step_only_with_history():
    opt, loss = make_optimizer()
    log = opt.watch(history=True)
    seen = []
    for _ in range(3):
        opt.step(loss)
        seen.append(log())
    assert log.history == seen
    assert [each["step"] for each in seen] == [1, 2, 3]
    plain = opt.watch()
    opt.step(loss)
    assert plain.history is None
    with pytest.raises(ValueError, match="history=True"):
        opt.plot_history()


def test_figures_have_the_values_of_watches_and_populations():
    pytest.importorskip("matplotlib")
    opt, loss = make_optimizer()
    log = opt.watch(history=True)
    with pytest.raises(ValueError, match="no step"):
        opt.plot_history()
    for _ in range(3):
        opt.step(loss)
    panels = opt.plot_history(["loss", "norm/1.Adam"]).axes
    assert [list(panel.lines[0].get_ydata()) for panel in panels] == [
        [record[name] for record in log.history] for name in ("loss", "norm/1.Adam")
    ]
    assert len(opt.plot_history().axes) == 4
    with pytest.raises(ValueError, match=r"\['lost'\] was not kept; there is step, loss"):
        opt.plot_history(["lost"])
    pop = mo.Population.of(nn.Linear(2, 1), 5, init=0.3)
    losses = torch.arange(5.0)
    line = pop.plot(losses).axes[0].lines[0]
    assert list(line.get_xdata()) == losses.tolist()
    assert torch.allclose(torch.tensor(line.get_ydata()), pop.norm().double())
    with pytest.raises(ValueError, match="there are 5 members"):
        pop.plot(losses[:2])
    assert len(lab.race(["sphere-10"], ["torch.SGD(lr=0.1)"], seeds=1, budget=20, workers=0).plot().axes) == 2


def test_matplotlib_is_imported_only_for_figures(monkeypatch):
    program = "import sys, moduli, moduli.lab, moduli.optim; print('matplotlib' in sys.modules)"
    source = str(Path(mo.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout == "False\n"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"moduli\[plot\]"):
        mo.Population.of(nn.Linear(2, 1), 5).plot()


def test_results_are_one_line_whatever_their_tensors():
    net = torch.nn.Linear(200, 30)
    result = mo.search(net, lambda net: net(torch.ones(200)).square().sum(), budget=40)
    prediction = EnsemblePrediction(torch.zeros(5, 300, 2), classes=True)
    assert repr(prediction) == "EnsemblePrediction(5 members, outputs of shape (300, 2), classes)"
    assert repr(result).startswith(f"SearchResult(value={result.value:.6g}, success=False, steps={result.steps}, ")
    assert "tensor" not in repr(result)
    assert "\n" not in repr(result)


def test_settings_of_links_have_no_addresses():
    """Else texts and pages would differ from run to run."""
    assert repr(m.LR(lambda step: 0.1)).endswith("<lambda>)")
    assert repr(m.LR(StepOfOne())) == f"LR(lr=<{__name__}.StepOfOne object>)"
    assert repr(m.LR(torch.linspace(0, 1, 30))) == "LR(lr=<30 numbers>)"
    page = mo.Optimizer([torch.nn.Parameter(torch.ones(3))], m.LR(math.exp))._repr_html_()
    assert "0x" not in page
    assert "1 parameter," in page


class StepOfOne:
    def __call__(self, step):
        return 1.0
