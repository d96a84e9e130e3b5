"""Problems to search on: episodes of Gymnasium as a fitness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["GymProblem", "gym"]


class GymProblem:
    """The negated mean return of a policy over episodes of an environment: a fitness for `search`, made by `gym`.

    All episodes run at once, in a vectorised environment, from starts that the seed fixes, so that a policy has the same
    fitness in every process and at every time. Each process makes a separate environment.

    Attributes:
        observations: The number of components of an observation.
        actions: The number of outputs of a policy: one for each discrete action, or for each component of a continuous one.
        episodes: How many episodes are averaged.
        steps: The steps of single episodes so far, in this process.
    """

    def __init__(
        self,
        name: str,
        episodes: int = 8,
        seed: int = 0,
        action: Callable[[Tensor], Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        if episodes < 1:
            raise ValueError(f"gym: episodes={episodes}; a fitness is the mean of at least one")
        self.name, self.episodes, self.seed, self.action = name, episodes, seed, action
        self.options, self.steps = dict(options or {}), 0
        self._environments: dict[int, Any] = {}
        environment = self._environment(episodes)
        spaces = _gymnasium().spaces
        observed, acted = environment.single_observation_space, environment.single_action_space
        if not isinstance(observed, spaces.Box):
            raise TypeError(f"gym: observations of {name} are {observed}; a policy takes a Box of numbers")
        self.discrete = isinstance(acted, spaces.Discrete)
        if not self.discrete and not isinstance(acted, spaces.Box):
            raise TypeError(f"gym: actions of {name} are {acted}; a policy gives Discrete ones or a Box of numbers")
        self.observations = int(np.prod(observed.shape))
        self.actions = int(acted.n) if self.discrete else int(np.prod(acted.shape))

    def __call__(self, policy: Callable[[Tensor], Tensor]) -> float:
        """Return the negated mean return over the episodes whose starts the seed fixes.

        Args:
            policy: Takes observations, one per row, and returns `actions` outputs for each: scores of discrete actions, of which
                the highest is chosen, or the components of a continuous one, which are clipped to its range.
        """
        return -float(self.returns(policy).mean())

    @torch.no_grad()
    def returns(
        self, policy: Callable[[Tensor], Tensor], episodes: int | None = None, seed: int | None = None
    ) -> Tensor:
        """Return the sum of rewards of each episode; with another seed, of episodes that the fitness does not use.

        Args:
            policy: As for a call.
            episodes: The number of episodes; by default as many as the fitness averages.
            seed: Fixes their starts; by default the seed of the fitness.
        """
        count = self.episodes if episodes is None else episodes
        environment = self._environment(count)
        observed, _ = environment.reset(seed=self.seed if seed is None else seed)
        total, running = np.zeros(count), np.ones(count, dtype=bool)
        while running.any():
            seen = torch.from_numpy(np.asarray(observed, dtype=np.float32).reshape(count, -1))
            observed, reward, terminated, truncated, _ = environment.step(self._act(policy(seen), environment))
            # The environment restarts an episode that has ended; its further rewards are not counted.
            total += np.where(running, reward, 0.0)
            self.steps += int(running.sum())
            running &= ~(terminated | truncated)
        return torch.from_numpy(total)

    def _act(self, outputs: Tensor, environment: Any) -> Any:
        """Convert outputs of the policy to actions of the environment."""
        if self.action is not None:
            return np.asarray(self.action(outputs))
        space = environment.single_action_space
        if outputs.shape != (len(outputs), self.actions):
            raise ValueError(
                f"gym: {self.name} takes {self.actions} outputs for each observation; the policy gave {tuple(outputs.shape)}"
            )
        if self.discrete:
            return outputs.argmax(1).cpu().numpy() + space.start
        values = outputs.cpu().numpy().astype(space.dtype).reshape(-1, *space.shape)
        return np.clip(values, space.low, space.high)

    def _environment(self, count: int) -> Any:
        """Return the cached vectorised environment for `count` episodes, of Gymnasium's vector class for the name if any."""
        if count not in self._environments:
            package = _gymnasium()
            own = package.spec(self.name).vector_entry_point is not None
            mode = "vector_entry_point" if own and not self.options else "sync"
            self._environments[count] = package.make_vec(self.name, count, vectorization_mode=mode, **self.options)
        return self._environments[count]

    def close(self) -> None:
        """Close the environments; a later call makes new ones."""
        for environment in self._environments.values():
            environment.close()
        self._environments = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environments": {}}

    def __repr__(self) -> str:
        kind = "discrete actions" if self.discrete else "numbers as an action"
        return f"GymProblem({self.name}: {self.observations} observations, {self.actions} {kind}, {self.episodes} episodes)"


def gym(
    name: str, *, episodes: int = 8, seed: int = 0, action: Callable[[Tensor], Any] | None = None, **options: Any
) -> GymProblem:
    """Make a fitness of an environment of Gymnasium: the negated mean return of a policy over episodes with fixed starts.

    Needs the extra `gym` (`pip install 'moduli[gym]'`).

    Args:
        name: The name of the environment, such as `"CartPole-v1"`.
        episodes: How many episodes are averaged; they run at once, in one vectorised environment.
        seed: Fixes the starts of the episodes.
        action: A function of the policy's outputs that gives the actions; by default the index of the highest output, or the
            outputs clipped to the range of continuous actions.
        **options: Those of the environment, handed to `gymnasium.make_vec`.

    Returns:
        A `GymProblem`, which is called with a policy.

    Raises:
        ImportError: Without Gymnasium.
        TypeError: If observations are no Box, or actions neither Discrete nor a Box.
    """
    return GymProblem(name, episodes, seed, action, options)


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ImportError("episodes are those of Gymnasium: pip install 'moduli[gym]'") from error
    return gymnasium
