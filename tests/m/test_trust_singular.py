"""A quasi-Newton model that becomes singular is begun again; the step goes on."""

import torch

import moduli as mo
from moduli import linalg, m


class Lost(m.BFGS):
    """A model that has lost a direction altogether."""

    def get_H(self, objective):
        size = sum(param.numel() for param in objective.params)
        return linalg.Dense(torch.zeros(size, size, dtype=objective.params[0].dtype), symmetric=True).inverse()


def test_a_singular_model_is_begun_again_and_the_step_descends():
    x = torch.nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))
    opt = mo.Optimizer([x], m.TrustCG(Lost()))
    for _ in range(50):
        opt.step(mo.closure(lambda: 0.5 * x.square().sum()))
    assert x.norm() < 1e-3
