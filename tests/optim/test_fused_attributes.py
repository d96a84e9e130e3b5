"""A fused step reads attributes at every step: a change of any plain one between steps gives what `fuse=False` gives."""

import copy

import pytest
import torch

from laws.registry import Row, collect
from moduli import Optimizer, m
from moduli.optim import TensorTransform
from moduli.testing._problems import LawProblem

PLAIN = (bool, int, float, str)
# Declarations about the link, which may not be wrong, and attributes that the code around the hooks uses.
NOT_READ = ("_", "elementwise", "uses_dtype", "counts", "needs", "members", "vector_state", "sharded", "keeps_outside")


class Scale(TensorTransform):
    """Multiplies by an attribute, a class attribute, an entry of a dict and a setting."""

    elementwise = True
    shared = 1.0
    config = {"rate": 1.0}

    def __init__(self):
        super().__init__({"power": 1.0})
        self.s = 1.0
        self.flip = False

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        out = tensor * self.s * self.shared * self.config["rate"] * setting["power"]
        return -out if self.flip else out


ROWS = [Row("Scale", lambda: [Scale(), m.LR(0.1)]), *collect()]


def pointwise(row):
    links = [link for top in row.links() for _, link in top.links()]
    return (
        not row.closure
        and not row.random
        and not row.members
        and any(isinstance(link, TensorTransform) and link.elementwise for link in links)
    )


def attributes(link):
    """Return the plain attributes of a link, including those of its classes."""
    values = {name: value for base in reversed(type(link).__mro__) for name, value in vars(base).items()}
    values |= vars(link)
    return {k: v for k, v in values.items() if isinstance(v, PLAIN) and not k.startswith(NOT_READ)}


def change_value(value):
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value * 0.5 + 0.25 if isinstance(value, float) else value


def train_with_change(row, where, name, fuse):
    """Return the parameters after steps between which one attribute changes, or the type of the error raised.

    Args:
        row: The row of the law book.
        where: The index of the link.
        name: The attribute.
        fuse: The option of the optimizer.
    """
    at = LawProblem()
    opt = Optimizer(at.params, *row.links(), fuse=fuse)
    links = [link for top in opt.modules for _, link in top.links()]
    try:
        for t in range(4):
            if t == 2:
                setattr(links[where], name, change_value(attributes(links[where])[name]))
            at.backward()
            opt.step()
    except Exception as error:  # noqa: BLE001 - the type of the error is compared
        return type(error)
    return [param.detach().clone() for param in at.params]


@pytest.mark.parametrize("row", [row for row in ROWS if pointwise(row)], ids=str)
def test_attributes_are_read_at_every_step(row, monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "foreach")  # reads are detected before a form is chosen, so one form is enough
    links = [link for top in copy.deepcopy(row.links()) for _, link in top.links()]
    # SOAP's first covariances have equal eigenvalues, whose eigenvectors depend on the last digit of the parameters.
    rtol = 1e-3 if any(type(link).__name__ == "SOAP" for link in links) else 1e-10
    for where, link in enumerate(links):
        for name in attributes(link):
            ours, theirs = (train_with_change(row, where, name, fuse) for fuse in ("auto", False))
            said = f"{type(link).__name__}.{name}"
            if isinstance(ours, type) or isinstance(theirs, type):
                assert ours is theirs, said
                continue
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(
                    a, b, rtol=rtol, atol=1e-12, equal_nan=True, msg=lambda t, s=said: f"{s}: {t}"
                )


@pytest.mark.parametrize("form", ["c", "foreach", "plain"])
def test_fused_forms_read_attributes_at_every_step(form, monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", form)
    for change in (
        lambda link, v: setattr(link, "s", v),
        lambda link, v: setattr(Scale, "shared", v),
        lambda link, v: Scale.config.update(rate=v),
    ):
        w = torch.nn.Parameter(torch.zeros(2))
        opt = Optimizer([w], link := Scale())
        moved = []
        try:
            for step in range(1, 5):
                change(link, float(step))
                w.grad = torch.ones(2)
                before = w.detach().clone()
                opt.step()
                moved.append(float((before - w.detach())[0]))
        finally:
            change(link, 1.0)
        assert moved == [1.0, 2.0, 3.0, 4.0]
