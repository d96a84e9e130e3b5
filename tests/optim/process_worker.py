"""Run one process of two: every check returns a list of differences from one process that has all the data."""

import copy
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_values import CHECKS, check, find_largest, full
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import moduli as mo
from moduli import m, optim, presets

STEPS = 3
# These form a matrix from the residuals of one process, so they are refused.
REFUSED = {"gauss_newton", "levenberg_marquardt"}
# One preset of each kind: pointwise, matrices, closures, Hessian-vector products, averages, estimates, refused.
QUICK = {
    *REFUSED,
    "adafactor",
    "adamw",
    "lbfgs",
    "muon",
    "newton_cg",
    "prodigy",
    "sam",
    "schedule_free",
    "soap",
    "spsa",
}
MORE = {
    "sophia often": lambda: [m.SophiaH(update_freq=1), m.LR(0.05)],
    "NystromPCG": lambda: [m.NystromPCG(rank=5), m.LR(0.5)],
    "ESGD": lambda: [m.ESGD(update_freq=1), m.LR(0.01)],
    "Newton by rows": lambda: [m.Newton(damping=1.0, hessian_method="autograd"), m.LR(0.5)],
    "Newton by differences": lambda: [m.Newton(damping=1.0, hessian_method="gfd_central"), m.LR(0.5)],
    "SubspaceNewton": lambda: [m.SubspaceNewton(sketch_size=3, sketch_type="rademacher", damping=1.0), m.LR(0.5)],
    "Dropout": lambda: [m.Adam(), m.Dropout(0.5), m.LR(0.05)],
    "RandomStepSize": lambda: [m.Adam(), m.RandomStepSize(), m.LR(0.05)],
    "MeZO": lambda: [m.MeZO(), m.LR(0.01)],
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def data(rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 3, dtype=torch.float64, generator=generator) * (1 + 3 * rank)
    return x, x.sum(1, keepdim=True).sin() * (1 + rank)


def train(model, make, x, y, **options):
    opt = mo.Optimizer(model, *make(), **options)
    if "reduce" in options:
        opt.binding.draws_alike = True
    losses = [float(opt.step(mo.closure(lambda: ((model(x) - y) ** 2).mean()))) for _ in range(STEPS)]
    return losses, [param.detach().clone() for param in model.parameters()]


def compare(rank, make):
    """Return differences between the two processes, and from one process with the data of both."""
    torch.manual_seed(100 + rank)  # a different seed in each process, as in programs that seed their data loaders
    losses, params = train(DistributedDataParallel(network()), make, *data(rank))
    torch.manual_seed(100)
    parts = [data(other) for other in range(2)]
    expected_losses, expected = train(
        network(), make, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), reduce=None
    )
    first = [param.clone() for param in params]
    for param in first:
        dist.broadcast(param, 0)
    apart = find_largest([(a - b).abs().max() for a, b in zip(params, first, strict=True)])
    away = find_largest([(a - b).abs().max() / (1 + b.abs().max()) for a, b in zip(params, expected, strict=True)])
    start = network().state_dict().values()
    moved = find_largest([(a - b).abs().max() for a, b in zip(params, start, strict=True)])
    problems = []
    if apart != 0:
        problems.append(f"processes are {apart:.1e} apart")
    if not away <= 1e-9:
        problems.append(f"{away:.1e} away from one process; losses {losses} for {expected_losses}")
    if moved == 0:
        problems.append("nothing moved")
    return problems


@check
def every_preset_under_ddp(rank):
    # muonclip needs the attention layers of its model. `--all` runs every other preset.
    names = [name for name in presets.__all__ if name != "muonclip"]
    if "MODULI_ALL" not in os.environ:
        names = [name for name in names if name in QUICK]
    rows = {name: lambda name=name: [getattr(presets, name)()] for name in names}
    problems = []
    for name, make in {**rows, **MORE}.items():
        try:
            differences = compare(rank, make)
        except optim.ChainError as error:
            differences = [] if name in REFUSED and "residuals" in str(error) else [f"refused: {error}"]
        except Exception as error:  # noqa: BLE001 - reported to the test
            differences = [repr(error)]
        else:
            differences += ["was not refused"] if name in REFUSED else []
        problems += [f"{name}: {what}" for what in differences]
    return problems


class Labelled(nn.Module):
    """A module whose output is a labelled tensor."""

    def __init__(self, unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.double()
        if unused:
            self.unused = nn.Linear(2, 2).double()

    def forward(self, x):
        return mo.tensor(self.head(self.body(x).tanh()), "b out")


def labelled_loss(model, x):
    return (model(x) ** 2).mean().data


def labelled_reference(unused=False):
    net = Labelled(unused)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.cat([data(other)[0] for other in range(2)])
    for _ in range(3):
        opt.zero_grad()
        labelled_loss(net, x).backward()
        opt.step()
    return [param.detach() for param in net.parameters()]


def train_labelled(model, opt, rank):
    for _ in range(3):
        opt.zero_grad()
        labelled_loss(model, data(rank)[0]).backward()
        opt.step()


def differing(params, expected, what):
    away = find_largest([(a - b).abs().max() for a, b in zip(params, expected, strict=True) if b.numel()])
    return [] if away < 1e-9 else [f"{what}: {away:.1e} away from one process"]


@check
def labelled_outputs_under_fully_shard(rank):
    from torch.distributed.fsdp import fully_shard

    net = Labelled()
    fully_shard(net)
    train_labelled(net, torch.optim.SGD(net.parameters(), lr=0.1), rank)
    return differing([full(param) for param in net.parameters()], labelled_reference(), "fully_shard")


@check
def labelled_outputs_under_fsdp1(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Labelled(), device_id=torch.device("cpu"), use_orig_params=True)
    train_labelled(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return differing([full(param).clone() for param in model.parameters()], labelled_reference(), "FSDP1")


@check
def labelled_outputs_with_unused_parameters(rank):
    model = DistributedDataParallel(Labelled(unused=True), find_unused_parameters=True)
    train_labelled(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return differing([full(param) for param in model.parameters()], labelled_reference(unused=True), "unused")


@check
def populations_are_not_sharded_implicitly(rank):
    pop = mo.Population.of(network(), 3)
    problems = []
    try:
        DistributedDataParallel(pop)
        problems.append("a population was taken for a module")
    except AttributeError as error:
        if "pop.shard(mesh)" not in str(error):
            problems.append(str(error))
    try:
        mo.Optimizer(pop, m.Adam(), m.LR(0.1))
        problems.append("accepted without `reduce` or a shard")
    except optim.ChainError as error:
        if "pop.shard(mesh)" not in str(error):
            problems.append(str(error))
    mo.Optimizer(pop, m.Adam(), m.LR(0.1), reduce=None)
    for reduce in ("mean", "sum"):
        try:
            mo.Optimizer(pop, m.Adam(), m.LR(0.1), reduce=reduce)
            problems.append(f"accepted reduce={reduce} for a population")
        except optim.ChainError as error:
            problems += [] if "pop.shard(mesh)" in str(error) else [str(error)]
    return problems


@check
def a_plain_closure_is_averaged(rank):
    """The optimizer differentiates the returned loss if the closure does not call backward."""
    model = DistributedDataParallel(network())
    x, y = data(rank)
    opt = mo.Optimizer(model, m.LR(0.1))
    opt.step(lambda: ((model(x) - y) ** 2).mean())
    net = network()
    parts = [data(other) for other in range(2)]
    loss = sum(((net(x) - y) ** 2).mean() for x, y in parts) / 2
    loss.backward()
    expected = [param.detach() - 0.1 * param.grad for param in net.parameters()]
    return differing([param.detach() for param in model.parameters()], expected, "closure")


@check
def sharded_beside_whole_parameters_step_alike(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def place(tensor, sharded):
        return distribute_tensor(tensor, mesh, [Shard(0)]) if sharded else tensor

    def run(make, sharded):
        generator = torch.Generator().manual_seed(0)
        # Some shards are empty in one process; vectors and scalars (a norm's scale) stay whole.
        shapes = [(5, 3), (1, 3), (3, 2, 2), (0, 3), (1,), (5,), ()]
        cuts = [sharded and len(shape) > 1 for shape in shapes]
        draws = [[torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes] for _ in range(4)]
        params = [nn.Parameter(place(value.clone(), cut)) for value, cut in zip(draws[0], cuts, strict=True)]
        opt = mo.Optimizer(params, *make(), **({} if sharded else {"reduce": None}))
        for grads in draws[1:]:
            for param, grad, cut in zip(params, grads, cuts, strict=True):
                param.grad = place(grad, cut)
            opt.step()
        again = mo.Optimizer(params, *make(), **({} if sharded else {"reduce": None}))
        again.load_state_dict(opt.state_dict())
        for param, grad, cut in zip(params, draws[0], cuts, strict=True):
            param.grad = place(grad, cut)
        again.step()
        return [full(param) for param in params]

    problems = []
    for name, make in {
        "LR": lambda: [m.LR(0.1)],
        "AdamW": lambda: [m.Adam(), m.WeightDecay(0.01), m.LR(0.1)],
        "ClipNorm": lambda: [m.ClipNorm(0.5), m.Adam(), m.LR(0.1)],
        "SOAP": lambda: [m.SOAP(), m.LR(0.1)],
        "Muon": lambda: [presets.muon()],
        "Adafactor": lambda: [m.Adafactor(), m.LR(0.1)],
        "TrustRatio": lambda: [m.Adam(), m.TrustRatio(), m.LR(0.1)],
        "PSGD": lambda: [m.PSGDKronWhiten(), m.LR(0.1)],
    }.items():
        problems += differing(run(make, True), run(make, False), name)
    return problems


class NormalizedSOAP(mo.Optimizer):
    """An optimizer class with fixed links, as ZeroRedundancyOptimizer takes."""

    links = (m.Normalize, m.SOAP)

    def __init__(self, params, **options):
        super().__init__(params, *[link() for link in self.links], m.LR(0.1), **options)


class OnlySOAP(NormalizedSOAP):
    links = (m.SOAP,)


@check
def links_over_all_parameters_are_refused_in_zero_redundancy(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    try:
        ZeroRedundancyOptimizer(network().parameters(), optimizer_class=NormalizedSOAP)
        return ["a norm of some parameters was not refused"]
    except optim.ChainError as error:
        problems = [] if "ZeroRedundancyOptimizer" in str(error) and "Normalize" in str(error) else [str(error)]
    model, other = network(), network()
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=OnlySOAP)
    train_plain(model, opt)
    train_plain(other, OnlySOAP(other.parameters()))
    return problems + differing([p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()], "Z")


@check
def replicated_flat_shards_are_refused(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def wrap(strategy):
        return FullyShardedDataParallel(
            network(), device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=strategy
        )

    mo.Optimizer(wrap(ShardingStrategy.FULL_SHARD).parameters(), m.Adam(), m.LR(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch recommends DistributedDataParallel instead
        whole = wrap(ShardingStrategy.NO_SHARD)
    problems = []
    for params, says in ((whole.parameters(), "the module itself"), (whole, "NO_SHARD")):
        try:
            mo.Optimizer(params, m.ClipNorm(1.0), m.LR(0.1))
            problems.append("shards that all processes hold were not refused")
        except optim.ChainError as error:
            problems += [] if says in str(error) else [str(error)]
    return problems


@check
def files_of_two_processes_resume(rank):
    import tempfile

    problems = []
    net = network()
    opt = mo.Optimizer(net, m.Adam(), m.LR(0.1))
    train_plain(net, opt)
    if "0.weight" not in opt.named_state_dict()["state"]:
        problems.append("state is not by name")
    with tempfile.TemporaryDirectory() as folder:
        mo.save(f"{folder}/one.safetensors", net, optimizer=opt)
        other = network(1)
        again = mo.Optimizer(other, m.Adam(), m.LR(0.1))
        mo.load(f"{folder}/one.safetensors", other, optimizer=again)
        train_plain(net, opt)
        train_plain(other, again)
        problems += differing([p.detach() for p in other.parameters()], [p.detach() for p in net.parameters()], "file")
    return problems


@check
def optimizers_of_sharded_models_are_not_copied(rank):
    from torch.distributed.fsdp import fully_shard

    sharded = network()
    fully_shard(sharded)
    try:
        copy.deepcopy(mo.Optimizer(sharded, m.LR(0.1)))
        return ["copying was not refused"]
    except (ValueError, TypeError, RuntimeError) as error:
        return [] if "DTensor" in str(error) or "pieces" in str(error) else [repr(error)]


def train_plain(net, opt):
    x, y = data(0)
    for _ in range(2):
        opt.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        opt.step()


def main(rank, count, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=int(count))
    problems = {}
    for function in CHECKS:
        try:
            problems[function.__name__] = function(rank)
        except Exception:  # noqa: BLE001 - reported to the test
            problems[function.__name__] = [traceback.format_exc()]
    Path(out).write_text(repr(problems))
    dist.barrier()  # `launch` ends the process: stopping gloo's threads while others leave can crash them


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
