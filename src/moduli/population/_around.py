r"""`Population.around`: members that are a mean and low-rank noise drawn from seeds, and are never stored.

A member is $W + \sigma\,A_i B_i^T/\sqrt{r}$ for every parameter with two axes or more (the axes after the first are one), and
$w + \sigma\,\varepsilon_i$ for vectors. A product with such a matrix is one product with W for all members, and thin ones for
each.

Reference:
    B. Sarkar et al., "Evolution strategies at the hyperscale", 2025, arXiv:2511.16652.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor, nn

from moduli._torch import pytree
from moduli.labels import Tensor as LabelledTensor
from moduli.particles import StructureError

from ._around_noise import BLOCK, MemberNoise
from ._low_rank_call import FunctionOfMember, call_low_rank
from ._members import copy_model
from ._rule import find_looped

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with defaults: `Population` alone is a population of anything

    ModelT = TypeVar("ModelT", bound=nn.Module, default=Any)
else:
    from typing import TypeVar

    ModelT = TypeVar("ModelT", bound=nn.Module)


class PopulationAround(MemberNoise, Generic[ModelT]):
    """Members around a mean, of which only the mean, a seed and a counter are stored.

    Made by `Population.around`. `pop[i]` returns a copy of member i as a module; `update` moves the mean and draws new members.

    Attributes:
        mean: The module that members are drawn around.
        sigma: The standard deviation of the noise of each number.
        rank: The rank of the noise of matrices.
        seed: The seed of the noise.
        generation: How often the mean was updated; every generation has new members.
        antithetic: Whether members 2k and 2k + 1 are opposite to each other.
    """

    def __init__(
        self, net: ModelT, n: int, *, sigma: float, rank: int = 1, seed: int = 0, antithetic: bool = False
    ) -> None:
        n, rank, seed = operator.index(n), operator.index(rank), operator.index(seed)
        if n < 1 or rank < 1 or not (sigma > 0 and math.isfinite(sigma)):
            raise ValueError(
                f"a population around a mean has n, rank and sigma above zero, not {n}, {rank} and {sigma}"
            )
        if antithetic and n % 2:
            raise ValueError(f"antithetic members come in pairs, and {n} is odd")
        self.mean = copy_model(net)
        self.sigma, self.rank, self.seed, self.antithetic = float(sigma), rank, seed, antithetic
        self.generation, self._count = 0, n
        self._caller = FunctionOfMember(self.mean)
        # During a call the parameters of the module are replaced by those of members.
        self._lock = threading.RLock()
        wrong = next((name for name, each in self._list_moving() if not each.is_floating_point()), None)
        if wrong is not None:
            raise StructureError(f"{wrong!r} is not real: members around a mean have real parameters")

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        numbers = sum(each.numel() for each in self.mean.parameters())
        what = f"{self._count} x {type(self.mean).__name__}, {numbers} parameters each"
        return f"PopulationAround({what}, sigma={self.sigma}, rank={self.rank}, generation={self.generation})"

    # -- noise ---------------------------------------------------------------------------------------------------------

    def _list_moving(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self.mean.named_parameters() if each.requires_grad]

    # -- members -------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: int) -> ModelT:
        """Return a copy of one member as a module.

        Raises:
            IndexError: If there is none.
        """
        index = operator.index(index)
        if not -self._count <= index < self._count:
            raise IndexError(f"there is no member {index} of {self._count}")
        at = index % self._count
        rows = range(at, at + 1)
        with torch.no_grad(), self._lock:
            member = copy.deepcopy(self.mean)
            for (name, mean), own in zip(self._list_moving(), _list_trained(member), strict=True):
                if mean.dim() < 2:
                    own.add_(self._draw_vectors(name, mean, rows)[0], alpha=self.sigma)
                else:
                    a, b = self._draw_factors(name, mean, rows)
                    own.add_((a[0] @ b[0].mT).reshape(mean.shape), alpha=self.sigma)
        return member

    def __iter__(self) -> Iterator[ModelT]:
        return (self[index] for index in range(self._count))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        *args: Any,
        in_dims: Any = None,
        chunk_size: int | None = None,
        randomness: str = "different",
        **kwargs: Any,
    ) -> Any:
        """Call every member and stack what they return along a new first axis.

        Args:
            *args: Arguments of the model, the same for all members unless `in_dims` says otherwise.
            in_dims: The axis of an argument along which each member has its own slice; a tuple for several arguments, None in
                it for those that are shared.
            chunk_size: At most how many members at a time, to bound memory.
            randomness: Whether layers such as dropout draw "different" numbers for each member, the "same", or raise an "error".
            **kwargs: More arguments of the model, the same for all members.

        Raises:
            ValueError: If an argument does not have one slice for each member.

        Example:
            >>> import torch, moduli as mo
            >>> pop = mo.Population.around(torch.nn.Linear(3, 2), 5, sigma=0.1)
            >>> pop(torch.ones(4, 3)).shape, pop(torch.ones(5, 4, 3), in_dims=0).shape
            (torch.Size([5, 4, 2]), torch.Size([5, 4, 2]))
        """
        fn = functools.partial(_call_member, kwargs=kwargs)
        return self._evaluate(fn, args, in_dims, chunk_size, randomness)

    def losses(
        self,
        fn: Callable[..., Any],
        *args: Any,
        in_dims: Any = None,
        chunk_size: int | None = None,
        randomness: str = "different",
    ) -> Tensor:
        """Return the loss of every member, `fn(member, *args)`, as a tensor of shape (N,).

        Args:
            fn: A function of a model and the arguments that returns one number.
            *args: Arguments, as in a call.
            in_dims: As in a call.
            chunk_size: As in a call.
            randomness: As in a call.

        Raises:
            ValueError: If the function returns anything but one number for each member.

        Example:
            >>> import torch, moduli as mo
            >>> pop = mo.Population.around(torch.nn.Linear(3, 2), 5, sigma=0.1)
            >>> pop.losses(lambda net: net(torch.ones(4, 3)).square().mean()).shape
            torch.Size([5])
        """
        values = self._evaluate(fn, args, in_dims, chunk_size, randomness)
        values = values.data if isinstance(values, LabelledTensor) else values
        if not isinstance(values, Tensor) or values.shape != (self._count,):
            shape = tuple(values.shape[1:]) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"a loss is one number for each member; the function returned {shape}: end it with .mean()"
            )
        return values

    @torch.no_grad()
    def _evaluate(
        self, fn: Callable[..., Any], args: tuple[Any, ...], in_dims: Any, chunk: int | None, randomness: str
    ) -> Any:
        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        if len(dims) != len(args):
            raise ValueError(f"in_dims has {len(dims)} entries for {len(args)} arguments")
        for at, (each, dim) in enumerate(zip(args, dims, strict=True)):
            if dim is not None and (not isinstance(each, Tensor) or each.shape[dim] != self._count):
                raise ValueError(
                    f"argument {at} does not have one slice for each of {self._count} members along axis {dim}"
                )
        if find_looped(self.mean) is not None:
            return self._evaluate_each(fn, args, dims)
        report: dict[str, set[str]] = {}
        with self._lock:
            return self._evaluate_chunks(fn, args, dims, chunk, randomness, report)

    def _evaluate_each(self, fn: Callable[..., Any], args: tuple[Any, ...], dims: tuple[Any, ...]) -> Any:
        """Return the stacked results of members that are built and called one after the other."""
        pairs = list(zip(args, dims, strict=True))
        results = [
            fn(self[at], *(each if dim is None else each.select(dim, at) for each, dim in pairs))
            for at in range(self._count)
        ]
        return pytree.tree_map(lambda *parts: torch.stack(parts), *results)

    def _evaluate_chunks(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        dims: tuple[Any, ...],
        chunk: int | None,
        randomness: str,
        report: dict[str, set[str]],
    ) -> Any:
        block = min(chunk or self._choose_chunk(), self._count)
        parts = []
        for start in range(0, self._count, block):
            rows = range(start, min(start + block, self._count))
            own = [
                each if dim is None else each.narrow(dim, start, len(rows))
                for each, dim in zip(args, dims, strict=True)
            ]
            parts.append(self._evaluate_rows(fn, own, dims, rows, randomness, report))
        return parts[0] if len(parts) == 1 else pytree.tree_map(lambda *each: torch.cat(each), *parts)

    def _choose_chunk(self) -> int:
        """Return how many members have together at most 3/5 as many noise numbers as the model has parameters.

        A call then stays below the memory of three models: the caller's model, the mean, noise and activations.
        """
        model = noise = 0
        for _, mean in self._list_moving():
            model += mean.numel()
            noise += mean.numel() if mean.dim() < 2 else self.rank * (len(mean) + mean[0].numel())
        return max(1, 3 * model // max(5 * noise, 1) // BLOCK) * BLOCK

    def _evaluate_rows(
        self,
        fn: Callable[..., Any],
        args: list[Any],
        dims: tuple[Any, ...],
        rows: range,
        randomness: str,
        report: dict[str, set[str]],
    ) -> Any:
        factors, vectors = {}, {}
        for name, mean in self._list_moving():
            if mean.dim() < 2:
                vectors[name] = self._draw_vectors(name, mean, rows).mul_(self.sigma).add_(mean.detach())
            else:
                a, b = self._draw_factors(name, mean, rows)
                factors[name] = (a.mul_(self.sigma), b)
        means = {name: mean.detach() for name, mean in self._list_moving()}
        how: dict[str, Any] = {"count": len(rows), "report": report, "randomness": randomness}
        return call_low_rank(self._caller, fn, args, dims, means, factors, vectors, **how)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Describe which parameters are evaluated by one product for all members, and which are formed for each member.

        Args:
            *args: Arguments of the model, the same for all members.
            **kwargs: More of them.

        Example:
            >>> import torch, moduli as mo
            >>> pop = mo.Population.around(torch.nn.Linear(3, 2), 100, sigma=0.1)
            >>> print(pop.explain(torch.ones(4, 3)))
            weight: one product for all members, and thin ones of rank 1 for each
            bias: a vector for each member
        """
        looped = find_looped(self.mean)
        if looped is not None:
            return f"every parameter: made for each member, one after the other: {looped} has no batching rule"
        report: dict[str, set[str]] = {}
        with torch.no_grad(), self._lock:
            fn = functools.partial(_call_member, kwargs=kwargs)
            self._evaluate_rows(fn, list(args), (None,) * len(args), range(1), "different", report)
        lines = []
        for name, mean in self._list_moving():
            used = report.get(name, set())
            if mean.dim() < 2:
                form = "a vector for each member"
            elif "materialised" in used:
                form = "made for each member: an operation with it does not come apart"
            elif used:
                form = f"one product for all members, and thin ones of rank {self.rank} for each"
            else:
                form = "not used with these arguments"
            lines.append(f"{name}: {form}")
        return "\n".join(lines)

    # -- moving --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, weights: Any) -> None:
        r"""Move the mean by $\sum_i w_i \varepsilon_i$, where member i is the mean plus $\sigma \varepsilon_i$; draw new members.

        The sum is computed by products of the factors, in the memory of one model.

        Args:
            weights: One number for each member.

        Raises:
            ValueError: If there are more or fewer, or they are not finite. Nothing is changed then.

        Example:
            >>> import torch, moduli as mo
            >>> pop = mo.Population.around(torch.nn.Linear(3, 1), 64, sigma=0.1)
            >>> losses = pop.losses(lambda net: net(torch.ones(3)).square().sum())
            >>> pop.update(-0.1 * (losses - losses.mean()) / losses.std() / len(pop))
            >>> pop.generation
            1
        """
        weights = torch.as_tensor(weights).detach()
        if weights.shape != (self._count,) or not bool(weights.isfinite().all()):
            raise ValueError(f"update takes one finite number for each of {self._count} members")
        with self._lock:
            self._move_mean(weights)
            self.generation += 1

    def _move_mean(self, weights: Tensor) -> None:
        block = min(4 * BLOCK, self._choose_chunk())
        for start in range(0, self._count, block):
            rows = range(start, min(start + block, self._count))
            for name, mean in self._list_moving():
                own = weights[rows.start : rows.stop].to(mean.device, mean.dtype)
                if mean.dim() < 2:
                    mean.add_(torch.tensordot(own, self._draw_vectors(name, mean, rows), 1))
                else:
                    a, b = self._draw_factors(name, mean, rows)
                    # One product sums over members and ranks.
                    a, b = (a * own[:, None, None]).transpose(0, 1).flatten(1), b.transpose(0, 1).flatten(1)
                    mean.view(mean.shape[0], -1).addmm_(a, b.T)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the mean, and the numbers that determine the noise."""
        numbers = {"count": self._count, "sigma": self.sigma, "rank": self.rank, "seed": self.seed}
        return {
            "mean": {name: each.detach().clone() for name, each in self.mean.state_dict().items()},
            "noise": {**numbers, "generation": self.generation, "antithetic": self.antithetic},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the population from a `state_dict`.

        Raises:
            ValueError: If it is the state of something else.
            RuntimeError: If the mean does not fit. Nothing is changed then.
        """
        noise = state.get("noise")
        if not isinstance(noise, Mapping) or set(noise) != set(self.state_dict()["noise"]):
            raise ValueError("this is not the state of a population around a mean: it has no noise with a seed")
        self.mean.load_state_dict(state["mean"])
        self._count, self.sigma, self.rank, self.seed = (noise[key] for key in ("count", "sigma", "rank", "seed"))
        self.generation, self.antithetic = noise["generation"], noise["antithetic"]


def _call_member(member: nn.Module, *args: Any, kwargs: Mapping[str, Any]) -> Any:
    return member(*args, **kwargs)


def _list_trained(net: nn.Module) -> list[nn.Parameter]:
    return [each for each in net.parameters() if each.requires_grad]
