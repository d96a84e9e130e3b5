"""Matrix-preconditioned links: a step of SOAP, Shampoo, Muon and PSGD against the same optimizer of other libraries.

The parameters are a 256 x 256 and a 512 x 128 matrix, for SOAP with their biases, with given gradients, in float32 on one
thread. Bases, roots and factors are learnt at every step, or at every tenth. Like for like: the same rule with the same
settings on the same tensors, nothing compiled; what still differs is said in the name of the row. A peer that is not
installed, or that fails, has no row. The time is that of the processor, so that other processes do not count, and the
median over turns that the libraries take.
"""

import contextlib
import gc
import io
import statistics
import time
import warnings

import torch

import moduli as mo
from moduli import m

MATRICES = [(256, 256), (512, 128)]
ALL = [(256, 256), (256,), (512, 128), (512,)]
STEPS = 10


def steps(make, shapes, count):
    """Return a function that makes some steps of an optimizer that has already made as many.

    Args:
        make: A function of the parameters that returns the optimizer.
        shapes: The shapes of the parameters.
        count: The number of steps of a call.
    """
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.1) for shape in shapes]
    grads = [[torch.randn(p.shape, generator=generator) for p in params] for _ in range(STEPS)]
    opt = make(params)

    def call():
        for k in range(count):
            for param, grad in zip(params, grads[k % STEPS], strict=True):
                param.grad = grad.clone()
            opt.step()

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        call()
    return call


def turns(calls, rounds):
    """Return the processor seconds per call: the median over rounds in one thread, each beginning with another candidate."""
    names, taken = list(calls), {name: [] for name in calls}
    gc.disable()
    for turn in range(rounds):
        for k in range(len(names)):
            name = names[(turn + k) % len(names)]
            start = time.process_time()
            calls[name]()
            taken[name].append(time.process_time() - start)
        gc.collect()
    gc.enable()
    return {name: statistics.median(times) for name, times in taken.items()}


def peers():
    """Return the installed libraries, by name."""
    libraries = {"torch": torch}
    for name in ("torchzero", "pytorch_optimizer", "heavyball"):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            libraries[name] = __import__(name)
    if "heavyball" in libraries:
        libraries["heavyball"].utils.compile_mode = None
    return libraries


def soap(libraries, every):
    yield (
        "moduli",
        lambda p: mo.Optimizer(p, m.SOAP(precond_freq=every, precondition_1d=False), m.LR(1e-3)),
    )
    if "torchzero" in libraries:
        tz = libraries["torchzero"]
        yield (
            "torchzero",
            lambda p: tz.Optimizer(p, tz.m.SOAP(precond_freq=every, precondition_1d=False), tz.m.LR(1e-3)),
        )
    if "pytorch_optimizer" in libraries:
        po = libraries["pytorch_optimizer"]
        yield "pytorch_optimizer", lambda p: po.SOAP(p, 1e-3, weight_decay=0.0, precondition_frequency=every)
    if "heavyball" in libraries:
        hb = libraries["heavyball"]
        yield (
            "heavyball",
            lambda p: hb.SOAP(
                p, 1e-3, betas=(0.95, 0.95), weight_decay=0.0, precondition_frequency=every, merge_dims=False
            ),
        )


def shampoo(libraries, every):
    yield "moduli", lambda p: mo.Optimizer(p, m.Shampoo(precond_freq=every), m.LR(1e-3))
    if "torchzero" in libraries:
        tz = libraries["torchzero"]
        yield (
            "torchzero",
            lambda p: tz.Optimizer(p, tz.m.Shampoo(precond_freq=every, merge_small=False), tz.m.LR(1e-3)),
        )
    if "pytorch_optimizer" in libraries:
        po = libraries["pytorch_optimizer"]
        yield "pytorch_optimizer, by SVD", lambda p: po.Shampoo(p, 1e-3, preconditioning_compute_steps=every)


class InFloat32:
    """An optimizer whose steps run without bfloat16, for peers that always use it, which this processor lacks."""

    def __init__(self, opt):
        self.opt = opt

    def step(self):
        convert = torch.Tensor.bfloat16
        torch.Tensor.bfloat16 = lambda tensor, *args, **settings: tensor
        try:
            self.opt.step()
        finally:
            torch.Tensor.bfloat16 = convert


def muon(libraries, every):
    yield "moduli", lambda p: mo.Optimizer(p, m.NAG(0.95, lerp=True), m.Orthogonalize(), m.LR(1e-3))
    peers = {}
    if hasattr(torch.optim, "Muon"):
        peers["torch"] = lambda p: torch.optim.Muon(p, 1e-3, weight_decay=0.0)
    if "torchzero" in libraries:
        tz = libraries["torchzero"]
        peers["torchzero"] = lambda p: tz.Optimizer(p, tz.m.NAG(0.95, lerp=True), tz.m.Orthogonalize(), tz.m.LR(1e-3))
    if "pytorch_optimizer" in libraries:
        po = libraries["pytorch_optimizer"]
        peers["pytorch_optimizer"] = lambda p: po.Muon(
            [{"params": list(p), "use_muon": True}], lr=1e-3, weight_decay=0.0
        )
    if "heavyball" in libraries:
        hb = libraries["heavyball"]
        peers["heavyball"] = lambda p: hb.Muon(p, 1e-3, betas=(0.95, 0.99))
    for name, make in peers.items():
        yield f"{name}, in bfloat16 as it comes", make
        if name != "pytorch_optimizer":  # which converts to bfloat16 by another function
            yield f"{name}, in float32", lambda p, make=make: InFloat32(make(p))


def wide_muon(libraries, every):
    """Yield Muon on the matrices of larger models, where bfloat16 takes minutes on a processor that lacks it."""
    yield from ((name, make) for name, make in muon(libraries, every) if name in ("moduli", "torch, in float32"))


def psgd(libraries, every):
    yield "moduli", lambda p: mo.Optimizer(p, m.PSGDKronWhiten(update_probability=1 / every), m.LR(1e-3))
    if "torchzero" in libraries:
        tz = libraries["torchzero"]
        yield (
            "torchzero",
            lambda p: tz.Optimizer(p, tz.m.PSGDKronWhiten(update_probability=1 / every), tz.m.LR(1e-3)),
        )
    if "pytorch_optimizer" in libraries:
        po = libraries["pytorch_optimizer"]
        yield (
            "pytorch_optimizer, triangular factors",
            lambda p: po.Kron(p, 1e-3, momentum=0.0, pre_conditioner_update_probability=1 / every),
        )
    if "heavyball" in libraries:
        hb = libraries["heavyball"]
        yield (
            "heavyball",
            lambda p: hb.PSGDPRO(p, 1e-3, preconditioner_update_probability=1 / every, exp_avg_input=False),
        )


CASES = (
    # Name, candidates, shapes, steps between updates of the preconditioner, steps per turn.
    ("SOAP", soap, ALL, 1, 3),
    ("SOAP", soap, ALL, 10, 10),
    ("Shampoo", shampoo, MATRICES, 1, 2),
    ("Shampoo", shampoo, MATRICES, 10, 10),
    ("Muon", muon, MATRICES, 1, 1),
    ("Muon, 1024 x 1024", wide_muon, [(1024, 1024)], 1, 1),
    ("PSGD", psgd, MATRICES, 1, 5),
    ("PSGD", psgd, MATRICES, 10, 30),  # updates are random: many steps, so that each turn has about as many updates
)


def table(rounds=7):
    libraries = peers()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for name, candidates, shapes, every, count in CASES:
        calls = {}
        for peer, make in candidates(libraries, every):
            try:
                calls[peer] = steps(make, shapes, count)
            except Exception as error:
                if peer == "moduli":
                    raise
                print(f"{name}: {peer} does not run: {type(error).__name__}: {str(error)[:100]}")
        times = turns(calls, rounds)
        often = "at every step" if every == 1 else f"at every {every}th step"
        title = name if candidates in (muon, wide_muon) else f"{name}, learning {often}"
        for peer in calls:
            if peer != "moduli":
                value = times["moduli"] / times[peer]
                rows.append({"name": f"{title} / {peer}", "value": value, "bar": 1.0, "unit": "x", "ok": value <= 1.0})
        one = times["moduli"] / count * 1e3
        rows.append({"name": f"{title}: one step", "value": one, "bar": None, "unit": "ms", "ok": True})
    torch.set_num_threads(threads)
    return rows


if __name__ == "__main__":
    for row in table():
        print(f"{row['name']:72} {row['value']:.3f} {row['unit']}")
