"""Steps on parameters in pieces: two gloo processes with `fully_shard`.

`python benchmarks/processes.py` prints ratios: clip + Adam + decay over 100 matrices 64 x 64 against torch's fused AdamW
after `clip_grad_norm_`, both on the pieces; Muon on pieces against half of Muon's step on whole matrices plus the measured
gather of the updates. The two sides take turns, and medians are compared.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent / "src"
TURNS = int(os.environ.get("TURNS", "15"))


def measure(rank: int, store: str) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import moduli as mo
    from moduli import m

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def model(count: int, size: int, sharded: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*[torch.nn.Linear(size, size, bias=False) for _ in range(count)])
        if sharded:
            fully_shard(net)
        for param in net.parameters():
            param.grad = torch.randn_like(param)
        return net

    def turns(steps: dict) -> dict[str, float]:
        taken = {name: [] for name in steps}
        for turn in range(TURNS + 3):
            for name, step in steps.items():
                dist.barrier()
                begin = time.perf_counter()
                step()
                dist.barrier()
                if turn >= 3:
                    taken[name].append(time.perf_counter() - begin)
        return {name: statistics.median(seconds) for name, seconds in taken.items()}

    ours, theirs = model(100, 64, True), model(100, 64, True)
    opt = mo.Optimizer(ours, m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-3))
    fused = torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)

    def step_torch() -> None:
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        fused.step()

    times = turns({"clip + Adam + decay": opt.step, "torch": step_torch})

    size, count = 256, 16
    pieces, whole = model(count, size, True), model(count, size, False)
    links = lambda: [m.NAG(0.95, lerp=True), m.Orthogonalize(adjust_lr=True), m.LR(1e-3)]  # noqa: E731
    muon, alone = mo.Optimizer(pieces, *links()), mo.Optimizer(whole, *links(), reduce=None)
    exchange = muon.shards.exchange
    updates = {i: local.detach() for i, local in enumerate(muon.shards.locals)}

    def gather() -> None:
        exchange.from_owners(exchange.to_owners(updates), updates)

    times.update(turns({"Muon": muon.step, "Muon, whole": alone.step, "gather": gather}))
    dist.destroy_process_group()
    return times


def table() -> list[dict]:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), f"{folder}/store"],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [process.communicate()[0] for process in processes]
    times = json.loads(outputs[0].splitlines()[-1])
    half = times["Muon, whole"] / 2 + times["gather"]
    rows = [
        ("FSDP2: clip + Adam + decay, 100 matrices 64 x 64", times["clip + Adam + decay"] / times["torch"], 1.0),
        ("FSDP2: Muon, 16 matrices 256 x 256 / (half of the whole + gather)", times["Muon"] / half, 1.3),
    ]
    return [{"name": name, "value": ratio, "bar": bar, "unit": "x", "ok": ratio <= bar} for name, ratio, bar in rows]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(int(sys.argv[1]), sys.argv[2])))
    else:
        for row in table():
            print(f"{row['name']}: {row['value']:.2f} {row['unit']} (bar {row['bar']})")
