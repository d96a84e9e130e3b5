"""Run one of two processes that share populations: every row steps, saves and resumes as in one process."""

import copy
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from laws.registry import collect
from moduli.optim import ChainError, Need, Optimizer, closure
from moduli.population import Population
from moduli.testing._problems import NotApplicable, needs, same
from moduli.testing._subjects import _model

MEMBERS, STEPS = 5, 4


def make(case, pop):
    torch.manual_seed(0)
    try:
        return Optimizer(pop, *case.links(), **({} if pop.sharding else {"reduce": None}))
    except ChainError as refused:
        raise NotApplicable(f"a population can't give it what it needs: {refused}") from refused


def step(opt, pop, steps=STEPS):
    for _ in range(steps):
        opt.step(closure(lambda: pop.losses(lambda net: net())))
    return [leaf.detach().clone() for leaf in pop.parameters()]


def save(opt, pop):
    """Return copies of the state dicts of a population and its optimizer."""
    return copy.deepcopy((pop.state_dict(), opt.state_dict()))


def go_on(case, pop, saved):
    """Return the members after a step from a checkpoint.

    Args:
        case: The row.
        pop: A population to load it into.
        saved: The result of `save`.
    """
    opt = make(case, pop)
    pop.load_state_dict(saved[0])
    opt.load_state_dict(saved[1])
    return step(opt, pop, 1)


def population(case):
    return Population.from_modules([_model(case, i, torch.float64) for i in range(MEMBERS)])


def move_alone(case):
    """Return the members of one process after some steps, their checkpoint, and the members after the next step."""
    if not case.population or case.random or Need.MEMBERS in needs(case.links()):
        raise NotApplicable("other random numbers, or coupled members, which have their own tests")
    pop = population(case)
    opt = make(case, pop)
    return step(opt, pop), save(opt, pop), step(opt, pop, 1)


def compare(case, expected, mesh):
    """Return the first difference of sharded members, or of members from a checkpoint; None if there is none.

    Args:
        case: The row.
        expected: The result of `move_alone`.
        mesh: The processes.
    """
    rows, saved, later = expected
    part = population(case).shard(mesh)
    own = part.sharding.own
    opt = make(case, part)
    gap = same(step(opt, part), [own(each) for each in rows], 1e-10)
    written = save(opt, part)
    return (
        gap
        or same(go_on(case, population(case), written), later, 1e-10)
        or same(go_on(case, population(case).shard(mesh), saved), [own(each) for each in later], 1e-10)
    )


def main(rank, store, out, every):
    warnings.simplefilter("ignore")
    expected = {}
    for case in collect()[::every]:
        try:
            expected[case.name] = (
                case,
                move_alone(case),
            )  # before the process group exists, which would change the results
        except NotApplicable:
            continue
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    results = {"passed": [], "failed": {}}
    for name, (case, rows) in expected.items():
        try:
            gap = compare(case, rows, mesh)
        except Exception as error:  # noqa: BLE001 - reported; the other process continues, so this one must
            gap = f"{type(error).__name__}: {error}"
        if gap is None:
            results["passed"].append(name)
        else:
            results["failed"][name] = str(gap)[:300]
    Path(out).write_text(json.dumps(results))
    dist.barrier()  # `launch` ends the process: stopping gloo's threads while others leave can crash them


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
