"""Define the chains whose state moduli 0.2 saved in `saved_by_0_2`, and the program that wrote the files.

Run as a program, it writes the files with the installed moduli: `python tests/optim/saved_cases.py FOLDER`.
"""

import copy
import gzip
import io
import sys
from pathlib import Path

import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.optim import Module, TensorTransform

STEPS = 3
INPUTS = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


class Noise(TensorTransform):
    """Adds random numbers from the link's own generator."""

    def __init__(self, seed):
        super().__init__({})
        self.seed = seed

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        generator = self.get_generator(tensor.device, self.seed)
        return tensor + 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)


class Inside(Module):
    """Runs its child on each update reshaped to one row."""

    def __init__(self, inner):
        super().__init__()
        self.set_child("inner", inner)

    def apply(self, objective):
        updates = [update.reshape(1, -1) for update in objective.get_updates()]
        moved = self.inner_step_tensors("inner", updates, clone=True, params=None, objective=objective)
        objective.updates = [new.reshape_as(old) for new, old in zip(moved, objective.get_updates(), strict=True)]
        return objective


def network(dtype=torch.float64):
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).to(dtype)


def start_one(*links, dtype=torch.float64, **options):
    torch.manual_seed(0)
    net = network(dtype)
    return net, mo.Optimizer(net, *links, **options)


def start_many(*links):
    torch.manual_seed(0)
    members = mo.Population.of(network, 3)
    return members, mo.Optimizer(members, *links)


CASES = {
    "adam": lambda: start_one(
        m.ClipNorm(0.5), m.Adam(), m.WeightDecay(0.01), m.LR(0.05), groups={"*.bias": {"lr": 0.1}}
    ),
    "soap": lambda: start_one(m.SOAP(precond_freq=2), m.LR(0.05)),
    "lbfgs": lambda: start_one(m.LBFGS(history_size=2), m.LR(0.1)),
    "bfgs": lambda: start_one(m.BFGS(), m.LR(0.1)),
    "averaged": lambda: start_one(m.Averaging(2), m.LR(0.05)),
    "noise": lambda: start_one(Noise(3), m.HeavyBall(0.9), m.LR(0.05)),
    "nested": lambda: start_one(
        m.Split(lambda p: p.ndim == 2, [m.Adam(), m.LR(0.05)], [Inside(m.HeavyBall(0.9)), m.LR(0.02)])
    ),
    "half": lambda: start_one(m.Adam(), m.LR(0.05), dtype=torch.bfloat16),
    "members": lambda: start_many(m.Adam(), m.LR(0.05)),
    "member_vectors": lambda: start_many(m.LBFGS(history_size=2), m.LR(0.1)),
    "member_values": lambda: start_many(m.GGT(), m.LR(0.05)),
}


def train(model, opt, steps=STEPS):
    """Make steps and return copies of all parameters.

    Args:
        model: The model or population.
        opt: Its optimizer.
        steps: The number of steps.
    """
    population = isinstance(model, mo.Population)

    def loss():
        inputs = INPUTS.to(next(iter(model.parameters())).dtype)
        squares = model(inputs).square()
        return squares.mean(dim=tuple(range(1, squares.dim()))) if population else squares.mean()

    for _ in range(steps):
        opt.step(mo.closure(loss))
    opt.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def read_state(folder, name, portable=False):
    """Return a dict with the parameters when saved, the state dict, and the parameters after more steps.

    Args:
        folder: The directory of the files.
        name: The case.
        portable: Whether state is saved by position, as torch.distributed.checkpoint needs.
    """
    packed = gzip.decompress((folder / f"{name}{'.portable' * portable}.pt.gz").read_bytes())
    return torch.load(io.BytesIO(packed), weights_only=True)


def write_state(folder, name, content, portable=False):
    file = io.BytesIO()
    torch.save(content, file)
    (folder / f"{name}{'.portable' * portable}.pt.gz").write_bytes(gzip.compress(file.getvalue(), mtime=0))


def write_all(folder):
    for name, start in CASES.items():
        model, opt = start()
        before = train(model, opt)
        state = copy.deepcopy(opt.state_dict())  # copied, because its tensors are those of the optimizer
        part = {"population": model} if isinstance(model, mo.Population) else {"module": model}
        mo.save(folder / "file", **part, optimizer=opt, rng=False)
        (folder / f"{name}.safetensors.gz").write_bytes(gzip.compress((folder / "file").read_bytes(), mtime=0))
        (folder / "file").unlink()
        write_state(folder, name, {"before": before, "state": state, "after": train(model, opt)})
    import torch.distributed.checkpoint.state_dict  # noqa: F401 - importing it makes state dicts go by position

    for name in ("adam", "averaged", "noise"):
        model, opt = CASES[name]()
        before = train(model, opt)
        state = copy.deepcopy(opt.state_dict())
        write_state(folder, name, {"before": before, "state": state, "after": train(model, opt)}, True)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
