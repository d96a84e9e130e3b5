"""Updates compared with the gradient.

* Cautious updates: move only where the update agrees with the gradient, or with another chain.
* Scaling by how much an update agrees with the gradient, or with that of another chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ... import kernels
from ...optim import (
    Across,
    Chainable,
    Objective,
    Setting,
    SettingsList,
    Tensors,
    UpdateTransform,
    as_real,
    restore_complex,
)
from ...optim import ranges as check
from .._measures import dot, larger, lengths, read, shape_like
from .._vectors import mask_absent
from ..ops._operations import _MultiOperation


class _SignAgreement(UpdateTransform):
    """The base of links that compare the signs of update and gradient, and with `normalize` count the agreement."""

    across = Across.SUMS
    fixed_settings = ("normalize",)
    differentiable = True
    elementwise = True
    ranges = {check.non_negative: ("eps",)}

    uses_grad = True

    normalize: bool = False
    eps: Setting = 1e-6

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        self.measures = given["normalize"]

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: SettingsList, members: int | None
    ) -> dict[str, Any] | None:
        if not settings[0]["normalize"] or grads is None:
            return None
        return {"kept": agreement(tensors, grads, members)}

    @staticmethod
    def _normalize(tensor: Tensor, setting: Any) -> Tensor:
        if not setting["normalize"]:
            return tensor
        enough = (setting["kept"] > setting["eps"]) * 1.0
        return tensor / (setting["kept"] * enough + setting["eps"] * (1 - enough))


class Cautious(_SignAgreement):
    r"""Drops the elements of the update whose sign differs from the gradient's.

    $u_i \leftarrow u_i\,[u_i g_i > 0]$, with `normalize` divided by the fraction of elements that are kept.

    Args:
        normalize: Divide by the fraction of elements kept (one over all parameters), so that the step keeps its size.
        eps: The smallest fraction to divide by.
        mode: What the other elements become: "zero"; "grad", the gradient; "backtrack", the update reversed.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Cautious(), [torch.tensor([1.0, 2.0])], grads=[torch.tensor([3.0, -1.0])])
        [tensor([1., 0.])]

    References:
        K. Liang, L. Chen, B. Liu, Q. Liu, "Cautious optimizers: improving training with one line of code", 2024.
    """

    mode: Literal["zero", "grad", "backtrack"] = "zero"

    def collect(self, given: Mapping[str, Any]) -> None:
        _check_mode("Cautious", given["normalize"], given["mode"])
        super().collect(given)

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        gradient = cast(Tensor, grad)
        agrees = tensor * gradient > 0
        if setting["mode"] == "grad":
            return torch.where(agrees, tensor, gradient)
        if setting["mode"] == "backtrack":
            return torch.where(agrees, tensor, -tensor)
        return self._normalize(torch.where(agrees, tensor, torch.zeros_like(tensor)), setting)


class UpdateGradientSignConsistency(_SignAgreement):
    r"""Replaces the update by the mask $[u_i g_i > 0]$; `Cautious` multiplies by it.

    Args:
        normalize: Divide by the fraction of ones (over all parameters).
        eps: The smallest fraction to divide by.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> u, g = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
        >>> optim.step_tensors(m.UpdateGradientSignConsistency(), [u], grads=[g])
        [tensor([1., 0.])]

    References:
        K. Liang, L. Chen, B. Liu, Q. Liu, "Cautious optimizers: improving training with one line of code", 2024.
    """

    def transform_at(self, tensor: Tensor, param: Tensor, grad: Tensor | None, state: Any, setting: Any) -> Tensor:
        return self._normalize(_agrees(tensor, cast(Tensor, grad)), setting)


class IntermoduleCautious(_MultiOperation):
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

    def __init__(
        self,
        main: Chainable,
        compare: Chainable,
        *,
        normalize: bool = False,
        eps: float = 1e-6,
        mode: Literal["zero", "grad", "backtrack"] = "zero",
    ) -> None:
        check.non_negative("IntermoduleCautious", "eps", eps)
        check.one_of("zero", "grad", "backtrack")("IntermoduleCautious", "mode", mode)
        _check_mode("IntermoduleCautious", normalize, mode)
        super().__init__({"normalize": normalize, "eps": eps, "mode": mode}, main=main, compare=compare)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        setting = self.settings[objective.params[0]]
        first = [as_real(a) for a in mask_absent(values["main"], objective.present)]
        second = [as_real(b) for b in mask_absent(values["compare"], objective.present)]
        other = {
            "zero": [torch.zeros_like(a) for a in first],
            "grad": second,
            "backtrack": [-a for a in first],
        }[setting["mode"]]
        out = [torch.where(a * b > 0, a, c) for a, b, c in zip(first, second, other, strict=True)]
        if setting["normalize"]:
            here = objective.present or [True] * len(first)
            fraction = agreement(
                [a for a, ok in zip(first, here, strict=True) if ok],
                [b for b, ok in zip(second, here, strict=True) if ok],
                objective.members,
            )
            fraction = (
                fraction.clamp(min=setting["eps"]) if isinstance(fraction, Tensor) else max(fraction, setting["eps"])
            )
            out = [
                o / (shape_like(fraction, o) if isinstance(fraction, Tensor) and fraction.dim() else fraction)
                for o in out
            ]
        return [restore_complex(o, a) for o, a in zip(out, values["main"], strict=True)]


def _check_mode(link: str, normalize: bool, mode: str) -> None:
    if normalize and mode != "zero":
        raise ValueError(f"{link}: normalize is for elements that are dropped, but mode is {mode!r}")


def agreement(first: list[Tensor], second: list[Tensor], members: int | None) -> Any:
    """Return the fraction of elements where two updates have the same sign.

    Args:
        first: One update.
        second: The other.
        members: The number of members of a population, for one number each; None for one model.
    """
    if kernels.over_processes() is not None:
        signs = [(a * b > 0).double() for a, b in zip(first, second, strict=True)]
        every = read(kernels.sum([torch.ones_like(sign) for sign in signs]))
        return read(kernels.sum(signs)) / larger(every, 1.0)
    if members is None and not torch.is_grad_enabled():
        count = sum(tensor.numel() for tensor in first)
        return read(kernels.sum(_signs_agree(first, second))) / max(count, 1)
    # In a differentiable step scalars may be traced by `torch.func`, so that they can't be read.
    shape = () if members is None else (members,)
    rows = [(a * b > 0).reshape(*shape, -1).sum(-1) for a, b in zip(first, second, strict=True)]
    return torch.stack(rows).sum(0).double() / max(sum(tensor.numel() for tensor in first) // (members or 1), 1)


def _agrees(first: Tensor, second: Tensor) -> Tensor:
    return torch.where(first * second > 0, torch.ones_like(first), torch.zeros_like(first))


_signs_agree = kernels.fuse(_agrees)


def _find_cosine(first: Sequence[Tensor], second: Sequence[Tensor], eps: float, members: int | None) -> Any:
    """Return the cosine of two updates over all parameters; one for each member of a population."""
    if members is not None:
        return dot(first, second, members) / (lengths(first) * lengths(second)).clamp(min=eps)
    sizes = (dot(first, first) * dot(second, second)) ** 0.5
    return dot(first, second) / larger(sizes, eps)


class ScaleByGradCosineSimilarity(UpdateTransform):
    r"""Multiplies the update by its cosine with the gradient, over all parameters: $u \leftarrow u\,\cos(u, g)$.

    Args:
        eps: The smallest product of norms to divide by.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> u, g = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
        >>> optim.step_tensors(m.ScaleByGradCosineSimilarity(), [u], grads=[g])
        [tensor([1.8000, 2.4000])]
    """

    across = Across.SUMS
    differentiable = True
    elementwise = True
    ranges = {check.non_negative: ("eps",)}

    uses_grad = True

    eps: float = 1e-6

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: SettingsList, members: int | None
    ) -> dict[str, Any] | None:
        return {"cosine": _find_cosine(tensors, cast(Tensors, grads), settings[0]["eps"], members)}

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * setting["cosine"]


class ScaleModulesByCosineSimilarity(_MultiOperation):
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

    def __init__(self, main: Chainable, compare: Chainable, *, eps: float = 1e-6) -> None:
        check.non_negative("ScaleModulesByCosineSimilarity", "eps", eps)
        super().__init__({"eps": eps}, main=main, compare=compare)

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        eps = self.settings[objective.params[0]]["eps"]
        first, second = (
            mask_absent(values["main"], objective.present),
            mask_absent(values["compare"], objective.present),
        )
        cosine = _find_cosine(first, second, eps, objective.members)
        return [a * (cosine if objective.members is None else shape_like(cosine, a)) for a in first]
