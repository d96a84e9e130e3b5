"""Run one process of several that share a population, and save losses, members and errors."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moduli as mo
from moduli import m

DOUBLE = torch.float64
COUNT, STEPS = 7, 6
CHAINS = {
    "adam": lambda: [m.ClipNorm(0.5), m.Adam(), m.WeightDecay(0.1), m.LR(0.05)],
    "rates": lambda: [m.Adam(), m.LR(torch.linspace(0.01, 0.1, COUNT, dtype=DOUBLE))],
    "search": lambda: [m.HeavyBall(0.9), m.Backtracking()],
    "swarm": lambda: [m.Adam(), m.LR(0.05), m.PSO(social=0.3, seed=3)],
    "ring": lambda: [m.Adam(), m.LR(0.05), m.PSO(topology="ring", social=0.3, seed=3)],
    "informed": lambda: [m.PSO(topology="informed", radius=2, social=0.3, seed=3)],
    "evolution": lambda: [m.DE(seed=2)],
    "mixed": lambda: [m.Adam(), m.LR(0.05), m.DE(strategy="current-to-pbest/1", adapt="shade", seed=2)],
    "genetic": lambda: [m.GA(seed=2)],
    "entropy": lambda: [m.CEM(seed=2)],
    "training": lambda: [m.Adam(), m.LR(0.05), m.PBT({"lr.lr": (1e-3, 1e-1)}, every=2, seed=4)],
}


def population():
    torch.manual_seed(0)
    return mo.Population.of(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), COUNT
    )


def closure(pop):
    x = torch.linspace(-1, 1, 18, dtype=DOUBLE).reshape(6, 3)
    return mo.closure(lambda: pop.losses(lambda f: (f(x) - 1).square().mean()))


def numbered():
    """Return a population whose members store their index in a buffer of bytes."""
    net = nn.Linear(2, 1)
    net.register_buffer("number", torch.zeros(1, dtype=torch.uint8))
    pop = mo.Population.of(net, COUNT)
    dict(pop.named_buffers())["number"].copy_(torch.arange(COUNT)[:, None])
    return pop


def vary(pop):
    """Yield populations with random changes, drawn from equal generators in every process."""
    torch.manual_seed(2)
    yield pop.mutate(rate=0.5, generator=torch.Generator().manual_seed(3))
    yield pop.crossover(2 * pop, generator=torch.Generator().manual_seed(4))
    yield pop.randn()


def train(pop, name, steps=STEPS, saved=None):
    """Return the losses of each step, and the optimizer.

    Args:
        pop: The population.
        name: The chain.
        steps: The number of steps.
        saved: A checkpoint to load first.
    """
    torch.manual_seed(1)
    opt = mo.Optimizer(pop, *CHAINS[name]())
    if saved is not None:
        pop.load_state_dict(saved["population"])
        opt.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
    losses = [opt.step(closure(pop)) for _ in range(steps)]
    return losses, opt


class SentNumbers:
    """A context that counts in `numbers` the elements that this process sends."""

    def __enter__(self):
        self.numbers, self.before = 0, (dist.all_gather, dist.all_reduce)

        def gather(parts, tensor, **kwargs):
            self.numbers += tensor.numel()
            return self.before[0](parts, tensor, **kwargs)

        def reduce(tensor, **kwargs):
            self.numbers += tensor.numel()
            return self.before[1](tensor, **kwargs)

        dist.all_gather, dist.all_reduce = gather, reduce
        return self

    def __exit__(self, *error):
        dist.all_gather, dist.all_reduce = self.before


def collect_errors(mesh, pop):
    """Return the messages of errors that unsupported operations on a sharded population raise, by name."""
    errors = {}
    for name, make in {
        "choice": lambda: pop.tournament(torch.zeros(len(pop))),
        "centre": lambda: pop.mean(),
        "apart": lambda: pop.distances(),
        "mean": lambda: mo.Optimizer(pop, m.LR(0.1), reduce="mean"),
        "five": lambda: mo.Optimizer(pop, m.LR(torch.ones(5))),
        "twice": lambda: pop.shard(mesh),
        "few": lambda: population()[:1].shard(mesh),
        "square": lambda: population().shard(init_device_mesh("cpu", (dist.get_world_size(), 1))),
        "members": lambda: mo.Optimizer(pop, m.LR(0.1)).load_state_dict(
            mo.Optimizer(mo.Population.of(nn.Linear(2, 2), 3), m.LR(0.1), reduce=None).state_dict()
        ),
    }.items():
        try:
            make()
        except ValueError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def main(rank, size, store, out, saved):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    before = torch.load(saved, weights_only=True)
    results = {}
    for name in CHAINS:
        pop = population().shard(mesh)
        shard = pop.sharding
        with SentNumbers() as sent:
            losses, opt = train(pop, name)
        results[name] = {
            "sent": sent.numbers,
            "losses": torch.stack([shard.gather(each) for each in losses]),
            "matrix": shard.gather(pop.matrix),
            "here": len(pop),
            "state": {"population": pop.state_dict(), "optimizer": opt.state_dict(), "random": torch.get_rng_state()},
        }
        resumed = population().shard(mesh)
        train(resumed, name, steps=2, saved=before[name])
        results[name]["resumed"] = shard.gather(resumed.matrix)
    results["refused"] = collect_errors(mesh, pop)
    results["drawn"] = [shard.gather(each.matrix) for each in vary(population().shard(mesh))]
    assert pop[torch.arange(len(pop)).flip(0)].sharding is None
    part = numbered().shard(mesh)
    part.load_state_dict({name: value.flip(0) for name, value in part.state_dict().items()})
    results["numbers"] = part.state_dict()["number"]
    torch.save(results, out)
    dist.barrier()  # `launch` ends the process: stopping gloo's threads while others leave can crash them


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
