"""Solve CartPole-v1 and Acrobot-v1 of Gymnasium with a linear policy, by CMA-ES.

CartPole-v1 counts as solved at a mean return of 475 over 100 episodes, Acrobot-v1 at -100. The search evaluates a few episodes
with fixed initial states; the 100 test episodes have others. Run it with `python examples/cartpole.py`; it needs `moduli[gym]`.

A comparison with evotorch 0.6.1 (`GymNE` and `CMAES`, also with 10 members): the number of evaluations until a member has a mean
return of 500 over 16 episodes of CartPole-v1, for a linear policy without bias, from zero with a step size of 1, with seeds 0, 1,
2 and so on. It is 30, 20 and 40 here, and 80, 30, 60 and 50 with evotorch, which draws other initial states for each evaluation,
while they are fixed here, which is easier. A return of -80 over 4 episodes of Acrobot-v1 took 36 and 24 evaluations here, and 36
with evotorch (one seed). With so few runs only large differences are meaningful.
"""

import sys

import torch

try:
    import gymnasium  # noqa: F401 - what `problems.gym` needs
except ImportError:
    print("this example needs Gymnasium: pip install 'moduli[gym]'")
    sys.exit(0)

from moduli.evolve import problems, search


def solve(name: str, episodes: int, goal: float, solved: float, seed: int = 1) -> None:
    """Evolve a linear policy until its mean return over a few episodes is the goal, and test it on a hundred others."""
    problem = problems.gym(name, episodes=episodes)
    policy = torch.nn.Linear(problem.observations, problem.actions, bias=False)
    torch.nn.init.zeros_(policy.weight)
    result = search(policy, problem, method="cmaes", sigma=1.0, budget=600, target=-goal, seed=seed)
    steps = problem.steps
    score = float(problem.returns(policy, episodes=100, seed=1000).mean())
    print(f"{name}: {result.evaluations} evaluations of {episodes} episodes ({steps} steps), mean return {score:.1f}")
    if score < solved:
        raise SystemExit(f"{name} is solved at {solved}")


if __name__ == "__main__":
    solve("CartPole-v1", episodes=16, goal=500, solved=475)
    solve("Acrobot-v1", episodes=4, goal=-80, solved=-100)
