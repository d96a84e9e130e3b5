"""Each recipe compared with its formula."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from merge.helpers import FLOATING, assert_same, equal_fishers, get_tensors, is_averaged, siblings, state
from moduli import merge
from strategies import modules

seeds = st.integers(0, 1000)
numbers = st.floats(-2, 2).map(lambda x: round(x, 3))
few = settings(max_examples=25)


# -- lines ------------------------------------------------------------------------------------------------------------


@few
@given(net=modules(FLOATING), seed=seeds, place=st.integers(0, 2))
def test_linear_with_one_weight_of_one_is_that_model(net, seed, place):
    models = siblings(net, 3, seed)
    weights = [float(index == place) for index in range(3)]
    assert_same(merge.linear(models, weights, buffers="merge"), models[place])


@few
@given(net=modules(FLOATING), seed=seeds, weights=st.lists(numbers, min_size=3, max_size=3), normalize=st.booleans())
def test_linear_is_the_loop_over_tensors(net, seed, weights, normalize):
    assume(not normalize or abs(sum(weights)) > 0.1)
    models = siblings(net, 3, seed)
    result = get_tensors(merge.linear(models, weights, normalize=normalize, buffers="merge"))
    for name, tensor in result.items():
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        total = sum(w * get_tensors(m)[name].detach().to(wide) for w, m in zip(weights, models, strict=True))
        expected = (total / sum(weights) if normalize else total).to(tensor.dtype)
        torch.testing.assert_close(tensor.detach(), expected)


@few
@given(net=modules(FLOATING), seed=seeds, t=numbers)
def test_lerp_goes_straight_from_end_to_end(net, seed, t):
    a, b = siblings(net, 2, seed)
    assert_same(merge.lerp(a, b, 0, buffers="merge"), a)
    assert_same(merge.lerp(a, b, 1, buffers="merge"), b)
    assert_same(merge.lerp(a, b, t), merge.linear([a, b], [1 - t, t], normalize=False), exactly=False)
    assert_same(merge.lerp(a, b, t, buffers="merge"), merge.lerp(b, a, 1 - t, buffers="merge"), exactly=False)


def test_half_precision_sums_are_not_accumulated_in_half_precision():
    # In float16, 2048 + 1 rounds to 2048, so a sum accumulated in float16 would stop there.
    models = [state(*[1.0] * 4, dtype=torch.float16) for _ in range(4095)]
    models[0] = state(*[2.0] * 4, dtype=torch.float16)
    naive = sum(model["w"] for model in models)
    result = merge.linear(models, [1.0] * 4095, normalize=False)["w"]
    assert naive[0] == 2048
    assert result.dtype == torch.float16
    assert result.tolist() == [4096.0] * 4


def test_double_precision_stays_double():
    fine = 1.0 + 2.0**-40
    assert merge.linear([state(fine, dtype=torch.float64), state(1.0, dtype=torch.float64)])["w"][0] == 1 + 2.0**-41
    pair = state(fine + 1j, dtype=torch.complex128), state(1.0 + 0j, dtype=torch.complex128)
    assert merge.linear(pair)["w"][0] == 1 + 2.0**-41 + 0.5j


# -- arcs -------------------------------------------------------------------------------------------------------------


@few
@given(net=modules(FLOATING), seed=seeds, t=st.floats(0, 1), angle=st.sampled_from(["tensor", "model"]))
def test_slerp_is_symmetric_exact_at_its_ends_and_constant_between_equal_models(net, seed, t, angle):
    a, b = siblings(net, 2, seed)
    how = {"angle": angle, "buffers": "merge"}
    assert_same(merge.slerp(a, copy.deepcopy(a), t, **how), a)
    assert_same(merge.slerp(a, b, 0, **how), a, exactly=False)
    assert_same(merge.slerp(a, b, 1, **how), b, exactly=False)
    assert_same(merge.slerp(a, b, t, **how), merge.slerp(b, a, 1 - t, **how), exactly=False)


@given(seed=seeds, t=st.floats(0, 1), size=st.integers(2, 20), complex=st.booleans())
def test_slerp_stays_on_the_sphere_and_divides_the_angle(seed, t, size, complex):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if complex else torch.float64
    a, b = (torch.randn(size, generator=generator, dtype=dtype) for _ in range(2))
    a, b = 3 * a / a.norm(), 3 * b / b.norm()
    result = merge.slerp({"w": a}, {"w": b}, t)["w"]

    def measure_angle(x, y):
        return math.acos(max(-1.0, min(1.0, torch.vdot(x, y).real.item() / 9)))

    assert result.norm().item() == pytest.approx(3)
    assert measure_angle(a, result) == pytest.approx(t * measure_angle(a, b), abs=1e-6)


def test_slerp_of_whole_models_has_one_angle_over_all_that_differs():
    a = {"x": torch.tensor([1.0, 0.0]), "y": torch.tensor([1.0]), "same": torch.tensor([5.0, 5.0])}
    b = {"x": torch.tensor([0.0, 1.5]), "y": torch.tensor([2.0]), "same": torch.tensor([5.0, 5.0])}
    omega = math.acos(2.0 / (math.sqrt(2.0) * 2.5))
    result = merge.slerp(a, b, 0.3, angle="model")
    for name in ("x", "y"):
        expected = math.sin(0.7 * omega) * a[name] + math.sin(0.3 * omega) * b[name]
        torch.testing.assert_close(result[name], expected / math.sin(omega))
    assert torch.equal(result["same"], a["same"])
    each = merge.slerp(a, b, 0.5)
    torch.testing.assert_close(each["x"], torch.tensor([0.5**0.5, 1.5 * 0.5**0.5]))


@pytest.mark.parametrize(
    ("a", "b"), [([1.0, 2.0], [2.0, 4.0]), ([1.0, 2.0], [-1.0, -2.0]), ([0.0, 0.0], [1.0, 2.0]), ([3.0], [-1.0])]
)
def test_slerp_is_lerp_where_there_is_no_arc(a, b):
    torch.testing.assert_close(merge.slerp(state(*a), state(*b), 0.25), merge.lerp(state(*a), state(*b), 0.25))


# -- task vectors -----------------------------------------------------------------------------------------------------


@few
@given(net=modules(FLOATING), seed=seeds)
def test_a_task_vector_leads_from_the_base_to_the_model(net, seed):
    base, model = siblings(net, 2, seed)
    assert_same(merge.task_arithmetic(base, [model], buffers="merge"), model)
    vector = merge.task_vector(model, base, buffers="merge")
    back = merge.linear([base, vector], [1, 1], normalize=False, buffers="merge")
    for name, tensor in get_tensors(back).items():
        # The vector itself is rounded to the dtype of the model.
        eps = torch.finfo(tensor.dtype).eps
        torch.testing.assert_close(tensor, get_tensors(model)[name], rtol=8 * eps, atol=8 * eps)


@few
@given(net=modules(FLOATING), seed=seeds, scales=st.lists(numbers, min_size=2, max_size=2))
def test_task_arithmetic_is_the_sum_of_scaled_vectors(net, seed, scales):
    base, *models = siblings(net, 3, seed)
    result = merge.task_arithmetic(base, models, scales, buffers="merge")
    for name, tensor in get_tensors(result).items():
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        start, *ends = (get_tensors(m)[name].detach().to(wide) for m in (base, *models))
        expected = start + sum(s * (end - start) for s, end in zip(scales, ends, strict=True))
        torch.testing.assert_close(tensor.detach(), expected.to(tensor.dtype))
    assert_same(merge.task_arithmetic(base, models, 0.3), merge.task_arithmetic(base, models, [0.3, 0.3]))


def compute_ties(base, vectors, densities, scale, weights, normalize, elect):
    """Compute TIES entry by entry in Python numbers.

    Args:
        base: The entries of the base.
        vectors: The task vectors.
        densities: The share of entries to keep of each.
        scale: The factor of the merged vector.
        weights: The weight of each vector.
        normalize: Whether to divide by the weights of the agreeing entries.
        elect: Whether signs are elected by sum or by count.
    """
    trimmed = []
    for vector, density in zip(vectors, densities, strict=True):
        count = max(1, round(density * len(vector))) if density else 0
        largest = sorted(range(len(vector)), key=lambda i: (-abs(vector[i]), i))[:count]
        trimmed.append([value if i in largest else 0.0 for i, value in enumerate(vector)])
    result = []
    for i, start in enumerate(base):
        entries = [(w * vector[i], abs(w)) for w, vector in zip(weights, trimmed, strict=True)]
        if elect == "sum":
            vote = sum(value for value, _ in entries)
        else:
            vote = sum((value > 0) - (value < 0) for value, _ in entries)
        agreeing = [(value, share) for value, share in entries if value * vote > 0]
        total = sum(value for value, _ in agreeing)
        if agreeing and normalize:
            total /= sum(share for _, share in agreeing)
        result.append(start + scale * total)
    return result


# Small sums of eighths are exact, so that votes of opposite signs cancel exactly.
eighths = st.integers(-16, 16).map(lambda x: x / 8)


@settings(max_examples=200)
@given(data=st.data(), size=st.integers(1, 9), count=st.integers(1, 4))
def test_ties_equals_a_loop_over_entries(data, size, count):
    vectors = data.draw(st.lists(st.lists(eighths, min_size=size, max_size=size), min_size=count, max_size=count))
    base = data.draw(st.lists(eighths, min_size=size, max_size=size))
    densities = data.draw(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.75, 1.0]), min_size=count, max_size=count))
    weights = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]), min_size=count, max_size=count))
    elect, normalize = data.draw(st.sampled_from(["sum", "count"])), data.draw(st.booleans())
    models = [state(*(b + v for b, v in zip(base, vector, strict=True))) for vector in vectors]
    result = merge.ties(state(*base), models, densities, scale=0.5, weights=weights, elect=elect, normalize=normalize)
    expected = compute_ties(base, vectors, densities, 0.5, weights, normalize, elect)
    torch.testing.assert_close(result["w"], torch.tensor(expected))


@given(seed=seeds, size=st.integers(1, 200), density=st.floats(0, 1), equal=st.booleans())
def test_ties_keeps_the_share_of_entries_given_by_the_density(seed, size, density, equal):
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(size, generator=generator)
    if equal:
        vector = vector.sign()
    result = merge.ties({"w": torch.zeros(size)}, [{"w": vector}], density)["w"]
    expected = max(1, round(density * size)) if density else 0
    assert int((result != 0).sum()) == expected
    dropped = vector[result == 0].abs()
    if expected and dropped.numel():
        assert dropped.max() <= result[result != 0].abs().min()


@given(data=st.data(), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), density=st.floats(0, 1))
def test_trimming_by_model_equals_trimming_the_concatenated_vector(data, sizes, density):
    vectors = [data.draw(st.lists(eighths, min_size=size, max_size=size)) for size in sizes]
    assume(all(any(vector) for vector in vectors))  # tensors that do not differ from the base are not counted
    base = {f"{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    model = {f"{i}": torch.tensor(vector) for i, vector in enumerate(vectors)}
    result = merge.ties(base, [model], density, trim="model")
    joined = torch.cat(list(model.values()))
    expected = merge.ties({"w": torch.zeros_like(joined)}, [{"w": joined}], density)["w"]
    assert torch.equal(torch.cat(list(result.values())), expected)


@few
@given(seed=seeds, density=st.floats(0, 1), dtype=st.sampled_from([torch.float32, torch.float64, torch.complex64]))
def test_trimming_by_model_keeps_the_share_given_by_the_density(seed, density, dtype):
    generator = torch.Generator().manual_seed(seed)
    models = [{name: torch.randn(40, generator=generator, dtype=dtype) for name in "abc"} for _ in range(2)]
    models[1]["b"] *= 100
    result = merge.ties({name: torch.zeros(40, dtype=dtype) for name in "abc"}, models[1:], density, trim="model")
    entries = {name: torch.view_as_real(t) if t.is_complex() else t for name, t in result.items()}
    total = sum(t.numel() for t in entries.values())
    assert sum(int((t != 0).sum()) for t in entries.values()) == (max(1, round(density * total)) if density else 0)
    if density < 0.3:
        assert all(int((entries[name] != 0).sum()) <= 4 for name in "ac")


@few
@given(net=modules(FLOATING), seed=seeds)
def test_ties_of_one_whole_model_is_that_model(net, seed):
    base, model = siblings(net, 2, seed)
    assert_same(merge.ties(base, [model], 1.0, buffers="merge"), model, exactly=False)
    assert_same(merge.ties(base, [model], 0.0, buffers="merge"), base)


@few
@given(seed=seeds)
def test_a_model_of_weight_zero_has_no_effect_on_ties(seed):
    base, a, b, other = siblings(nn.Linear(5, 4), 4, seed)
    with_it = merge.ties(base, [a, other, b], 0.5, weights=[1, 0, 2])
    assert_same(with_it, merge.ties(base, [a, b], 0.5, weights=[1, 2]))


def test_ties_treats_complex_entries_as_two_real_ones():
    base = {"w": torch.zeros(3, dtype=torch.complex64)}
    a, b = (torch.randn(3, 2, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    result = merge.ties(base, [{"w": torch.view_as_complex(each)} for each in (a, b)], 0.5)["w"]
    real = merge.ties({"w": torch.zeros(3, 2)}, [{"w": a}, {"w": b}], 0.5)["w"]
    torch.testing.assert_close(torch.view_as_real(result), real)


# -- dropping ---------------------------------------------------------------------------------------------------------


@few
@given(net=modules(FLOATING), seed=seeds)
def test_dare_with_density_one_is_the_plain_merge(net, seed):
    base, *models = siblings(net, 4, seed)
    assert_same(merge.dare(base, models[:1], 1.0, generator=seed, buffers="merge"), models[0])
    assert_same(
        merge.dare(base, models, 1.0, generator=seed), merge.task_arithmetic(base, models, 1 / 3), exactly=False
    )
    assert_same(
        merge.dare(base, models, 1.0, generator=seed, then="ties"), merge.ties(base, models, 1.0), exactly=False
    )
    assert_same(merge.dare(base, models, 0.0, generator=seed), base)


def test_dare_has_the_expectation_of_the_plain_merge():
    size, density = 200_000, 0.3
    base, model = {"w": torch.zeros(size)}, {"w": torch.ones(size)}
    result = merge.dare(base, [model], density, generator=0)["w"]
    # Each entry is 1/density with probability density: variance 1/density - 1. Five standard errors.
    bound = 5 * math.sqrt((1 / density - 1) / size)
    assert abs(result.mean().item() - 1) < bound
    assert set(result.unique().tolist()) == {0.0, torch.tensor(1 / density).item()}
    plain = merge.dare(base, [model], density, generator=0, rescale=False)["w"]
    assert torch.equal(plain != 0, result != 0)
    assert set(plain.unique().tolist()) == {0.0, 1.0}
    # Two models are dropped independently of each other.
    both = merge.dare(base, [model, model], density, generator=0, rescale=False, normalize=False)["w"]
    share = (both == 2).float().mean().item()
    assert abs(share - density**2) < 5 * math.sqrt(density**2 / size)


@few
@given(seed=seeds, then=st.sampled_from(["linear", "ties"]))
def test_dare_depends_only_on_the_seed_and_the_names(seed, then):
    base, *models = (dict(m.state_dict()) for m in siblings(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), 3, seed))
    result = merge.dare(base, models, 0.5, generator=seed, then=then)

    def backwards(model):
        return dict(reversed(model.items()))

    again = merge.dare(backwards(base), [backwards(m) for m in models], 0.5, generator=seed, then=then)
    assert list(again) == list(reversed(result))
    assert all(torch.equal(result[name], again[name]) for name in result)
    alone = merge.dare(
        {"1.weight": base["1.weight"]}, [{"1.weight": m["1.weight"]} for m in models], 0.5, generator=seed, then=then
    )
    assert torch.equal(alone["1.weight"], result["1.weight"])
    other = merge.dare(base, models, 0.5, generator=seed + 1, then=then)
    assert not torch.equal(other["0.weight"], result["0.weight"])
    changes = [(result[name] != base[name]).flatten() for name in ("0.weight", "1.weight")]
    assert not torch.equal(*changes)


def test_dare_draws_its_seed_from_a_generator():
    base, model = {"w": torch.zeros(50)}, {"w": torch.ones(50)}
    one, two = (merge.dare(base, [model], 0.5, generator=torch.Generator().manual_seed(s))["w"] for s in (5, 5))
    assert torch.equal(one, two)
    generator = torch.Generator().manual_seed(5)
    first, second = (merge.dare(base, [model], 0.5, generator=generator)["w"] for _ in range(2))
    assert torch.equal(first, one)
    assert not torch.equal(first, second)
    with pytest.raises(TypeError, match="integer"):
        merge.dare(base, [model], 0.5, generator=0.5)
    torch.manual_seed(7)
    default = merge.dare(base, [model], 0.5)["w"]
    torch.manual_seed(7)
    assert torch.equal(default, merge.dare(base, [model], 0.5)["w"])


def test_dare_drops_complex_entries_whole():
    base = {"w": torch.zeros(100, dtype=torch.complex64)}
    model = {"w": torch.full((100,), 1 + 2j)}
    for then in ("linear", "ties"):
        result = merge.dare(base, [model], 0.5, generator=0, then=then)["w"]
        assert set(result.tolist()) == {0j, 2 + 4j}


# -- soups ------------------------------------------------------------------------------------------------------------


@few
@given(net=modules(FLOATING), seed=seeds, count=st.integers(1, 4))
def test_a_uniform_soup_is_the_average(net, seed, count):
    models = siblings(net, count, seed)
    assert_same(merge.soup(models), merge.linear(models))


@few
@given(values=st.lists(numbers, min_size=1, max_size=6), target=numbers, mode=st.sampled_from(["max", "min"]))
def test_a_greedy_soup_is_the_algorithm_of_the_paper_and_no_worse_than_the_best_model(values, target, mode):
    models = [state(value, dtype=torch.float64) for value in values]
    sign = 1 if mode == "min" else -1
    calls = []

    def evaluate(model):
        calls.append(model)
        return sign * abs(model["w"].item() - target)

    chosen = merge.greedy_ingredients(models, evaluate, mode=mode)
    assert len(calls) == 2 * len(models) - 1
    result = merge.soup(models, how="greedy", evaluate=evaluate, mode=mode)
    assert abs(result["w"].item() - target) <= min(abs(value - target) for value in values) + 1e-12

    order = sorted(range(len(values)), key=lambda i: abs(values[i] - target))
    expected, error = [order[0]], abs(values[order[0]] - target)
    for index in order[1:]:
        tried = abs(sum(values[i] for i in [*expected, index]) / (len(expected) + 1) - target)
        assume(abs(tried - error) > 1e-9 or tried == error)
        if tried <= error:
            expected, error = [*expected, index], tried
    assert list(chosen) == expected
    assert result["w"].item() == pytest.approx(sum(values[i] for i in expected) / len(expected))


# -- information ------------------------------------------------------------------------------------------------------


@few
@given(net=modules(FLOATING), seed=seeds)
def test_fisher_of_equal_information_is_the_average(net, seed):
    models = siblings(net, 3, seed)
    fishers = [{n: f for n, f in each.items() if n in dict(net.named_parameters())} for each in equal_fishers(models)]
    assert_same(merge.fisher(models, fishers), merge.soup(models), exactly=False)
    nothing = [{name: torch.zeros_like(f) for name, f in each.items()} for each in fishers]
    assert_same(merge.fisher(models, nothing), merge.soup(models), exactly=False)
    weights = [1.0, 2.0, 0.5]
    assert_same(merge.fisher(models, fishers, weights), merge.linear(models, weights), exactly=False)


@few
@given(net=modules(FLOATING), seed=seeds, place=st.integers(0, 2))
def test_fisher_with_one_dominating_information_is_that_model(net, seed, place):
    models = siblings(net, 3, seed)
    named = dict(net.named_parameters(remove_duplicate=False))
    fishers = [
        {name: torch.full(p.shape, 1.0 if index == place else 1e-12) for name, p in named.items() if is_averaged(p)}
        for index in range(3)
    ]
    result = merge.fisher(models, fishers)
    for name, parameter in result.named_parameters():
        torch.testing.assert_close(parameter, models[place].get_parameter(name))


@few
@given(seed=seeds)
def test_fisher_is_its_formula(seed):
    generator = torch.Generator().manual_seed(seed)
    thetas = [torch.randn(3, 4, generator=generator) for _ in range(3)]
    fishers = [torch.rand(3, 4, generator=generator) for _ in range(3)]
    weights = [0.5, 1.0, 2.0]
    result = merge.fisher([{"w": t} for t in thetas], [{"w": f} for f in fishers], weights)["w"]
    top = sum(w * f * t for w, f, t in zip(weights, fishers, thetas, strict=True))
    torch.testing.assert_close(result, top / sum(w * f for w, f in zip(weights, fishers, strict=True)))


# -- stock ------------------------------------------------------------------------------------------------------------


@given(seed=seeds, count=st.integers(2, 5), shared=st.floats(0, 3), complex=st.booleans())
def test_stock_is_its_formula_over_all_pairs(seed, count, shared, complex):
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.complex128 if complex else torch.float64
    base, common = (torch.randn(4, 5, generator=generator, dtype=dtype) for _ in range(2))
    models = [base + shared * common + torch.randn(4, 5, generator=generator, dtype=dtype) for _ in range(count)]
    result = merge.stock({"w": base}, [{"w": model} for model in models])["w"]

    cosines = []
    for one, other in itertools.combinations(models, 2):
        x, y = (one - base).flatten(), (other - base).flatten()
        cosines.append((torch.vdot(x, y).real / (x.norm() * y.norm())).item())
    cosine = sum(cosines) / len(cosines)
    t = count * cosine / (1 + (count - 1) * cosine) if cosine > 0 else 0.0
    torch.testing.assert_close(result, t * sum(models) / count + (1 - t) * base)


def test_stock_of_equal_orthogonal_and_opposite_models():
    base = state(0.0, 0.0)
    right, up, left = state(1.0, 0.0), state(0.0, 1.0), state(-1.0, 0.0)
    assert merge.stock(base, [right, right])["w"].tolist() == [1.0, 0.0]
    assert merge.stock(base, [right, up])["w"].tolist() == [0.0, 0.0]
    assert merge.stock(base, [right, left])["w"].tolist() == [0.0, 0.0]
    assert merge.stock(base, [right, base])["w"].tolist() == [0.0, 0.0]
    with pytest.raises(merge.MergeError, match="1, and this needs at least two"):
        merge.stock(base, [right])


# -- directions, entries and signs ------------------------------------------------------------------------------------


def base_and_models():
    """Return a base and two models of 5 x 7 entries, and their task vectors."""
    torch.manual_seed(1)
    base, a, b = ({"w": torch.randn(5, 7)} for _ in range(3))
    return base, a, b, [model["w"] - base["w"] for model in (a, b)]


def test_karcher_of_two_directions_is_slerp():
    _, a, b, _ = base_and_models()
    unit = [{"w": model["w"] / model["w"].norm()} for model in (a, b)]
    assert torch.allclose(merge.karcher(unit)["w"], merge.slerp(*unit, 0.5)["w"], atol=1e-5)
    weighted = merge.karcher(unit, [1, 3])["w"]
    assert torch.allclose(weighted, merge.slerp(*unit, 0.75)["w"], atol=1e-5)
    assert torch.allclose(merge.karcher([a, b], [1, 0])["w"], a["w"], atol=1e-6)


def test_breadcrumbs_keeps_the_entries_between_the_largest_and_the_smallest():
    base, a, _, vectors = base_and_models()
    result = merge.breadcrumbs(base, [a], 0.4, gamma=0.2)["w"] - base["w"]
    ranks = vectors[0].abs().flatten().argsort(descending=True)
    mask = torch.zeros(35, dtype=torch.bool)
    mask[ranks[7:21]] = True
    assert torch.allclose(result, vectors[0] * mask.view(5, 7), atol=1e-6)


def test_della_divides_each_entry_by_its_probability_and_has_the_vector_as_its_mean():
    base, a, _, vectors = base_and_models()
    vector = vectors[0]
    probability = 0.5 + 0.4 * (vector.abs().argsort(dim=-1).argsort(dim=-1) / 6 - 0.5)
    samples = [
        merge.della(base, [a], 0.5, epsilon=0.4, generator=seed, then="linear")["w"] - base["w"] for seed in range(400)
    ]
    dropped, rescaled = samples[0].abs() < 1e-5, (samples[0] - vector / probability).abs() < 1e-4
    assert torch.all(dropped | rescaled)
    # Five standard errors of the mean of 400 samples.
    bound = 5 * vector.abs() * ((1 / probability - 1) / 400).sqrt()
    assert torch.all((torch.stack(samples).mean(0) - vector).abs() <= bound)


def test_sce_weights_by_squared_sizes_and_erases_the_minority():
    base, a, b, vectors = base_and_models()
    majority = (vectors[0] + vectors[1]).sign()
    for density, count in ((1.0, 35), (0.5, 18)):
        variance = (vectors[0] - vectors[1]).square()
        mask = torch.zeros(35).index_fill(0, variance.flatten().argsort(descending=True)[:count], 1.0).view(5, 7)
        selected = [vector * mask for vector in vectors]
        weights = [float(vector.square().sum()) for vector in selected]
        shares = [w * (vector.sign() == majority) for w, vector in zip(weights, selected, strict=True)]
        total = sum(shares)
        expected = sum(s * vector for s, vector in zip(shares, selected, strict=True)) / total.where(total > 0, 1)
        result = merge.sce(base, [a, b], density)["w"] - base["w"]
        assert torch.allclose(result, expected, atol=1e-5)
