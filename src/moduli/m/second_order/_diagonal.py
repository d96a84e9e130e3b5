"""Links from estimates of the Hessian's diagonal.

* The base of methods that precondition by a sketch of the Hessian's diagonal.
* AdaHessian.
* Sophia with Hutchinson's estimator.
* Equilibrated gradient descent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...optim import Chainable, Objective, Setting, sample_like, transform_buffers
from ...optim import ranges as check
from ..adaptive._axes import add_or_average
from ._newton import _SecondOrderLink


class _HutchinsonBase(_SecondOrderLink):
    """Estimates the Hessian's diagonal, or products with random vectors, at every n-th step.

    Args:
        given: More settings of the link, and the `*_tfm`, links that transform copies of what is remembered before it is used.
        update_freq: Estimate at every n-th step.
        distribution: Of the random vectors.
        hvp_method: How products are made.
        h: The length of difference steps.
        n_samples: How many random vectors.
        zHz: Whether products are multiplied by the vectors.
        seed: Of a generator of its own; None for torch's.
        inner: Links between learning and the transformation.
    """

    shared_settings = ("n_samples", "zHz", "distribution", "hvp_method", "h")

    update_freq: int = 1
    distribution: str = "gaussian"
    hvp_method: str = "autograd"
    h: float = 1e-3
    n_samples: int = 1
    zHz: bool = True
    seed: int | None = None
    inner: Chainable | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        # Moments are updated at every step, the diagonal at every n-th.
        self.every, self.update_freq = self.update_freq, 1

    def find_known(
        self, objective: Objective, states: list[dict[str, Any]], **buffers: str
    ) -> list[tuple[int, dict[str, Any]]]:
        """The parameters that something is known about, with their states as the `*_tfm` links make them.

        Args:
            objective: The objective.
            states: The states.
            **buffers: The state that each argument's links are for.
        """
        positions = [i for i, state in enumerate(states) if all(name in state for name in buffers.values())]
        rows = [dict(states[i]) for i in positions]
        params = [objective.params[i] for i in positions]
        for key, name in buffers.items():
            buffers_now = transform_buffers(self, key, [row[name] for row in rows], params, objective)
            for row, buffer in zip(rows, buffers_now, strict=True):
                row[name] = buffer
        return list(zip(positions, rows, strict=True))


class _DiagonalMoments(_HutchinsonBase):
    """Divides the mean gradient by a running mean of estimates of the Hessian's diagonal."""

    second: ClassVar[str]
    """The entry of the state that holds that mean."""

    @abstractmethod
    def learn_diagonal(self, held: Tensor, D: Tensor, setting: Any) -> None:
        """Add one estimate of the diagonal to the mean, in place.

        Args:
            held: The mean.
            D: The estimate.
            setting: The settings.
        """

    @abstractmethod
    def divide(self, m: Tensor, D: Tensor, setting: Any) -> Tensor:
        """Return the update from both means.

        Args:
            m: The mean gradient.
            D: The mean of the diagonal.
            setting: The settings.
        """

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        diagonals: list[Tensor] | None = None
        first = settings[0]
        if self.increment_counter("estimates", 0) % self.every == 0:
            diagonals = objective.hutchinson_hessian(
                n_samples=first["n_samples"],
                distribution=first["distribution"],
                hvp_method=first["hvp_method"],
                h=first["h"],
                generator=self.get_generator(objective.params[0].device, self.seed),
                zHz=first["zHz"],
            )[0]
        for i, (u, state, setting) in enumerate(zip(objective.peek_updates(), states, settings, strict=True)):
            if objective.present is not None and not objective.present[i]:
                continue
            if "exp_avg" not in state:
                state["exp_avg"], state[self.second] = torch.zeros_like(u), torch.zeros_like(u)
                state["step"] = state["estimates"] = 0
            state["step"] += 1
            state["exp_avg"].lerp_(u, 1 - setting["beta1"])
            if diagonals is not None:
                state["estimates"] += 1
                self.learn_diagonal(state[self.second], diagonals[i], setting)

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        out = list(objective.get_updates())
        buffers = {"exp_avg_tfm": "exp_avg", f"{self.second}_tfm": self.second}
        for i, state in self.find_known(objective, states, **buffers):
            setting, m, D = settings[i], state["exp_avg"], state[self.second]
            if setting["debias"]:
                m = m / (1 - setting["beta1"] ** state["step"])
                D = D / (1 - setting["beta2"] ** max(state["estimates"], 1))
            out[i] = self.divide(m, D, setting)
        objective.updates = out
        return objective


class AdaHessian(_DiagonalMoments):
    r"""Adam with the Hessian's diagonal in place of the gradient in the second moment.

    $D = z \odot Hz$ (averaged over space), $v_t = \beta_2 v_{t-1} + (1-\beta_2) D^2$,
    $u \leftarrow \hat m_t / (\hat v_t^{k/2} + \epsilon)$.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        averaging: Average the diagonal over the axes beyond the second (the kernels of a convolution).
        block_size: Average over blocks of this many numbers along the first axis instead.
        update_freq: Estimate the diagonal at every n-th step only.
        eps: Added to the denominator.
        hessian_power: k, between 0 and 1.
        distribution: "rademacher", "normal", "uniform" or "sphere".
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        n_samples: Vectors per estimate.
        zHz: False to use Hz itself.
        debias: Correct for the moments starting at zero.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        inner: Links between learning and the transformation.
        exp_avg_tfm: Links that transform a copy of the mean before it is used.
        D_exp_avg_sq_tfm: Links that transform a copy of the mean square before its power is taken.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> _ = mo.Optimizer([w], m.AdaHessian(seed=0)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data.abs() < 1e-5
        tensor([True, True])

    References:
        Z. Yao et al., "AdaHessian: an adaptive second order optimizer for machine learning", AAAI 2021.
    """

    second = "D_exp_avg_sq"

    beta1: Setting = 0.9
    beta2: Setting = 0.999
    averaging: bool = True
    block_size: int | None = None
    eps: Setting = 1e-8
    hessian_power: Setting = 1.0
    debias: bool = True
    distribution: str = "rademacher"
    exp_avg_tfm: Chainable | None = None
    D_exp_avg_sq_tfm: Chainable | None = None

    def learn_diagonal(self, held: Tensor, D: Tensor, setting: Any) -> None:
        D = _average_blocks(D, setting)
        held.mul_(setting["beta2"]).addcmul_(D, D.conj(), value=1 - setting["beta2"])

    def divide(self, m: Tensor, D: Tensor, setting: Any) -> Tensor:
        out: Tensor = m / (D ** (setting["hessian_power"] / 2) + setting["eps"])
        return out


def _average_blocks(D: Tensor, setting: Any) -> Tensor:
    block = setting["block_size"]
    if block is not None and D.dim() > 0 and D.shape[0] % block == 0:
        blocks = D.reshape(D.shape[0] // block, block, *D.shape[1:]).abs().mean(1, keepdim=True)
        return blocks.expand(D.shape[0] // block, block, *D.shape[1:]).reshape(D.shape)
    if setting["averaging"] and D.dim() >= 3:
        return D.abs().mean(tuple(range(2, D.dim())), keepdim=True).expand_as(D)
    return D


class SophiaH(_DiagonalMoments):
    r"""Divides the mean gradient by a running mean of the Hessian's diagonal, and clips.

    $h_t = \beta_2 h_{t-1} + (1-\beta_2)\, z \odot Hz$ at every n-th step,
    $u \leftarrow \mathrm{clip}(m_t / \max(\rho h_t, \epsilon), \pm c)$.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the diagonal.
        update_freq: Estimate the diagonal at every n-th step.
        precond_scale: $\rho$.
        clip: c.
        eps: The smallest divisor.
        hvp_method: As for `NewtonCG`.
        distribution: "gaussian", "rademacher", "uniform" or "sphere".
        h: The length of difference steps.
        n_samples: Vectors per estimate.
        zHz: False to use Hz itself.
        debias: Correct for the means starting at zero.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        inner: Links between learning and the transformation.
        exp_avg_tfm: Links that transform a copy of the mean before it is used.
        D_exp_avg_tfm: Links that transform a copy of the mean diagonal before it is used.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.SophiaH(seed=0), m.LR(0.1))
        >>> for _ in range(100):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 1)
        True

    References:
        H. Liu et al., "Sophia: a scalable stochastic second-order optimizer for language model pre-training", ICLR 2024.
    """

    second = "D_exp_avg"

    beta1: Setting = 0.96
    beta2: Setting = 0.99
    precond_scale: Setting = 1.0
    clip: Setting = 1.0
    eps: Setting = 1e-12
    debias: bool = False
    update_freq: int = 10
    exp_avg_tfm: Chainable | None = None
    D_exp_avg_tfm: Chainable | None = None

    def learn_diagonal(self, held: Tensor, D: Tensor, setting: Any) -> None:
        held.lerp_(D, 1 - setting["beta2"])

    def divide(self, m: Tensor, D: Tensor, setting: Any) -> Tensor:
        ratio = m / (D * setting["precond_scale"]).clamp(min=setting["eps"])
        return ratio.clamp(-setting["clip"], setting["clip"])


class ESGD(_HutchinsonBase):
    r"""Divides by the norms of the Hessian's rows, estimated as $\sqrt{E (Hz)^2}$.

    $D_t = D_{t-1} + (Hz)^2$ at every n-th step, $u \leftarrow u / (\sqrt{D_t / k} + \lambda)$, with k the number of draws.

    Args:
        damping: $\lambda$.
        update_freq: Draw at every n-th step.
        distribution: "gaussian", "rademacher", "uniform" or "sphere".
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        n_samples: Draws each time.
        zHz: Accumulate the squares of $z \odot Hz$ instead.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        beta: Memory of an exponential mean; None for the mean of all draws.
        beta_debias: Correct that mean for starting at zero.
        inner: Links between learning and the transformation.
        Hz_sq_acc_tfm: Links that transform a copy of the accumulated squares before they are used.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> opt = mo.Optimizer([w], m.ESGD(seed=0, update_freq=1), m.LR(0.2))
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 9 * w[1] ** 2))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        Y. N. Dauphin, H. de Vries, Y. Bengio, "Equilibrated adaptive learning rates for non-convex optimization", NeurIPS
        2015.
    """

    ranges = {check.allow(check.fraction, None): ("beta",)}

    damping: Setting = 1e-4
    beta: float | None = None
    beta_debias: bool = True
    update_freq: int = 20
    zHz: bool = False
    Hz_sq_acc_tfm: Chainable | None = None

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        if self.increment_counter("estimates", 0) % self.every:
            return
        setting = settings[0]
        generator = self.get_generator(objective.params[0].device, self.seed)
        grads = None
        for _ in range(setting["n_samples"]):
            z = sample_like(objective.params, setting["distribution"], generator=generator)
            product, grads = objective.hessian_vector_product(
                z, grads, hvp_method=setting["hvp_method"], h=setting["h"]
            )
            for state, own, v, p in zip(states, settings, z, product, strict=True):
                if "Hz_sq" not in state:
                    state["Hz_sq"], state["draws"] = torch.zeros_like(p), 0
                square = (v * p if own["zHz"] else p).abs().square().to(p.dtype)
                state["draws"] += 1
                add_or_average(state["Hz_sq"], square, own["beta"])

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        out = list(objective.get_updates())
        for i, state in self.find_known(objective, states, Hz_sq_acc_tfm="Hz_sq"):
            setting = settings[i]
            mean = state["Hz_sq"]
            if setting["beta"] is None:
                mean = mean / state["draws"]
            elif setting["beta_debias"]:
                mean = mean / (1 - setting["beta"] ** state["draws"])
            out[i] = out[i] / (mean.sqrt() + setting["damping"])
        objective.updates = out
        return objective
