"""One process of several (or one alone): trains, saves with torch.distributed.checkpoint, or goes on from what was saved."""

import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import moduli as mo
from moduli import m, presets

CHAINS = {
    "clip": lambda: [m.ClipNorm(0.5), m.Adam(), m.WeightDecay(0.01), m.LR(0.05)],
    "soap": lambda: [m.SOAP(), m.LR(0.05)],
    "muon": lambda: [presets.muon(lr=0.05)],
    "prodigy": lambda: [m.Prodigy(d0=0.01), m.LR(1.0)],
    "averaged": lambda: [m.Averaging(3), m.LR(0.05)],  # keeps a deque of pieces
}
# FSDP1 has no shapes, so that links on whole tensors are refused there.
FLAT = ["clip", "prodigy"]


def network(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "fsdp2":
        fully_shard(net)
    return net


def train(model, opt, steps):
    """The same data in every process: what is compared is what was saved."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    for _ in range(steps):
        opt.zero_grad()
        (model(x) - x[:, :2].sin()).square().mean().backward()
        opt.step()
    opt.zero_grad()


def full(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [param.detach().clone() for param in model.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def main(rank, count, store, folder, kind, task, *names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if int(count) > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=int(rank),
            world_size=int(count),
            timeout=timedelta(seconds=300),
        )
    problems = []
    for name in names:
        model = network(kind)
        opt = mo.Optimizer(model, *CHAINS[name]())
        where = Path(folder) / name
        if task == "save":
            train(model, opt, 3)
            state = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
            dcp.save(state, checkpoint_id=where)
            train(model, opt, 3)
            found = full(model)
            if rank == "0":
                torch.save(found, f"{where}.pt")
            continue
        state = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
        dcp.load(state, checkpoint_id=where)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, opt, state["opt"])
        if opt.current_step != 3:
            problems.append(f"{name}: step {opt.current_step}")
        train(model, opt, 3)
        expected = torch.load(f"{where}.pt", weights_only=True)
        away = max(float((a - b).abs().max()) for a, b in zip(full(model), expected, strict=True))
        if not away < 1e-9:
            problems.append(f"{name}: {away:.1e} away from the run that was saved")
    if problems:
        raise SystemExit("; ".join(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
