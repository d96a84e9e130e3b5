"""Members on the workers of a Ray cluster, each of which stores, evaluates and trains some of them."""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moduli._torch import pytree
from moduli.particles import StructureError

from ._evaluator import forward
from ._rule import read_call

if TYPE_CHECKING:
    from ._population import Population


class HostedPopulation:
    """The members of a population, stored by actors of a Ray cluster. Made by `Population.host`.

    A generation transfers the evaluated function, one loss of each member, and the members that move to another worker. After
    each `step` and `copy` a worker stores a copy of its members in the object store of its node; a worker that dies later is
    replaced by one that starts from this copy and repeats the request.

    With a `timeout` of the executor, a worker has that many seconds for each of its members and each step. A worker that died
    or is late is replaced within `start_timeout` seconds, `retries` times; then an error is raised. Without a `timeout`, Ray
    notices a lost node (by default within half a minute). The members of a lost node are lost, which raises an error.

    Args:
        population: The members.
        executor: A `moduli.evolve.Ray` with the number of workers, their resources and time limits. Idle workers of a search
            are ended first; the next search starts others.
        optimizer: Makes the optimizer of the members of one worker.

    Example:
        >>> from moduli.population import HostedPopulation
        >>> HostedPopulation.__name__  # with mo.evolve.Ray(8) as executor: hosted = pop.host(executor)
        'HostedPopulation'
    """

    def __init__(self, population: Population, executor: Any, optimizer: Callable[[Any], Any] | None) -> None:
        self._ray: Any = importlib.import_module("ray")
        self._executor, self._optimizer = executor, optimizer
        self._actors: list[Any] = []
        count = len(population)
        if count < 1:
            raise StructureError("a population without members has nothing to put on workers")
        self._actors = executor.launch_actors(_Host, min(executor.workers, count), executor.threads)
        workers = len(self._actors)
        small, more = divmod(count, workers)
        self._starts = [worker * small + min(worker, more) for worker in range(workers + 1)]
        self._stored = [
            self._ray.put(population[start:stop].clone()) for start, stop in itertools.pairwise(self._starts)
        ]
        try:
            self._ask("take", [(stored, optimizer) for stored in self._stored])
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return f"HostedPopulation({len(self)} members on {len(self._actors)} workers)"

    def losses(self, fn: Callable[..., Any], *args: Any, in_dims: Any = None) -> Tensor:
        """Return the loss of every member, as `Population.losses` computes it, without gradients.

        Args:
            fn: A function of a model and the arguments that returns one number.
            *args: Arguments, the same for all members unless `in_dims` says otherwise.
            in_dims: The dimension of an argument along which each member has its own slice.
        """
        return self._evaluate("losses", fn, args, in_dims)

    def step(self, fn: Callable[..., Any], *args: Any, steps: int = 1, in_dims: Any = None) -> Tensor:
        """Run steps of the optimizer on every worker; return the losses before the last step.

        Args:
            fn: A function of a model and the arguments that returns one number.
            *args: Arguments, as for `losses`.
            steps: The number of steps.
            in_dims: As for `losses`.

        Raises:
            ValueError: If there is no optimizer.
        """
        if self._optimizer is None:
            raise ValueError("nothing says how members move; give pop.host(executor, optimizer=lambda pop: ...)")
        return self._evaluate("step", fn, args, in_dims, steps)

    def copy(self, targets: Tensor | Sequence[int], sources: Tensor | Sequence[int]) -> None:
        """Give some members the parameters, buffers and optimizer state of others.

        Args:
            targets: The members that are replaced.
            sources: The members that are copied, one for each target.

        Raises:
            ValueError: If the numbers of both differ, or a target occurs twice.
            IndexError: If there is no such member.
        """
        to, of = ([int(i) for i in each] for each in (targets, sources))
        if len(to) != len(of) or len(set(to)) != len(to):
            raise ValueError(f"{len(to)} targets, each at most once, and {len(of)} sources; give one source for each")
        if any(not 0 <= i < len(self) for i in (*to, *of)):
            raise IndexError(f"members are numbered from 0 to {len(self) - 1}")
        # All sources are read before any target is written, because a member may be both.
        rows = {i: self._call(self._find(i), "read", i - self._starts[self._find(i)]) for i in dict.fromkeys(of)}
        changes: dict[int, list[tuple[int, Any]]] = {}
        for target, source in zip(to, of, strict=True):
            worker = self._find(target)
            changes.setdefault(worker, []).append((target - self._starts[worker], rows[source]))
        for worker, written in changes.items():
            self._call(worker, "write", written)

    def collect(self) -> Population:
        """Return a copy of all members as a population in this process."""
        parts: list[Population] = self._ask("members", [()] * len(self._actors))
        population: Population = parts[0][[0] * len(self)]
        for start, part in zip(self._starts, parts, strict=False):
            population.replace(range(start, start + len(part)), part)
        return population

    def close(self) -> None:
        """End the workers."""
        while self._actors:
            self._ray.kill(self._actors.pop())

    def __enter__(self) -> HostedPopulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _evaluate(self, method: str, fn: Callable[..., Any], args: tuple[Any, ...], in_dims: Any, *more: Any) -> Tensor:
        """Call a method of all workers that returns one number of each member, and concatenate the results."""
        shared = self._ray.put(fn)
        arguments = [(shared, own, in_dims, *more) for own in self._split_arguments(args, in_dims)]
        return torch.cat(self._ask(method, arguments, *more))

    def _ask(self, method: str, arguments: Sequence[Sequence[Any]], steps: int = 1) -> list[Any]:
        """Call a method of every worker with its arguments, and return the answers.

        All answers are awaited before an error of one worker is raised, so that the changes of the others are stored.
        """
        requests = [self._remote(worker, method, own) for worker, own in enumerate(arguments)]
        answers, errors = [], list[Exception]()
        for worker, own in enumerate(arguments):
            try:
                answers.append(self._answer(worker, requests[worker], method, own, steps))
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def _remote(self, worker: int, method: str, args: Sequence[Any]) -> tuple[Any, Any, float]:
        """Start a method of a worker; return the references to its answer and to its changed members, and the time."""
        remote = getattr(self._actors[worker], method)
        changing = method in _CHANGING
        refs = remote.options(num_returns=2).remote(*args) if changing else (remote.remote(*args), None)
        return *refs, monotonic()

    def _answer(
        self, worker: int, request: tuple[Any, Any, float], method: str, args: Sequence[Any], steps: int = 1
    ) -> Any:
        """Return the answer of a worker; replace a worker that died or is late, and repeat the request.

        Raises:
            RuntimeError: If that happens more than `retries` times, or no other can be started, or the members are lost.
        """
        own = f"its members {self._starts[worker]} to {self._starts[worker + 1] - 1}"
        size = (self._starts[worker + 1] - self._starts[worker]) * steps
        seconds = None if self._executor.timeout is None else self._executor.timeout * size
        exceptions = self._ray.exceptions
        for attempt in range(self._executor.retries + 1):
            try:
                left = None if seconds is None else max(0.0, request[2] + seconds - monotonic())
                answer = self._ray.get(request[0], timeout=left)
            except exceptions.ObjectLostError as error:
                raise RuntimeError(f"a node of the cluster is lost, and with it {own} of worker {worker}") from error
            except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
                late = isinstance(error, exceptions.GetTimeoutError)
                lost, why = error, f"had no answer within {seconds} seconds" if late else "died"
                self._replace(worker, own, error)
                if method == "take":  # `_replace` has done that
                    return None
                if attempt < self._executor.retries:
                    request = self._remote(worker, method, args)
                continue
            self._stored[worker] = request[1] or self._stored[worker]
            return answer
        raise RuntimeError(
            f"worker {worker} {why} ({self._executor.retries + 1} attempts); {own} are as they were before"
        ) from lost

    def _replace(self, worker: int, own: str, cause: Exception) -> None:
        """End a worker, whatever it does, and start another with the members that were stored last."""
        self._ray.kill(self._actors[worker])
        try:
            (self._actors[worker],) = self._executor.launch_actors(_Host, 1, self._executor.threads)
            taken = self._actors[worker].take.remote(self._stored[worker], self._optimizer)
            self._ray.get(taken, timeout=self._executor.start_timeout)
        except (RuntimeError, self._ray.exceptions.RayError) as error:
            raise RuntimeError(
                f"worker {worker} was lost ({str(cause).splitlines()[0]}), and no other could take {own} within "
                f"{self._executor.start_timeout} seconds: {str(error).splitlines()[0]}"
            ) from error

    def _call(self, worker: int, method: str, *args: Any) -> Any:
        return self._answer(worker, self._remote(worker, method, args), method, args)

    def _split_arguments(self, args: tuple[Any, ...], in_dims: Any) -> list[Any]:
        """Return the arguments of each worker, with the slices of its members."""
        flat = read_call(forward, args, {}, in_dims, len(self))
        arguments = []
        for start, stop in itertools.pairwise(self._starts):
            rows = [
                leaf if dim is None else leaf[(*[slice(None)] * dim, slice(start, stop))]
                for leaf, dim in zip(flat.leaves, flat.dims, strict=True)
            ]
            arguments.append(pytree.tree_unflatten(rows, flat.spec))
        return arguments

    def _find(self, member: int) -> int:
        return next(worker for worker in range(len(self._actors)) if member < self._starts[worker + 1])


# Methods of a worker that change its members. They also return a copy, which the driver owns and which survives the worker.
_CHANGING = ("step", "write")


class _Host:
    """The actor on a worker: some members, and their optimizer."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def ready(self) -> None:
        """Return when the worker has started."""

    def take(self, stored: Any, optimizer: Callable[[Any], Any] | None) -> None:
        """Start with members, or with (members, state of their optimizer)."""
        members, state = stored if isinstance(stored, tuple) else (stored, None)
        self.pop = members.clone()
        self.opt: Any = None if optimizer is None else optimizer(self.pop)
        if self.opt is not None and state is not None:
            self.opt.load_state_dict(copy.deepcopy(state))

    def losses(self, fn: Callable[..., Any], args: tuple[Any, ...], in_dims: Any) -> Tensor:
        with torch.no_grad():
            losses: Tensor = self.pop.losses(fn, *args, in_dims=in_dims)
        return losses

    def step(self, fn: Callable[..., Any], args: tuple[Any, ...], in_dims: Any, steps: int) -> tuple[Tensor, Any]:
        closure = importlib.import_module("moduli.optim").closure
        losses = torch.empty(0)
        for _ in range(steps):
            losses = self.opt.step(closure(lambda: self.pop.losses(fn, *args, in_dims=in_dims)))
        return losses.detach(), self._keep()

    def read(self, member: int) -> list[Tensor]:
        return [rows[member].clone() for rows in self._list_rows(self._state())]

    def write(self, changes: Sequence[tuple[int, list[Tensor]]]) -> tuple[None, Any]:
        state = copy.deepcopy(self._state())
        for member, values in changes:
            for rows, value in zip(self._list_rows(state), values, strict=True):
                rows[member] = value
        self.pop.load_state_dict(state[0])
        if self.opt is not None:
            self.opt.load_state_dict(state[1])
        return None, self._keep()

    def _keep(self) -> Any:
        return self.pop.clone(), None if self.opt is None else self.opt.state_dict()

    def members(self) -> Any:
        return self.pop.clone()

    def _state(self) -> tuple[Any, Any]:
        return self.pop.state_dict(), None if self.opt is None else self.opt.state_dict()

    def _list_rows(self, state: tuple[Any, Any]) -> list[Tensor]:
        """Return the tensors with one row for each member. In states of optimizers, uint8 tensors are states of generators."""
        of_links = [leaf for leaf in pytree.tree_leaves(state[1]) if isinstance(leaf, Tensor)]
        count = len(self.pop)
        own = [leaf for leaf in of_links if leaf.shape[:1] == (count,) and leaf.dtype is not torch.uint8]
        return [*state[0].values(), *own]
