"""The update through a function of one argument.

* The link that does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..._search_ranges import SIGN_STEPS
from ...linalg import LinearOperator, ScaledIdentity
from ...optim import ListTransform, Objective, SettingsList, States, Tensors, UpdateTransform
from .._vectors import size


class Abs(UpdateTransform):
    r"""$u \leftarrow |u|$.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Abs(), [torch.tensor([2.0, -4.0])])
        [tensor([2., 4.])]
    """

    elementwise = True

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor.abs()


class Exp(UpdateTransform):
    r"""$u \leftarrow e^u$.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Exp(), [torch.zeros(2)])
        [tensor([1., 1.])]
    """

    elementwise = True

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor.exp()


class Sqrt(UpdateTransform):
    r"""$u \leftarrow \sqrt u$; NaN where u is negative.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Sqrt(), [torch.tensor([4.0, 9.0])])
        [tensor([2., 3.])]
    """

    elementwise = True

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor.sqrt()


class Reciprocal(UpdateTransform):
    r"""$u \leftarrow 1 / (u + \epsilon)$.

    Args:
        eps: Added to the denominator.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Reciprocal(), [torch.tensor([2.0, -4.0])])
        [tensor([ 0.5000, -0.2500])]
    """

    elementwise = True
    eps: Any = 0.0

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return 1 / (tensor + setting["eps"])


class Negate(UpdateTransform):
    r"""$u \leftarrow -u$: maximise.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Negate(), [torch.tensor([2.0, -4.0])])
        [tensor([-2.,  4.])]
    """

    elementwise = True

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return -tensor


class Sign(UpdateTransform):
    r"""Replaces each element by its sign, $u \leftarrow \operatorname{sign}(u)$; real and imaginary parts by themselves.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Sign(), [torch.tensor([3.0, 0.0, -0.1])])
        [tensor([ 1.,  0., -1.])]

    References:
        J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: compressed optimisation for non-convex
        problems", ICML 2018.
    """

    search_ranges = {"lr": SIGN_STEPS}

    elementwise = True

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor.sign()


class Clip(UpdateTransform):
    r"""Keeps each element between two numbers, $u \leftarrow \min(\max(u, a), b)$.

    Args:
        min: The lower bound a, or None.
        max: The upper bound b, or None.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Clip(min=-1.0, max=0.5), [torch.tensor([3.0, 0.0, -2.0])])
        [tensor([ 0.5000,  0.0000, -1.0000])]
    """

    elementwise = True

    min: Any = None
    max: Any = None

    def collect(self, given: Mapping[str, Any]) -> None:
        low, high = given["min"], given["max"]
        if low is None and high is None:
            raise ValueError("Clip: give min, max or both")
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            raise ValueError(f"Clip: min is {low!r}, which is above max, {high!r}")
        super().collect(given)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if setting["min"] is not None:
            tensor = tensor.clamp(min=setting["min"])
        if setting["max"] is not None:
            tensor = tensor.clamp(max=setting["max"])
        return tensor


class NanToNum(UpdateTransform):
    """Puts numbers in place of NaN and infinities.

    Args:
        nan: In place of NaN; 0 where it is None.
        posinf: In place of infinity; the largest number where it is None.
        neginf: In place of minus infinity; the smallest number where it is None.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.NanToNum(posinf=1.0), [torch.tensor([float("nan"), float("inf")])])
        [tensor([0., 1.])]
    """

    members = True

    nan: float | None = None
    posinf: float | None = None
    neginf: float | None = None

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return torch.nan_to_num(tensor, setting["nan"], setting["posinf"], setting["neginf"])


class UnaryLambda(ListTransform):
    """The update through your own function of the list of tensors. The function is not saved: it belongs to the code.

    Args:
        fn: A function from a list of tensors to a list of tensors.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.UnaryLambda(lambda tensors: [2 * t for t in tensors]), [torch.ones(2)])
        [tensor([2., 2.])]
    """

    differentiable = True
    members = True

    def __init__(self, fn: Callable[[list[Tensor]], Sequence[Tensor]]) -> None:
        super().__init__()
        self.fn = fn

    def transform_all(self, tensors: Tensors, states: States, settings: SettingsList) -> Sequence[Tensor]:
        out = list(self.fn(tensors))
        if [tuple(t.shape) for t in out] != [tuple(t.shape) for t in tensors]:
            raise ValueError(
                f"UnaryLambda: the function returned shapes {[tuple(t.shape) for t in out]} for "
                f"{[tuple(t.shape) for t in tensors]}; return one tensor of the same shape for each"
            )
        return out


class UnaryParameterwiseLambda(UnaryLambda):
    """The update through your own function of one tensor.

    Args:
        fn: A function from a tensor to a tensor of the same shape.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.UnaryParameterwiseLambda(torch.tanh), [torch.zeros(2)])
        [tensor([0., 0.])]
    """

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__(partial(_map, fn))


class CustomUnaryOperation(UnaryLambda):
    """The update through a method of `torch.Tensor`, by name.

    Args:
        name: The name of a method without arguments.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.CustomUnaryOperation("square"), [torch.tensor([3.0])])
        [tensor([9.])]
    """

    def __init__(self, name: str) -> None:
        method = getattr(torch.Tensor, name, None)
        if name.startswith("_") or not callable(method):
            raise ValueError(f"CustomUnaryOperation: torch.Tensor has no method {name!r}")
        super().__init__(partial(_map, method))


def _map(fn: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    return [fn(tensor) for tensor in tensors]


class Identity(UpdateTransform):
    """Passes the update on. Its model of the Hessian is the identity, so that a trust region works on it as on descent.

    Args:
        *args: Anything; ignored, so that it can stand in for any link.
        **kwargs: Anything; ignored.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Identity(), [torch.tensor([3.0, 0.0])])
        [tensor([3., 0.])]
    """

    elementwise = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """Return the identity over all parameters concatenated."""
        return make_scaled_identity(objective, 1.0)


def make_scaled_identity(objective: Objective, alpha: float) -> LinearOperator:
    """Return the Hessian for which the Newton step is this step size."""
    first = objective.params[0]
    dtype = first.dtype.to_real() if first.is_complex() else first.dtype
    return ScaledIdentity(size(objective.params), 1 / alpha, dtype=dtype, device=first.device)


Noop = Identity
"""Another name of `Identity`."""
