"""Matrix-preconditioned links: a step of SOAP, Shampoo, Muon and PSGD against the same optimizer of other libraries.

A call is ten steps on two layers of 128 x 128, one of 128 x 512 and their biases, with given gradients, so that each has
one refresh of its bases or roots (at every tenth step everywhere). Everything runs in float32 on one thread. A peer that
is not installed, or that fails, has no row. Like for like: the same rule on the same tensors with the same frequency; what
still differs is said in the name of the row.
"""

import contextlib
import io
import warnings

import torch

import moduli as mo
from _timing import interleaved
from moduli import m

SHAPES = [(128, 128), (128,), (128, 128), (128,), (512, 128), (512,)]
STEPS = 10


def problem(shapes=None):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator) * 0.1) for s in shapes or SHAPES]
    grads = [[torch.randn(p.shape, generator=generator) for p in params] for _ in range(STEPS)]
    return params, grads


def steps(make, shapes=None):
    """A function that makes ten steps; the state is that of an optimizer that has already made some."""
    params, grads = problem(shapes)
    opt = make(params)

    def call():
        for given in grads:
            for param, grad in zip(params, given, strict=True):
                param.grad = grad.clone()
            opt.step()

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        call()
    return call


def ours(*make):
    return lambda params: mo.Optimizer(params, *[link() for link in make])


MATRICES = [shape for shape in SHAPES if len(shape) == 2]


def candidates():
    """For each algorithm: our chain, the peers by name, and the shapes (None: all)."""
    torchzero = pytorch_optimizer = heavyball = None
    with contextlib.suppress(ImportError):
        import torchzero
    with contextlib.suppress(ImportError):
        import pytorch_optimizer
    with contextlib.suppress(ImportError):
        import heavyball
    tables = {
        "SOAP": (ours(lambda: m.SOAP(precond_freq=10, precondition_1d=False), lambda: m.LR(1e-3)), {}, None),
        "Shampoo": (ours(lambda: m.Shampoo(precond_freq=10), lambda: m.LR(1e-3)), {}, MATRICES),
        "Muon": (ours(lambda: m.NAG(0.95, lerp=True), m.Orthogonalize, lambda: m.LR(1e-3)), {}, MATRICES),
        "PSGD": (ours(m.PSGDKronWhiten, lambda: m.LR(1e-3)), {}, MATRICES),
    }
    if hasattr(torch.optim, "Muon"):
        tables["Muon"][1]["torch"] = lambda p: torch.optim.Muon(p, 1e-3)
    if torchzero is not None:
        tz = torchzero
        chain = getattr(tz, "Optimizer", None) or tz.Modular
        tables["SOAP"][1]["torchzero"] = lambda p: chain(
            p, tz.m.SOAP(precond_freq=10, precondition_1d=False), tz.m.LR(1e-3)
        )
        tables["Shampoo"][1]["torchzero"] = lambda p: chain(
            p, tz.m.Shampoo(precond_freq=10, merge_small=False), tz.m.LR(1e-3)
        )
        tables["Muon"][1]["torchzero"] = lambda p: chain(p, tz.m.NAG(0.95), tz.m.Orthogonalize(), tz.m.LR(1e-3))
        tables["PSGD"][1]["torchzero"] = lambda p: chain(p, tz.m.PSGDKronWhiten(), tz.m.LR(1e-3))
    if pytorch_optimizer is not None:
        po = pytorch_optimizer
        tables["SOAP"][1]["pytorch_optimizer"] = lambda p: po.SOAP(p, 1e-3, precondition_frequency=10)
        tables["Shampoo"][1]["pytorch_optimizer"] = lambda p: po.Shampoo(p, 1e-3, preconditioning_compute_steps=10)
        tables["Muon"][1]["pytorch_optimizer"] = lambda p: po.Muon([{"params": list(p), "use_muon": True}], lr=1e-3)
        tables["PSGD"][1]["pytorch_optimizer"] = lambda p: po.Kron(p, 1e-3, pre_conditioner_update_probability=1.0)
    if heavyball is not None:
        hb = heavyball
        hb.utils.compile_mode = None
        tables["SOAP"][1]["heavyball"] = lambda p: hb.SOAP(p, 1e-3, precondition_frequency=10)
        tables["Muon"][1]["heavyball"] = lambda p: hb.Muon(p, 1e-3)
        tables["PSGD"][1]["heavyball"] = lambda p: hb.PSGDKron(p, 1e-3, preconditioner_update_probability=1.0)
    return tables


def table():
    rows = []
    for name, (own, peers, shapes) in candidates().items():
        calls = {"moduli": steps(own, shapes)}
        for peer, make in peers.items():
            try:
                calls[peer] = steps(make, shapes)
            except Exception as error:  # noqa: BLE001 - a peer may fail in any way; the row is left out and the reason printed
                print(f"{name}: {peer} does not run: {type(error).__name__}: {str(error)[:100]}")
        times = interleaved(calls, rounds=7, number=1)
        for peer in calls:
            if peer != "moduli":
                value = times["moduli"] / times[peer]
                label = f"{name}, ten steps / {peer}"
                rows.append({"name": label, "value": value, "bar": 1.0, "unit": "x", "ok": value <= 1.0})
        rows.append(
            {"name": f"{name}, one step", "value": times["moduli"] / STEPS * 1e3, "bar": None, "unit": "ms", "ok": True}
        )
    return rows


if __name__ == "__main__":
    for row in table():
        print(f"{row['name']:45} {row['value']:.3f} {row['unit']}")
