"""A fitness of vectorised Gymnasium episodes equals episodes played one by one."""

import pickle

import numpy as np
import pytest
import torch

from moduli.evolve import problems, search

gymnasium = pytest.importorskip("gymnasium", reason="an extra: pip install moduli[gym]")


def play(name, policy, episodes, seed):
    """Return the returns of episodes played one by one, with the seeds of a vectorised environment.

    Args:
        name: The environment.
        policy: The network.
        episodes: The number of episodes.
        seed: The seed of the first.
    """
    returns = []
    for episode in range(episodes):
        environment = gymnasium.make(name)
        observation, _ = environment.reset(seed=seed + episode)
        total, over = 0.0, False
        while not over:
            outputs = policy(torch.from_numpy(np.asarray(observation, dtype=np.float32))[None])[0]
            if isinstance(environment.action_space, gymnasium.spaces.Discrete):
                action = int(outputs.argmax())
            else:
                action = outputs.numpy().clip(environment.action_space.low, environment.action_space.high)
            observation, reward, terminated, truncated, _ = environment.step(action)
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return returns


@pytest.mark.parametrize(("name", "options"), [("CartPole-v1", {"sutton_barto_reward": False}), ("Pendulum-v1", {})])
@torch.no_grad()
def test_episodes_at_once_are_episodes_one_by_one(name, options):
    problem = problems.gym(name, episodes=3, seed=5, **options)
    policy = torch.nn.Linear(problem.observations, problem.actions, bias=False)
    policy.weight.copy_(torch.linspace(-1, 1, policy.weight.numel()).view_as(policy.weight))
    one_by_one = play(name, policy, 3, 5)
    assert problem.returns(policy).tolist() == pytest.approx(one_by_one, rel=1e-5)
    assert problem(policy) == pytest.approx(-np.mean(one_by_one), rel=1e-5)
    if name == "CartPole-v1":
        assert problem.steps == 2 * sum(one_by_one)  # the reward is 1 per step, and the policy was evaluated twice


def test_a_policy_is_evolved_with_fixed_initial_states():
    problem = problems.gym("CartPole-v1", episodes=4)
    policy = torch.nn.Linear(problem.observations, problem.actions, bias=False)
    torch.nn.init.zeros_(policy.weight)
    result = search(policy, problem, sigma=1.0, budget=100, target=-200.0, seed=1)
    assert result.value <= -200
    assert problem(policy) == result.value
    elsewhere = pickle.loads(pickle.dumps(problem))
    assert elsewhere(policy) == result.value
    problem.close()
    assert problem(policy) == result.value


def test_wrong_policies_and_environments_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        problems.gym("CartPole-v1", episodes=0)
    problem = problems.gym("CartPole-v1")
    assert "4 observations, 2 discrete actions" in repr(problem)
    with pytest.raises(ValueError, match="takes 2 outputs"):
        problem(torch.nn.Linear(4, 3))
    with pytest.raises(TypeError, match="a Box of numbers"):
        problems.gym("FrozenLake-v1")
