"""A repeated bound call compares its lists in C; any difference falls back to the full checks."""

import pytest
import torch

from moduli import kernels


def descend(p, g, m, lr):
    m.mul_(0.5).add_(g)
    p.sub_(m * lr)


def make(sizes=(100, 1, 5)):
    """Return a bound call after two runs, and its lists; memory has one more element before each parameter."""
    params, moments = ([torch.arange(n + 1.0)[1:] for n in sizes] for _ in range(2))
    bound = kernels.fuse(descend, private=["m"]).bind(m=moments)
    for _ in range(2):
        bound(params, [torch.ones(n) for n in sizes], 0.25)
    return bound, params, moments


def expect(params, moments, grads, lr=0.25):
    """Return what torch computes on copies.

    Args:
        params: The parameters.
        moments: The moments.
        grads: The gradients.
        lr: The step size.
    """
    params, moments = [p.clone() for p in params], [m.clone() for m in moments]
    grads = [g.clone() for g in grads]
    for p, g, m in zip(params, grads, moments, strict=True):
        descend(p, g, m, lr)
    return params, moments


def shift(param):
    """Return a gradient that overlaps the parameter, shifted by one element."""
    return param.as_strided(param.shape, param.stride(), param.storage_offset() - 1)


GRADS = {
    "new": lambda p: torch.full_like(p, 3.0),
    "the parameter itself": lambda p: p,
    "the parameter, shifted": shift,
    "every second number": lambda p: torch.arange(float(2 * len(p)))[::2],
    "negated": lambda p: torch.complex(torch.zeros(len(p)), p.clone()).conj().imag,
    "negated and contiguous": lambda p: torch._neg_view(p.clone()),
    "double": lambda p: torch.ones(len(p), dtype=torch.float64),
    "a parameter": lambda p: torch.nn.Parameter(torch.ones(len(p))),
}


@pytest.mark.parametrize("kind", GRADS)
@torch.no_grad()
def test_any_gradient_after_a_warm_call(monkeypatch, kind):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    bound, params, moments = make()
    assert bound._warm is not None
    for _ in range(2):
        grads = [GRADS[kind](param) for param in params]
        expected = expect(params, moments, grads)
        bound(params, grads, 0.25)
        torch.testing.assert_close((params, moments), expected)


@torch.no_grad()
def test_changed_lists_after_a_warm_call(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    bound, params, moments = make()
    params[0].data = torch.arange(101.0)[1:]  # new memory, which the gradient overlaps
    grads = [shift(params[0]), *(torch.ones(len(param)) for param in params[1:])]
    expected = expect(params, moments, grads)
    bound(params, grads, 0.25)
    torch.testing.assert_close((params, moments), expected)
    with pytest.raises(ValueError, match="same number of elements"):
        bound(params, [*grads[:2], torch.ones(4)], 0.25)
    with pytest.raises(ValueError, match="lists must be of one length"):
        bound(params, grads[:2], 0.25)
    with pytest.raises(TypeError, match="not a tensor"):
        bound(params, [*grads[:2], None], 0.25)
    torch.testing.assert_close((params, moments), expected)  # the failed calls wrote nothing


def test_versions_and_graphs_after_a_warm_call(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "c")
    with torch.no_grad():
        bound, params, _ = make()
        before = [param._version for param in params]
        bound(params, [torch.ones(len(param)) for param in params], 0.25)
    assert [param._version for param in params] == [version + 1 for version in before]
    leaf = [torch.nn.Parameter(param) for param in params]
    with pytest.raises(RuntimeError, match="leaf Variable"):
        bound(leaf, [torch.ones(len(param)) for param in params], 0.25)


@pytest.mark.parametrize("form", ["auto", "foreach", "plain"])
@torch.no_grad()
def test_a_scalar_bound_to_the_norm_of_a_list(monkeypatch, form):
    """The norm is of the list of each call, at any position of the scalar, also if squares overflow."""
    monkeypatch.setenv("MODULI_KERNELS", form)

    def scale(p, g, a, size, b):
        p.copy_(a * g / size + b)

    bound = kernels.fuse(scale).bind(norms={"size": "g"})
    params = [torch.zeros(n) for n in (100, 1, 5)]
    for factor in (1.0, 2.0, 1e30, 1e-30, 3.0):
        grads = [torch.arange(1.0, len(param) + 1) * factor for param in params]
        bound(params, grads, 2.0, 0.5)
        size = torch.cat(grads).double().norm()
        for param, grad in zip(params, grads, strict=True):
            torch.testing.assert_close(param.double(), 2.0 * grad.double() / size + 0.5, rtol=1e-5, atol=0)
    bound(params, grads, a=2.0, b=0.5)
    assert (bound._warm is not None) == (form == "auto")


@torch.no_grad()
def test_a_bound_norm_of_strided_or_double_tensors():
    bound = kernels.fuse(lambda g, size: g / size, inplace="g").bind(norms={"size": "g"})
    lists = [[torch.tensor([3.0])], [torch.tensor([3.0, 0.0])[::2]], [torch.tensor([3.0], dtype=torch.float64)]]
    for tensors in (*lists, *lists):
        tensors = [tensors[0].clone(), torch.tensor([4.0], dtype=tensors[0].dtype)]
        bound(tensors)
        torch.testing.assert_close([float(t[0]) for t in tensors], [0.6, 0.8])
