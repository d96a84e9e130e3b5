"""`Population`: many models of one structure, stacked."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast, final, overload

import torch
from torch import Tensor, nn

from moduli.layout import layout_and_tensors
from moduli.particles import StructureError, adopt

from .._figures import make_axes
from .._html import draw_spark, write_frame, write_html_table
from ._around import ModelT, PopulationAround
from ._ensemble import Ensembles
from ._hosted import HostedPopulation
from ._members import copy_model
from ._noise import normal, seeds
from ._resizing import Resizing
from ._state import State
from ._statistics import Statistics
from ._variation import Variation

NetT = TypeVar("NetT", bound=nn.Module)


@final
class Population(State, Ensembles, Variation, Statistics, Resizing, Generic[ModelT]):
    """N models of one structure, stored as one N x P matrix for each dtype and device, and evaluated together.

    Made by `Population.of` and `Population.from_modules`. `pop[i]` is a module whose parameters are views of row i.
    `matrix` is the storage, `named_parameters()` the same storage as one leaf of shape (N, *shape) for each parameter
    of the model, which any optimizer can update in place.

    Attributes:
        template: A module with the structure of the members. Its values are not used.
        layout: The layout of one member.

    Example:
        >>> from moduli.population import Population
        >>> pop = Population.of(nn.Linear(3, 2), 5)
        >>> len(pop), pop.matrix.shape, pop(torch.ones(4, 3)).shape
        (5, torch.Size([5, 8]), torch.Size([5, 4, 2]))
        >>> with torch.no_grad():
        ...     _ = pop[1].bias.fill_(7.0)
        >>> pop.matrix[1, 6:]
        tensor([7., 7.])
    """

    if TYPE_CHECKING:  # members are of the user's class, which the parts of this class don't know
        template: ModelT

        @overload
        def __getitem__(self, index: int) -> ModelT: ...
        @overload
        def __getitem__(self, index: slice | Sequence[int] | Sequence[bool]) -> Self: ...
        @overload
        def __getitem__(self, index: Tensor) -> Any: ...  # a member for one number, members for several
        def __getitem__(self, index: Any) -> Any: ...
        def __iter__(self) -> Iterator[ModelT]: ...
        def best(self, losses: Tensor) -> ModelT: ...
        def to_module(self, member: int) -> ModelT: ...
        def to_modules(self) -> list[ModelT]: ...  # type: ignore[override]

    def __init__(self) -> None:
        raise TypeError("a Population is made by Population.of(net, n) or Population.from_modules([...])")

    # -- making ------------------------------------------------------------------------------------------------------

    @classmethod
    def of(
        cls,
        net: NetT | Callable[..., NetT],
        n: int,
        *args: Any,
        init: float | str | Callable[..., Any] | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Population[NetT]:
        """Return a population of `n` copies of a model, or of `n` models of a class.

        Args:
            net: A module, which is copied; or a class (or function), which is called for every member.
            n: The number of members.
            *args: Arguments for the class.
            init: The initial values: None for those of the module, or those that the class makes; a number for these values
                plus normal noise of that standard deviation; or a function, called as `init(name, stacked)` under `no_grad`
                to fill tensors of shape (n, *shape).
            generator: Where the randomness comes from; torch's own by default.
            **kwargs: More arguments for the class.

        Raises:
            TypeError: If `net` is neither a module nor callable.
            ValueError: If `n` is negative or `init` is unknown.

        Example:
            >>> from moduli.population import Population
            >>> twins = Population.of(nn.Linear(2, 1), 3)
            >>> bool((twins.matrix == twins.matrix[0]).all())
            True
            >>> different = Population.of(nn.Linear, 3, 2, 1)
            >>> bool((different.matrix == different.matrix[0]).all())
            False
        """
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"a population cannot have {n} members")
        if isinstance(net, nn.Module):
            if args or kwargs:
                raise TypeError("arguments for the class were given together with a module that is built already")
            pop = cls._like(adopt(copy_model(net)), n)
            _initialise(pop, init, generator)
            return cast("Population[NetT]", pop)
        if not callable(net):
            raise TypeError(f"a population is of a module, or of a class of modules, not of a {type(net).__name__}")
        with _replace_generator(generator):
            pop = cls._like(adopt(net(*args, **kwargs)), n)
            for index in range(1, n):
                try:
                    pop.replace([index], net(*args, **kwargs))
                except StructureError as error:
                    raise StructureError(
                        f"member {index} was made with another structure than member 0: {error}"
                    ) from error
        _initialise(pop, init, generator)
        return cast("Population[NetT]", pop)

    @classmethod
    def from_modules(cls, modules: Iterable[NetT]) -> Population[NetT]:
        """Return a population of copies of modules; the modules themselves are not changed.

        Args:
            modules: Modules of one structure, at least one of them.

        Raises:
            StructureError: If one differs from the first.
            ValueError: If there is none.

        Example:
            >>> from moduli.population import Population
            >>> nets = [nn.Linear(2, 1) for _ in range(3)]
            >>> pop = Population.from_modules(nets)
            >>> torch.equal(pop[2].weight, nets[2].weight)
            True
        """
        nets = list(modules)
        if not nets:
            raise ValueError("a population of no modules has no structure; use Population.of(net, 0)")
        pop = cls._like(adopt(copy_model(nets[0])), len(nets))
        for index, net in enumerate(nets[1:], 1):
            try:
                pop.replace([index], net)
                for name, flag, its in zip(pop.layout.names, pop._flags, layout_and_tensors(net)[1], strict=True):
                    if flag != its.requires_grad:
                        raise StructureError(f"{name!r} is trained in one and frozen in the other")
            except StructureError as error:
                raise StructureError(f"members 0 and {index} cannot be stacked: {error}") from error
        return cast("Population[NetT]", pop)

    @staticmethod
    def around(
        net: NetT, n: int, *, sigma: float, rank: int = 1, seed: int = 0, antithetic: bool = False
    ) -> PopulationAround[NetT]:
        """Return members that are a model plus low-rank noise, of which only the model and a seed are stored.

        Use it for networks whose members do not fit into memory. With noise of low rank, a product with all members' weights
        is one product with the model's weight, and thin products for each member.

        Args:
            net: The model, which is copied.
            n: The number of members.
            sigma: The standard deviation of the noise of each number.
            rank: The rank of the noise of parameters with two axes or more; vectors have full noise.
            seed: The seed of the noise.
            antithetic: Whether members 2k and 2k + 1 are opposite to each other.

        Raises:
            ValueError: If a number is not above zero, or antithetic members are odd in number.

        Example:
            >>> import torch, moduli as mo
            >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
            >>> pop = mo.Population.around(torch.nn.Linear(3, 1), 200, sigma=0.05, seed=1)
            >>> def step():
            ...     losses = pop.losses(lambda net, x, y: (net(x) - y).square().mean(), x, y)
            ...     pop.update(-0.05 / pop.sigma * (losses - losses.mean()) / len(pop))
            ...     return losses.mean()
            >>> first = step()
            >>> all_losses = [step() for _ in range(20)]
            >>> bool(all_losses[-1] < first)
            True

        Reference:
            B. Sarkar et al., "Evolution strategies at the hyperscale", 2025, arXiv:2511.16652.
        """
        return PopulationAround(net, n, sigma=sigma, rank=rank, seed=seed, antithetic=antithetic)

    def host(self, executor: Any, optimizer: Callable[[Population], Any] | None = None) -> HostedPopulation:
        """Put the members on the workers of a Ray cluster, for models whose evaluation is the cost.

        Args:
            executor: A `moduli.evolve.Ray`, which says how many workers there are and what they need.
            optimizer: A function of a population that makes its `Optimizer`; called on every worker, for its members. Links
                that compare members then compare those of one worker.

        Returns:
            The members on their workers: `losses`, `step`, `copy` and `collect`.

        Raises:
            StructureError: If there are no members.

        Example:
            >>> import moduli as mo
            >>> from moduli import m
            >>> def main(pop, x, y):  # with a Ray cluster
            ...     with mo.evolve.Ray(4) as executor:
            ...         hosted = pop.host(executor, lambda pop: mo.Optimizer(pop, m.Adam(), m.LR(1e-2)))
            ...         for _ in range(10):
            ...             losses = hosted.step(lambda net, x, y: (net(x) - y).square().mean(), x, y, steps=20)
            ...             ranked = losses.argsort()
            ...             hosted.copy(targets=ranked[-2:], sources=ranked[:2])
            ...         return hosted.collect()
        """
        return HostedPopulation(self, executor, optimizer)

    def __repr__(self) -> str:
        kind = type(self.template).__name__
        return f"Population({self._count} x {kind}, {self.layout.numel} parameters each)"

    def _repr_html_(self) -> str:
        if self._shard is not None or not self._count:  # statistics of members elsewhere would wait for other processes
            return write_frame(repr(self))
        with torch.no_grad():
            norms = self.norm().double()
        numbers = {"least": norms.min(), "mean": norms.mean(), "largest": norms.max()}
        row = ["norm", *(f"{float(each):.4g}" for each in numbers.values())]
        table = write_html_table(["", *numbers], [row], labelled=True)
        return write_frame(repr(self), table, draw_spark(norms[:256].tolist()), "<div>norm by member</div>")

    def plot(self, losses: Tensor | None = None, ax: Any = None) -> Any:
        """Draw the norm of each member, against its loss if there are losses; needs matplotlib (extra `plot`).

        Args:
            losses: A loss for each member.
            ax: The axes of matplotlib to draw into; by default those of a new figure.

        Returns:
            The figure, which is not shown.

        Raises:
            ImportError: Without matplotlib.
            ValueError: There is not one loss for each member.
        """
        if losses is not None and tuple(losses.shape) != (self._count,):
            raise ValueError(f"losses have shape {tuple(losses.shape)}, and there are {self._count} members")
        self._refuse_shard("a picture")
        with torch.no_grad():
            norms = self.norm().double().cpu().numpy()
        ax = make_axes(ax)
        x = range(self._count) if losses is None else losses.detach().double().cpu().numpy()
        ax.plot(x, norms, ".")
        ax.set(xlabel="member" if losses is None else "loss", ylabel="norm")
        return ax.figure


@contextmanager
def _replace_generator(generator: torch.Generator | None) -> Iterator[None]:
    """Seed torch's default generator, from which constructors draw, from the given one inside of the block."""
    if generator is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(1 << 62, (), generator=generator, device=generator.device)))
        yield


def _initialise(pop: Any, init: Any, generator: torch.Generator | None) -> None:
    """Set the initial values of members by the argument `init` of `Population.of`."""
    if init is None:
        return
    if callable(init):
        with torch.no_grad():
            for name, leaf in pop.named_parameters():
                init(name, leaf.detach())
        pop._mark_changed()
        return
    if isinstance(init, float | int) and not isinstance(init, bool):
        noise = normal(pop.layout, seeds(len(pop), generator), scale=float(init))
        with torch.no_grad():
            for group, matrix, values in zip(pop.layout.groups, pop._values.matrices, noise, strict=True):
                if group.dtype.is_floating_point or group.dtype.is_complex:
                    matrix.add_(values)
        return
    raise ValueError(f"init={init!r}; give None, a number, or a function of a name and a stacked tensor")
