"""One of two processes that hold populations together: every row of the law book moves as in one process."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from laws.registry import collect
from moduli.optim import Need, closure
from moduli.population import Population
from moduli.testing._case import NotApplicable
from moduli.testing._populations import _model, _stacked
from moduli.testing._problems import needs, same

MEMBERS, STEPS = 5, 4


def step(case, pop):
    opt = _stacked(case, pop, False)
    for _ in range(STEPS):
        opt.step(closure(lambda: pop.losses(lambda net: net())))


def population(case):
    return Population.from_modules([_model(case, i, torch.float64) for i in range(MEMBERS)])


def move_alone(case):
    """Where the members of one process go."""
    if not case.population or case.random or Need.MEMBERS in needs(case.links()):
        raise NotApplicable("other random numbers, or coupled members, which are tested by themselves")
    pop = population(case)
    step(case, pop)
    return [leaf.detach() for leaf in pop.parameters()]


def compare(case, expected, mesh):
    """What differs where the members are spread over processes; None where nothing does."""
    part = population(case).shard(mesh)
    shard = part.sharding
    step(case, part)
    return same(
        [leaf.detach() for leaf in part.parameters()], [rows[shard.start : shard.stop] for rows in expected], 1e-10
    )


def main(rank, store, out, every):
    warnings.simplefilter("ignore")
    expected = {}
    for case in collect()[::every]:
        try:
            expected[case.name] = case, move_alone(case)  # before there are processes to be asked about
        except NotApplicable:
            continue
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found = {"passed": [], "failed": {}}
    for name, (case, rows) in expected.items():
        try:
            gap = compare(case, rows, mesh)
        except Exception as error:  # noqa: BLE001 - the other process goes on, so this one does too
            gap = f"{type(error).__name__}: {error}"
        if gap is None:
            found["passed"].append(name)
        else:
            found["failed"][name] = str(gap)[:300]
    Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
