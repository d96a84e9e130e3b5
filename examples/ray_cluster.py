"""Train a network by evolution; the actors of a Ray cluster compute and evaluate its members from seeds.

`python examples/ray_cluster.py` runs Ray on this machine, `python examples/ray_cluster.py auto` uses a cluster that was started
with `ray start`. Without Ray (`pip install 'moduli[ray]'`) it uses the processes of a `Pool`.
"""

import importlib.util
import sys

import torch
from torch import Tensor, nn

from moduli.evolve import Executor, Pool, Ray, search


def make_net() -> nn.Module:
    """Return a network of 264,256 parameters, which is large enough that workers get seeds instead of parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1, bias=False))


def spirals(count: int = 64) -> tuple[Tensor, Tensor]:
    """Return points of two interleaved spirals and their classes."""
    turn = torch.linspace(0.5, 3.0, count)
    arm = torch.stack([turn * torch.cos(2 * turn), turn * torch.sin(2 * turn)], 1)
    return torch.cat([arm, -arm]) / 3, torch.cat([torch.ones(count), -torch.ones(count)])


def fitness(net: nn.Module) -> Tensor:
    """Return the mean squared difference from +1 on one arm and -1 on the other."""
    x, y = spirals()
    return (net(x)[:, 0] - y).square().mean()


def make_executor(address: str | None) -> Executor:
    """Return an executor with Ray actors; with fewer processors, or if a node is lost, there are fewer actors and a warning."""
    if importlib.util.find_spec("ray") is None:
        return Pool(2, timeout=60)
    import ray

    ray.init(address or "local", include_dashboard=False, log_to_driver=False)
    return Ray(timeout=60)


def main(address: str | None = None) -> None:
    """Run the search and print its result."""
    net = make_net()
    with make_executor(address) as executor:
        result = search(net, fitness, method="openes", budget=64, population=32, sigma=0.02, lr=0.01, executor=executor)
    print(
        f"{result.evaluations} members on {type(executor).__name__}: from {result.history[0]:.3f} to {result.value:.3f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
