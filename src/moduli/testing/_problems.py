"""What a law is told about a link, small problems with known optima, and ways to run a chain on them."""

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
    """Raised by a law that says nothing about this link; the text is the reason."""


@dataclass(frozen=True)
class Case:
    """One link, in the smallest chain that makes it an optimizer, and what may be expected of it.

    Args:
        name: What reports and tests print.
        make: Makes new links at each call, the chain in order.
        steps: How many steps it may take on its target problem.
        target: The problem it must solve: "bowl" (a convex quadratic), "rosenbrock", "least squares" (the closure
            returns residuals), or "" for a link that is no optimizer by itself (then only the structural laws apply).
        tolerance: How near to the optimum's value it must come.
        reference: An independent implementation: a function of the parameters that returns a torch optimizer, or a
            function `(params, grads, memory, step) -> None` that moves the parameters by the formula written out
            (memory is a dictionary of its own), to be equalled to 1e-10 in float64.
        closure: Whether a step needs a closure (line searches, second order); otherwise it also runs on `.grad` alone.
        random: Whether a step draws random numbers (then equalities use a fixed seed).
        pieces: Whether one tensor and its pieces give the same step (elementwise and concatenating links).
        population: Whether it runs on a population as N separate optimizers would.
        members: For links that move the members of a population relative to each other: how many members the population
            has that every law gives them; 0 gives them one model. The best member must solve the target problem.
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
        """New links."""
        made = self.make()
        return [made] if isinstance(made, Module) else list(made)

    def fail(self, law: str, what: str) -> LawError:
        """The error for a broken law."""
        return LawError(f"{self.name} breaks the law {law!r}: {what}")


SHAPES: tuple[tuple[int, ...], ...] = ((3, 2), (4,))


class LawProblem:
    """Parameters and residuals; the loss is half their squared norm, with minimum 0.

    Args:
        shapes: Shapes of the parameters.
        dtype: Of the parameters.
        kind: "bowl" (residuals are linear), "rosenbrock" (two unknowns), or "bent" (smooth, not quadratic, coupled).
        residuals: Whether closures return the residuals instead of the loss.
        members: How many members a population has that begin at different points, with a loss for each; 0 is one model.

    Attributes:
        subject: What an optimizer is made for: the parameters, or the population.
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
            pieces = torch.split(torch.randn(count, generator=generator, dtype=wide), sizes)
            return [nn.Parameter(piece.reshape(shape).to(dtype)) for piece, shape in zip(pieces, shapes, strict=True)]

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
        """All parameters as one tensor, or a row for each member."""
        rows = (self.members,) if self.members else ()
        return torch.cat([param.detach().reshape(*rows, -1) for param in self.params], -1)

    def residuals(self) -> Tensor:
        """The residuals."""
        if self.kind == "rosenbrock":
            x, y = self.params[0]
            return torch.stack([2**0.5 * (1 - x), 200**0.5 * (y - x * x)])
        return self.residuals_at(self.params)

    def residuals_at(self, params: Iterable[Tensor]) -> Tensor:
        """The residuals of other parameters."""
        flat = torch.cat([param.reshape(-1) for param in params])
        error = self.scale * (flat - self.optimum)
        if self.kind == "bowl" or not flat.numel():
            return error
        return error + 0.1 * torch.sin(error + torch.roll(error, 1))

    def loss(self) -> Tensor:
        """Half their squared norm, of each member."""
        if not self.members:
            return half_square(self.residuals())
        found: Tensor = self.subject.losses(lambda net: net())
        return found

    def value(self) -> float:
        """The loss as a number, of the best member."""
        with torch.no_grad():
            return float(self.loss().min())

    def answer(self) -> Tensor:
        """What the closure returns."""
        return self.residuals() if self.returns_residuals else self.loss()

    def closure(self) -> Closure:
        """The closure in the form that every chain takes."""
        return closure(self.answer)

    def backward(self) -> None:
        """Fill `.grad`, for steps without a closure."""
        for param in self.params:
            param.grad = None
        with torch.enable_grad():
            torch.autograd.backward(self.loss().sum())


def half_square(found: Tensor) -> Tensor:
    """Half the squared norm."""
    return 0.5 * (found.abs() ** 2).sum() if found.is_complex() else 0.5 * (found * found).sum()


class LawModel(nn.Module):
    """Parameters of a problem as a model: calling it gives the loss."""

    def __init__(self, at: LawProblem, params: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(params)
        self.measure = at.residuals_at

    def forward(self) -> Tensor:
        """The loss."""
        return half_square(self.measure(self.held))


def problem(case: Case, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> LawProblem:
    """The problem for structural laws: of the kind that the link's closure asks for."""
    return LawProblem(shapes, residuals=case.target == "least squares", members=case.members, **options)


def needs(links: Sequence[Module]) -> frozenset[Need]:
    """What a chain needs."""
    return frozenset().union(*(link.all_needs() for link in links))


def optimizer(case: Case, params: Any, **options: Any) -> Optimizer:
    """A new optimizer of the case's chain, random numbers from their beginning."""
    torch.manual_seed(0)
    if case.members and not isinstance(params, Population):
        raise NotApplicable("a population says itself what its parameters are")
    return Optimizer(params, *case.links(), **options)


def step(case: Case, opt: torch.optim.Optimizer, at: LawProblem, steps: int = 1) -> None:
    """Some steps, with a closure where the case needs one."""
    for _ in range(steps):
        if case.closure or case.target == "least squares":
            opt.step(at.closure())
        else:
            at.backward()
            opt.step()


def run(case: Case, at: LawProblem, steps: int, **options: Any) -> Optimizer:
    """Run a new optimizer for some steps."""
    opt = optimizer(case, at.subject, **options)
    step(case, opt, at, steps)
    return opt


def trial(
    case: Case,
    at: LawProblem | None = None,
    groups: Any = None,
    change: Callable[[Optimizer], None] | None = None,
) -> list[Tensor]:
    """Where three steps lead: with these groups, after a change of the optimizer."""
    at = problem(case) if at is None else at
    opt = optimizer(case, at.subject if groups is None else groups)
    if change is not None:
        change(opt)
    torch.manual_seed(1)
    step(case, opt, at, 3)
    return snapshot(at.params)


def all_links(links: Sequence[Module]) -> Iterator[Module]:
    """The links, and all inside them."""
    for top in links:
        for _, link in top.links():
            yield link


def snapshot(params: Sequence[Tensor]) -> list[Tensor]:
    """Copies."""
    return [param.detach().clone() for param in params]


def same(first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float = 0.0) -> str | None:
    """None where the lists agree (relative to their size; 0: bit by bit), else where they differ."""
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
    """Break the law unless something holds; the sentence says what is the case otherwise."""
    if not holds:
        raise LawError(otherwise)


def expect_same(what: str, first: Sequence[Tensor], second: Sequence[Tensor], tolerance: float = 0.0) -> None:
    """Break the law where two lists of tensors differ; the sentence begins with what they are."""
    gap = same(first, second, tolerance)
    expect(gap is None, f"{what} {gap}")


def expect_finite(what: str, params: Iterable[Tensor]) -> None:
    """Break the law where a parameter is not finite; the sentence begins with what they are."""
    finite = all(bool(torch.isfinite(param.detach()).all()) for param in params)
    expect(finite, f"{what} became infinite or NaN")


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Inside the block kernels take this form: "c", "triton", "foreach" or "plain"."""
    with mock.patch.dict(os.environ, MODULI_KERNELS=name):
        yield


LAWS: dict[str, Callable[[Case], None]] = {}
"""Every law by name: functions of a `Case` that raise a `LawError` where the link breaks them."""


def law(check: Callable[[Case], None]) -> Callable[[Case], None]:
    """Enter a law into the book; those that are not about compiled kernels do not wait for the compiler."""

    @functools.wraps(check)
    def check_eagerly(case: Case) -> None:
        with backend("eager"):
            check(case)

    LAWS[check.__name__] = check_eagerly
    return check_eagerly
