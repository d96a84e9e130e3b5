"""Print as JSON the launches of particles and populations on a fake accelerator, for 2 and for 8 layers.

Sums of models are measured as if no dispatch mode was active: under a mode they are composed of single operations.
"""

from __future__ import annotations

import json
import warnings
from unittest import mock

import torch
from torch import nn

import moduli as mo
from laws.fake_device import DEVICE, Launches, fake_accelerator, leave
from moduli import Optimizer, Population, m, particles
from moduli._torch import in_transform


def make_models(layers, count=3):
    with mock.patch.object(nn.Linear, "reset_parameters"):
        return [nn.Sequential(*(nn.Linear(3, 3, device=DEVICE) for _ in range(layers))) for _ in range(count)]


def on_particles(work):
    def make(models):
        adopted = [mo.adopt(model) for model in models]
        return lambda: work(*adopted)

    return make


def add_in_place(a, b, c):
    a += b
    a *= 0.5
    a /= torch.empty((), device=DEVICE)


def step_population(gather, *links):
    def make(models):
        members = gather(models)
        optimizer = Optimizer(members, *(link() for link in links))

        def step():
            for leaf in members.parameters():
                leaf.grad = torch.empty_like(leaf)
            optimizer.step()
            for link in optimizer.modules:
                for row in link.state.values():
                    assert all(value.device.type == DEVICE for value in row.values() if isinstance(value, torch.Tensor))

        return step

    return make


def add_populations(models):
    members = Population.from_modules(models)
    return lambda: (members + 0.5 * (members - members)).matrix


def number():
    return torch.empty((), device=DEVICE)


WORK = {
    "a + 0.5 * (b - c)": on_particles(lambda a, b, c: list((a + 0.5 * (b - c)).parameters())),
    "lerp": on_particles(lambda a, b, c: list(particles.lerp(a, b, 0.3).parameters())),
    "clone": on_particles(lambda a, b, c: list(a.clone().parameters())),
    "a * number, number + a": on_particles(lambda a, b, c: list((number() + a * number()).parameters())),
    "a += b": on_particles(add_in_place),
    "population": step_population(Population.from_modules, m.Adam, lambda: m.LR(0.1)),
    "population of one": step_population(lambda models: Population.of(models[0], 4), m.Adam, lambda: m.LR(0.1)),
    "population, clipped": step_population(Population.from_modules, lambda: m.ClipNorm(1.0), m.Adam, lambda: m.LR(0.1)),
    "populations added": add_populations,
}


def main() -> None:
    warnings.simplefilter("ignore")
    measured = {}
    for name, make in WORK.items():
        rows = measured[name] = []
        for layers in (2, 8):
            try:
                with (
                    fake_accelerator(),
                    mock.patch("moduli.particles._modes.is_watched", in_transform),
                    mock.patch("moduli.particles._record.is_watched", in_transform),
                ):
                    work = make(make_models(layers))
                    work()
                    with Launches():
                        work()
                    with Launches() as seen:
                        work()
                rows.append([seen.cost.launches, seen.cost.copies])
            except Exception as error:  # noqa: BLE001 - reported to the test
                rows.append(f"{type(error).__name__}: {str(error)[:200]}")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
    leave()
