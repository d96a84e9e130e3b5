"""Every row on a fake accelerator: nothing is read back, nothing strays to the host, launches do not grow with tensors.

A fake device is registered for the rest of a process, so each part of the rows has a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from laws.fake_device import find_deciding
from laws.registry import collect
from moduli import m

TESTS = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'src'}"}
PARTS = 10  # two of them in each fifth of the law book

# By nature these decide in Python what comes next: whether a step is accepted, a search goes on, a solver has converged.
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
    done = subprocess.run(
        [sys.executable, str(TESTS / "laws" / "accelerate.py"), str(part), str(PARTS)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == {row.name for row in [row for row in collect() if not row.members][part::PARTS]}
    broken = [error for error in found.values() if error is not None]
    assert not broken, "\n".join(broken)


def test_particles_and_populations_keep_to_the_device():
    done = subprocess.run(
        [sys.executable, str(TESTS / "laws" / "rooms_on_device.py")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) > 8
    for name, rows in found.items():
        assert not any(isinstance(row, str) for row in rows), (name, rows)
        (few, copied), (many, _) = rows
        assert not copied, (name, copied)
        assert len(few) == len(many), (name, few, many)
    assert found["a + 0.5 * (b - c)"][1][0] == ["_foreach_add", "_foreach_add"]


def test_what_decides_on_the_host_is_counted():
    found = sorted({name for row in collect() for name in find_deciding(row.links())})
    assert found == DECIDING.split()


def test_a_declaration_says_so_for_what_is_inside():
    assert find_deciding([m.Online(m.LBFGS()), m.LR(1.0)]) == ["LBFGS"]
    assert not find_deciding([m.ClipNorm(1.0), m.Adam(), m.SOAP(), m.SAM(), m.Prodigy(), m.BarzilaiBorwein()])
    assert m.Wrap(torch.optim.LBFGS).decides_on_host
    assert not m.Wrap(torch.optim.Adam).decides_on_host
