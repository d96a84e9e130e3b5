"""Every Hessian link in every trust region and line search: it descends, or is refused when the optimizer is built."""

import itertools

import pytest
import torch

import moduli as mo
from moduli import m
from moduli.optim import ChainError

PROVIDERS = {
    "Newton": m.Newton,
    "NewtonCG": m.NewtonCG,
    "NystromSketchAndSolve": lambda: m.NystromSketchAndSolve(seed=0, reg=1e-3),
    "NystromPCG": lambda: m.NystromPCG(seed=0),
    "SubspaceNewton": m.SubspaceNewton,
    "GaussNewton": m.GaussNewton,
    "LBFGS": m.LBFGS,
    "LSR1": m.LSR1,
    "BFGS": m.BFGS,
    "BFGS, Hessian": lambda: m.BFGS(inverse=False),
    "DFP": m.DFP,
    "SR1": m.SR1,
    "SR1, Hessian": lambda: m.SR1(inverse=False),
    "PSB": m.PSB,
    "SSVM": m.SSVM,
    "Horisho": m.Horisho,
    "BroydenGood": m.BroydenGood,
    "BroydenBad": m.BroydenBad,
    "DiagonalQuasiCauchi": m.DiagonalQuasiCauchi,
    "SG2": lambda: m.SG2(seed=0),
}
REGIONS = {
    "TrustCG": m.TrustCG,
    "TrustExact": m.TrustExact,
    "Dogleg": m.Dogleg,
    "CubicRegularization": m.CubicRegularization,
    "LevenbergMarquardt": m.LevenbergMarquardt,
}
SEARCHES = {"Backtracking": m.Backtracking, "StrongWolfe": m.StrongWolfe, "Adaptive": m.AdaptiveBacktracking}
PRODUCTS_ONLY = {"NewtonCG", "NystromPCG"}
# DFP recovers slowly from a bad estimate with inexact line searches.
SLOW = {"DFP": 0.03}
NOT_SYMMETRIC = {"BroydenGood", "BroydenBad"}


def _impossible(provider, region):
    return provider in NOT_SYMMETRIC or (provider in PRODUCTS_ONLY and region != "TrustCG")


def _descends(links, residuals, enough=1e-2):
    w = torch.nn.Parameter(torch.tensor([-1.2, 1.0, 0.5], dtype=torch.float64))
    parts = lambda: torch.stack([2 * (w[1] - w[0] ** 2), 1 - w[0], w[2] + 0.1 * w[1]])  # noqa: E731
    opt = mo.Optimizer([w], *links)
    closure = mo.closure(parts if residuals else lambda: 0.5 * parts().square().sum(), fixed=True)
    losses = [float(opt.step(closure)) for _ in range(80)]
    assert all(
        b <= a + 1e-12 for a, b in itertools.pairwise(losses)
    )  # trust regions and searches never increase the loss
    assert losses[-1] < enough * losses[0]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_any_hessian_works_in_any_trust_region(provider, region):
    links = [REGIONS[region](PROVIDERS[provider]())]
    if _impossible(provider, region):
        with pytest.raises(ChainError, match=region):
            mo.Optimizer([torch.nn.Parameter(torch.ones(2))], *links)
        return
    _descends(links, residuals=provider == "GaussNewton", enough=SLOW.get(provider, 1e-2))


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("provider", PROVIDERS)
def test_any_hessian_works_before_any_line_search(provider, search):
    _descends(
        [PROVIDERS[provider](), SEARCHES[search]()],
        residuals=provider == "GaussNewton",
        enough=SLOW.get(provider, 1e-2),
    )


def test_a_link_without_a_hessian_is_refused():
    with pytest.raises(ChainError, match="gives none"):
        mo.Optimizer([torch.nn.Parameter(torch.ones(2))], m.TrustCG(m.LR(0.1)))
