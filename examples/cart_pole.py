"""Evolve a controller that balances a pole on a cart, for all members and all starts in one tensor.

Run it with `python examples/cart_pole.py`.
"""

import torch
from torch import Tensor, nn

from moduli.evolve import search

GRAVITY, CART, POLE, LENGTH, FORCE, STEP = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


def physics(state: Tensor, push: Tensor) -> Tensor:
    """The cart and the pole a moment later (Barto, Sutton, Anderson 1983); the state is x, x', angle, angle'."""
    x, speed, angle, spin = state.unbind(-1)
    force = FORCE * push
    total, moment = CART + POLE, POLE * LENGTH
    pull = (force + moment * spin**2 * torch.sin(angle)) / total
    turn = (GRAVITY * torch.sin(angle) - torch.cos(angle) * pull) / (
        LENGTH * (4 / 3 - POLE * torch.cos(angle) ** 2 / total)
    )
    slide = pull - moment * turn * torch.cos(angle) / total
    return torch.stack([x + STEP * speed, speed + STEP * slide, angle + STEP * spin, spin + STEP * turn], -1)


def fallen(controller: nn.Module, starts: Tensor, moments: int = 250) -> Tensor:
    """The share of the time that the pole is down or the cart out of reach; to be minimised."""
    state, up, standing = starts, torch.ones(len(starts)), torch.zeros(len(starts))
    for _ in range(moments):
        push = torch.tanh(controller(state)).squeeze(-1)
        # What has fallen stays where it is, so that its numbers stay finite.
        state = torch.where(up[:, None] > 0, physics(state, push), state)
        up = up * (state[:, 0].abs() < 2.4) * (state[:, 2].abs() < 0.21)
        standing = standing + up
    return 1 - standing.mean() / moments


def main() -> None:
    """Evolve, and try the controller on starts that it has not seen."""
    torch.manual_seed(0)
    controller = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    starts = 0.1 * torch.randn(8, 4)
    with torch.no_grad():
        before = float(fallen(controller, starts))
    result = search(
        controller,
        lambda model: fallen(model, starts),
        method="cmaes",
        vectorised=True,
        budget=500,
        target=0.0,
        sigma=0.5,
    )
    with torch.no_grad():
        after = float(fallen(controller, 0.1 * torch.randn(50, 4)))
    print(f"down for {before:.0%} of the time before, {result.value:.0%} after {result.evaluations} evaluations")
    print(f"on 50 new starts: {after:.0%}")
    print(result.reason)
    if not after < before:
        raise SystemExit("evolution has not helped")


if __name__ == "__main__":
    main()
