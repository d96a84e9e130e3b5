"""Aligned models: a permuted copy is recovered exactly, outputs stay the same, and the loss barrier between models falls."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moduli as mo
from axes.zoo import MODELS
from moduli import merge

pytest.importorskip("scipy")


def add_noise(net):
    """Add noise to every parameter, because units with equal initial values cannot be matched uniquely."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in (*net.parameters(), *net.buffers()):
            if each.is_floating_point():
                each += 0.05 * torch.rand(each.shape, generator=generator, dtype=each.dtype)
    return net.eval()


def permute_randomly(net, example):
    ax = mo.axes.trace(net, *example)
    generator = torch.Generator().manual_seed(5)
    units = {axis.name: torch.randperm(axis.size, generator=generator) for axis in ax.free}
    return ax, merge.permute_units(net, ax, units, example)


def make_mlp(seed=0, width=12):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.mark.parametrize("name", MODELS)
def test_a_permuted_copy_is_recovered_exactly(name):
    torch.manual_seed(0)
    net, example, _ = MODELS[name]()
    net = add_noise(net)
    ax, other = permute_randomly(net, example)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    aligned = merge.align(other, net, ax, example)
    for key, value in net.state_dict().items():
        assert torch.equal(aligned.state_dict()[key], value), key
        assert torch.equal(other.state_dict()[key], before[key]), key


def test_a_permuted_copy_is_recovered_by_its_activations():
    net = add_noise(MODELS["conv 2d"]()[0])
    example = MODELS["conv 2d"]()[1]
    ax, other = permute_randomly(net, example)
    data = [torch.randn(16, *example[0].shape[1:], generator=torch.Generator().manual_seed(at)) for at in range(3)]
    aligned = merge.align(other, net, ax, example, by="activations", data=data)
    for key, value in net.state_dict().items():
        assert torch.equal(aligned.state_dict()[key], value), key


def test_state_dicts_are_aligned_with_axes():
    net, x = make_mlp(), torch.randn(5, 4)
    ax, other = permute_randomly(net, (x,))
    aligned = merge.align(other.state_dict(), net.state_dict(), ax)
    assert all(map(torch.equal, aligned.values(), net.state_dict().values()))
    assert list(aligned) == list(net.state_dict())


def test_double_precision_complex_and_tied_models_are_recovered():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 6, dtype=torch.float64)
            self.mix = nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x):
            return self.mix(self.embed(x)).tanh() @ self.embed.weight.T

    net, x = add_noise(Tied()), torch.arange(7)
    ax, other = permute_randomly(net, (x,))
    aligned = merge.align(other, net, ax, x)
    assert all(map(torch.equal, aligned.parameters(), net.parameters()))

    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
            self.b = nn.Parameter(torch.randn(5, 2, dtype=torch.complex64))

        def forward(self, x):
            return (x @ self.a) @ self.b

    waves, x = Waves(), torch.randn(4, 3, dtype=torch.complex64)
    ax, other = permute_randomly(waves, (x,))
    assert torch.equal(merge.align(other, waves, ax, x).a, waves.a)


def test_alignment_of_half_precision_allows_for_rounding():
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
        for _ in range(2)
    ]
    a, b = (net.bfloat16() for net in nets)
    x = torch.randn(8, 64).bfloat16()
    aligned = merge.align(b, a, example=x)
    assert aligned[0].weight.dtype is torch.bfloat16
    assert not torch.equal(aligned[0].weight, b[0].weight)
    torch.testing.assert_close(aligned(x), b(x), rtol=0.05, atol=0.05)
    with pytest.raises(merge.MergeError, match="does not compute"):
        merge.permute_units(a, mo.axes.trace(a, x), {"4.out": torch.tensor([1, 2, 3, 0])}, x)


@pytest.mark.parametrize("by", ["weights", "activations"])
def test_alignment_keeps_the_outputs_and_reduces_the_distance(by):
    a, b, x = make_mlp(0), make_mlp(1), torch.randn(64, 4)
    data = [x] if by == "activations" else None
    c = merge.align(b, a, example=x, by=by, data=data)
    torch.testing.assert_close(c(x), b(x), rtol=1e-5, atol=1e-5)
    again = merge.align(b, a, example=x, by=by, data=data)
    assert all(map(torch.equal, c.parameters(), again.parameters()))
    if by == "weights":
        vector = nn.utils.parameters_to_vector(a.parameters())
        distance_before, distance_after = (
            vector.dist(nn.utils.parameters_to_vector(each.parameters())) for each in (b, c)
        )
        assert distance_after < distance_before


def test_alignment_lowers_the_barrier_between_trained_models():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator)
    y = (x[:, :3].prod(1) > 0).long() + 2 * (x[:, 3:].sum(1) > 0).long()

    def train(seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 4))
        opt = torch.optim.Adam(net.parameters(), 3e-3)
        for _ in range(250):
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        return net.requires_grad_(False)

    a, b = train(0), train(1)
    loss = lambda net: F.cross_entropy(net(x), y)  # noqa: E731
    naive = merge.path(a, b, loss, points=11).barrier
    c = merge.align(b, a, example=x)
    aligned = merge.path(a, c, loss, points=11).barrier
    assert aligned < 0.5 * naive
    middle = merge.lerp(a, b, 0.5, align=True, example=x)
    assert float(loss(merge.repair(middle, [x], [a, c]))) < float(loss(merge.lerp(a, b, 0.5)))


def test_recipes_align_their_models_to_the_first():
    a, x = make_mlp(), torch.randn(5, 4)
    ax, b = permute_randomly(a, (x,))
    for merged in (
        merge.lerp(a, b, 0.5, align=True, example=x),
        merge.linear([a, b, b], align=ax),
        merge.slerp(a, b, 0.3, align=ax),
        merge.ties(a, [b, b], density=0.5, align=True, example=x),
        merge.task_arithmetic(a, [b], 1.0, align=ax),
    ):
        torch.testing.assert_close(merged(x), a(x), rtol=1e-4, atol=1e-5)
    state = merge.lerp(a.state_dict(), b.state_dict(), 0.5, align=ax)
    torch.testing.assert_close(state["0.weight"], a[0].weight.data)


def test_several_models_are_aligned_to_their_mean():
    a, x = make_mlp(width=8), torch.randn(5, 4)
    ax, b = permute_randomly(a, (x,))
    c = permute_randomly(b, (x,))[1]
    nets = merge.align_all([a, b, c], ax, x)
    for net, source in zip(nets, (a, b, c), strict=True):
        torch.testing.assert_close(net(x), source(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(net[0].weight, nets[0][0].weight)


def test_repair_sets_the_statistics_of_batch_norm():
    torch.manual_seed(0)
    x = torch.randn(200, 4)

    def make():
        net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        net.train()(x)
        return net.eval()

    a, b = make(), make()
    merged = merge.lerp(a, b, 0.5)
    fixed = merge.repair(merged, [x])
    out = merged[0](x)
    torch.testing.assert_close(fixed[1].running_mean, out.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fixed[1].running_var, out.var(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(merge.MergeError, match="no batch"):
        merge.repair(merged, [])
    with pytest.raises(merge.MergeError, match="1 weights for 2 sources"):
        merge.repair(merged, [x], [a, b], [1.0])


def test_path_of_three_models_has_the_losses_of_a_plane():
    corners = [{"w": torch.tensor(w)} for w in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0])]
    plane = merge.path(*corners[:2], lambda model: float(model["w"].prod()), corners[2], points=5)
    assert plane.losses.shape == (5, 5)
    torch.testing.assert_close(plane.losses, plane.grid[:, None] * plane.grid[None])
    assert plane.barrier == 0.25
    assert "barrier=0.25" in repr(plane)


def test_paths_are_plotted():
    pytest.importorskip("matplotlib")
    a, b, c = ({"w": torch.tensor([w])} for w in (0.0, 1.0, 2.0))
    for result in (merge.path(a, b, lambda m: float(m["w"])), merge.path(a, b, lambda m: float(m["w"]), c, points=4)):
        assert result.plot().axes[0].get_xlabel() == "weight of the second model"


def test_invalid_arguments_of_alignment_are_refused():
    a, x = make_mlp(), torch.randn(5, 4)
    ax = mo.axes.trace(a, x)
    with pytest.raises(merge.MergeError, match="give example="):
        merge.align(a, copy.deepcopy(a))
    with pytest.raises(merge.MergeError, match=r"shape \(12, 4\) in the model, \(16, 4\) in `to`"):
        merge.align(a, make_mlp(width=16), ax)
    with pytest.raises(merge.MergeError, match="missing in `to`"):
        merge.align(a.state_dict(), {"0.weight": a[0].weight}, ax)
    with pytest.raises(merge.MergeError, match="together"):
        merge.align(a, a, ax, by="activations")
    with pytest.raises(merge.MergeError, match="no batch"):
        merge.align(a, a, ax, by="activations", data=[])
    with pytest.raises(merge.MergeError, match="are those of modules"):
        merge.align(a.state_dict(), a.state_dict(), ax, by="activations", data=[x])
    with pytest.raises(merge.MergeError, match="points is 1"):
        merge.path(a, a, lambda net: 0.0, points=1)
    with pytest.raises(merge.MergeError, match="does not say what its axes are"):
        merge.lerp("a", "b", 0.5, out="c", align=True)


def test_checkpoints_are_aligned_with_axes(tmp_path):
    a, x = make_mlp(), torch.randn(5, 4)
    ax, b = permute_randomly(a, (x,))
    mo.save(tmp_path / "a.safetensors", a)
    mo.save(tmp_path / "b.safetensors", b)
    merge.linear([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], out=tmp_path / "c.safetensors", align=ax)
    merged = mo.io.read(tmp_path / "c.safetensors").module
    assert all(torch.equal(merged[name], value) for name, value in a.state_dict().items())


def test_permuting_an_output_axis_is_refused():
    net, x = make_mlp(), torch.randn(5, 4)
    ax = mo.axes.trace(net, x)
    with pytest.raises(merge.MergeError, match="does not compute"):
        merge.permute_units(net, ax, {"4.out": torch.tensor([2, 0, 1])}, x)
