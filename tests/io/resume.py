"""The law of resuming: 2n steps equal n steps, a checkpoint, and n steps in another process.

A factory creates a `Case`: the objects of a run and a function that does one step, with any randomness. `CASES` holds the
factories that the law is run over. Run as a program, this file is the other process.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import moduli as mo
import moduli.io as mio

STEPS = 5


@dataclass
class Case:
    """A run: the objects to save, and a function that does one step."""

    objects: dict[str, Any]
    step: Callable[[], object]
    load: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Callable[[], Case]] = {}


def case(function):
    CASES[function.__name__] = function
    return function


def digest(value) -> str:
    """Return a hash of all bits of a tree of tensors and plain values."""
    hasher = hashlib.sha256()

    def visit(each):
        if isinstance(each, torch.Tensor):
            data = each.detach().resolve_conj().contiguous().reshape(-1)
            data = torch.view_as_real(data) if data.is_complex() else data
            hasher.update(f"{each.dtype}{tuple(each.shape)}".encode() + data.view(torch.uint8).numpy().tobytes())
        elif isinstance(each, np.ndarray):
            hasher.update(each.tobytes())
        elif isinstance(each, torch.Generator):
            visit(each.get_state())
        elif isinstance(each, Mapping):
            for key, inner in each.items():
                hasher.update(repr(key).encode())
                visit(inner)
        elif isinstance(each, list | tuple):
            hasher.update(f"{type(each).__name__}{len(each)}".encode())
            for inner in each:
                visit(inner)
        elif hasattr(each, "state_dict"):
            visit(each.state_dict())
        else:
            hasher.update(repr(each).encode())

    visit(value)
    return hasher.hexdigest()


def digest_run(run: Case) -> str:
    """Return a hash of the objects of a run and of the random states of torch, Python and NumPy."""
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
    return digest([run.objects, states])


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def run_uninterrupted(factory) -> tuple[str, list[Any]]:
    """Do all steps; return the hash of the run and the losses of the second half."""
    seed(1)
    run = factory()
    losses = [run.step() for _ in range(2 * STEPS)]
    return digest_run(run), losses[STEPS:]


def run_and_save(factory, path) -> None:
    """Do the first half of the steps and save."""
    seed(1)
    run = factory()
    for _ in range(STEPS):
        run.step()
    mio.save(path, **run.objects, rng=True, fsync=False)


def load_and_run(factory, path) -> tuple[str, list[Any]]:
    """Load and do the second half of the steps; return the hash of the run and the losses."""
    seed(2)
    run = factory()
    mio.load(path, **{**run.objects, **run.load}, rng=True)
    losses = [run.step() for _ in range(STEPS)]
    return digest_run(run), losses


def check(names, directory) -> None:
    """Check the law for registered cases, all of them in one other process."""
    expected = {}
    for name in names:
        expected[name] = run_uninterrupted(CASES[name])
        run_and_save(CASES[name], os.path.join(directory, f"{name}.safetensors"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, __file__, str(directory), str(torch.get_num_threads()), *names],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout)
    # NaN is not equal to itself, so the texts are compared.
    wrong = [name for name in names if json.dumps(results[name][1]) != json.dumps(expected[name][1])]
    assert not wrong, f"other losses after resuming: {wrong}"
    wrong = [name for name in names if results[name][0] != expected[name][0]]
    assert not wrong, f"another state after resuming: {wrong}"


# -- runs --------------------------------------------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 2))


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator))


def make_case(module, optimizer, scheduler=None, extra=None, metric=False, **objects):
    """Return a run over shuffled batches, with dropout, and noise of torch, Python and NumPy.

    Args:
        module: The module to train.
        optimizer: Its optimizer.
        scheduler: A scheduler that is stepped after each epoch.
        extra: More objects to save.
        metric: Whether the scheduler gets the loss.
        objects: More parts of the checkpoint.
    """
    rows = data()

    def step():
        total = 0.0
        for x, y in DataLoader(rows, batch_size=12, shuffle=True):
            x = x + 0.01 * random.random() + 0.01 * np.random.rand()

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = (module(x) - y).square().mean()
                loss.backward()
                return loss

            total += optimizer.step(closure).item()
        if scheduler is not None:
            scheduler.step(total) if metric else scheduler.step()
        return total

    parts = {"module": module, "optimizer": optimizer, "scheduler": scheduler, "extra": extra, **objects}
    return Case({name: value for name, value in parts.items() if value is not None}, step)


def with_torch_optimizer(name, **options):
    def factory():
        module = net()
        return make_case(module, getattr(torch.optim, name)(module.parameters(), **options))

    CASES[f"torch_{name}" + "".join(f"_{key}" for key in options if key != "lr")] = factory


for _name, _options in {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}, "AdamW": {"lr": 1e-2},
    "Adamax": {}, "NAdam": {}, "RAdam": {}, "Adagrad": {}, "Adadelta": {}, "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {}, "ASGD": {}, "LBFGS": {"lr": 0.1, "max_iter": 4}, "Adafactor": {},
}.items():  # fmt: skip
    with_torch_optimizer(_name, **_options)
with_torch_optimizer("Adam", lr=1e-2, foreach=True)
with_torch_optimizer("AdamW", lr=1e-2, fused=True)
with_torch_optimizer("SGD", lr=1e-2)


SCHEDULERS = {
    "StepLR": {"step_size": 3}, "MultiStepLR": {"milestones": [2, 6, 6]}, "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 7}, "OneCycleLR": {"max_lr": 0.1, "total_steps": 20}, "LinearLR": {},
    "CosineAnnealingWarmRestarts": {"T_0": 3}, "PolynomialLR": {"total_iters": 12}, "ConstantLR": {},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}, "ReduceLROnPlateau": {"patience": 0},
}  # fmt: skip


def with_scheduler(name, options):
    def factory():
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
        return make_case(module, optimizer, scheduler, metric=name == "ReduceLROnPlateau")

    CASES[f"scheduler_{name}"] = factory


for _name, _options in SCHEDULERS.items():
    with_scheduler(_name, _options)


@case
def lambda_and_sequential_schedulers():
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    library = torch.optim.lr_scheduler
    both = [library.LambdaLR(optimizer, lambda step: 0.9**step), library.StepLR(optimizer, 2)]
    return make_case(module, optimizer, library.SequentialLR(optimizer, both, milestones=[4]))


@case
def groups_with_different_settings():
    module = net()
    groups = [
        {"params": module[0].parameters(), "lr": torch.tensor(0.02)},
        {"params": module[4].parameters(), "lr": 0.1},
    ]
    return make_case(module, torch.optim.Adam(groups, betas=(0.8, 0.9), foreach=False, capturable=False))


@case
def labelled_particle_with_ties_and_a_virtual_weight():
    class Fit(mo.Module):
        def __init__(self):
            super().__init__()
            self.w = mo.Tensor(
                torch.randn(4, 2, requires_grad=True), (mo.Space(list("abcd"), "in"), mo.Space(2, "out"))
            )
            self.scale = nn.Parameter(torch.randn(2))
            mo.nn.tie(self, "again", to="scale")
            self.dropout = nn.Dropout(0.2)

        @mo.virtual
        def weight(self):
            return self.w.data * self.scale

        def forward(self, x):
            return self.dropout(x) @ self.weight + self.again

    module = Fit()
    return make_case(module, torch.optim.Adam(module.parameters(), lr=1e-2))


@case
def an_lstm_with_its_own_generator_and_a_scaler():
    class Last(nn.LSTM):
        def forward(self, x):
            return super().forward(x[:, :, None])[0][:, -1]

    module = Last(1, 2, num_layers=2, dropout=0.3, batch_first=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    generator, counter = torch.Generator().manual_seed(7), {"steps": 0}
    scaler = torch.amp.GradScaler("cpu")
    run = make_case(module, optimizer, extra={"generator": generator, "scaler": scaler})
    rows = data()

    def step():
        for x, y in DataLoader(rows, batch_size=8, shuffle=True, generator=generator):
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        counter["steps"] += 1
        return loss.item()

    return Case(run.objects, step)


@case
def two_modules_and_two_optimizers():
    module = nn.ModuleDict(
        {"generator": nn.Linear(3, 2), "critic": nn.Sequential(nn.Linear(2, 8), nn.Dropout(), nn.Linear(8, 1))}
    )
    optimizers = {name: torch.optim.Adam(each.parameters(), lr=1e-2) for name, each in module.items()}
    schedulers = {name: torch.optim.lr_scheduler.StepLR(each, 2) for name, each in optimizers.items()}

    def step():
        losses = []
        for name, sign in (("generator", 1), ("critic", -1)):
            optimizers[name].zero_grad()
            loss = sign * module["critic"](module["generator"](torch.randn(6, 3))).mean()
            loss.backward()
            optimizers[name].step()
            schedulers[name].step()
            losses.append(loss.item())
        return losses

    return Case({"module": module, "optimizer": optimizers, "scheduler": schedulers}, step)


class Swarm:
    """A small population: stacked members, a generator for each, and a state dict."""

    def __init__(self, count=4, size=3):
        self.x, self.v = torch.randn(count, size), torch.zeros(count, size)
        self.generators = [torch.Generator().manual_seed(int(s)) for s in torch.randint(2**31, (count,))]

    def step(self):
        for member, generator in enumerate(self.generators):
            self.v[member] = 0.7 * self.v[member] + torch.rand(3, generator=generator) * -self.x[member]
        self.x += self.v
        return self.x.square().sum(1).tolist()

    def state_dict(self):
        return {"x": self.x, "v": self.v, "generators": self.generators}

    def load_state_dict(self, state):
        self.x.copy_(state["x"])
        self.v.copy_(state["v"])
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved.get_state())


@case
def members_with_their_own_generators():
    swarm = Swarm()
    return Case({"population": swarm}, swarm.step)


# -- every link of the catalogue, and links over populations ----------------------------------------------------------


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 2))


def with_row(row):
    """Register a case for one link of the law book: shuffled batches, dropout, and the kind of objective that it needs."""

    def factory():
        module, rows = small(), data()
        optimizer = mo.Optimizer(module, *row.make())

        def step():
            losses = []
            for x, y in DataLoader(rows, batch_size=12, shuffle=True):

                def loss(x=x, y=y):
                    residuals = (module(x) - y).reshape(-1)
                    return residuals if row.target == "least squares" else residuals.square().mean()

                loss_value = optimizer.step(mo.closure(loss))
                losses.append(None if loss_value is None else loss_value.tolist())
            return losses

        return Case({"module": module, "optimizer": optimizer}, step)

    CASES[f"link_{row.name}"] = factory


def with_population(name, make):
    def factory():
        pop, rows = mo.Population.of(small(), 6, init=0.2), data()
        optimizer = mo.Optimizer(pop, *make())

        def step():
            losses = []
            for x, y in DataLoader(rows, batch_size=12, shuffle=True):
                values = optimizer.step(mo.closure(lambda net, x=x, y=y: (net(x) - y).square().mean()))
                losses.append(values.tolist())
            return losses

        return Case({"population": pop, "optimizer": optimizer}, step)

    CASES[f"population_{name}"] = factory


def register_links():
    """Register the cases of links; not at import, because collecting the law book takes a second."""
    from laws.registry import collect

    for row in collect():
        if row.name != "TerminateAfterNSeconds":  # its state is the elapsed time, which differs between runs
            with_population(row.name, row.make) if getattr(row, "members", None) else with_row(row)
    links = mo.m
    for name, make in {
        "Adam": lambda: [links.ClipNorm(1.0), links.Adam(), links.LR(torch.linspace(0.01, 0.1, 6))],
        "PSO": lambda: [links.Adam(), links.LR(0.01), links.PSO(social=0.3)],
        "seeded_PSO": lambda: [links.PSO(seed=3, topology="ring")],
        "DE": lambda: [links.DE(seed=1)],
        "GA": lambda: [links.GA(seed=1)],
        "CEM": lambda: [links.CEM(seed=1)],
        "PBT": lambda: [links.Adam(), links.LR(0.01), links.PBT({"lr.lr": (1e-3, 1e-1)}, every=2, seed=4)],
        "per_member_norms": lambda: [links.EMA(), links.Normalize(dim=None), links.LR(0.01)],
    }.items():
        with_population(name, make)


def main(directory, threads, *names):
    if any(name.startswith(("link_", "population_")) for name in names):
        register_links()
    torch.set_num_threads(int(threads))
    print(json.dumps({name: load_and_run(CASES[name], Path(directory) / f"{name}.safetensors") for name in names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
