"""A search over a network whose members are made by the actors of a Ray cluster, from seeds.

Run it with `python examples/ray_cluster.py` for Ray on this machine, or on a node of a cluster that `ray start` made with
`python examples/ray_cluster.py auto`. Without Ray (`pip install moduli[ray]`) it uses the processes of a `Pool`.
"""

import importlib.util
import sys

import torch
from torch import Tensor, nn

from moduli.evolve import Executor, Pool, Ray, search


def make_net() -> nn.Module:
    """A network of 264,256 parameters: members of it are made from seeds, where they are evaluated."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1, bias=False))


def spirals(count: int = 64) -> tuple[Tensor, Tensor]:
    """Two spirals that turn around each other."""
    turn = torch.linspace(0.5, 3.0, count)
    arm = torch.stack([turn * torch.cos(2 * turn), turn * torch.sin(2 * turn)], 1)
    return torch.cat([arm, -arm]) / 3, torch.cat([torch.ones(count), -torch.ones(count)])


def fitness(net: nn.Module) -> Tensor:
    """How far the answers are from +1 on one arm and -1 on the other."""
    x, y = spirals()
    return (net(x)[:, 0] - y).square().mean()


def make_executor(address: str | None) -> Executor:
    """Actors of a cluster: fewer, with a warning, where it has fewer processors or loses a node on the way."""
    if importlib.util.find_spec("ray") is None:
        return Pool(2, timeout=60)
    import ray

    ray.init(address or "local", include_dashboard=False, log_to_driver=False)
    return Ray(timeout=60)


def main(address: str | None = None) -> None:
    """Search, and say what was found."""
    net = make_net()
    with make_executor(address) as executor:
        found = search(net, fitness, method="openes", budget=64, population=32, sigma=0.02, lr=0.01, executor=executor)
    print(f"{found.evaluations} members on {type(executor).__name__}: from {found.history[0]:.3f} to {found.value:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
