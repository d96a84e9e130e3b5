"""QK-clip: attention logits kept bounded by rescaling query and key weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...optim import Module, Objective
from .._checks import positive


class QKClip(Module):
    r"""Scales the query and key weights of attention heads whose largest logit exceeded a bound.

    After the step, head h with largest logit $S_h > \tau$ has $\gamma_h = \tau / S_h$, its rows of $W_q$ are multiplied by
    $\gamma_h^{\alpha}$ and those of $W_k$ by $\gamma_h^{1-\alpha}$, so that its logits are at most $\tau$ again. Put it
    last. After `presets.muon` it is MuonClip (`presets.muonclip`).

    Args:
        pairs: The weights (query, key) of each attention layer, both (heads * size, inputs).
        logits: A function that returns, for each pair, the largest logit of each head in the last forward pass.
        tau: The bound $\tau$.
        alpha: How much of the factor queries take.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> q, k = (torch.nn.Parameter(torch.full((2, 1), 20.0)) for _ in range(2))
        >>> link = m.QKClip([(q, k)], lambda: [torch.tensor([400.0, 50.0])], tau=100.0)
        >>> _ = mo.Optimizer([q, k], m.LR(0.0), link).step(mo.closure(lambda: (q * k).sum()))
        >>> q.data.squeeze()
        tensor([10., 20.])

    References:
        Kimi Team, "Kimi K2: open agentic intelligence", 2025, Algorithm 1.
    """

    needs = frozenset()

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        logits: Callable[[], Sequence[Tensor]],
        *,
        tau: Any = 100.0,
        alpha: Any = 0.5,
    ) -> None:
        positive("QKClip", tau=tau)
        pairs = list(pairs)
        if not pairs or any(len(pair) != 2 or not all(isinstance(w, Tensor) for w in pair) for pair in pairs):
            raise ValueError("QKClip: pairs is a list of (query weight, key weight), one for each attention layer")
        if not callable(logits):
            raise TypeError(f"QKClip: logits is {logits!r}; give a function that returns the largest logits per head")
        super().__init__({"tau": tau, "alpha": alpha})
        self.pairs, self.logits = pairs, logits

    def apply(self, objective: Objective) -> Objective:
        """The update that leaves the scaled weights behind."""
        found = list(self.logits())
        if len(found) != len(self.pairs):
            raise ValueError(f"QKClip: logits returned {len(found)} tensors for {len(self.pairs)} attention layers")
        updates, where = list(objective.get_updates()), {id(p): i for i, p in enumerate(objective.params)}
        for (query, key), largest in zip(self.pairs, found, strict=True):
            setting = self.settings[query]
            gamma = (setting["tau"] / largest.detach().reshape(-1).clamp(min=setting["tau"])).to(query)
            for weight, power in ((query, setting["alpha"]), (key, 1 - setting["alpha"])):
                i = where.get(id(weight))
                if i is None:
                    raise ValueError("QKClip: a weight of its pairs is not a parameter of this optimizer")
                heads = gamma.numel()
                if weight.shape[0] % heads:
                    raise ValueError(f"QKClip: {heads} heads do not divide the {weight.shape[0]} rows of a weight")
                rows = (gamma**power).repeat_interleave(weight.shape[0] // heads)
                scale = rows.reshape(-1, *([1] * (weight.dim() - 1)))
                updates[i] = weight.detach() - (weight.detach() - updates[i]) * scale
        objective.updates = updates
        return objective
