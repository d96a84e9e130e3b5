"""Check in one process of two that sharded models (FSDP2, tensor parallel) compute what whole models compute."""

import functools
import operator
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import moduli as mo
from moduli import m, merge, particles

CHECKS = []
KINDS = ("fsdp2", "tp")


def check(function):
    """Register a check: a function of the rank that returns a list of differences."""
    CHECKS.append(function)
    return function


@functools.cache
def mesh():
    """Return one mesh for all checks: each new one starts threads that never end."""
    return dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def network(seed):
    torch.manual_seed(seed)
    # The last layer has one row, so its shard in one of the two processes is empty.
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()


def wrap(kind, net):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if kind == "tp":
        # The norm and the last layer stay plain: DTensors beside whole parameters.
        return parallelize_module(net, mesh()["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if kind == "fsdp2":
        fully_shard(net[0], mesh=mesh())
        return fully_shard(net, mesh=mesh())
    return net


def full(tensor):
    """Return a tensor, gathered if it is a DTensor, without its graph."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def models(kind, count):
    return [mo.adopt(wrap(kind, network(seed))) for seed in range(count)]


def values(model):
    """Return the whole tensors of a model or a state dict, by name."""
    named = model.items() if isinstance(model, dict) else model.named_parameters()
    return {name: full(tensor) for name, tensor in named}


def find_largest(numbers):
    """Return the largest of some 0-d tensors as a float, and NaN if one of them is NaN."""
    return float(torch.stack(numbers).max())


def differ(result, expected, what):
    if not isinstance(result, dict):
        result, expected = {"": full(torch.as_tensor(result))}, {"": full(torch.as_tensor(expected))}
    if list(result) != list(expected):
        return [f"{what}: names {list(result)} for {list(expected)}"]
    away = find_largest([(result[name] - to).abs().max() / (1 + to.abs().max()) for name, to in expected.items()])
    return [] if away < 1e-9 else [f"{what}: {away:.1e} away from one process"]


def placed_like(result, like, what):
    same = [
        getattr(a, "placements", None) == getattr(b, "placements", None)
        for a, b in zip(result.parameters(), like.parameters(), strict=True)
    ]
    return [] if all(same) else [f"{what}: the result is placed otherwise"]


def draws(seed):
    return {"generator": torch.Generator().manual_seed(seed)}


EXPRESSIONS = {
    "task arithmetic": lambda a, b, c: a + 0.5 * (b - c),
    "difference": lambda a, b, c: (a - b) / 3,
    "product": lambda a, b, c: 2 - a * b * 0.1,
    "power": lambda a, b, c: abs(a) ** 1.5 // 0.1 % 0.7,
    "lerp": lambda a, b, c: particles.lerp(a, b, 0.3),
    "lerp by a tensor": lambda a, b, c: particles.lerp(a, b, torch.tensor(0.3, dtype=torch.float64)),
    "sign": lambda a, b, c: particles.sign(a) + particles.sqrt(abs(b)) + particles.exp(c),
    "clamp": lambda a, b, c: particles.clamp(a, -0.1, 0.1),
    "where": lambda a, b, c: particles.where(particles.sign(a) + 1, b, c),
    "where by a vector": lambda a, b, c: particles.where(torch.arange(65) % 3 == 0, b, c),
    "where or zero": lambda a, b, c: particles.where(particles.sign(a) + 1, b, 0),
    "map": lambda a, b, c: particles.map(lambda p, q: p * 2 + q, a, b),
    "rand": lambda a, b, c: particles.rand(a, **draws(1)) + b,
    "randn": lambda a, b, c: particles.randn(a, **draws(2)) + c,
    "zeros": lambda a, b, c: particles.zeros_like(a) + b,
    "a vector": lambda a, b, c: particles.from_vector(a, particles.vector(b) * 2),
    "only": lambda a, b, c: particles.only(a, "0.*") + b,
    "clone": lambda a, b, c: a.clone(),
    "negative": lambda a, b, c: -a + (+b),
    "broadcast": lambda a, b, c: particles.only(a, "*.weight") * torch.tensor([2.0], dtype=torch.float64),
}
NUMBERS = {
    "norm": lambda a, b: particles.norm(a),
    "norm 1": lambda a, b: particles.norm(a, 1),
    "norm inf": lambda a, b: particles.norm(a, float("inf")),
    "dot": particles.dot,
    "cosine": particles.cosine,
    "distance": particles.distance,
    "vector": lambda a, b: particles.vector(a + b),
}


@check
def arithmetic_of_sharded_models(rank):
    problems = []
    for kind in KINDS:
        sharded, plain = models(kind, 3), models("plain", 3)
        for name, act in EXPRESSIONS.items():
            result = act(*sharded)
            problems += differ(values(result), values(act(*plain)), f"{kind} {name}")
            problems += placed_like(result, sharded[0], f"{kind} {name}")
        for name, act in NUMBERS.items():
            problems += differ(act(*sharded[:2]), act(*plain[:2]), f"{kind} {name}")
    return problems


IN_PLACE = {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*= number": lambda a, b: operator.imul(a, 0.5),
    "/= number": lambda a, b: operator.itruediv(a, 3),
    "+= tensor": lambda a, b: operator.iadd(a, torch.tensor([0.5], dtype=torch.float64)),
    "lerp_": lambda a, b: particles.lerp_(a, b, 0.25),
    "axpy_": lambda a, b: particles.axpy_(a, -0.5, b),
}


@check
def changes_in_place_keep_wrapped_models_training(rank):
    """In-place arithmetic between forward and step keeps the wrapping and the parameters that the optimizer has."""
    problems = []
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for kind in KINDS:
        for name, act in IN_PLACE.items():
            trained = []
            for which in (kind, "plain"):
                a, b = models(which, 2)
                opt = mo.Optimizer(a, m.Adam(), m.LR(0.1))
                a(x).sum().item()  # after it FSDP2 leaves the root's parameters unsharded
                act(a, b)
                for _ in range(2):
                    opt.zero_grad()
                    a(x).square().mean().backward()
                    opt.step()
                trained.append(values(a))
            problems += differ(*trained, f"{kind} {name}")
    return problems


@check
def results_are_values(rank):
    """The result of arithmetic is not wrapped by FSDP2, but it can be added to, and loaded into, a model that is."""
    problems = []
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for kind in KINDS:
        a, b = models(kind, 2)
        c, d = models("plain", 2)
        delta, expected = a - b, c - d
        a += delta
        c += expected
        problems += differ(values(a), values(c), f"{kind} +=")
        b.load_state_dict((0.5 * (a + b)).state_dict())
        d.load_state_dict((0.5 * (c + d)).state_dict())
        problems += differ(full(b(x)), full(d(x)), f"{kind} forward after loading")
        if type(delta[0]).__name__.startswith("FSDP"):
            problems.append(f"{kind}: the result has hooks that gather another model")
        if kind == "tp":
            problems += differ(full((a - b)(x)), full((c - d)(x)), "tp forward of a result")
    return problems


@check
def models_sharded_differently_are_refused(rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    problems = []
    a = mo.adopt(wrap("fsdp2", network(0)))
    b = mo.adopt(network(1))
    c = mo.adopt(network(1))
    for part in c.modules():
        for name, param in list(part.named_parameters(recurse=False)):
            part.register_parameter(
                name, nn.Parameter(distribute_tensor(param.detach(), mesh(), [Shard(param.dim() - 1)]))
            )
    for what, act in {
        "whole": lambda: a + b,
        "other placements": lambda: a - c,
        "in place": lambda: operator.iadd(a, b),
        "dot": lambda: particles.dot(a, c),
    }.items():
        try:
            act()
            problems.append(f"{what} was not refused")
        except ValueError as error:
            if "0.weight" not in str(error):
                problems.append(f"{what}: {error}")
    problems += differ(values(a), values(network(0)), "a refused operation has changed values")
    return problems


RECIPES = {
    "lerp": lambda a, b, c: merge.lerp(a, b, 0.3),
    "linear": lambda a, b, c: merge.linear([a, b, c], [0.5, 0.3, 0.2]),
    "slerp": lambda a, b, c: merge.slerp(a, b, 0.3),
    "task_arithmetic": lambda a, b, c: merge.task_arithmetic(a, [b, c], [0.5, 0.25]),
    "task_vector": lambda a, b, c: merge.task_vector(a, b),
    "ties": lambda a, b, c: merge.ties(a, [b, c], density=0.5),
    "ties, whole": lambda a, b, c: merge.ties(a, [b, c], density=0.5, trim="model"),
    "dare": lambda a, b, c: merge.dare(a, [b, c], 0.5, generator=1),
    "della": lambda a, b, c: merge.della(a, [b, c], 0.5, generator=1),
    "breadcrumbs": lambda a, b, c: merge.breadcrumbs(a, [b, c]),
    "sce": lambda a, b, c: merge.sce(a, [b, c]),
    "stock": lambda a, b, c: merge.stock(a, [b, c]),
    "karcher": lambda a, b, c: merge.karcher([a, b, c]),
    "soup": lambda a, b, c: merge.soup([a, b, c]),
}


@check
def merges_of_sharded_models(rank):
    problems = []
    for kind in KINDS:
        sharded, plain = models(kind, 3), models("plain", 3)
        for name, act in RECIPES.items():
            expected = act(*plain)
            problems += differ(values(act(*sharded)), values(expected), f"{kind} {name}")
            merged = act(*(model.state_dict() for model in sharded))
            problems += differ(values(merged), values(expected), f"{kind} {name} of state dicts")
        mixed = merge.lerp(
            sharded[0].state_dict(), plain[1].state_dict(), 0.3
        )  # the first operand decides the placements
        problems += differ(values(mixed), values(merge.lerp(*plain[:2], 0.3)), f"{kind} beside whole tensors")
        problems += differ(values(sharded[0]), values(plain[0]), f"{kind}: the first has changed")
    return problems


@check
def merges_fail_in_every_process(rank):
    a, b = models("fsdp2", 2)
    with torch.no_grad():
        if rank == 0:
            next(b.parameters()).to_local()[0, 0] = float("nan")
    problems = []
    for what, act in {"lerp": lambda: merge.lerp(a, b, 0.5), "slerp": lambda: merge.slerp(a, b, 0.5)}.items():
        try:
            act()
            problems.append(f"{what} of NaN was not refused")
        except merge.MergeError as error:
            if "0.weight" not in str(error):
                problems.append(str(error))
    return problems


@check
def files_of_sharded_models(rank):
    """Files saved by two processes load in one, and the reverse; model and optimizer then continue as in one process."""
    problems = []
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def train(model, opt, steps):
        for _ in range(steps):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()

    chains = {"adam": lambda: [m.ClipNorm(1.0), m.Adam(), m.LR(0.05)], "soap": lambda: [m.SOAP(), m.LR(0.05)]}
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    for name, chain in chains.items():
        expected = network(0)
        opt = mo.Optimizer(expected, *chain())
        train(expected, opt, 5)
        # Tensor parallel sums in another order, and SOAP's eigenvectors amplify the rounding.
        kinds = ("plain", "fsdp2") if name == "soap" else ("plain", *KINDS)
        for saving in kinds:
            model = wrap(saving, network(0))
            opt = mo.Optimizer(model, *chain())
            train(model, opt, 3)
            path = Path(folder[0]) / f"{name}-{saving}{rank if saving == 'plain' else ''}.safetensors"
            mo.save(path, model, optimizer=opt, extra={"epoch": 3})
            for loading in kinds:
                other = wrap(loading, network(1))
                again = mo.Optimizer(other, *chain())
                loaded = mo.load(path, other, optimizer=again)
                if loaded.extra != {"epoch": 3}:
                    problems.append(f"extra is {loaded.extra}")
                train(other, again, 2)
                problems += differ(values(other), values(expected), f"{name} {saving} to {loading}")
        result = mo.adopt(wrap("fsdp2", network(0))) * 0.5
        path = Path(folder[0]) / "result.safetensors"
        mo.save(path, result)
        mo.load(path, other := network(2))
        problems += differ(values(other), values(mo.adopt(network(0)) * 0.5), "saved result")
    try:
        mo.Checkpointer(folder[0], wrap("fsdp2", network(0)), seconds=1.0)
        problems.append("checkpoints by the clock of each process were not refused")
    except ValueError:
        pass
    before = values(other)
    for act in (
        lambda: mo.save(Path(folder[0]) / "missing" / "x.safetensors", wrap("fsdp2", network(0))),
        lambda: mo.load(Path(folder[0]) / "missing.safetensors", wrap("fsdp2", network(0))),
    ):
        try:
            act()
            problems.append("a path that can't be written or read was not refused")
        except (OSError, mo.CheckpointError):
            pass
    return problems + differ(values(other), before, "unchanged")


STEPS = {
    "momentum": lambda: [m.HeavyBall(0.9), m.LR(0.1)],
    "Adam": lambda: [m.Adam(), m.LR(0.01)],
    "RMSprop": lambda: [m.RMSprop(), m.LR(0.01)],
    "Adagrad": lambda: [m.Adagrad(), m.LR(0.01)],
    "Lion": lambda: [m.Lion(), m.LR(0.01)],
}


@check
def sharded_models_are_not_resized(rank):
    """Growing or shrinking a sharded layer raises GrowthError and changes no shape."""
    problems = []
    for kind in KINDS:
        net = wrap(kind, network(0))
        shapes = [param.shape for param in net.parameters()]
        for act in (particles.grow, particles.shrink):
            try:
                act(net, {"0.out": 2}, example=torch.zeros(1, 3, dtype=torch.float64))
                problems.append(f"{kind}: {act.__name__} was not refused")
            except particles.GrowthError as error:
                if "is sharded over processes" not in str(error):
                    problems.append(f"{kind}: {error}")
        if shapes != [param.shape for param in net.parameters()]:
            problems.append(f"{kind}: shapes have changed")
    return problems


@check
def steps_in_half_precision_equal_those_of_whole_models(rank):
    """Compare fused and unfused steps of sharded and whole models, with gradients whose squares underflow in float16."""
    problems = []
    for dtype in (torch.float16, torch.bfloat16):
        for name, make in STEPS.items():
            ends = {}
            for kind, fuse in (("plain", "auto"), ("fsdp2", "auto"), ("fsdp2", False)):
                net = wrap(kind, network(0).to(dtype))
                opt = mo.Optimizer(net, *make(), fuse=fuse, **({} if kind == "plain" else {"reduce": None}))
                for step in range(3):
                    for param in net.parameters():
                        param.grad = torch.full_like(param.detach(), 1e-4 * (step + 1))
                    opt.step()
                ends[kind, fuse] = {key: value.double() for key, value in values(net).items()}
            for key in (("fsdp2", "auto"), ("fsdp2", False)):
                problems += differ(ends[key], ends["plain", "auto"], f"{name} in {dtype}, {key}")
    return problems


@check
def small_steps_add_up_in_sharded_models(rank):
    """Check steps of 1e-4 in bfloat16: compensated and master weights equal a whole model's, stochastic rounding on average."""
    problems = []
    remedies = {"StochasticRounding": {}, "Kahan": {}, "master": {"master": "float32"}}
    for name, options in remedies.items():

        def make(net, reduce, name=name, options=options):
            last = [] if options else [getattr(m, name)()]
            return mo.Optimizer(net, m.Adam(), m.LR(1e-4), *last, reduce=reduce, **options)

        def train(net, opt, steps):
            for _ in range(steps):
                for param in net.parameters():
                    param.grad = torch.ones_like(param.detach())
                opt.step()

        nets = [wrap(kind, network(0).to(torch.bfloat16)) for kind in ("plain", "fsdp2", "fsdp2")]
        for net in nets:
            for param in net.parameters():
                param.data.fill_(1.0)
        opts = [make(net, "auto" if k == 0 else None) for k, net in enumerate(nets)]
        train(nets[0], opts[0], 200)
        train(nets[1], opts[1], 200)
        train(nets[2], opts[2], 90)
        again = make(nets[2], None)
        again.load_state_dict(opts[2].state_dict())
        train(nets[2], again, 110)
        whole, sharded, resumed = ({key: value.double() for key, value in values(net).items()} for net in nets)
        if any(not torch.equal(sharded[key], resumed[key]) for key in sharded):
            problems.append(f"{name}: a resumed run is another one")
        if name != "StochasticRounding":
            problems += differ(sharded, whole, name)
        mean = torch.cat([value.flatten() for value in sharded.values()]).mean().item()
        if abs(mean - 0.98) > 0.003:
            problems.append(f"{name}: {mean} in place of 0.98")
    return problems


@check
def relatives_keep_their_own_values_when_sharded(rank):
    """Assign a whole parameter where a relative's is sharded, and a sharded one where it is whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def cut(*numbers):
        return nn.Parameter(distribute_tensor(torch.tensor(numbers), mesh(), [Shard(0)]))

    net = mo.Module()
    net.w = cut(0.0, 0.0, 0.0)
    teacher = net.clone()
    with torch.no_grad():
        teacher.w.fill_(7)
    result = []
    for assigned in (nn.Parameter(torch.ones(4)), cut(2.0, 2.0, 2.0, 2.0, 2.0)):
        net.w = assigned
        result.append(full(teacher.touch().w).tolist())
    particles.rollback(net, 0)
    result += [full(net.w).tolist(), full(teacher.touch().w).tolist(), particles.diff(net, teacher).changed]
    expected = [[7, 7, 7, 1], [7, 7, 7, 1, 2], [0, 0, 0], [7, 7, 7], ["w"]]
    return [] if result == expected else [f"{result} in place of {expected}"]
