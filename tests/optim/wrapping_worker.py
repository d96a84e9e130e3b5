"""Run one process of several: rows of the law book and presets train a wrapped model and are compared with one process."""

import functools
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import moduli as mo  # noqa: E402
from laws.registry import collect  # noqa: E402
from moduli import optim, presets  # noqa: E402

STEPS = 3
# muonclip needs the attention layers of its model.
PRESETS = [name for name in presets.__all__ if name != "muonclip"]
# Four processes sum gradients in another order than one. These links take eigenvectors of matrices with nearly equal or zero
# eigenvalues, which change with the last bit of a gradient, so the reference process gets the same summed gradients.
TURNED = ("SOAP", "SOAP, its mean outside, inner", "SOAPBasis", "SPlus", "presets.soap", "presets.splus")
# Stops by its own tolerance, so the number of evaluations may differ.
NEAR = {"ScipyMinimizeScalar": 1e-8}


def collect_chains():
    """Return a function that makes the links of each row and preset, by name."""
    chains = {row.name: row.make for row in collect() if row.members == 0}
    chains.update({f"presets.{name}": lambda name=name: [getattr(presets, name)()] for name in PRESETS})
    return chains


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(part):
    generator = torch.Generator().manual_seed(part)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    return x, x[:, :2].sin() * (1 + part)


@functools.cache
def make_mesh(rows, columns, names):
    """Return one mesh for all rows: each new one starts a thread for every pair of processes, and they never end.

    Args:
        rows: The processes along the first dimension.
        columns: The processes along the second dimension.
        names: The names of the two dimensions.
    """
    return dist.device_mesh.init_device_mesh("cpu", (rows, columns), mesh_dim_names=names)


def wrap(kind, net):
    """Return the wrapped model, the part of the data that this process trains on, and the number of parts."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, count = dist.get_rank(), dist.get_world_size()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net), rank, count
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True), rank, count
    parts, mesh = count, None
    if kind == "hsdp":
        mesh = make_mesh(2, count // 2, ("replicate", "shard"))
    if kind == "tp":
        whole = make_mesh(count // 2, 2, ("dp", "tp"))
        parallelize_module(net, whole["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        mesh, parts = whole["dp"], count // 2
        rank = rank // 2
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, rank, parts


def gather_params(model):
    """Return whole copies of all parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [param.detach().clone() for param in model.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def train(model, links, parts, alike):
    """Return the parameters after training on the mean loss over some parts of the data.

    Args:
        model: The model, wrapped or not.
        links: The links of its optimizer.
        parts: Pairs of inputs and targets; losses are added in the order in which processes add them.
        alike: Whether this is the one process that several are compared with.
    """
    opt = mo.Optimizer(model, *links, **({"reduce": None} if alike else {}))
    opt.binding.draws_alike = opt.binding.draws_alike or alike
    for _ in range(STEPS):
        opt.step(mo.closure(lambda: sum(((model(x) - y) ** 2).mean() for x, y in parts) / len(parts)))
    return gather_params(model)


def compare_given_gradients(kind, make):
    """Return the difference from one process that is given the gradients of all; None if there is none."""
    (model, part, _), net = wrap(kind, network()), network()
    opt, reference = mo.Optimizer(model, *make()), mo.Optimizer(net, *make(), reduce=None)
    x, y = data(part)
    for _ in range(STEPS):
        opt.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        for param, own in zip(model.parameters(), net.parameters(), strict=True):
            own.grad = param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad.clone()
        opt.step()
        reference.step()
    return describe_difference(gather_params(model), gather_params(net))


def describe_difference(params, expected, near=1e-9):
    away = max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(params, expected, strict=True))
    same = all(
        torch.allclose(a, b, rtol=near, atol=near, equal_nan=True) for a, b in zip(params, expected, strict=True)
    )
    return None if same else f"! {away:.1e} away from one process"


def compare(kind, make, near):
    """Compare with one process; return None if they agree, the error if the chain is refused, else the difference.

    Args:
        kind: The wrapping.
        make: A function that makes the links.
        near: The tolerance.
    """
    model, part, parts = wrap(kind, network())
    torch.manual_seed(7)
    try:
        params = train(model, make(), [data(part)], alike=False)
    except optim.ChainError as error:
        return str(error)
    torch.manual_seed(7)
    expected = train(network(), make(), [data(other) for other in range(parts)], alike=True)
    return describe_difference(params, expected, near)


def refuses(kind, links):
    """Whether a wrapping can't meet the declared needs of these links."""
    every = [link for top in optim.Chain(*links).children.values() for _, link in top.links()]
    needs = frozenset().union(*(link.needs for link in every))
    if kind == "ddp":
        return optim.Need.RESIDUALS in needs
    tangents = any(getattr(link, "jvp_method", None) == "autograd" for link in every)
    if optim.keeps_graph(needs) or any(link.keeps_outside for link in every) or tangents:
        return True
    whole = (optim.Across.MATRICES, optim.Across.EVERYTHING)
    inner = any(link.children and not isinstance(link, optim.Chain) and not link.divides_params for link in every)
    shapes = any(link.divides_params and callable(getattr(link, "filter", None)) for link in every)
    return kind == "fsdp1" and (inner or shapes or any(link.across in whole for link in every))


def check(kind, names, out):
    problems = {}
    for name, make in collect_chains().items():
        if names and name not in names:
            continue
        try:
            turned = name in TURNED and kind in ("tp", "hsdp")
            problems[name] = (
                compare_given_gradients(kind, make) if turned else compare(kind, make, NEAR.get(name, 1e-9))
            )
            refused = problems[name] is not None and not problems[name].startswith("!")
            if refused != refuses(kind, make()):
                problems[name] = (
                    f"! {'refused: ' + problems[name] if refused else 'accepted'}, against what it declares"
                )
            elif refused:
                problems[name] = None
        except Exception:  # noqa: BLE001 - reported to the test
            problems[name] = "! " + traceback.format_exc()
            if "Connection closed" in problems[name] or "Timed out" in problems[name]:
                break
        Path(out).write_text(repr(problems))
    return problems


def main(rank, count, store, out, kind, *names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(count), timeout=timedelta(seconds=300)
    )
    check(kind, names, out)
    dist.barrier()  # `launch` ends the process: stopping gloo's threads while others leave can crash them


if __name__ == "__main__":
    main(*sys.argv[1:])
