"""Run one process of two: train a model under DistributedDataParallel and save parameters, losses and errors."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moduli as mo
from moduli import m, optim
from optim.helpers import Backtrack, Half


def links(kind):
    if kind == "adam":
        return [m.Adam(), m.LR(0.05)]
    if kind == "lbfgs":
        return [m.LBFGS(), m.StrongWolfe()]
    return [Half(4.0), Backtrack()]  # a step so long that the search must shorten it


def main(rank, store, out, kinds):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for kind in kinds:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        model = torch.nn.parallel.DistributedDataParallel(net)
        # Each process has different data at a different scale: on their own they would take different decisions.
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(8, 3, dtype=torch.float64, generator=generator) * (1 + 3 * rank)
        y = x.sum(1, keepdim=True).sin() * (1 + rank)
        opt = mo.Optimizer(model, *links(kind))
        losses = []
        for _ in range(6):
            loss = opt.step(mo.closure(lambda: ((model(x) - y) ** 2).mean()))
            losses.append(float(loss))
        results[kind] = {
            "params": [p.detach() for p in net.parameters()],
            "losses": losses,
            "evaluations": opt.num_evaluations,
        }
    alone = torch.nn.Linear(3, 1)
    try:
        mo.Optimizer(alone, Half(), Backtrack())
    except optim.ChainError as error:
        results["refused"] = str(error)
    own = mo.Optimizer(alone, Half(), Backtrack(), reduce=None)
    own.step(mo.closure(lambda: (alone.weight**2).sum()))
    total = mo.Optimizer([torch.nn.Parameter(torch.ones(1))], Half(), Backtrack(), reduce="sum")
    (w,) = total.param_groups[0]["params"]
    results["sum"] = float(total.step(mo.closure(lambda: (w * (1 + rank)).sum())))
    torch.save(results, out)
    dist.barrier()  # `launch` ends the process: stopping gloo's threads while others leave can crash them


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3], sys.argv[4], sys.argv[5].split(","))
