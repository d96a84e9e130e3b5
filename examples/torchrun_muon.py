"""Train a sharded model (FSDP2) with Muon.

    torchrun --nproc-per-node 2 examples/torchrun_muon.py

Every process has a shard of each matrix. The matrices are distributed over the processes, which orthogonalise their updates and
send back shards of the results. The losses are those of one process with all the data. Without torchrun it runs in one process.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import moduli as mo
from moduli import presets


def main() -> None:
    """Train in this process, which may be one of several."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = tempfile.mktemp()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(256, 8)
    y = x.sin().sum(1, keepdim=True)
    x, y = x.chunk(count)[rank], y.chunk(count)[rank]
    fully_shard(net)
    opt = mo.Optimizer(net, presets.muon(lr=1e-2))
    for step in range(101):
        opt.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean / count:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
