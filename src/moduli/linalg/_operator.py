"""The abstract linear operator: its public face is final, and its hooks are what a kind of operator provides."""

from abc import ABC, abstractmethod
from typing import overload

import torch
from torch import Tensor

from . import _checks
from ._results import MissingAbilityError


class LinearOperator(ABC):
    """A linear map A from vectors of n numbers to vectors of m, known by what it does.

    The public methods check their arguments and are final. A kind of operator is a final subclass that provides
    `_matmat` and whichever other hooks its structure makes cheap; what it leaves out follows from the rest:

    | hook | gives | without it |
    |---|---|---|
    | `_matmat(X)` | A X | (required) |
    | `_rmatmat(Y)` | Aᴴ Y | A Y if declared symmetric, else refused |
    | `_solve(B)` | A⁻¹ B | factors `to_dense()`, unless the operator is matrix-free |
    | `_solve_plus_diag(B, d)` | (A + diag d)⁻¹ B | factors `to_dense()`, unless the operator is matrix-free |
    | `_to_dense()` | the matrix | A I |
    | `_diagonal()` | its diagonal | of `to_dense()` |

    Every operator may have leading *batch* axes: its shape is (*batch, m, n), one matrix per member, and vectors are
    (..., n) with leading axes that broadcast against the batch. Solutions are differentiable wherever torch is. Operators
    are values: the tensors they are made from must not be changed in place while they are used.

    Attributes:
        shape: (*batch, m, n): m numbers out, n numbers in.
        batch_shape: The leading axes: one matrix per member. Empty for a single operator.
        dtype: The dtype of vectors that go in and come out.
        device: The device of vectors that go in and come out.
        is_symmetric: Whether A = Aᴴ is declared or follows from the structure (Hermitian, if complex). Never measured.
        is_positive_semidefinite: Whether xᴴ A x ≥ 0 is declared or follows from the structure. Never measured.
        is_matrix_free: Whether only products are known: `solve` then refuses instead of forming the matrix.

    Args:
        shape: (*batch, m, n).
        dtype: The dtype of the entries, real or complex.
        device: Where products are computed.
        symmetric: Declared: A = Aᴴ.
        positive_semidefinite: Declared: A = Aᴴ and xᴴ A x ≥ 0.
        matrix_free: Declared: the matrix is not to be formed behind the caller's back.

    Example:
        >>> import torch
        >>> from moduli.linalg import Dense, Diagonal
        >>> A = Dense(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), symmetric=True)
        >>> A @ torch.tensor([1.0, 1.0])
        tensor([3., 4.])
        >>> B = A + Diagonal(torch.tensor([1.0, 1.0]))
        >>> B.solve(torch.tensor([4.0, 5.0])).round(decimals=3)
        tensor([1., 1.])
        >>> (2 * A - 1.0).to_dense()
        tensor([[3., 2.],
                [2., 5.]])
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        symmetric: bool = False,
        positive_semidefinite: bool = False,
        matrix_free: bool = False,
    ) -> None:
        self.shape = torch.Size(shape)
        self.batch_shape = self.shape[:-2]
        self.dtype, self.device = dtype, device
        self.is_symmetric = symmetric or positive_semidefinite
        self.is_positive_semidefinite, self.is_matrix_free = positive_semidefinite, matrix_free
        if self.is_symmetric and self.shape[-1] != self.shape[-2]:
            raise ValueError(f"{self} is declared symmetric, but is not square")

    # -- products -----------------------------------------------------------------------------------------------------

    def matvec(self, x: Tensor) -> Tensor:
        """A x, for one vector (n,) or a batch of them (..., n).

        Raises:
            TypeError: If `x` is no tensor of this dtype.
            ValueError: If `x` has the wrong length, batch or device.
        """
        return self._matmat(_checks.operand(self, x, self.shape[-1], "x").unsqueeze(-1)).squeeze(-1)

    def rmatvec(self, y: Tensor) -> Tensor:
        """Aᴴ y, for one vector (m,) or a batch of them (..., m).

        Raises:
            MissingAbilityError: If only products with A are known.
        """
        return self._rmatmat(_checks.operand(self, y, self.shape[-2], "y").unsqueeze(-1)).squeeze(-1)

    def matmat(self, X: Tensor) -> Tensor:
        """A X, for a matrix (..., n, k)."""
        return self._matmat(_checks.operand(self, X, self.shape[-1], "X", -2))

    def rmatmat(self, Y: Tensor) -> Tensor:
        """Aᴴ Y, for a matrix (..., m, k).

        Raises:
            MissingAbilityError: If only products with A are known.
        """
        return self._rmatmat(_checks.operand(self, Y, self.shape[-2], "Y", -2))

    # -- systems ------------------------------------------------------------------------------------------------------

    def solve(self, b: Tensor) -> Tensor:
        """The x with A x = b, for one vector (n,) or a batch of them (..., n).

        Raises:
            MissingAbilityError: If the operator is not square, or is matrix-free.
            SingularError: If there is no unique solution (an exactly zero pivot or eigenvalue).
        """
        self._need_square("solve")
        return self._solve(_checks.operand(self, b, self.shape[-1], "b").unsqueeze(-1)).squeeze(-1)

    def solve_plus_diag(self, b: Tensor, diag: float | complex | Tensor) -> Tensor:
        """The x with (A + D) x = b, where D is a multiple of the identity or a diagonal matrix.

        This is the system of trust regions and of the Levenberg-Marquardt method.

        Args:
            b: One vector (n,) or a batch of them (..., n).
            diag: A number (D = diag I), a vector (..., n), or one number per member (..., 1).

        Raises:
            MissingAbilityError: If the operator is not square, or is matrix-free.
            SingularError: If there is no unique solution.
        """
        self._need_square("solve_plus_diag")
        rhs = _checks.operand(self, b, self.shape[-1], "b")
        return self._solve_plus_diag(rhs.unsqueeze(-1), _checks.diagonal_argument(self, diag)).squeeze(-1)

    # -- entries ------------------------------------------------------------------------------------------------------

    def diagonal(self) -> Tensor:
        """The diagonal, (*batch, min(m, n)). Costs n products where the structure does not give it."""
        return self._diagonal()

    def trace(self) -> Tensor:
        """The sum of the diagonal, one number per member.

        Raises:
            MissingAbilityError: If the operator is not square.
        """
        self._need_square("trace")
        return self._diagonal().sum(-1)

    def to_dense(self) -> Tensor:
        """The matrix, (*batch, m, n). Costs n products where the structure does not give it."""
        return self._to_dense()

    # -- algebra ------------------------------------------------------------------------------------------------------

    def adjoint(self) -> "LinearOperator":
        """Aᴴ, the conjugate transpose; also written `A.H`."""
        return self if self.is_symmetric else self._adjoint()

    def transpose(self) -> "LinearOperator":
        """Aᵀ; also written `A.T`. For a real operator it is the adjoint."""
        return self._transpose() if self.dtype.is_complex else self.adjoint()

    @property
    def H(self) -> "LinearOperator":
        """The adjoint."""
        return self.adjoint()

    @property
    def T(self) -> "LinearOperator":
        """The transpose."""
        return self.transpose()

    def inverse(self) -> "LinearOperator":
        """A⁻¹ as an operator: its products are solutions, and its solutions products."""
        from ._derived import Inverse

        self._need_square("inverse")
        return self._operator if isinstance(self, Inverse) else Inverse(self)

    def scale(self, factor: float | complex | Tensor) -> "LinearOperator":
        """The multiple factor · A; also written `factor * A`.

        Args:
            factor: A number, or a tensor that broadcasts with the batch shape: one number per member.
        """
        return self._scale(_checks.factor(self, factor))

    def add_diagonal(self, diag: float | complex | Tensor) -> "LinearOperator":
        """A + D, where D is `diag` times the identity, or the matrix with the diagonal `diag`.

        Args:
            diag: A number, a vector (..., n), or one number per member (..., 1).
        """
        from ._matrices import Diagonal, ScaledIdentity

        self._need_square("add_diagonal")
        d, n = _checks.diagonal_argument(self, diag), self.shape[-1]
        return self + (ScaledIdentity(n, d[..., 0]) if d.shape[-1] == 1 else Diagonal(d))

    def __add__(self, other: "LinearOperator | float | complex | Tensor") -> "LinearOperator":
        if isinstance(other, LinearOperator):
            from ._derived import add

            return add(self, other)
        if isinstance(other, Tensor) and other.ndim:
            raise TypeError(f"{self} + a tensor could mean two things; write A + Dense(B) or A.add_diagonal(d)")
        if isinstance(other, int | float | complex | Tensor):
            return self.add_diagonal(other)
        return NotImplemented

    __radd__ = __add__

    def __sub__(self, other: "LinearOperator | float | complex | Tensor") -> "LinearOperator":
        return self + (-other)

    def __rsub__(self, other: "LinearOperator | float | complex | Tensor") -> "LinearOperator":
        return -self + other

    def __neg__(self) -> "LinearOperator":
        return self.scale(-1.0)

    def __mul__(self, factor: float | complex | Tensor) -> "LinearOperator":
        return self.scale(factor)

    __rmul__ = __mul__

    def __truediv__(self, factor: float | complex | Tensor) -> "LinearOperator":
        return self.scale(1 / factor)

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: "LinearOperator") -> "LinearOperator": ...
    def __matmul__(self, other: "Tensor | LinearOperator") -> "Tensor | LinearOperator":
        if isinstance(other, LinearOperator):
            from ._derived import OperatorProduct

            return OperatorProduct(self, other)
        # As in torch.matmul, one axis is a vector and more are matrices; matvec takes batches of vectors.
        return self.matvec(other) if isinstance(other, Tensor) and other.ndim == 1 else self.matmat(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of shape {' x '.join(map(str, self.shape))}"

    # -- hooks --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _matmat(self, X: Tensor) -> Tensor: ...

    def _rmatmat(self, Y: Tensor) -> Tensor:
        if self.is_symmetric:
            return self._matmat(Y)
        fact = f"{self} cannot multiply by its adjoint: only products with A are known"
        raise MissingAbilityError(f"{fact}; give rmatvec=, or declare symmetric=True if A = Aᴴ")

    def _solve(self, B: Tensor) -> Tensor:
        return self._dense_for("solve")._solve(B)

    def _solve_plus_diag(self, B: Tensor, d: Tensor) -> Tensor:
        return self._dense_for("solve_plus_diag")._solve_plus_diag(B, d)

    def _to_dense(self) -> Tensor:
        # A copy per call: torch.eye is the only thing that can be multiplied to read off the matrix.
        return self._matmat(torch.eye(self.shape[-1], dtype=self.dtype, device=self.device))

    def _diagonal(self) -> Tensor:
        return self._to_dense().diagonal(dim1=-2, dim2=-1)

    def _adjoint(self) -> "LinearOperator":
        from ._derived import Adjoint

        return Adjoint(self)

    def _transpose(self) -> "LinearOperator":
        from ._derived import Transpose

        return Transpose(self)

    def _scale(self, factor: Tensor) -> "LinearOperator":
        from ._derived import Scaled

        return Scaled(self, factor)

    def _plus(self, other: "LinearOperator") -> "LinearOperator | None":
        """The sum in a structured form, or None where there is no better form than `OperatorSum`."""
        return None

    # -- helpers of the kinds -----------------------------------------------------------------------------------------

    def _keep_under(self, factor: Tensor) -> dict[str, bool]:
        """Which declarations a multiple keeps."""
        real = _checks.is_real(factor)
        positive = real and self.is_positive_semidefinite and bool((factor.real >= 0).all())
        return {"symmetric": real and self.is_symmetric, "positive_semidefinite": positive}

    def _dense_for(self, ability: str) -> "LinearOperator":
        """The operator with its matrix formed, for a default that has no better way."""
        from ._matrices import Dense

        if self.is_matrix_free:
            raise MissingAbilityError(f"{self} cannot {ability}: it is matrix-free; use cg, minres or lsqr")
        return Dense(self._to_dense(), symmetric=self.is_symmetric, positive_semidefinite=self.is_positive_semidefinite)

    def _need_square(self, ability: str) -> None:
        if self.shape[-1] != self.shape[-2]:
            raise MissingAbilityError(f"{self} cannot {ability}: it is not square; for least squares use lsqr")
