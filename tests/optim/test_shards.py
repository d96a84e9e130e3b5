"""Two processes with FSDP2 train as one process without it."""

import os
import subprocess
import sys
from pathlib import Path

import moduli

SCRIPT = """
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor

import moduli as mo
from moduli import kernels, m

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))


def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()


CHAINS = [
    lambda: [m.Adam(), m.LR(0.05)],
    lambda: [m.ClipNorm(0.1), m.Adam(), m.WeightDecay(0.01), m.LR(0.05)],
    lambda: [m.HeavyBall(0.9), m.Normalize(0.3), m.LR(0.1)],
    lambda: [m.OrthoGrad(dim="global"), m.LR(0.1)],
    lambda: [m.Lion(), m.LR(0.01)],
    lambda: [m.Backtracking()],
    lambda: [m.Adam(), m.StrongWolfe(), m.LR(0.5)],
    lambda: [m.HeavyBall(0.5), m.StrongWolfe()],
    lambda: [m.Orthogonalize(batch="group"), m.MuP(base=3), m.WeightDecay(0.1, only="matrices"), m.LR(0.05)],
    lambda: [m.NeuronNormalize(batch="group"), m.LR(0.05)],
    lambda: [m.Adafactor(matrix="unit in"), m.LR(0.05)],
]
torch.manual_seed(5)
X, Y = torch.randn(8, 4).double(), torch.randn(8, 3).double()
axes = mo.axes.trace(make(), X, names={"0.weight": "(group=2 unit) feature"})
x, y = X[4 * rank : 4 * rank + 4], Y[4 * rank : 4 * rank + 4]
for index, links in enumerate(CHAINS):
    sharded, plain = make(), make()
    for layer in (sharded[0], sharded[2]) if index % 2 else ():  # otherwise the root holds all parameters
        fully_shard(layer)
    fully_shard(sharded)
    a, b = mo.Optimizer(sharded, *links(), axes=axes), mo.Optimizer(plain, *links(), reduce=None, axes=axes)
    for step in range(6):
        if step == 3:
            saved, a = a.state_dict(), mo.Optimizer(sharded, *links(), axes=axes)
            a.load_state_dict(saved)
        if step % 2 or any(isinstance(link, m.LineSearchBase) for link in a.modules):
            a.step(mo.closure(lambda: (sharded(x) - y).square().mean()))
        else:
            a.zero_grad()
            (sharded(x) - y).square().mean().backward()
            a.step()
        b.step(mo.closure(lambda: (plain(X) - Y).square().mean()))
    for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor)
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-9, atol=1e-12)

# Reductions: shards are summed over processes, replicas counted once, partial sums added first, plain tensors unmodified.
whole = torch.arange(1.0, 8.0).double()
shards = distribute_tensor(whole, mesh, [Shard(0)])
copies = distribute_tensor(whole, mesh, [Replicate()])
terms = DTensor.from_local(whole / 2, mesh, [Partial()])
with torch.no_grad():
    for tensors in ([shards], [copies], [terms], [shards, copies, whole], [whole, terms]):
        plain = [whole] * len(tensors)
        for function in (kernels.norm, kernels.sum, kernels.amax):
            torch.testing.assert_close(function(tensors), function(plain))
        torch.testing.assert_close(kernels.dot(tensors, tensors), kernels.dot(plain, plain))
    one = distribute_tensor(-whole[:1], mesh, [Shard(0)])  # its shard in the second process is empty
    for function in (kernels.norm, kernels.sum, kernels.amax):
        torch.testing.assert_close(function([one]), function([-whole[:1]]))
    torch.testing.assert_close(kernels.dot([shards], [copies]), kernels.dot([whole], [whole]))

# Chains that need whole tensors or a graph are refused when built.
for links in ([m.Newton()], [m.Wrap(torch.optim.Adam)], [m.AdaHessian(), m.LR(0.1)]):
    net = make()
    fully_shard(net)
    try:
        mo.Optimizer(net, *links, reduce=None)
    except mo.optim.ChainError as error:
        assert "pieces" in str(error) or "processes" in str(error), error
    else:
        raise AssertionError(f"{links} are accepted")
dist.destroy_process_group()
print("done", flush=True)
os._exit(0)  # a thread of torch may still use the interpreter, and aborts if that has ended
"""


def test_two_processes_with_shards_equal_one_without(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(moduli.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=600) for run in runs]
    finally:
        for run in runs:
            run.kill()
    for run, (out, err) in zip(runs, outputs, strict=True):
        assert run.returncode == 0, err
        assert out.strip().endswith("done")
