"""Clipping and normalisation against torch and plain arithmetic."""

import pytest
import torch

from m.first_order import close, run
from moduli import m, optim

FUSE = pytest.mark.parametrize("fuse", ["auto", False])
TENSORS = [torch.arange(1.0, 7.0).reshape(2, 3), torch.tensor([3.0, -4.0]), torch.tensor(2.0)]


def through(link, tensors=TENSORS):
    return optim.step_tensors(link, [tensor.clone() for tensor in tensors])


@FUSE
@pytest.mark.parametrize("ord", [2, 1, float("inf")])
def test_clip_norm_is_torchs(fuse, ord):
    ours = run(lambda p: [m.ClipNorm(0.7, ord=ord), m.LR(0.1)], fuse=fuse)
    theirs = run(
        lambda p: torch.optim.SGD(p, 0.1), after=lambda p: torch.nn.utils.clip_grad_norm_(p, 0.7, norm_type=ord)
    )
    close(ours, theirs)


@FUSE
def test_the_usual_chain_is_torchs_clipped_adamw(fuse):
    ours = run(lambda p: [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.1), m.LR(0.01)], fuse=fuse, steps=30)
    theirs = run(
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
        after=lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0),
        steps=30,
    )
    close(ours, theirs)


def test_clip_value():
    close(through(m.ClipValue(2.5)), [tensor.clamp(-2.5, 2.5) for tensor in TENSORS])


def test_a_norm_below_the_bound_stays():
    assert all(torch.equal(a, b) for a, b in zip(through(m.ClipNorm(100.0)), TENSORS, strict=True))


@pytest.mark.parametrize("ord", [2, 1, float("inf"), "mad", "std", "l3"])
def test_normalize_over_all_tensors_or_each(ord):
    def size(x):
        if ord == "mad":
            return x.abs().mean()
        if ord == "std":
            return x.std(correction=0)
        return torch.linalg.vector_norm(x, 3 if ord == "l3" else ord)

    whole = torch.cat([tensor.reshape(-1) for tensor in through(m.Normalize(2.0, ord=ord))])
    assert size(whole).item() == pytest.approx(2.0, rel=1e-5)
    for tensor, original in zip(through(m.Normalize(2.0, ord=ord, dim=None)), TENSORS, strict=True):
        if size(original):
            assert size(tensor).item() == pytest.approx(2.0, rel=1e-5)
        else:
            assert torch.equal(tensor, original)


def test_dimensions_are_resolved_for_each_tensor():
    # Axes are normalised per tensor, not with those of the first tensor.
    first, second = torch.tensor([3.0, 4.0]), torch.arange(1.0, 7.0).reshape(2, 3)
    out = through(m.Normalize(dim=None), [first, second])
    close(out, [first / 5, second / second.norm()], 1e-6)
    out = through(m.Normalize(dim=0, inverse_dims=True), [first, second])
    close(out, [first, second / second.norm(dim=1, keepdim=True)], 1e-6)
    out = through(m.ClipNorm(1.0, dim=1), [first, second])
    close(out, [first, second / second.norm(dim=1, keepdim=True)], 1e-5)


def test_small_slices_are_left_alone():
    close(through(m.Normalize(dim=None, min_size=3)), [TENSORS[0] / TENSORS[0].norm(), *TENSORS[1:]], 1e-6)


def test_normalize_leaves_zero_as_it_is():
    for dim in ("global", None):
        assert torch.equal(through(m.Normalize(dim=dim), [torch.zeros(3)])[0], torch.zeros(3))


def test_centralize():
    matrix = TENSORS[0]
    close(through(m.Centralize()), [matrix - 3.5, TENSORS[1] + 0.5, TENSORS[2]])
    close(through(m.Centralize(dim=0, inverse_dims=True))[0:1], [matrix - matrix.mean(1, keepdim=True)])
    whole = torch.cat([tensor.reshape(-1) for tensor in TENSORS])
    close(through(m.Centralize(dim="global")), [tensor - whole.mean() for tensor in TENSORS], 1e-6)


@pytest.mark.parametrize("dim", ["global", None])
def test_complex_norms_are_of_moduli(dim):
    z = torch.tensor([3.0 + 4.0j, 0.0])
    for ord in (2, 1, float("inf")):
        close(through(m.Normalize(ord=ord, dim=dim), [z]), [z / 5], 1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: m.ClipNorm(-1.0), "ClipNorm: max_norm"),
        (lambda: m.ClipNorm(1.0, ord="l9"), "ClipNorm: ord"),
        (lambda: m.Normalize(dim="all"), "Normalize: dim"),
        (lambda: m.Normalize(dim="global", inverse_dims=True), "inverse_dims"),
        (lambda: m.Centralize(min_size=0), "Centralize: min_size"),
        (lambda: m.ClipValue(-1), "ClipValue: value"),
    ],
)
def test_wrong_arguments_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
