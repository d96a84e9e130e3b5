"""Selection and variation: counts, reproducible children, and no loop over members."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from moduli.particles import StructureError
from moduli.population import Population, selection
from population.helpers import close


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def pair(count=6):
    torch.manual_seed(0)
    a, b = (Population.of(net, count) for _ in range(2))
    for pop, value in ((a, 1.0), (b, 2.0)):
        for _, buffer in pop.named_buffers():
            buffer.fill_(value)
    return a, b


def test_selection_gives_exact_counts():
    pop, _ = pair()
    fitness = torch.tensor([5.0, 1.0, 3.0, 0.0, 4.0, 2.0])
    best_first = [3, 1, 5, 2, 4, 0]
    assert torch.equal(pop.sort(fitness).matrix, pop.matrix[best_first])
    assert torch.equal(pop.sort(fitness, maximize=True).matrix, pop.matrix[best_first[::-1]])
    assert torch.equal(pop.top(fitness, 2).matrix, pop.matrix[[3, 1]])
    for k in (0, 1, 6, 20):
        assert len(pop.tournament(fitness, k)) == k
        assert len(pop.roulette(fitness, k)) == k
    rare = selection.tournament(fitness, 4000, size=3, generator=torch.Generator().manual_seed(1))
    shares = torch.bincount(rare, minlength=6) / 4000
    ranks = torch.tensor([best_first.index(i) for i in range(6)])
    expected = ((6 - ranks.double()) ** 3 - (5 - ranks.double()) ** 3) / 6**3
    torch.testing.assert_close(shares.double(), expected, atol=0.03, rtol=0)
    drawn = torch.bincount(selection.roulette(fitness, 8000), minlength=6) / 8000
    torch.testing.assert_close(drawn, (5 - fitness) / (5 - fitness).sum(), atol=0.03, rtol=0)
    assert set(selection.roulette(torch.ones(3), 200).tolist()) == {0, 1, 2}
    assert set(selection.roulette(torch.tensor([0.0, -torch.inf]), 20).tolist()) == {1}


def test_nan_fitness_is_ranked_last_with_a_warning():
    pop, _ = pair(4)
    fitness = torch.tensor([torch.nan, 1.0, torch.inf, 0.0])
    for maximize, expected in ((False, [3, 1, 2, 0]), (True, [2, 1, 3, 0])):
        with pytest.warns(UserWarning, match="the fitness of member 0 is not a number; ranked last"):
            assert selection.order(fitness, maximize).tolist() == expected
    with pytest.warns(UserWarning, match="member 0"):
        assert torch.equal(pop.top(fitness, 3).matrix, pop.matrix[[3, 1, 2]])
    with pytest.warns(UserWarning, match="member 0"):
        assert 0 not in selection.roulette(fitness, 100).tolist()
    with pytest.warns(UserWarning, match="member 0"):
        assert selection.tournament(fitness, 5, size=60).tolist() == [3] * 5
    with pytest.warns(UserWarning, match=r"0, 1, 2, 3, 4, 5, 6, 7 and 2 more"):
        selection.order(torch.full((10,), torch.nan))


@pytest.mark.parametrize("kind", ["uniform", "one_point", "layer", "arithmetic"])
def test_crossover_never_mixes_names(kind):
    a, b = pair(50)
    child = a.crossover(b, kind, generator=torch.Generator().manual_seed(0))
    x, y, c = a.matrix, b.matrix, child.matrix
    if kind == "arithmetic":
        weight = ((c - x) / (y - x)).nanmedian(1, keepdim=True).values
        torch.testing.assert_close(c, x + weight * (y - x), atol=1e-5, rtol=1e-4)
        assert 0 <= weight.min() < 0.2
        assert 0.8 < weight.max() <= 1
    else:
        second = (c == y) & (x != y)
        assert ((c == x) | (c == y)).all()
        assert 0.3 < second.double().mean() < 0.7
    if kind == "one_point":
        differs = x != y
        for row, different in zip(second, differs, strict=True):
            marks = row[different].int()
            assert (marks.diff() >= 0).all()
    if kind == "layer":
        for index, member in enumerate(child):
            from_b = bool((member[0].weight == b[index][0].weight).all())
            source = (b if from_b else a)[index]
            assert torch.equal(member[0].bias, source[0].bias)
            norm = member[1].running_mean[0].item()
            assert norm in (1.0, 2.0)
    assert torch.equal(a.crossover(b, "uniform", rate=0.0).matrix, x)
    assert torch.equal(a.crossover(b, "uniform", rate=1.0).matrix, y)


def test_children_do_not_depend_on_chunks_or_other_members():
    a, b = pair(9)
    generators = [torch.Generator().manual_seed(3) for _ in range(4)]
    whole = a.mutate(0.5, 0.2, generator=generators[0])
    for chunk, generator in zip((1, 2, 5), generators[1:], strict=True):
        assert torch.equal(a.mutate(0.5, 0.2, generator=generator, chunk_size=chunk).matrix, whole.matrix)
    seeds = a.seeds(torch.Generator().manual_seed(3))
    some = torch.tensor([7, 2, 4])
    assert torch.equal(a[some].mutate(0.5, 0.2, seeds=seeds[some]).matrix, whole.matrix[some])
    for kind in ("uniform", "one_point", "layer", "arithmetic"):
        children = a.crossover(b, kind, seeds=seeds)
        assert torch.equal(a[some].crossover(b[some], kind, seeds=seeds[some]).matrix, children.matrix[some])
    assert torch.equal(a.randn(seeds=seeds).matrix[some], a[some].randn(seeds=seeds[some]).matrix)
    assert torch.equal(a.rand(seeds=seeds).matrix[some], a[some].rand(seeds=seeds[some]).matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_the_moments_of_its_distribution(dtype):
    pop = Population.of(nn.Linear(50, 40), 200).to(dtype)
    n, u = (draw(generator=torch.Generator().manual_seed(5)).matrix.double() for draw in (pop.randn, pop.rand))
    size = n.numel() ** 0.5
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs((n**power).mean() - moment) < 5 * 10 ** (power / 2) / size
    assert abs(u.mean() - 0.5) < 2 / size
    assert abs(u.var() - 1 / 12) < 2 / size
    assert u.min() >= 0
    assert u.max() < 1
    for values in (n - n.mean(), u - 0.5):
        scaled = values / values.std()
        between = scaled @ scaled.T / values.shape[1]
        assert (between - torch.eye(len(values))).abs().max() < 7 / values.shape[1] ** 0.5
        for lag in (1, 2, 7, 1024, 1025):
            assert abs((scaled[:, lag:] * scaled[:, :-lag]).mean()) < 6 / size
    histogram = torch.histc(u, 100) / u.numel()
    assert (histogram - 0.01).abs().max() < 0.001
    assert not torch.equal(pop.randn().matrix, pop.randn().matrix)


def test_mutation_has_the_given_rate_and_scale():
    pop, _ = pair(200)
    pop.requires_grad_(False, "0.*")
    rate = torch.linspace(0, 1, 200)
    child = pop.mutate(rate, torch.linspace(1, 2, 200))
    steps = (child - pop).matrix[:, 16:]
    assert (child.matrix[:, :16] == pop.matrix[:, :16]).all()
    assert (steps[0] == 0).all()
    assert (steps[-1] != 0).all()
    assert abs((steps != 0).double().mean() - 0.5) < 0.02
    assert abs(steps[-50:][steps[-50:] != 0].std() - 1.87) < 0.2
    for wrong in ({"rate": 1.5}, {"rate": -0.1}, {"scale": -1.0}, {"seeds": torch.zeros(3)}, {"rate": torch.ones(3)}):
        with pytest.raises(ValueError, match=r"probability|negative|seeds|rate is"):
            pop.mutate(**wrong)


def test_replacing_keeps_storage():
    a, b = pair(5)
    member, where = a[1], a.matrix.data_ptr()
    a.replace(torch.tensor([1, 3]), b[:2])
    assert a.matrix.data_ptr() == where
    assert torch.equal(member[0].weight, b[0][0].weight)
    assert (member[1].running_mean == 2).all()
    before = a.matrix.clone()
    with pytest.raises(ValueError, match="replaced twice"):
        a.replace([1, 1], b[:2])
    with pytest.raises(StructureError, match="2 members cannot be replaced by 3"):
        a.replace([1, 2], b[:3])
    with pytest.raises(StructureError, match="'weight' on the right|only on|cannot combine"):
        a.replace([1], Population.of(nn.Linear(2, 2), 1))
    with pytest.raises(IndexError, match="member 9"):
        a.replace([9], b[0])
    assert torch.equal(a.matrix, before)


def test_migration_around_a_ring():
    pop, _ = pair(6)
    before = pop.matrix.clone()
    source = pop.migrate(torch.tensor([3.0, 1.0, 2.0, 6.0, 4.0, 5.0]), islands=2)
    assert source.tolist() == [4, 1, 2, 1, 4, 5]
    assert torch.equal(pop.matrix, before[source])
    with pytest.raises(ValueError, match="cannot be divided"):
        pop.migrate(torch.zeros(6), islands=4)
    with pytest.raises(ValueError, match="cannot leave an island"):
        pop.migrate(torch.zeros(6), islands=3, count=3)


def test_norms_distances_and_means_are_those_of_the_matrix():
    a, b = pair(4)
    x, y = a.matrix, b.matrix
    close(a.norm(), x.norm(dim=1))
    torch.testing.assert_close(a.dot(b), (x * y).sum(1))
    torch.testing.assert_close(a.dot(b[0]), x @ y[0])
    torch.testing.assert_close(a.cosine(b), nn.functional.cosine_similarity(x, y))
    torch.testing.assert_close(a.cosine(y[0]), nn.functional.cosine_similarity(x, y[:1]))
    torch.testing.assert_close(a.distance(b[1]), (x - y[1]).norm(dim=1))
    torch.testing.assert_close(a.distances(b[:2]), torch.cdist(x, y[:2]))
    torch.testing.assert_close(a.diversity(), (x - x.mean(0)).square().sum(1).mean().sqrt())
    torch.testing.assert_close(a.mean()[0].weight.reshape(-1), x.mean(0)[:12])
    torch.testing.assert_close(a.std()[2].bias, x.std(0, correction=0)[-2:])
    torch.testing.assert_close(
        a.lerp(b, torch.tensor([0.0, 1.0, 0.5, 2.0])).matrix[1:3], torch.stack([y[1], (x + y)[2] / 2])
    )
    a.mean()[0] = nn.Linear(3, 4)
    c = a.clone()
    c.axpy_(torch.arange(4.0), b).lerp_(b[0], 0.5)
    torch.testing.assert_close(c.matrix, (x + torch.arange(4.0)[:, None] * y + y[0]) / 2)


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def work(pop):
    other, fitness = pop.clone(), torch.arange(float(len(pop)))
    per_member = torch.rand(len(pop))
    steps = [
        lambda: 0.7 * pop + 1.5 * per_member * (other - pop) - pop / 2,
        lambda: pop.__iadd__(other),
        lambda: pop.sort(fitness),
        lambda: pop.top(fitness, 2),
        lambda: pop.tournament(fitness, size=3),
        lambda: pop.roulette(fitness),
        lambda: pop.mutate(0.5, 0.1),
        lambda: pop.replace([0, 1], other[:2]),
        lambda: pop.migrate(fitness, 2),
        lambda: (pop.diversity(), pop.norm(), pop.distances(), pop.mean()),
        *(lambda kind=kind: pop.crossover(other, kind) for kind in ("uniform", "one_point", "layer", "arithmetic")),
        lambda: pop[::2],
        lambda: pop(torch.ones(2, 3), vectorize="vmap"),
    ]
    counts = []
    for step in steps:
        with Count() as count:
            step()
        counts.append(count.calls)
    return counts


def test_no_operation_loops_over_members():
    assert work(Population.of(net(), 8)) == work(Population.of(net(), 64))


def test_large_populations_fit_into_chunks():
    make = lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # noqa: E731
    pop = Population.of(make, 512)
    assert pop.layout.numel == 8970
    x = torch.randn(8, 64)
    with torch.no_grad():
        whole = pop(x, vectorize="vmap")
        largest = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor) and out._base is None:
                    largest.append(out.numel())
                return out

        with Watch():
            torch.testing.assert_close(pop(x, chunk_size=16, vectorize="vmap"), whole, atol=1e-5, rtol=1e-5)
        assert max(largest) < 512 * 8 * 64  # the number of activations of all members
    for form in ("auto", "chunked"):
        torch.testing.assert_close(pop(x, vectorize=form), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [0, 1])
def test_no_members_and_one(count):
    pop = Population.of(net(), count).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pop(torch.ones(5, 3)).shape == (count, 5, 2)
        assert pop.losses(lambda f: f(torch.ones(5, 3)).sum()).shape == (count,)
        assert len(pop.gradients(lambda f: f(torch.ones(5, 3)).sum())) == count
        assert len(2 * pop - pop[:]) == count
        assert len(pop.mutate()) == count
        assert len(pop.crossover(pop, "layer")) == count
        assert len(pop.sort(torch.zeros(count))) == count
        assert pop.norm().shape == (count,)
        assert pop.distances().shape == (count, count)
        assert len(Population.of(net, count)) == count
    if not count:
        with pytest.raises(IndexError, match="of a population of 0"):
            pop[0]
        with pytest.raises(ValueError, match="mean of no members"):
            pop.mean()
        with pytest.raises(ValueError, match="from none"):
            pop.tournament(torch.zeros(0), 3)


def test_wrong_arguments_are_refused():
    a, b = pair(4)
    with pytest.raises(TypeError, match=r"made by Population\.of"):
        Population()
    with pytest.raises(ValueError, match="cannot have -1"):
        Population.of(net(), -1)
    with pytest.raises(TypeError, match="interpreted as an integer"):
        Population.of(net(), 2.5)
    with pytest.raises(TypeError, match="not of a int"):
        Population.of(3, 2)
    with pytest.raises(TypeError, match=r"of a torch.nn.Module, not of a dict"):
        Population.of(dict, 2)
    with pytest.raises(ValueError, match="init="):
        Population.of(net(), 2, init="wild")
    with pytest.raises(ValueError, match="no modules"):
        Population.from_modules([])
    with pytest.raises(StructureError, match=r"members 0 and 1 cannot be stacked: .*'0\.weight' has shape"):
        Population.from_modules([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(3, 2))])
    with pytest.raises(StructureError, match="members 0 and 1 .*trained in one and frozen in the other"):
        Population.from_modules([nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)])
    with pytest.raises(StructureError, match=r"shape \(3, 3\): dimension 0 must be 4"):
        a(torch.ones(3, 3), in_dims=0)
    with pytest.raises(StructureError, match="populations of 4 and 2 members"):
        a + b[:2]
    with pytest.raises(StructureError, match=r"shape \(5,\) does not fit 4 members of 34 parameters"):
        a * torch.ones(5)
    with pytest.raises(StructureError, match="cannot combine a population.*resize its members"):
        a - nn.Linear(2, 2)
    with pytest.raises(TypeError):
        a + "text"
    with pytest.raises(ValueError, match="vectorize='fast'"):
        a(torch.ones(5, 3), vectorize="fast")
    with pytest.raises(ValueError, match="chunk_size is a positive"):
        a(torch.ones(5, 3), chunk_size=0)
    with pytest.raises(ValueError, match="one number per member"):
        a.losses(lambda f: f(torch.ones(5, 3)))
    with pytest.raises(ValueError, match="one number for each of 4 members"):
        a.sort(torch.zeros(3))
    with pytest.raises(ValueError, match="kind 'magic'"):
        a.crossover(b, "magic")
    with pytest.raises(ValueError, match=r"LSTM\) has no batching rule"):
        Population.of(nn.LSTM(3, 2), 2)(torch.ones(4, 3), vectorize="vmap")
    with pytest.raises(StructureError, match="could be one number per member or one vector"):
        Population.of(nn.Linear(1, 1), 2) * torch.ones(2)
    with pytest.raises(TypeError, match="another kind of number"):
        a * 2j


def test_a_failed_call_leaves_statistics_as_they_were():
    pop, _ = pair(3)

    def fail(f, x):
        f(x)
        raise RuntimeError("after the first layers")

    before = {name: buffer.clone() for name, buffer in pop.named_buffers()}
    for form in ("vmap", "loop", "chunked"):
        with pytest.raises(RuntimeError, match="after the first"):
            pop.losses(fail, torch.randn(5, 3), vectorize=form)
        for name, buffer in pop.named_buffers():
            assert torch.equal(buffer, before[name])


def test_a_class_initialises_its_members_as_it_does_one():
    class Own(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.lin = nn.Linear(width, 40)
            nn.init.normal_(self.lin.weight, 3.0, 0.5)
            nn.init.zeros_(self.lin.bias)
            self.gain = nn.Parameter(torch.rand(10) * 4)
            self.table = nn.Embedding(6, 5, padding_idx=0)
            self.register_buffer("seen", torch.randn(7))

    pops = [Population.of(Own, 300, 30, generator=torch.Generator().manual_seed(2)) for _ in range(2)]
    assert torch.equal(pops[0].matrix, pops[1].matrix)
    leaves = dict(pops[0].named_parameters())
    assert abs(leaves["lin.weight"].mean() - 3) < 0.01
    assert abs(leaves["lin.weight"].std(0).mean() - 0.5) < 0.01
    assert (leaves["lin.bias"] == 0).all()
    assert abs(leaves["gain"].mean() - 2) < 0.1
    assert abs(leaves["gain"].max() - 4) < 0.1
    assert (leaves["table.weight"][:, 0] == 0).all()
    assert abs(leaves["table.weight"][:, 1:].std(0).mean() - 1) < 0.1
    assert abs(dict(pops[0].named_buffers())["seen"].std(0).mean() - 1) < 0.1

    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            import numpy as np

            self.w = nn.Parameter(torch.from_numpy(np.random.default_rng().normal(size=3)))
            self.v = nn.Parameter(torch.tensor(float(np.random.rand())))

    for _ in range(3):  # NumPy's key changes only after many draws, but its position at each
        values = Population.of(Foreign, 4)
        assert len({row.item() for row in dict(values.named_parameters())["v"]}) == 4
