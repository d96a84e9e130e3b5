"""Recipes of directions and of selected entries, compared with their formulas in float64."""

import pytest
import torch

from moduli import merge


def states(*tensors):
    return [{"w": tensor} for tensor in tensors]


def assert_close(result, expected):
    torch.testing.assert_close(result["w"].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(5, 6, generator=generator)
    return [base, *(base + torch.randn(5, 6, generator=generator) for _ in range(3))]


def interpolate_arc(x, y, t, axis):
    """Interpolate along the arc between vectors of `axis` (slerp).

    Args:
        x: The vectors at `t` 0.
        y: The vectors at `t` 1.
        t: The position on the arc.
        axis: The axes of a vector.
    """
    x, y = x.double(), y.double()
    omega = torch.acos(
        (x * y).sum(axis, keepdim=True) / (x.norm(dim=axis, keepdim=True) * y.norm(dim=axis, keepdim=True))
    )
    return (torch.sin((1 - t) * omega) * x + torch.sin(t * omega) * y) / torch.sin(omega)


@pytest.mark.parametrize(("axis", "axes"), [(None, (0, 1)), (-1, 1), (0, 0)])
def test_nuslerp_follows_arcs_of_tensors_rows_or_columns(axis, axes, tensors):
    base, a, b, _ = tensors
    assert_close(merge.nuslerp(states(a, b), [3, 1], axis=axis), interpolate_arc(a, b, 0.25, axes))
    expected = base.double() + interpolate_arc(a - base, b - base, 0.25, axes)
    assert_close(merge.nuslerp(states(base, a, b), [0.6, 0.2], tasks=True, axis=axis), expected)
    # Vectors in the same direction are interpolated linearly, each row or column separately.
    c = a.clone()
    c[1], c[:, 2] = 2 * a[1], 0.0
    c[1, 2] = 2 * a[1, 2]
    assert merge.nuslerp(states(a, c), axis=axis)["w"].isfinite().all()
    rows = merge.nuslerp(states(a, c), [1, 1], axis=-1)["w"]
    torch.testing.assert_close(rows[1], 1.5 * a[1])


def test_nuslerp_of_whole_tensors_and_of_vectors_equals_slerp(tensors):
    _, a, b, _ = tensors
    assert torch.equal(merge.nuslerp(states(a, b), [7, 3])["w"], merge.slerp(*states(a, b), 0.3)["w"])
    assert torch.equal(merge.nuslerp(states(a[0], b[0]), axis=-1)["w"], merge.slerp(*states(a[0], b[0]), 0.5)["w"])
    for models in (states(a), states(a, b, a)):
        with pytest.raises(merge.MergeError, match="needs two models"):
            merge.nuslerp(models)
    with pytest.raises(merge.MergeError, match="two models after the base"):
        merge.nuslerp(states(a, b), tasks=True)
    with pytest.raises(merge.MergeError, match="add up to 0"):
        merge.nuslerp(states(a, b), [1, -1])


def test_multislerp_averages_directions_and_norms(tensors):
    base, *models = tensors

    def average(vectors, weights):
        norms = [float(each.norm()) for each in vectors]
        direction = sum(w * each.double() / n for w, each, n in zip(weights, vectors, norms, strict=True))
        return direction / direction.norm() * sum(w * n for w, n in zip(weights, norms, strict=True))

    shares = [1 / 6, 2 / 6, 3 / 6]
    assert_close(merge.multislerp(states(*models), [1, 2, 3]), average(models, shares))
    assert_close(merge.multislerp(states(*models), [1, 2, 3], normalize=False), average(models, [1, 2, 3]))
    deltas = [each - base for each in models]
    assert_close(
        merge.multislerp(states(base, *models), [1, 2, 3], tasks=True), base.double() + average(deltas, shares)
    )
    # The result for two directions is the middle of their arc; opposite directions give zero.
    unit = [each / each.norm() for each in models[:2]]
    assert_close(merge.multislerp(states(*unit)), merge.slerp(*states(*unit), 0.5)["w"].double())
    assert not merge.multislerp(states(models[0], -models[0]))["w"].any()
    same = states(models[0], models[0].clone())
    torch.testing.assert_close(merge.multislerp(same, [1, 1], normalize=False)["w"], 2 * models[0])
    with pytest.raises(merge.MergeError, match="a base and no model"):
        merge.multislerp(states(base), tasks=True)


def test_nearswap_moves_entries_by_a_distance(tensors):
    base, a, *_ = tensors
    reach = 0.4
    result = merge.nearswap(*states(base, a), reach)["w"]
    near = (base - a).abs() <= reach
    assert 0 < int(near.sum()) < near.numel()
    assert torch.equal(result[near], a[near])
    torch.testing.assert_close(result[~near], (base + reach * (a - base).sign())[~near])
    assert torch.equal(merge.nearswap(*states(base, a), 0.0)["w"], base)
    with pytest.raises(merge.MergeError, match="at least 0"):
        merge.nearswap(*states(base, a), -1.0)


def test_arcee_fusion_selects_the_important_entries():
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(12, 16, generator=generator)
    other = base + torch.randn(12, 16, generator=generator)
    p, q = (each.double().softmax(-1) for each in (other, base))
    importance = (other - base).double().abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    q1, middle, q3 = (importance.flatten().quantile(share, interpolation="lower") for share in (0.25, 0.5, 0.75))
    mask = importance >= middle + 1.5 * (q3 - q1)
    assert 5 < int(mask.sum()) < 60
    assert torch.equal(merge.arcee_fusion(*states(base, other))["w"], torch.where(mask, other, base))
    # The divergence is asymmetric, so the swapped models have other important entries.
    swapped = merge.arcee_fusion(*states(other, base))["w"]
    assert not torch.equal(swapped == base, mask)


def test_ram_keeps_entries_changed_by_one_model_and_averages_shared_ones():
    base = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    a = base + torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1e-6])
    b = base + torch.tensor([0.0, 3.0, 4.0, 0.0, 2.0, 0.0])
    c = base + torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0, 0.0])
    models = states(base, a, b, c)
    assert_close(
        merge.ram(models[0], models[1:]), base.double() + torch.tensor([1.0, 3.0, 4.0, 0.0, 1.5, 0.0]).double()
    )
    # Both a and b changed one entry alone and two that are shared: λ = 1 + 0.5 · min(2, 1.5).
    plus = merge.ram(models[0], models[1:], r=0.5, alpha=1.5)
    assert_close(plus, base.double() + torch.tensor([1.75, 3.0, 7.0, 0.0, 1.5, 0.0]).double())
    lower = merge.ram(models[0], models[1:], threshold=1e-7)["w"]
    assert float(lower[5]) > 6.0
    with pytest.raises(merge.MergeError, match="threshold is -1"):
        merge.ram(models[0], models[1:], threshold=-1.0)
