"""Run one process of three: two train a sharded model, the third an ordinary one, and each loads what the others saved."""

import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

import moduli as mo
from moduli import m, presets

CHAINS = {
    "clip": lambda: [m.ClipNorm(0.5), m.Adam(), m.WeightDecay(0.01), m.LR(0.05)],
    "soap": lambda: [m.SOAP(), m.LR(0.05)],
    "muon": lambda: [presets.muon(lr=0.05)],
    "prodigy": lambda: [m.Prodigy(d0=0.01), m.LR(1.0)],
    # torch's checkpoints take a first step with zero gradients: these chains would fail in it, or move parameters by it.
    "lbfgs": lambda: [m.LBFGS(), m.StrongWolfe()],
    "sam": lambda: [m.SAM(), m.Adam(), m.LR(0.05)],
    "adafactor": lambda: [m.Adafactor(), m.LR(0.05)],
    "decay": lambda: [m.WeightDecay(0.1), m.Normalize(), m.LR(lambda step: 0.05)],
    "averaged": lambda: [m.Averaging(3), m.LR(0.05)],  # stores a deque of local shards
}
# Under FSDP1 parameters have no shapes, so links that need whole tensors are refused.
FLAT = ["clip", "prodigy"]
PAIR = 2


def network(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "fsdp2":
        fully_shard(net)
    return net


def start(kind, name):
    model = network(kind)
    return model, mo.Optimizer(model, *CHAINS[name]())


def train(model, opt):
    """Make three steps on the same data in every process, so that runs differ only by what was loaded."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    for _ in range(3):
        opt.step(mo.closure(lambda: (model(x) - x[:, :2].sin()).square().mean()))
    opt.zero_grad()


def gather_params(model):
    """Return whole copies of all parameters."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return [param.detach().clone() for param in model.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def states(model, opt):
    """Return the state dicts of the model and the optimizer, as torch.distributed.checkpoint takes them."""
    return {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}


def save(kind, name, folder):
    """Train, save a checkpoint, train on, and save the parameters that runs from the checkpoint must reach.

    Args:
        kind: "plain", "fsdp1" or "fsdp2".
        name: The chain.
        folder: The directory of all checkpoints.
    """
    model, opt = start(kind, name)
    states(model, opt)  # querying the state before the first step must not change the run
    train(model, opt)
    dcp.save(states(model, opt), checkpoint_id=folder / kind / name)
    train(model, opt)
    torch.save(gather_params(model), folder / kind / f"{name}.pt")


def load(kind, name, folder, saved, expected=None):
    """Load a checkpoint into an optimizer that never stepped; return a list of differences after more steps.

    Args:
        kind: How the model is wrapped here.
        name: The chain.
        folder: The directory of all checkpoints.
        saved: The kind of the checkpoint.
        expected: The kind whose parameters must be reached, if it is not `saved`.
    """
    model, opt = start(kind, name)
    state = states(model, opt)
    dcp.load(state, checkpoint_id=folder / saved / name)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["opt"])
    return go_on(model, opt, folder / (expected or saved) / f"{name}.pt", f"{name}, {saved} to {kind}")


def go_on(model, opt, expected, what):
    """Train on and return a list of differences from the saved run.

    Args:
        model: The model.
        opt: Its optimizer.
        expected: The file with the parameters to reach.
        what: The name of the check.
    """
    problems = [] if opt.current_step == 3 else [f"{what}: step {opt.current_step}"]
    train(model, opt)
    expected = torch.load(expected, weights_only=True)
    pairs = zip(gather_params(model), expected, strict=True)
    away = float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())  # NaN if any difference is
    return problems + ([] if away < 1e-9 else [f"{what}: {away:.1e} away from the run that was saved"])


def pass_on(name, folder):
    """Load in one process the checkpoint of two, save it again, and return a list of differences after more steps."""
    model, opt = start("plain", name)
    state = states(model, opt)
    dcp.load(state, checkpoint_id=folder / "fsdp2" / name)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["opt"])
    dcp.save(states(model, opt), checkpoint_id=folder / "again" / name)
    return go_on(model, opt, folder / "fsdp2" / f"{name}.pt", f"{name}, fsdp2 to plain")


def use_whole_states(name, folder):
    """Check torch's options: `full_state_dict` resumes; a flattened state, which holds tensors only, is refused."""
    whole, flat = StateDictOptions(full_state_dict=True), StateDictOptions(flatten_optimizer_state_dict=True)
    model, opt = start("fsdp2", name)
    train(model, opt)
    saved = get_model_state_dict(model, options=whole), get_optimizer_state_dict(model, opt, options=whole)
    flattened = get_optimizer_state_dict(model, opt, options=flat)
    other, again = start("fsdp2", name)
    problems = []
    try:
        set_optimizer_state_dict(other, again, flattened, options=flat)
        problems.append(f"{name}: a flattened state was not refused")
    except ValueError as error:
        problems += [] if "flatten_optimizer_state_dict" in str(error) else [f"{name}: {error}"]
    other, again = start("fsdp2", name)
    set_model_state_dict(other, saved[0], options=whole)
    set_optimizer_state_dict(other, again, saved[1], options=whole)
    return problems + go_on(other, again, folder / "fsdp2" / f"{name}.pt", f"{name}, whole")


def use_fsdp1(name, folder):
    """Check FSDP1's functions on sharded state dicts.

    Its full state dicts on the CPU are wrong for torch's optimizers too: they share one buffer.
    """
    model, opt = start("fsdp1", name)
    train(model, opt)
    other, again = start("fsdp1", name)
    for each in (model, other):
        FullyShardedDataParallel.set_state_dict_type(each, StateDictType.SHARDED_STATE_DICT)
    values, state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, opt)
    other.load_state_dict(values)
    again.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, again, state))
    return go_on(other, again, folder / "fsdp1" / f"{name}.pt", f"{name}, optim_state_dict")


def wait(path):
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.1)
    raise TimeoutError(f"{path} is not there after ten minutes")


def run_pair(rank, store, folder, collect):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=PAIR, timeout=timedelta(seconds=600)
    )
    cases = [("fsdp2", name) for name in CHAINS] + [("fsdp1", name) for name in FLAT]
    for kind, name in cases:
        save(kind, name, folder)
    dist.barrier()
    (folder / "saved by two").touch()
    for kind, name in cases:
        collect(load, kind, name, folder, kind)
    for name in ("clip", "soap", "lbfgs", "averaged"):
        collect(use_whole_states, name, folder)
    for name in FLAT:
        collect(use_fsdp1, name, folder)
    wait(folder / "saved by one")
    for name in CHAINS:
        collect(load, "fsdp2", name, folder, "plain")
        collect(load, "fsdp2", name, folder, "again", "fsdp2")
    dist.barrier()  # `launch` ends the process: stopping gloo's threads while others leave can crash them


def run_alone(folder, collect):
    for name in CHAINS:
        save("plain", name, folder)
    wait(folder / "saved by two")
    for name in CHAINS:
        collect(pass_on, name, folder)
    (folder / "saved by one").touch()
    for name in FLAT:
        collect(load, "plain", name, folder, "fsdp1")


def main(rank, count, store, folder, out):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    problems = []

    def collect(check, *arguments):
        try:
            problems.extend(check(*arguments))
        except Exception:  # noqa: BLE001 - reported to the test
            problems.append(f"{check.__name__} {arguments}: {traceback.format_exc()}")

    folder = Path(folder)
    for kind in ("plain", "fsdp1", "fsdp2"):
        (folder / kind).mkdir(exist_ok=True)
    if int(rank) < PAIR:
        run_pair(int(rank), store, folder, collect)
    else:
        run_alone(folder, collect)
    Path(out).write_text(repr(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
