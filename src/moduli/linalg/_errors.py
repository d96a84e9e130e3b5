"""What an operator can refuse: a question it has no means to answer, and a system without a unique solution."""

import torch


class MissingAbilityError(TypeError):
    """An operator was asked for something that its kind cannot give.

    The message names the class, the ability, and what to use instead.

    Example:
        >>> import torch
        >>> from moduli.linalg import FunctionOperator
        >>> A = FunctionOperator(lambda x: 2 * x, 3, symmetric=True)
        >>> A.solve(torch.ones(3))
        Traceback (most recent call last):
        ...
        moduli.linalg._errors.MissingAbilityError: FunctionOperator of shape 3 x 3 cannot solve: ...
    """


class SingularError(torch.linalg.LinAlgError):  # type: ignore[misc, name-defined]
    """A system has no unique solution, or an operator declared positive (semi)definite turned out not to be.

    It is a `torch.linalg.LinAlgError`, which is what torch raises for its own matrices.

    Example:
        >>> import torch
        >>> from moduli.linalg import Diagonal
        >>> Diagonal(torch.tensor([1.0, 0.0])).solve(torch.ones(2))
        Traceback (most recent call last):
        ...
        moduli.linalg._errors.SingularError: Diagonal of shape 2 x 2 is singular: ...
    """
