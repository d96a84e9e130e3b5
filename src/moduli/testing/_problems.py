"""`Case`, the expected properties of a link; small problems with known optima; functions to run chains on them."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ..optim import Closure, Module, Need, Optimizer, closure
from ..population import Population

TARGETS = ("bowl", "rosenbrock", "least squares", "")


class LawError(AssertionError):
    """A link breaks a law; the sentence names the law, the link, and what differed.

    Example:
        >>> from moduli.testing import LawError
        >>> issubclass(LawError, AssertionError)
        True
    """


class NotApplicable(Exception):
    """Raised by a law that does not apply to a link; the text is the reason."""


@dataclass(frozen=True)
class Case:
    """One link, in the smallest chain that makes it an optimizer, and its expected properties.

    Args:
        name: The name in reports and tests.
        make: Makes new links at each call, the chain in order.
        steps: The most steps on its target problem.
        target: The problem it must solve: "bowl" (a convex quadratic), "rosenbrock", "least squares" (the closure
            returns residuals), or "" for a link that is no optimizer by itself (then only the structural laws apply).
        tolerance: The largest final loss on its target problem.
        reference: An independent implementation: a function of the parameters that returns a torch optimizer, or a
            function `(params, grads, memory, step) -> None` that moves the parameters by explicit formulas (memory is a
            dictionary for its state). Both must agree to 1e-10 in float64.
        closure: Whether a step needs a closure (line searches, second order); otherwise it also runs on `.grad` alone.
        random: Whether a step draws random numbers (then equalities use a fixed seed).
        pieces: Whether one tensor and its split give the same step (elementwise and concatenating links).
        population: Whether it runs on a population as N separate optimizers would.
        members: For links that move the members of a population relative to each other: the number of members of the
            population in every law; 0 for one model. The best member must solve the target problem.
        complex: Whether it takes complex parameters.
        half: Whether it takes half-precision parameters.
        skip: Laws that do not apply, by name, each with the reason.

    Example:
        >>> from moduli import m
        >>> from moduli.testing import Case
        >>> print(Case("plain descent", lambda: [m.LR(0.1)]))
        plain descent
    """

    name: str
    make: Callable[[], Module | Sequence[Module]]
    steps: int = 500
    target: str = "bowl"
    tolerance: float = 1e-3
    reference: Callable[..., Any] | None = None
    closure: bool = False
    random: bool = False
    pieces: bool = True
    population: bool = True
    complex: bool = True
    half: bool = True
    members: int = 0
    skip: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ValueError(f"{self.name}: target is {self.target!r}; it is one of {', '.join(map(repr, TARGETS))}")

    def __str__(self) -> str:
        return self.name

    def links(self) -> list[Module]:
        """Return new links."""
        links = self.make()
        return [links] if isinstance(links, Module) else list(links)

    def fail(self, law: str, what: str) -> LawError:
        """Return the error for a broken law."""
        return LawError(f"{self.name} breaks the law {law!r}: {what}")


SHAPES: tuple[tuple[int, ...], ...] = ((3, 2), (4,))


class LawProblem:
    """Parameters and residuals; the loss is half their squared norm, with minimum 0.

    Args:
        shapes: Shapes of the parameters.
        dtype: Of the parameters.
        kind: "bowl" (residuals are linear), "rosenbrock" (two unknowns), or "bent" (smooth, not quadratic, coupled).
        residuals: Whether closures return the residuals instead of the loss.
        members: The number of members of a population, which start at different points; 0 is one model.

    Attributes:
        subject: The first argument of an optimizer: the parameters, or the population.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        *,
        dtype: torch.dtype = torch.float64,
        kind: str = "bent",
        residuals: bool = False,
        members: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.kind = kind
        self.returns_residuals = residuals
        self.members = members
        self.subject: Any
        if kind == "rosenbrock":
            self.subject = [nn.Parameter(torch.tensor([-1.2, 1.0], dtype=dtype))]
            return
        sizes = [torch.Size(shape).numel() for shape in shapes]
        count = sum(sizes)
        wide = torch.complex128 if dtype.is_complex else torch.float64

        def draw(generator: torch.Generator) -> list[nn.Parameter]:
            parts = torch.split(torch.randn(count, generator=generator, dtype=wide), sizes)
            return [nn.Parameter(part.reshape(shape).to(dtype)) for part, shape in zip(parts, shapes, strict=True)]

        self.subject = draw(generator)
        self.optimum = torch.randn(count, generator=generator, dtype=wide).to(dtype)
        real = dtype.to_real() if dtype.is_complex else dtype
        self.scale = torch.linspace(0.7, 1.4, max(count, 1), dtype=torch.float64)[:count].to(real)
        if members:
            generator = torch.Generator().manual_seed(11)
            self.subject = Population.from_modules([LawModel(self, draw(generator)) for _ in range(members)])

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters; of a population, those of all members stacked."""
        return list(self.subject.parameters()) if self.members else self.subject

    def flat(self) -> Tensor:
        """Return all parameters as one tensor, or a row for each member."""
        rows = (self.members,) if self.members else ()
        return torch.cat([param.detach().reshape(*rows, -1) for param in self.params], -1)

    def residuals(self) -> Tensor:
        """Return the residuals."""
        if self.kind == "rosenbrock":
            x, y = self.params[0]
            return torch.stack([2**0.5 * (1 - x), 200**0.5 * (y - x * x)])
        return self.residuals_at(self.params)

    def residuals_at(self, params: Iterable[Tensor]) -> Tensor:
        """Return the residuals of other parameters."""
        flat = torch.cat([param.reshape(-1) for param in params])
        error = self.scale * (flat - self.optimum)
        if self.kind == "bowl" or not flat.numel():
            return error
        return error + 0.1 * torch.sin(error + torch.roll(error, 1))

    def loss(self) -> Tensor:
        """Return half the squared norm of the residuals, of each member."""
        if not self.members:
            return half_square(self.residuals())
        losses: Tensor = self.subject.losses(lambda net: net())
        return losses

    def value(self) -> float:
        """Return the loss as a number, of the best member."""
        with torch.no_grad():
            return float(self.loss().min())

    def answer(self) -> Tensor:
        """Return the value of the closure: the residuals, or the loss."""
        return self.residuals() if self.returns_residuals else self.loss()

    def closure(self) -> Closure:
        """Return the closure in the form that every chain takes."""
        return closure(self.answer)

    def backward(self) -> None:
        """Fill `.grad`, for steps without a closure."""
        for param in self.params:
            param.grad = None
        with torch.enable_grad():
            torch.autograd.backward(self.loss().sum())


def half_square(values: Tensor) -> Tensor:
    """Return half the squared norm."""
    return 0.5 * (values.abs() ** 2).sum() if values.is_complex() else 0.5 * (values * values).sum()


class LawModel(nn.Module):
    """The parameters of a problem as a model, whose forward pass returns the loss."""

    def __init__(self, at: LawProblem, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(params)
        self.measure = at.residuals_at

    def forward(self) -> Tensor:
        """Return the loss."""
        return half_square(self.measure(self.held))


def problem(case: Case, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> LawProblem:
    """Return the problem for structural laws, whose closure is of the kind that the link needs."""
    return LawProblem(shapes, residuals=case.target == "least squares", members=case.members, **options)


def needs(links: Sequence[Module]) -> frozenset[Need]:
    """Return the needs of a chain."""
    return frozenset().union(*(link.all_needs() for link in links))


def optimizer(case: Case, params: Any, **options: Any) -> Optimizer:
    """Seed torch and return a new optimizer of the case's chain."""
    torch.manual_seed(0)
    if case.members and not isinstance(params, Population):
        raise NotApplicable("a population says itself what its parameters are")
    return Optimizer(params, *case.links(), **options)


def step(case: Case, opt: torch.optim.Optimizer, at: LawProblem, steps: int = 1) -> None:
    """Take steps, with a closure if the case needs one.

    Args:
        case: The case.
        opt: The optimizer.
        at: The problem.
        steps: The number of steps.
    """
    for _ in range(steps):
        if case.closure or case.target == "least squares":
            opt.step(at.closure())
        else:
            at.backward()
            opt.step()


def run(case: Case, at: LawProblem, steps: int, **options: Any) -> Optimizer:
    """Run a new optimizer for some steps, and return it.

    Args:
        case: The case.
        at: The problem.
        steps: The number of steps.
        options: Those of `Optimizer`.
    """
    opt = optimizer(case, at.subject, **options)
    step(case, opt, at, steps)
    return opt


def trial(
    case: Case,
    at: LawProblem | None = None,
    groups: Any = None,
    change: Callable[[Optimizer], None] | None = None,
) -> list[Tensor]:
    """Return the parameters after three steps of a new optimizer.

    Args:
        case: The case.
        at: The problem; by default a new one.
        groups: The parameter groups; by default the problem's subject.
        change: Called with the optimizer before the steps.
    """
    at = problem(case) if at is None else at
    opt = optimizer(case, at.subject if groups is None else groups)
    if change is not None:
        change(opt)
    torch.manual_seed(1)
    step(case, opt, at, 3)
    return snapshot(at.params)


def all_links(links: Sequence[Module]) -> Iterator[Module]:
    """Iterate over the links, and all inside them."""
    for top in links:
        for _, link in top.links():
            yield link


def snapshot(params: Sequence[Tensor]) -> list[Tensor]:
    """Return detached copies."""
    return [param.detach().clone() for param in params]


def same(first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float = 0.0) -> str | None:
    """Return a sentence about the first difference of two lists of tensors, None if they agree.

    Args:
        first: One list.
        second: The other.
        tolerance: The largest difference relative to the size of the values; 0 for bitwise equality.
    """
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        a, b = a.detach(), b.detach()
        if a.shape != b.shape or a.dtype is not b.dtype:
            return f"parameter {i} is {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
        if torch.equal(a, b) or (tolerance == 0.0 and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)):
            continue
        gap = float((a - b).abs().max() / (1e-300 + max(1.0, float(b.abs().max()))))
        if not gap <= tolerance:
            return f"parameter {i} differs by {gap:.3g}, at most {tolerance:g} is allowed"
    return None


def have_moved(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Whether anything changed."""
    return any(not torch.equal(a.detach(), b.detach()) for a, b in zip(first, second, strict=True))


def expect(holds: bool, otherwise: str) -> None:
    """Raise LawError with the sentence `otherwise` unless a condition holds."""
    if not holds:
        raise LawError(otherwise)


def expect_same(what: str, first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float = 0.0) -> None:
    """Raise LawError if two lists of tensors differ.

    Args:
        what: The start of the sentence: what is compared.
        first: One list.
        second: The other.
        tolerance: As for `same`.
    """
    gap = same(first, second, tolerance)
    expect(gap is None, f"{what} {gap}")


def expect_finite(what: str, params: Iterable[Tensor]) -> None:
    """Raise LawError if a parameter is not finite; `what` is the start of the sentence."""
    finite = all(bool(torch.isfinite(param.detach()).all()) for param in params)
    expect(finite, f"{what} became infinite or NaN")


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Select the backend of kernels inside of the block: "c", "triton", "foreach" or "plain"."""
    with mock.patch.dict(os.environ, MODULI_KERNELS=name):
        yield


LAWS: dict[str, Callable[[Case], None]] = {}
"""Every law by name: functions of a `Case` that raise a `LawError` if the link breaks them."""


def law(check: Callable[[Case], None]) -> Callable[[Case], None]:
    """Register a law, which runs without compiled kernels so that it does not wait for the compiler."""

    @functools.wraps(check)
    def check_eagerly(case: Case) -> None:
        with backend("eager"):
            check(case)

    LAWS[check.__name__] = check_eagerly
    return check_eagerly
