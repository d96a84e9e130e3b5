"""Growing and shrinking axes of models: outputs stay the same, and remaining units keep their values."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli.particles import GrowthError, StructureError, grow, shrink

from ..axes.zoo import MODELS

# For each model: pairs of the sizes to grow to, and of the plain attributes that its code needs changed with them.
HEADS = {f"blocks.{i}.att.{name}": 8 for i in (0, 1) for name in ("heads", "kv")}
WIDER = {
    "mlp": [({"0.out": 19}, {}), ({"0.out": 32, "2.out": 17}, {})],
    "residual mlp": [({"a.out": 16}, {}), ({"b.out": 27}, {})],
    "bilinear": [({"a.out": 7, "b.out": 9, "mix.out": 8}, {})],
    "swiglu": [({"a.out": 16, "both.out.1": 13, "down.out": 10}, {})],
    "glu": [({"both.out.1": 9}, {})],
    "conv 1d": [({"a.out.0": 8}, {}), ({"a.out.2": 3, "up.out": 5}, {})],
    "conv 2d": [({"a.out.0": 8}, {}), ({"a.out.2": 3, "up.out": 5}, {})],
    "conv 3d": [({"a.out.0": 8}, {})],
    "plain convolutions": [({"0.out": 7, "3.out": 11}, {})],
    "unet": [({"a.out": 7, "b.out": 13, "c.out": 9}, {})],
    "padded shortcut": [({"a.out": 9}, {})],
    "tied": [({"embed.out": 16, "up.out": 30}, {})],
    "attention by hand": [({"embed.out": 48, "blocks.*.head": 8, "blocks.*.up.out": 50}, {})],
    "attention by torch": [({"embed.out": 48, "blocks.*.head": 8}, {})],
    "fused qkv": [({"embed.out": 48, "blocks.*.head": 8}, HEADS)],
    "fused qkv by hand": [({"embed.out": 48, "blocks.*.head": 8}, HEADS)],
    "grouped queries": [({"embed.out": 48, "blocks.*.head.1": 4}, {})],
    "rotary": [({"embed.out": 48, "blocks.*.head": 8}, {})],
    "multihead attention": [({"embed.out": 24, "att.in_proj.head": 6}, {})],
    "encoder layer": [({"0.out": 24, "1.*.head": 6, "1.*.linear1.out": 21}, {})],
    "rnn": [({"cell.*.out": 9}, {})],
    "gru": [({"cell.*.out.1": 9}, {})],
    "lstm": [({"cell.*.out.1": 9}, {})],
    "lstm, both ways": [({"cell.*.out.1": 9}, {})],
    "einsum experts": [({"a.out": 9, "router.out": 10, "up.out.1": 10}, {})],
    "chosen experts": [({"a.out": 9, "up.out": 12}, {})],
    "gathered": [({"score.out": 7}, {})],
    "functional": [({"b.out": 9}, {})],
    "weight norm": [({"0.out": 9}, {})],
    "low rank": [({"a.out": 9, "left.out": 3, "base.out": 10}, {})],
}


def compute(net, example):
    net.eval()
    with torch.no_grad():
        result = net(*example)
    return result if isinstance(result, tuple) else (result,)


def assert_outputs_close(net, example, expected):
    for a, b in zip(compute(net, example), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def disturb(net):
    """Perturb parameters and buffers, because the zeros and ones of an initialisation could hide an error."""
    with torch.no_grad():
        for tensor in (*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())):
            tensor.mul_(1 + 0.1 * torch.rand_like(tensor))
            if tensor.dim() == 1:
                tensor.add_(0.05 * torch.rand_like(tensor))


@pytest.mark.parametrize(("name", "case"), [(name, i) for name, cases in WIDER.items() for i in range(len(cases))])
def test_a_grown_model_computes_the_same_outputs(name, case):
    torch.manual_seed(0)
    net, example, _ = MODELS[name]()
    disturb(net)
    sizes, attributes = WIDER[name][case]
    expected = compute(net, example)
    flags = [p.requires_grad for p in net.parameters()]
    count = sum(p.numel() for p in net.parameters())
    assert grow(net, sizes, example=example, attributes=attributes) is net
    assert_outputs_close(net, example, expected)
    assert sum(p.numel() for p in net.parameters()) > count
    assert flags == [p.requires_grad for p in net.parameters()]
    # The outgoing weights of copies differ, so that copies get different gradients.
    sum(out.square().sum() for out in net(*example) if out.is_floating_point()).backward()


@pytest.mark.parametrize("name", ["mlp", "swiglu", "conv 2d", "unet", "lstm", "low rank", "weight norm", "bilinear"])
def test_new_units_have_zero_outgoing_weights_with_how_zero(name):
    torch.manual_seed(0)
    net, example, _free = MODELS[name]()
    disturb(net)
    expected = compute(net, example)
    ax = mo.axes.trace(net, *example)
    normalised = {"swiglu": {"a.out"}, "conv 2d": {"a.out.0", "a.out.1", "b.out.2"}}.get(name, set())
    sizes = {axis.name: axis.size + 3 for axis in ax.free if axis.name not in normalised}
    grow(net, sizes, ax, example, how="zero")
    assert_outputs_close(net, example, expected)


def test_outgoing_weights_of_copies_differ_and_sum_to_the_original():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))
    old = copy.deepcopy(net)
    grow(net, {"0.out": 10}, example=torch.zeros(1, 3))
    assert torch.equal(net[0].weight[:4], old[0].weight)
    assert torch.equal(net[0].weight[4:8], old[0].weight)
    assert torch.equal(net[0].bias[8:], old[0].bias[:2])
    sums = net[2].weight[:, :4] + net[2].weight[:, 4:8]
    sums[:, :2] += net[2].weight[:, 8:]
    torch.testing.assert_close(sums, old[2].weight)
    ratio = net[2].weight[:, 3] / net[2].weight[:, 7]
    assert not torch.allclose(ratio, ratio[0])
    plain = grow(copy.deepcopy(old), {"0.out": 8}, example=torch.zeros(1, 3), noise=0.0)
    torch.testing.assert_close(plain[2].weight, torch.cat([old[2].weight, old[2].weight], 1) / 2)


def test_equal_seeds_grow_equal_models():
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))]
    nets += [copy.deepcopy(nets[0]) for _ in range(2)]
    for net, seed in zip(nets, (1, 1, 2), strict=True):
        grow(net, {"0.out": 7}, example=torch.zeros(1, 3), how="zero", seed=seed)
    assert torch.equal(nets[0][0].weight, nets[1][0].weight)
    assert not torch.equal(nets[0][0].weight, nets[2][0].weight)


def snapshot(net):
    tensors = {name: (id(t), t.detach().clone()) for name, t in (*net.named_parameters(), *net.named_buffers())}
    sizes = {path: {k: v for k, v in m.__dict__.items() if type(v) in (int, tuple)} for path, m in net.named_modules()}
    return tensors, sizes


REFUSED = {
    "residual mlp": ({"a.out": 12}, {}, r"'n' takes statistics over these units.*a multiple of the size"),
    "swiglu": ({"a.out": 12}, {"how": "zero"}, r"'n' takes statistics"),
    "attention by torch": ({"embed.out": 48}, {}, r"the forward fails.*'blocks.0.att.size' is 6|the forward fails"),
    "fused qkv": ({"embed.out": 48, "blocks.*.head": 8}, {}, r"These have the old size: 'blocks.0.att.heads' is 4"),
    "chosen experts": ({"router.out": 10}, {}, r"a softmax, a top-k"),
    "interleaved rotary": ({"a.out.0": 6}, {}, r"the forward fails"),
    "slices": ({"a.out": 8}, {}, r"the forward fails"),
    "functional": ({"a.out": 12}, {}, r"the output differs"),
    "gru": ({"cell.weight_ih_l0.out.1": 9}, {}, r"the forward fails"),
}


@pytest.mark.parametrize("particle", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_growth_that_would_change_the_outputs_is_refused_and_nothing_changes(name, particle):
    torch.manual_seed(0)
    net, example, _ = MODELS[name]()
    if particle:
        twin = mo.adopt(net).clone()
    disturb(net)
    before, expected = snapshot(net), compute(net, example)
    sizes, options, message = REFUSED[name]
    with pytest.raises(GrowthError, match=message):
        grow(net, sizes, example=example, **options)
    after = snapshot(net)
    assert before[1] == after[1]
    assert {k: i for k, (i, _) in before[0].items()} == {k: i for k, (i, _) in after[0].items()}
    assert all(torch.equal(v, after[0][k][1]) for k, (_, v) in before[0].items())
    assert_outputs_close(net, example, expected)
    if particle:
        assert mo.particles.history(net) == []
        assert set(dict((net + twin).named_parameters())) == set(dict(net.named_parameters()))


def test_errors_name_the_axis_and_the_remedy():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)), torch.zeros(1, 3)
    with pytest.raises(ValueError, match=r"pass example=inputs"):
        grow(net, {"0.out": 8})
    with pytest.raises(KeyError, match=r"no axis '0.ot'"):
        grow(net, {"0.ot": 8}, example=x)
    with pytest.raises(ValueError, match=r"has 4 units, more than 2; particles.shrink"):
        grow(net, {"0.out": 2}, example=x)
    with pytest.raises(TypeError, match=r"has no labels; give the number"):
        grow(net, {"0.out": ["a", "b"]}, example=x)
    with pytest.raises(ValueError, match=r"how='copy'"):
        grow(net, {"0.out": 8}, example=x, how="copy")
    with pytest.raises(KeyError, match=r"no plain attribute 'heads'"):
        grow(net, {"0.out": 8}, example=x, attributes={"heads": 3})
    ax = mo.axes.trace(net, x)
    grow(net, {"0.out": 8}, ax, x)
    with pytest.raises(
        ValueError, match=r"has shape \(8, 3\), and the axes are of shape \(4, 3\); trace the model again"
    ):
        grow(net, {"0.out": 16}, ax, x)
    kernel = nn.Conv1d(2, 3, 5)
    with pytest.raises(ValueError, match=r"is fixed.*positions of a kernel"):
        grow(kernel, {"kernel": 7}, example=torch.zeros(1, 2, 9))
    with pytest.raises(ValueError, match=r"at least one, each once"):
        shrink(net, {"0.out": [1, 1]}, example=x)
    with pytest.raises(ValueError, match=r"of which 9 can't stay"):
        shrink(net, {"0.out": 9}, example=x)
    with pytest.raises(TypeError, match="neither a module nor a population"):
        grow([1], {"a": 2})
    with pytest.raises(GrowthError, match="DistributedDataParallel"):
        fake = object.__new__(nn.parallel.DistributedDataParallel)
        nn.Module.__init__(fake)
        grow(nn.Sequential(fake), {"0.out": 2}, example=x)


def test_outputs_tokens_and_inputs_keep_their_old_values():
    torch.manual_seed(0)
    net, example, _ = MODELS["tied"]()
    (before,) = compute(net, example)
    grow(net, {"embed.index": 15}, example=example)
    assert net.embed.num_embeddings == 15
    torch.testing.assert_close(compute(net, example)[0][..., :11], before, rtol=1e-5, atol=1e-5)
    assert net(torch.full((1, 3), 14)).shape == (1, 3, 15)
    head = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    before = head(x)
    grow(head, {"1.out": 5, "0.out": 6}, example=x)
    torch.testing.assert_close(head(x)[:, :2], before)
    assert head[1].weight[2:].std() > 0
    grow(head, {"0.in": 4}, example=x)
    torch.testing.assert_close(head(torch.cat([x, torch.randn(5, 1)], 1))[:, :2], before)


def test_traced_axes_suffice_without_an_example():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)), torch.randn(2, 3)
    expected = compute(net, (x,))
    grow(net, {"0.out": 9}, mo.axes.trace(net, x))
    assert_outputs_close(net, (x,), expected)


def test_growth_of_normalised_units_is_refused_without_an_example():
    net, example, _ = MODELS["residual mlp"]()
    ax = mo.axes.trace(net, *example)
    with pytest.raises(GrowthError, match="'n' takes statistics"):
        grow(net, {"a.out": 12}, ax)
    expected = compute(net, example)
    grow(net, {"a.out": 16}, ax)
    assert_outputs_close(net, example, expected)
    tied, ids, _ = MODELS["tied"]()
    with pytest.raises(GrowthError, match=r"only an example shows which normalisation can be in its place \('norm'\)"):
        grow(tied, {"embed.out": 16}, mo.axes.trace(tied, *ids))


def test_an_error_in_the_forward_is_the_cause_of_the_growth_error():
    net, example, _ = MODELS["slices"]()
    with pytest.raises(GrowthError) as caught:
        grow(net, {"a.out": 8}, example=example)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_and_requires_grad_stay_the_same(dtype):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).to(dtype)
    net[0].weight.requires_grad_(False)
    x = torch.randn(6, 3, dtype=dtype)
    net(x)
    expected = compute(net, (x,))
    tolerance = 1e-12 if dtype == torch.float64 else 0.05
    grow(net, {"0.out": 8}, example=x, tolerance=tolerance)
    assert {t.dtype for t in net.parameters()} == {dtype}
    assert not net[0].weight.requires_grad
    assert net[0].bias.requires_grad
    assert net[1].num_features == 8
    assert net[1].running_var.shape == (8,)
    torch.testing.assert_close(compute(net, (x,))[0], expected[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["split", "zero"])
def test_models_of_half_precision_grow_with_the_default_tolerance(dtype, how):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 30)).to(dtype)
    x = torch.randn(5, 40, dtype=dtype)
    expected = net(x)
    grow(net, {"0.out": 120}, example=x, how=how)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(net(x), expected, rtol=2 * eps, atol=2 * eps)
    normalised = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
    with pytest.raises(GrowthError, match="takes statistics over these units"):
        grow(normalised, {"0.out": 12}, example=torch.randn(3, 4, dtype=dtype))


class ConvertedInput(nn.Linear):
    def forward(self, x):
        return super().forward(x.bfloat16())


def test_models_that_convert_their_inputs_to_half_precision_grow():
    net = nn.Sequential(ConvertedInput(40, 80), nn.ReLU(), nn.Linear(80, 30)).bfloat16()
    x = torch.randn(5, 40)
    expected = net(x)
    grow(net, {"0.out": 120}, example=x)
    torch.testing.assert_close(net(x), expected, rtol=2e-2, atol=2e-2)


def test_shrinking_keeps_units_by_position_score_and_mask():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)), torch.randn(2, 3)
    old = copy.deepcopy(net)
    shrink(net, {"0.out": [4, 0, -1]}, example=x)
    assert torch.equal(net[0].weight, old[0].weight[[4, 0, 5]])
    assert torch.equal(net[3].weight, old[3].weight[:, [4, 0, 5]])
    assert net[0].out_features == net[1].num_features == net[3].in_features == 3
    other = copy.deepcopy(old)
    shrink(other, {"0.out": 2}, example=x, score=torch.tensor([0.0, 5, 1, 0, 7, 0]))
    assert torch.equal(other[0].bias, old[0].bias[[1, 4]])
    with torch.no_grad():
        old[0].weight[3] *= 100
        old[3].weight[:, 0] *= 100
    shrink(old, {"0.out": torch.tensor([False, True, True, True, True, True])}, example=x)
    shrink(old, {"0.out": 1}, example=x)  # chosen by the norm of the weights of each unit
    assert old[0].weight.abs().max() > 5
    scored = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
    best = scored[0].bias.argmax()
    best_bias = scored[0].bias[best].item()
    shrink(scored, {"0.out": 1}, example=x, score=lambda axes, tensors: tensors["0.bias"])
    assert scored[0].bias.item() == best_bias


def test_masks_of_another_size_and_units_that_are_no_integers_are_refused():
    net, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)), torch.randn(2, 3)
    for units in (torch.tensor([True, False, True]), [True] * 7, torch.ones(6, 1, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"the mask of axis '0.out' has shape \(.*\), not \(6,\)"):
            shrink(net, {"0.out": units}, example=x)
    for units in ([0.0, 2.7], torch.tensor([1.0, 3.0]), torch.tensor([1 + 0j])):
        with pytest.raises(TypeError, match="the units of axis '0.out' are torch.*; give positions"):
            shrink(net, {"0.out": units}, example=x)
    assert net[0].out_features == 6


def test_both_inputs_of_a_bilinear_layer_grow_at_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.c, self.b = nn.Linear(4, 6), nn.Linear(4, 5), nn.Bilinear(6, 5, 3)

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)), torch.tanh(self.c(x)))

    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(7, 4, dtype=torch.float64)
    before = net(x)
    grow(net, {"a.out": 16, "c.out": 13}, axes=mo.axes.trace(net, x), noise=0.5)
    torch.testing.assert_close(net(x), before, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["pruned", "weight_norm"])
def test_layers_with_weights_that_hooks_compute_have_the_sizes_of_what_they_compute(how):
    net, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4)
    if how == "pruned":
        nn.utils.prune.l1_unstructured(net[0], "weight", 0.5)
    else:
        nn.utils.weight_norm(net[0])
    before, weight = net(x), net[0].weight.detach()
    grow(net, {"0.out": 9}, example=x)
    torch.testing.assert_close(net(x), before, rtol=1e-5, atol=1e-5)
    assert net[0].out_features == net[2].in_features == 9
    shrink(net, {"0.out": [4, 1]}, example=x)
    assert net[0].out_features == 2
    torch.testing.assert_close(net[0].weight.detach(), weight[[4, 1]])


def test_growing_and_shrinking_back_restores_the_values():
    torch.manual_seed(0)
    net, example, _ = MODELS["unet"]()
    expected, values = compute(net, example), {k: v.clone() for k, v in net.state_dict().items()}
    grow(net, {"a.out": 9, "b.out": 12}, example=example, how="zero")
    shrink(net, {"a.out": range(6), "b.out": list(range(10))}, example=example)
    assert_outputs_close(net, example, expected)
    assert all(torch.equal(v, values[k]) for k, v in net.state_dict().items())


# ---------------------------------------------------------------------- species


class Net(mo.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


def test_relatives_grow_with_their_own_values_and_follow_shrinking():
    x = torch.randn(6, 3)
    net = Net()
    teacher, late = net.clone(), net.clone()
    for each in (net, teacher, late):
        disturb(each)
        each.train()(x)
    product, mix = net.product(), 0.5 * (net + teacher)
    expected = [compute(each, (x,)) for each in (net, teacher)]
    grow(net, {"body.out": 8}, example=x)
    assert mo.particles.history(teacher) == ["version 1: axis 'body.out' grew from 4 to 8"]
    teacher.touch()
    assert teacher.body.out_features == 8
    assert teacher.norm.num_features == 8
    assert teacher.head.in_features == 8
    assert_outputs_close(net, (x,), expected[0])
    assert_outputs_close(teacher, (x,), expected[1])
    grow(net, {"body.out": 12}, example=x)  # the late one follows both at once
    shrink(net, {"body.out": list(range(8))}, example=x)
    late.touch(), teacher.touch()
    assert late.norm.running_mean.shape == (8,)
    net2, teacher2, late2 = net.clone(), teacher.clone(), late.clone()
    for each, other in ((net, net2), (teacher, teacher2), (late, late2)):
        assert torch.equal(compute(each, (x,))[0], compute(other, (x,))[0])
    soup = net + teacher
    torch.testing.assert_close(soup.body.weight, net.body.weight + teacher.body.weight)
    assert len(mo.particles.history(net)) == 3
    assert mix.touch().body.out_features == 8
    with pytest.raises(StructureError, match="has been edited since"):
        product.module()


def test_relatives_that_follow_growth_compute_the_same_outputs():
    x = torch.randn(6, 3)
    net = Net()
    teacher, late = net.clone(), net.clone()
    for each in (net, teacher, late):
        disturb(each)
    expected = [compute(each, (x,))[0] for each in (net, teacher, late)]
    grow(net, {"body.out": 9}, example=x)
    teacher.touch()
    grow(net, {"body.out": 11}, example=x, how="zero")
    grow(teacher, {"body.out": 12}, example=x)  # which follows first
    for each, before in zip((net, teacher, late), expected, strict=True):
        each.touch()
        assert each.body.out_features == 12
        torch.testing.assert_close(compute(each, (x,))[0], before, rtol=1e-5, atol=1e-5)


def test_copies_of_a_grown_particle_combine_with_it():
    x = torch.randn(6, 3)
    net = Net()
    twin = net.clone()
    old = copy.deepcopy(net)
    grow(net, {"body.out": 8}, example=x)
    assert torch.equal((old + net).body.bias, old.body.bias + net.body.bias)
    assert (twin - net).body.weight.abs().sum() == 0  # equal values, grown in the same way
    assert torch.equal((twin + old).head.weight, twin.head.weight + old.head.weight)


def test_growing_a_child_is_an_edit_of_the_whole_particle():
    class Outer(mo.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = Net(), nn.Linear(2, 2)

        def forward(self, x):
            return self.out(self.inner(x))

    x, net = torch.randn(4, 3), Outer()
    twin = net.clone()
    expected = compute(twin, (x,))
    grow(net.inner, {"body.out": 8}, example=x)
    assert twin.touch().inner.body.out_features == 8
    assert_outputs_close(twin, (x,), expected)
    plain = nn.Sequential(Net(), nn.Linear(2, 2))
    twin = plain[0].clone()
    grow(plain, {"0.body.out": 8}, example=x)
    assert twin.touch().body.out_features == 8


def test_a_vocabulary_grows_and_shrinks_by_label():
    class Speaker(mo.Module):
        def __init__(self, words):
            super().__init__()
            space = mo.Space(words, name="token")
            self.embed = mo.Tensor(torch.randn(len(words), 6, requires_grad=True), (space, mo.Space(6, name="model")))
            self.bias = mo.Tensor(torch.zeros(len(words), requires_grad=True), (space,))

        def forward(self, ids):
            table = self.embed.data
            return table[ids].tanh() @ table.T + self.bias.data

    ids = torch.tensor([[0, 2, 1]])
    for example in (None, ids):
        net = Speaker(["a", "b", "c"])
        twin = net.clone()
        before, table = net(ids), net.embed.data.detach().clone()
        grow(net, {"token": ["a", "new", "b", "c", "d"]}, example=example)
        assert net.embed.dims[0].labels == ("a", "new", "b", "c", "d")
        assert net.bias.dims[0] == net.embed.dims[0]
        moved = torch.tensor([0, 2, 3])
        assert torch.equal(net.embed.data[moved], table)
        torch.testing.assert_close(net(moved[ids])[..., moved], before)
        assert (twin + net).embed.dims[0].labels == ("a", "new", "b", "c", "d")
        shrink(net, {"token": ["c", "a"]}, example=example)
        assert net.embed.dims[0].labels == ("c", "a")
        assert torch.equal(net.embed.data, table[[2, 0]])
        with pytest.raises(ValueError, match=r"\['c'\] would be removed; particles.shrink"):
            grow(net, {"token": ["a", "x", "y"]}, example=example)
        with pytest.raises(KeyError, match=r"no labels \['z'\]"):
            shrink(net, {"token": ["z"]}, example=example)
        with pytest.raises(TypeError, match="give the labels of all units"):
            grow(net, {"token": 7}, example=example)
