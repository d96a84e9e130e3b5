"""Every row on a fake accelerator: no step reads back or copies to the host, or launches more for more tensors.

A fake device stays registered until its process ends, so each part of the rows runs in a separate process.
"""

import json

import pytest
import torch

from launching import TESTS, run_python
from laws.fake_device import find_deciding
from laws.registry import collect
from moduli import m

PARTS = 10  # two parts in each fifth of the law book

# These decide in Python whether a step is accepted, a search continues, or a solver has converged.
DECIDING = """
AEGD ARS AdaptiveBacktracking AdaptiveBisection AugmentedLagrangian BFGS Backtracking BirginMartinezRestart BroydenBad
BroydenGood CD CEM CMAES CubicRegularization DE DFP DNRTR DiagonalBFGS DiagonalQuasiCauchi DiagonalSR1
DiagonalWeightedQuasiCauchi Dogleg EscapeAnnealing FletcherVMM GA GGT GGTBasis GaussNewton GradientSampling Greenstadt1
Greenstadt2 GuidedES Horisho ICUM InverseFreeNewton LBFGS LSR1 LevenbergMarquardt McCormick NegateOnLossIncrease NewDQN
Newton NewtonCG NewtonCGSteihaug NystromPCG NystromSketchAndSolve OpenES PGPE PSB Pearson PowellRestart PrintLoss
PrintParams PrintUpdate ProjectedGradientMethod ProjectedNewtonRaphson RestartOnStuck SG2 SNES SR1 SSVM SaveBest
ScipyMinimizeScalar ShorR SixthOrder3P SixthOrder3PM2 SixthOrder5P StrongWolfe SubspaceNewton TerminateByGradientNorm
TerminateByUpdateNorm TerminateOnLossReached TerminateOnNoImprovement ThomasOptimalMethod TrustCG TrustExact
TwoPointNewton Wrap XNES
"""


@pytest.mark.parametrize("part", range(PARTS))
def test_links_keep_to_the_device(part):
    errors = json.loads(run_python(TESTS / "laws" / "accelerate.py", part, PARTS))
    assert set(errors) == {row.name for row in [row for row in collect() if not row.members][part::PARTS]}
    broken = [error for error in errors.values() if error is not None]
    assert not broken, "\n".join(broken)


def test_particles_and_populations_keep_to_the_device():
    measured = json.loads(run_python(TESTS / "laws" / "rooms_on_device.py"))
    assert len(measured) > 8
    for name, rows in measured.items():
        assert not any(isinstance(row, str) for row in rows), (name, rows)
        (few, copied), (many, _) = rows
        assert not copied, (name, copied)
        assert len(few) == len(many), (name, few, many)
    assert measured["a + 0.5 * (b - c)"][1][0] == ["_foreach_add", "_foreach_add"]


def test_links_that_decide_on_the_host_are_listed():
    deciding = sorted({name for row in collect() for name in find_deciding(row.links())})
    assert deciding == DECIDING.split()


def test_decisions_of_inner_links_are_declared():
    assert find_deciding([m.Online(m.LBFGS()), m.LR(1.0)]) == ["LBFGS"]
    assert not find_deciding([m.ClipNorm(1.0), m.Adam(), m.SOAP(), m.SAM(), m.Prodigy(), m.BarzilaiBorwein()])
    assert m.Wrap(torch.optim.LBFGS).decides_on_host
    assert not m.Wrap(torch.optim.Adam).decides_on_host
