"""Links that read axes: a parameter as a batch of matrices equals separate matrices."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from axes.zoo import MODELS
from moduli import m, optim

QKV = "blocks.0.att.qkv.weight"

LINKS = {
    "Orthogonalize": lambda **words: m.Orthogonalize(adjust_lr=True, **words),
    "polar express": lambda **words: m.Orthogonalize(method="polar_express", **words),
    "dual norm": lambda **words: m.Orthogonalize(method="svd", dual_norm_correction=True, **words),
    "Shampoo": lambda **words: m.Shampoo(precond_freq=2, **words),
    # Directions without any gradient have equal eigenvalues: their order in the basis would depend on rounding.
    "SOAP": lambda **words: m.SOAP(precond_freq=10, **words),
    "KLShampoo": lambda **words: m.KLShampoo(**words),
    "SPlus": lambda **words: m.SPlus(precond_freq=2, **words),
    "PSGD": lambda **words: m.PSGDKronWhiten(seed=0, **words),
    "Dion": lambda **words: m.Dion(seed=0, **words),
    "Scion": lambda **words: m.LMO("spectral", **words),
    "rows": lambda **words: m.LMO("row", **words),
    "NorMuon": lambda **words: m.NeuronNormalize(**words),
    "Adafactor": lambda **words: m.Adafactor(**words),
    "CAME": lambda **words: m.CAME(**words),
    "DualNormCorrection": lambda **words: m.DualNormCorrection(**words),
    "MuonAdjustLR": lambda **words: m.MuonAdjustLR(**words),
    "GaLore": lambda **words: m.GaLore(m.Adam(), rank=3, update_gap=2, **words),
    "Fira": lambda **words: m.Fira(m.Adam(), rank=3, update_gap=2, **words),
    "APOLLO": lambda **words: m.APOLLO(m.Adam(), rank=3, update_gap=2, seed=0, **words),
}


@pytest.fixture
def fused():
    torch.manual_seed(0)
    net, example, _ = MODELS["fused qkv"]()
    return net.double(), mo.axes.trace(net, *example)


def make_gradients(param, steps=4):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(param.shape, generator=generator, dtype=param.dtype) for _ in range(steps)]


def run_whole(net, ax, name, link, steps=4):
    net = copy.deepcopy(net)
    opt = mo.Optimizer(net, link, m.LR(0.1), axes=ax)
    param = dict(net.named_parameters())[name]
    for grad in make_gradients(param, steps):
        param.grad = grad.clone()
        opt.step()
    return param.detach()


def run_alone(tensor, gradients, link):
    param = nn.Parameter(tensor.clone())
    opt = mo.Optimizer([param], link, m.LR(0.1))
    for grad in gradients:
        param.grad = grad.clone()
        opt.step()
    return param.detach()


@pytest.mark.parametrize("name", LINKS)
def test_heads_of_a_fused_projection_are_separate_matrices(fused, name):
    net, ax = fused
    result = run_whole(net, ax, QKV, LINKS[name](batch="head"))
    start, gradients = net.blocks[0].att.qkv.weight.detach(), make_gradients(result)
    for head in range(12):  # four heads in each of query, key and value
        rows = slice(6 * head, 6 * head + 6)
        alone = run_alone(start[rows], [grad[rows] for grad in gradients], LINKS[name]())
        torch.testing.assert_close(result[rows], alone, atol=1e-6, rtol=1e-6)


def test_all_heads_are_one_call(fused):
    net, ax = fused
    assert optim.matrix_view(ax.of(QKV), "head").shapes == ((12, 6, 24),)
    assert optim.matrix_view(ax.of("blocks.0.att.o.weight"), "head").shapes == ((4, 24, 6),)
    calls = []
    link = m.Orthogonalize(batch="head")
    transform = type(link).transform
    link.transform = lambda *args: calls.append(args[0].shape) or transform(link, *args)
    run_whole(net, ax, QKV, link, steps=1)
    assert calls == [(6, 24)]


def test_matrix_view_by_names_of_axes(fused):
    net, example, _ = MODELS["fused qkv"]()
    ax = mo.axes.trace(net, *example, names={"*.qkv.weight": "(qkv=3 head=4 size) model"})
    assert optim.matrix_view(ax.of(QKV), "head").shapes == ((4, 18, 24),)
    assert optim.matrix_view(ax.of(QKV), ("head", "qkv")).shapes == ((12, 6, 24),)
    assert optim.matrix_view(ax.of(QKV), "head qkv").shapes == ((12, 6, 24),)
    assert optim.matrix_view(ax.of(QKV), matrix="size model").shapes == ((12, 6, 24),)
    assert optim.matrix_view(ax.of("blocks.0.att.qkv.bias"), "head") is None


def test_uneven_segments_are_one_batch_for_each_size():
    torch.manual_seed(0)
    net, example, _ = MODELS["unet"]()
    ax = mo.axes.trace(net, *example)
    view = optim.matrix_view(ax.of("c.weight"), batch="segment", matrix="out in")
    assert view.shapes == ((9, 8, 6), (9, 8, 10))
    assert torch.equal(view.join(view.split(net.c.weight)), net.c.weight)
    assert "(9, 8, 6)" in repr(view)


@pytest.mark.parametrize(
    "name", ["mlp", "conv 2d", "unet", "fused qkv", "lstm", "einsum experts", "grouped queries, fused"]
)
@pytest.mark.parametrize(
    "words", [{}, {"batch": "head"}, {"batch": "segment"}, {"matrix": "out in"}, {"matrix": "in out"}]
)
def test_splitting_into_matrices_and_joining_is_the_identity(name, words):
    torch.manual_seed(0)
    net, example, _ = MODELS[name]()
    ax = mo.axes.trace(net, *example)
    for path, param in net.named_parameters():
        view = optim.matrix_view(ax.of(path), **words)
        if view is not None:
            batches = view.split(param)
            assert tuple(tuple(batch.shape) for batch in batches) == view.shapes
            assert torch.equal(view.join(batches), param)


def test_rows_are_outputs_wherever_they_are_stored():
    """Transposed convolutions store inputs first; experts are a batch of matrices."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.ConvTranspose2d(3, 8, 2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    ax = mo.axes.trace(net, torch.zeros(1, 3, 4, 4))
    assert optim.matrix_view(ax.of("0.weight")).shapes == ((1, 8, 12),)
    net, example, _ = MODELS["chosen experts"]()
    ax = mo.axes.trace(net, *example)
    assert optim.matrix_view(ax.of("up")).shapes == ((5, 9, 8),)
    result = run_whole(net, ax, "up", m.Orthogonalize())
    gradients = make_gradients(result)
    for expert in range(5):
        alone = run_alone(net.up[expert].detach(), [grad[expert] for grad in gradients], m.Orthogonalize())
        torch.testing.assert_close(result[expert], alone, atol=1e-6, rtol=1e-6)


def test_kernel_positions_are_separate_matrices():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    ax = mo.axes.trace(net, torch.zeros(1, 6, 5, 5))
    result = run_whole(net, ax, "0.weight", m.Shampoo(matrix="out in"))
    gradients = make_gradients(result)
    start = net[0].weight.detach()
    for i in range(9):
        place = (slice(None), slice(None), i // 3, i % 3)
        alone = run_alone(start[place], [grad[place] for grad in gradients], m.Shampoo())
        torch.testing.assert_close(result[place], alone, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("link", [m.Orthogonalize, m.Shampoo, m.SOAP, m.Adafactor])
def test_axes_without_the_matrix_setting_change_nothing_where_rows_come_first(link):
    torch.manual_seed(0)
    net, example, _ = MODELS["unet"]()
    ax = mo.axes.trace(net, *example)
    for name in ("a.weight", "c.weight"):
        assert torch.equal(run_whole(net, ax, name, link()), run_whole(net, None, name, link()))


def test_wrong_matrix_settings_and_axes_are_refused(fused):
    net, ax = fused
    with pytest.raises(ValueError, match=r"Orthogonalize: 'head' are axes, .* axes=mo.axes.trace"):
        mo.Optimizer(net, m.Orthogonalize(batch="head"), m.LR(0.1))
    with pytest.raises(ValueError, match=r"no axis 'haed'. did you mean 'head'"):
        mo.Optimizer(net, m.Orthogonalize(batch="haed"), m.LR(0.1), axes=ax)
    with pytest.raises(ValueError, match="names 3 axes; write the rows and the columns"):
        mo.Optimizer(net, m.Shampoo(matrix="out in kernel"), m.LR(0.1), axes=ax)
    with pytest.raises(ValueError, match=r"'embed.weight' has shape \(12, 24\), and the axes are of shape \(11, 24\)"):
        other = copy.deepcopy(net)
        other.embed = nn.Embedding(12, 24)
        mo.Optimizer(other, m.Adam(), m.LR(0.1), axes=ax)
    with pytest.raises(ValueError, match="axes are of another model: .* no parameter or buffer '0.weight'"):
        mo.Optimizer(nn.Sequential(nn.Linear(2, 2)), m.Adam(), m.LR(0.1), axes=ax)
    with pytest.raises(ValueError, match="which the optimizer has to know"):
        optim.step_tensors(m.Orthogonalize(batch="head"), [torch.ones(4, 4)])
    with pytest.raises(ValueError, match="tensors that another link made"):
        run_whole(net, ax, QKV, m.VectorProjection(m.Orthogonalize(batch="head")))


def train(net, opt, example, steps):
    for step in range(steps):
        target = (example + step) % 11
        opt.step(mo.closure(lambda: nn.functional.cross_entropy(net(example).flatten(0, 1), target.flatten())))


@pytest.mark.parametrize("name", ["Orthogonalize", "Shampoo", "SOAP", "PSGD", "Dion", "NorMuon", "GaLore"])
def test_resuming_is_exact(fused, name, tmp_path):
    net, ax = fused
    example = torch.arange(14).reshape(2, 7) % 11
    first, second = copy.deepcopy(net), copy.deepcopy(net)
    whole = mo.Optimizer(first, LINKS[name](batch="head"), m.LR(0.01), axes=ax)
    train(first, whole, example, 3)
    half = mo.Optimizer(second, LINKS[name](batch="head"), m.LR(0.01), axes=ax)
    train(second, half, example, 3)
    mo.save(tmp_path / "state", second, optimizer=half)
    third = copy.deepcopy(net)
    resumed = mo.Optimizer(third, LINKS[name](batch="head"), m.LR(0.01), axes=ax)
    mo.load(tmp_path / "state", third, optimizer=resumed)
    train(first, whole, example, 2)
    train(third, resumed, example, 2)
    for one, two in zip(first.parameters(), third.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["Orthogonalize", "Shampoo", "SOAP", "Adafactor", "NorMuon"])
def test_populations(name):
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double() for _ in range(3)]
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    ax = mo.axes.trace(nets[0], x, names={"0.weight": "(group=2 unit) feature"})
    population = mo.Population.from_modules(nets)
    opt = mo.Optimizer(population, LINKS[name](batch="group"), m.LR(0.05), axes=ax)
    for _ in range(3):
        opt.step(mo.closure(lambda: ((population(x) - y) ** 2).mean((1, 2))))
    for i, net in enumerate(nets):
        own = mo.Optimizer(net, LINKS[name](batch="group"), m.LR(0.05), axes=ax)
        for _ in range(3):
            own.step(mo.closure(lambda: ((net(x) - y) ** 2).mean()))
        for (path, param), (_, stacked) in zip(net.named_parameters(), population.named_parameters(), strict=True):
            torch.testing.assert_close(stacked[i], param, atol=1e-6, rtol=1e-6, msg=lambda text: f"{path}: {text}")


def test_labels_are_axes():
    """A module with labelled tensors has axes without a trace."""

    class Heads(mo.Module):
        def __init__(self):
            super().__init__()
            self.w = mo.tensor(torch.randn(4, 6, 8, dtype=torch.float64), "head size model", requires_grad=True)

        def forward(self, x):
            return mo.dot(self.w, x)

    torch.manual_seed(0)
    net = Heads()
    start = net.w.data.detach().clone()
    opt = mo.Optimizer(net, m.Orthogonalize(matrix="size model"), m.LR(0.1))
    (param,) = net.parameters()
    gradients = make_gradients(param)
    for grad in gradients:
        param.grad = grad.clone()
        opt.step()
    for head in range(4):
        alone = run_alone(start[head], [grad[head] for grad in gradients], m.Orthogonalize())
        torch.testing.assert_close(param.detach()[head], alone, atol=1e-6, rtol=1e-6)
    assert (
        mo.Optimizer(Heads(), m.Orthogonalize(), m.LR(0.1)).binding.axes is None
    )  # axes are read only if a link needs them


def test_soap_with_links_inside_is_refused(fused):
    net, ax = fused
    with pytest.raises(ValueError, match="SOAP: inner= and batch= or matrix= do not go together"):
        mo.Optimizer(net, m.SOAP(batch="head", inner=m.EMA(0.9)), m.LR(0.1), axes=ax)
