"""Problems from physics whose axes have names: the bands of a chain, and the ground state of an oscillator."""

import math
from collections.abc import Callable
from typing import Any

import torch

from ...labels import Tensor, dot, eigvalsh, tensor
from ...nn import nograd_tensors
from ...particles import Module
from ._base import Problem

BONDS = ("s energy", "p energy", "s-s", "p-p", "s-p", "s-s 2nd", "p-p 2nd")
TRUE_HOPPINGS = (-2.0, 2.0, -0.5, 0.4, 0.6, -0.15, 0.1)


def _make_bond_matrices(momenta: torch.Tensor) -> Tensor:
    """Return the term of each bond in the Hamiltonian of a chain with an s and a p orbital per site, at each momentum."""
    one, wave = torch.ones_like(momenta), 2 * torch.cos(momenta)
    far, odd = 2 * torch.cos(2 * momenta), 2j * torch.sin(momenta)
    matrices = torch.zeros(len(BONDS), len(momenta), 2, 2, dtype=torch.complex128)
    for bond, (orbital, value) in enumerate([(0, one), (1, one), (0, wave), (1, wave)]):
        matrices[bond, :, orbital, orbital] = value.to(torch.complex128)
    matrices[4, :, 0, 1], matrices[4, :, 1, 0] = odd, odd.conj()
    matrices[5, :, 0, 0], matrices[6, :, 1, 1] = far.to(torch.complex128), far.to(torch.complex128)
    orbitals = ["s", "p"]
    return tensor(matrices, "bond k orbital other", bond=list(BONDS), orbital=orbitals, other=orbitals)


@nograd_tensors("matrices")
class TightBinding(Module):
    """Energies over momentum of a chain of atoms, from the strength of each bond."""

    def __init__(self, matrices: Tensor, hoppings: torch.Tensor) -> None:
        super().__init__()
        self.matrices = matrices
        self.hoppings = tensor(hoppings, bond=list(BONDS)).attach()

    def forward(self) -> Tensor:
        """Return the bands: axes k and spectrum."""
        strengths = self.hoppings.to(torch.complex128)
        return eigvalsh(dot(strengths, self.matrices, over="bond"))


class Bands(Problem):
    """Find the bond strengths of an s-p chain from its bands.

    H(k) = sum_b t_b M_b(k) with labelled axes momentum and orbital; the loss is the mean squared distance between the
    eigenvalues of H and measured energies, which were made with known strengths: the optimum is zero.

    >>> problem = Bands()
    >>> problem.dimension
    7
    >>> print(problem.model(0).hoppings.dims[0].name)
    bond
    """

    name = "bands"
    summary = "bond strengths of an s-p chain from its bands; labelled momentum and orbital axes"
    tags = ("n-D", "multimodal", "physics", "labelled")
    optimum = 0.0
    tolerance = 1e-10
    budget = 600

    def __init__(self) -> None:
        self.matrices = _make_bond_matrices(torch.linspace(-math.pi, math.pi, 33, dtype=torch.float64))
        truth = TightBinding(self.matrices, torch.tensor(TRUE_HOPPINGS, dtype=torch.float64))
        with torch.no_grad():
            self.energies = truth().detach()

    def model(self, seed: int) -> TightBinding:
        """Return a chain with two flat bands in the right order, and weak random bonds."""
        noise = torch.randn(len(BONDS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        start = 0.2 * noise
        start[0], start[1] = start[0] - 1, start[1] + 1
        return TightBinding(self.matrices, start)

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the mean squared error of the energies."""
        error: Tensor = model() - self.energies
        return _strip_labels((error**2).mean())


@nograd_tensors("hamiltonian")
class TrialState(Module):
    """A state as amplitudes of oscillator levels; called, it returns its mean energy."""

    def __init__(self, hamiltonian: Tensor, amplitudes: torch.Tensor) -> None:
        super().__init__()
        self.hamiltonian = hamiltonian
        self.amplitudes = tensor(amplitudes, "level").attach()

    def forward(self) -> Tensor:
        """Return <c|H|c> / <c|c>."""
        c = self.amplitudes
        energy = dot(dot(c, self.hamiltonian, over="level").rename(other="level"), c, over="level")
        result: Tensor = energy / dot(c, c, over="level")
        return result


class GroundState(Problem):
    """The variational ground state of a quartic oscillator, H = p^2/2 + x^2/2 + x^4, in its lowest 20 harmonic levels.

    By the variational principle no state has less energy than the smallest eigenvalue, which is the optimum. The energy of
    high levels grows like n^2, so the problem is ill-conditioned, and it does not change along the state's length.

    >>> round(GroundState().optimum, 6)
    0.803774
    """

    name = "ground-state"
    summary = "the ground state of a quartic oscillator from 20 harmonic levels"
    tags = ("n-D", "smooth", "ill-conditioned", "physics", "labelled")
    tolerance = 1e-8
    budget = 600

    def __init__(self, levels: int = 20) -> None:
        # x is taken in a larger basis, so that x^4 is exact in the first `levels` levels.
        root = torch.arange(1, levels + 8, dtype=torch.float64).div(2).sqrt()
        position = torch.diag(root, 1) + torch.diag(root, -1)
        quartic = torch.linalg.matrix_power(position, 4)[:levels, :levels]
        matrix = torch.diag(torch.arange(levels, dtype=torch.float64) + 0.5) + quartic
        self.hamiltonian = tensor(matrix, "level other")
        self.optimum = float(torch.linalg.eigvalsh(matrix)[0])

    def model(self, seed: int) -> TrialState:
        """Return random amplitudes that decrease with the level."""
        size = self.hamiltonian.shape[0]
        noise = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return TrialState(self.hamiltonian, noise / (1 + torch.arange(size, dtype=torch.float64)))

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the mean energy."""
        return _strip_labels(model())


def _strip_labels(value: Tensor | torch.Tensor) -> torch.Tensor:
    """Return a tensor without labels; under vmap, a value without axes is a plain tensor already."""
    return value if isinstance(value, torch.Tensor) else value.data
