"""How much two chains agree about the same update."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import Chainable, Objective, as_real, restore_complex
from .._checks import choice, non_negative
from .._lists import dot
from .._metrics import lengths
from .._scalars import larger
from ..ops._operands import MultiOperation, present, spread_numbers
from ._cautious import agreement


class IntermoduleCautious(MultiOperation):
    r"""`Cautious` with another chain in place of the gradient: elements where two chains disagree are dropped.

    $u_i \leftarrow a_i\,[a_i b_i > 0]$ with a and b what the two chains make of the update.

    Args:
        main: The links whose result is used, a.
        compare: The links it is compared with, b.
        normalize: Divide by the fraction of elements kept (one over all parameters).
        eps: The smallest fraction to divide by.
        mode: What the other elements become: "zero"; "grad", those of b; "backtrack", those of a reversed.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.IntermoduleCautious(m.Identity(), m.Add(-3.0)), [torch.tensor([1.0, 4.0])])
        [tensor([0., 4.])]

    References:
        K. Liang, L. Chen, B. Liu, Q. Liu, "Cautious optimizers: improving training with one line of code", 2024.
    """

    differentiable = True

    def __init__(
        self,
        main: Chainable,
        compare: Chainable,
        *,
        normalize: bool = False,
        eps: float = 1e-6,
        mode: Literal["zero", "grad", "backtrack"] = "zero",
    ) -> None:
        choice("IntermoduleCautious", "mode", mode, ("zero", "grad", "backtrack"))
        non_negative("IntermoduleCautious", eps=eps)
        if normalize and mode != "zero":
            raise ValueError(f"IntermoduleCautious: normalize is for elements that are dropped, but mode is {mode!r}")
        super().__init__({"normalize": normalize, "eps": eps, "mode": mode}, main=main, compare=compare)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        setting = self.settings[objective.params[0]]
        first = [as_real(a) for a in present(objective, values["main"])]
        second = [as_real(b) for b in present(objective, values["compare"])]
        other = {
            "zero": [torch.zeros_like(a) for a in first],
            "grad": second,
            "backtrack": [-a for a in first],
        }[setting["mode"]]
        out = [torch.where(a * b > 0, a, c) for a, b, c in zip(first, second, other, strict=True)]
        if setting["normalize"]:
            here = objective.present or [True] * len(first)
            kept = agreement(
                [a for a, ok in zip(first, here, strict=True) if ok],
                [b for b, ok in zip(second, here, strict=True) if ok],
                objective.members,
            )
            kept = kept.clamp(min=setting["eps"]) if isinstance(kept, Tensor) else max(kept, setting["eps"])
            factors = spread_numbers(objective, [kept] * len(out))
            out = [
                o / (k.reshape(-1, *([1] * (o.dim() - 1))).to(o.dtype) if isinstance(k, Tensor) and k.dim() else k)
                for o, k in zip(out, factors, strict=True)
            ]
        return [restore_complex(o, a) for o, a in zip(out, values["main"], strict=True)]


class ScaleModulesByCosineSimilarity(MultiOperation):
    r"""Multiplies what one chain makes of the update by its cosine with what another makes of it: $u \leftarrow a\cos(a, b)$.

    Args:
        main: The links whose result is used, a.
        compare: The links it is compared with, b.
        eps: The smallest product of norms to divide by.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link = m.ScaleModulesByCosineSimilarity(m.Identity(), m.Sign())
        >>> optim.step_tensors(link, [torch.tensor([3.0, 0.0])])
        [tensor([3., 0.])]
    """

    differentiable = True

    def __init__(self, main: Chainable, compare: Chainable, *, eps: float = 1e-6) -> None:
        non_negative("ScaleModulesByCosineSimilarity", eps=eps)
        super().__init__({"eps": eps}, main=main, compare=compare)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        eps = self.settings[objective.params[0]]["eps"]
        first, second = present(objective, values["main"]), present(objective, values["compare"])
        if objective.members is None:
            sizes = (dot(first, first) * dot(second, second)) ** 0.5
            return [a * (dot(first, second) / larger(sizes, eps)) for a in first]
        rows = [
            (as_real(a).double() * as_real(b)).reshape(objective.members, -1).sum(1)
            for a, b in zip(first, second, strict=True)
        ]
        cosine = torch.stack(rows).sum(0) / (lengths(first) * lengths(second)).clamp(min=eps)
        return [a * cosine.to(as_real(a).dtype).reshape(-1, *([1] * (a.dim() - 1))) for a in first]
