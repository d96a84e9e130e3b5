"""Members that are never stored are those that `pop[i]` makes: called, drawn, moved and saved."""

import copy
import math
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moduli as mo
from moduli.lab.problems import TextTransformer
from moduli.population import Population, PopulationAround


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)

    def forward(self, x):
        return F.linear(torch.tanh(self.mix(self.embed(x))), self.embed.weight)


class Products(nn.Module):
    """Every way to multiply with a matrix that comes apart, and one that does not."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(4, 5))
        self.c, self.d = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        y = x @ self.a
        y = torch.matmul(y, self.a.T) + y @ self.a.t() + torch.mm(y, self.b) + y @ self.b.transpose(0, 1).mT
        y = (self.c @ y.mT).mT
        return y @ self.d.exp()


class Sums(nn.Module):
    """Products by `einsum` and with parts of parameters, all of which come apart."""

    def __init__(self):
        super().__init__()
        self.qkv, self.heads = nn.Parameter(0.2 * torch.randn(12, 6)), nn.Parameter(0.2 * torch.randn(6, 2, 5))
        self.out = nn.Parameter(0.2 * torch.randn(2, 5, 6))

    def forward(self, x):
        q, k, v = self.qkv.chunk(3)
        y = x @ q.T + F.linear(x, k) + F.linear(x, v.t().T) + x @ self.qkv[2:6].T
        for part in (self.qkv.split(4)[1], self.qkv.split([4, 8], 0)[0], self.qkv.narrow(0, 3, 4)):
            y = y + F.linear(x, part)
        y = y @ self.qkv[:, :].narrow(1, 0, 6)[8:] + x @ self.qkv.T.narrow(1, 2, 6)
        y = torch.einsum("...i,ihd->...hd", y, self.heads)
        return torch.einsum("hdi,...hd->...i", self.out, y) + torch.einsum("...j,ji->...i", x, self.qkv.T)[..., :1]


class Counter(nn.Module):
    """A module that assigns its buffer again at every call, and writes to another."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + x.sum(0)
        self.calls += 1
        return self.lin(x) + self.seen.sum()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(4, 3, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def _net(seed, *layers):
    torch.manual_seed(seed)
    return nn.Sequential(*(make() for make in layers))


MODELS = {
    "mlp": lambda: (_net(0, lambda: nn.Linear(4, 9), nn.Tanh, lambda: nn.Linear(9, 3)), torch.randn(5, 4)),
    "no bias": lambda: (nn.Linear(4, 3, bias=False), torch.randn(5, 4)),
    "one row": lambda: (nn.Linear(4, 3), torch.randn(4)),
    "conv 1d": lambda: (
        _net(0, lambda: nn.Conv1d(2, 4, 3, stride=2), nn.ReLU, lambda: nn.Conv1d(4, 3, 1)),
        torch.randn(2, 2, 9),
    ),
    "conv 2d": lambda: (
        _net(0, lambda: nn.Conv2d(2, 4, 3, padding=1, dilation=2), nn.ReLU, lambda: nn.Conv2d(4, 3, (2, 1))),
        torch.randn(2, 2, 7, 7),
    ),
    "same padding": lambda: (nn.Conv2d(2, 4, 3, padding="same"), torch.randn(2, 2, 7, 7)),
    "grouped": lambda: (nn.Conv2d(4, 10, 3, groups=2), torch.randn(2, 4, 6, 6)),
    "depthwise": lambda: (nn.Conv2d(4, 4, 3, groups=4), torch.randn(2, 4, 6, 6)),
    "transposed": lambda: (
        _net(
            0,
            lambda: nn.ConvTranspose1d(8, 4, 3, stride=2, output_padding=1),
            nn.ReLU,
            lambda: nn.ConvTranspose1d(4, 3, 2, dilation=2),
        ),
        torch.randn(2, 8, 5),
    ),
    "transposed, grouped": lambda: (nn.ConvTranspose2d(8, 6, 3, groups=2, padding=1), torch.randn(2, 8, 4, 4)),
    "one image": lambda: (nn.Conv2d(2, 5, 3), torch.randn(2, 6, 6)),
    "sums": lambda: (Sums(), torch.randn(3, 4, 6)),
    "buffers": lambda: (Counter(), torch.randn(5, 4)),
    "batch norm in training": lambda: (
        _net(0, lambda: nn.Linear(4, 6), lambda: nn.BatchNorm1d(6), nn.ReLU, lambda: nn.Linear(6, 2)),
        torch.randn(5, 4),
    ),
    "recurrent": lambda: (Recurrent(), torch.randn(2, 5, 4)),
    "normalised": lambda: (
        _net(0, lambda: nn.Linear(4, 6), lambda: nn.LayerNorm(6), lambda: nn.BatchNorm1d(6)).eval(),
        torch.randn(5, 4),
    ),
    "tied": lambda: (Tied(), torch.randint(11, (3, 4))),
    "padding of an embedding": lambda: (nn.Embedding(7, 3, padding_idx=0), torch.randint(7, (3, 4))),
    "products": lambda: (Products(), torch.randn(6, 5)),
    "attention": lambda: (Attention(), torch.randn(2, 5, 8)),
    "multihead attention": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        torch.randn(2, 5, 8),
    ),
    "double precision": lambda: (nn.Linear(4, 3).double(), torch.randn(5, 4, dtype=torch.float64)),
    "frozen": lambda: (
        _net(0, lambda: nn.Linear(4, 6).requires_grad_(False), lambda: nn.Linear(6, 2)),
        torch.randn(5, 4),
    ),
}


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_members_are_those_that_are_made(name, rank):
    torch.manual_seed(1)
    net, x = MODELS[name]()
    pop = Population.around(net, 6, sigma=0.3, rank=rank, seed=7)
    with torch.no_grad():
        made = torch.stack([member(x) for member in pop])
        several = torch.stack([x] * 6)
        own = torch.stack([member(each) for member, each in zip(pop, several, strict=True)])
    torch.testing.assert_close(pop(x), made, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pop(several, in_dims=0), own, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pop(x, chunk_size=4), made, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(pop.mean.buffers(), net.buffers(), strict=True):  # calls leave buffers alone
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["sums", "transposed", "grouped", "multihead attention", "attention", "products"])
def test_products_come_apart(name):
    net, x = MODELS[name]()
    told = Population.around(net, 2, sigma=0.1).explain(x).splitlines()
    made = [line.split(":")[0] for line in told if "made for each member" in line]
    assert made == (["d"] if name == "products" else [])


def test_multihead_attention_with_all_its_arguments():
    torch.manual_seed(0)
    net = nn.MultiheadAttention(8, 2, batch_first=True, kdim=5, vdim=6, add_bias_kv=True, add_zero_attn=True)
    pop = Population.around(net, 4, sigma=0.3, rank=2)
    args = (torch.randn(3, 4, 8), torch.randn(3, 7, 5), torch.randn(3, 7, 6))
    masks = {"key_padding_mask": torch.rand(3, 7) < 0.3, "attn_mask": torch.rand(4, 7) < 0.3}
    outputs, weights = pop(*args, average_attn_weights=False, **masks)
    for at, member in enumerate(pop):
        with torch.no_grad():
            expected = member(*args, average_attn_weights=False, **masks)
        torch.testing.assert_close((outputs[at], weights[at]), expected, rtol=1e-5, atol=1e-5)
    told = pop.explain(*args, **masks).splitlines()
    assert [line.split(":")[0] for line in told if "made for each" in line] == ["bias_k", "bias_v"]


def test_members_that_are_looped_over_say_so():
    net, x = MODELS["recurrent"]()
    assert "cell (GRU) has no batching rule" in Population.around(net, 2, sigma=0.1).explain(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    pop, x = Population.around(net, 6, sigma=0.1, rank=2), torch.randn(4, 8).to(dtype)
    with torch.no_grad():
        expected = torch.stack([member(x) for member in pop])
    assert pop(x).dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(pop(x), expected, rtol=8 * eps, atol=8 * eps)
    weights = torch.randn(6)
    change = sum(
        weight * (own.float() - mean.float()) / 0.1
        for weight, own, mean in zip(weights, (each[0].weight for each in pop), [net[0].weight] * 6, strict=True)
    )
    before = net[0].weight.detach().float()
    pop.update(weights)
    torch.testing.assert_close(pop.mean[0].weight.detach().float(), before + change.detach(), rtol=0.05, atol=100 * eps)


class Labelled(mo.Module):
    """A labelled module with a virtual weight."""

    def __init__(self):
        super().__init__()
        self.raw = mo.tensor(torch.randn(3, 4), feature=["a", "b", "c"], unit=list("wxyz"))
        self.requires_grad_(True)

    @mo.virtual
    def scaled(self):
        return self.raw / (1 + self.raw.data.square().sum().sqrt())

    def forward(self, x):
        return self.scaled.data.mT @ x


def test_labelled_members_with_virtual_weights():
    torch.manual_seed(0)
    pop, x = Population.around(Labelled(), 5, sigma=0.3), torch.randn(3)
    with torch.no_grad():
        for _ in range(2):  # virtual weights are computed again after the mean has moved
            torch.testing.assert_close(pop(x), torch.stack([member(x) for member in pop]), rtol=1e-5, atol=1e-6)
            pop.update(torch.randn(5) / 5)
    assert [dim.name for dim in pop[1].raw.dims] == ["feature", "unit"]


def test_the_transformer_of_the_lab():
    problem = TextTransformer()
    net = problem.model(0)
    pop = Population.around(net, 5, sigma=0.05, seed=3)
    tokens = torch.randint(20, (2, 9))
    with torch.no_grad():
        made = torch.stack([member(tokens) for member in pop])
    torch.testing.assert_close(pop(tokens), made, rtol=1e-5, atol=1e-5)
    told = pop.explain(tokens)
    assert "made for each member" not in told
    assert told.count("one product for all members") == sum(each.dim() > 1 for each in net.parameters())


def test_noise_has_the_variance_asked_for():
    net = nn.Linear(60, 50)
    for rank in (1, 4):
        pop = Population.around(net, 200, sigma=0.1, rank=rank)
        noise = torch.stack([member.weight.detach() - net.weight.detach() for member in pop])
        assert noise.std().item() == pytest.approx(0.1, rel=0.02)
        assert abs(noise.mean().item()) < 1e-3
        assert int(torch.linalg.matrix_rank(noise[0])) == rank


def test_members_do_not_depend_on_each_other():
    few, many = (Population.around(nn.Linear(4, 3, dtype=torch.float64), n, sigma=0.2, seed=5) for n in (3, 300))
    many.mean.load_state_dict(few.mean.state_dict())
    for index in range(3):
        assert torch.equal(few[index].weight, many[index].weight)
    assert torch.equal(many[-1].weight, many[299].weight)
    assert not torch.equal(many[64].weight, many[0].weight)
    other = Population.around(few.mean, 3, sigma=0.2, seed=6)
    assert not torch.equal(few[0].weight, other[0].weight)


def test_antithetic_members_are_opposite():
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    pop = Population.around(net, 140, sigma=0.2, rank=2, antithetic=True)
    for pair in (0, 1, 40, 69):
        one, two = pop[2 * pair], pop[2 * pair + 1]
        for mean, p, q in zip(net.parameters(), one.parameters(), two.parameters(), strict=True):
            torch.testing.assert_close(p + q, 2 * mean)
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(pop(x, chunk_size=31), torch.stack([member(x) for member in pop]))
    with pytest.raises(ValueError, match="3 is odd"):
        Population.around(net, 3, sigma=0.1, antithetic=True)


@pytest.mark.parametrize("antithetic", [False, True])
def test_an_update_is_the_sum_over_members_that_are_made(antithetic):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Conv1d(5, 3, 1), nn.Linear(5, 2)).double()
    pop = Population.around(net, 150, sigma=0.3, rank=2, seed=9, antithetic=antithetic)
    weights = torch.randn(150, dtype=torch.float64)
    expected = [mean.detach().clone() for mean in net.parameters()]
    for weight, member in zip(weights, pop, strict=True):
        for total, mean, own in zip(expected, net.parameters(), member.parameters(), strict=True):
            total += weight * (own - mean).detach() / 0.3
    before = pop[0][0].weight.detach() - pop.mean[0].weight.detach()
    pop.update(weights)
    for total, mean in zip(expected, pop.mean.parameters(), strict=True):
        torch.testing.assert_close(mean.detach(), total, rtol=1e-5, atol=1e-5)
    assert pop.generation == 1
    assert not torch.equal(pop[0][0].weight - pop.mean[0].weight, before)
    torch.testing.assert_close(net[0].weight, expected[0] * 0 + net[0].weight)


def test_evolution_by_updates_finds_a_minimum():
    torch.manual_seed(0)
    x = torch.randn(64, 5)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])[:, None]
    pop = Population.around(nn.Linear(5, 1), 128, sigma=0.1, antithetic=True)
    first = None
    for _ in range(80):
        losses = pop.losses(lambda net, x, y: (net(x) - y).square().mean(), x, y)
        first = losses.mean() if first is None else first
        pop.update(-0.03 / pop.sigma * (losses - losses.mean()) / len(pop))
    assert losses.mean() < 0.1 * first


def test_state_makes_the_same_members_again(tmp_path):
    net = nn.Linear(4, 3)
    pop = Population.around(net, 10, sigma=0.1, rank=2, seed=4, antithetic=True)
    pop.update(torch.randn(10))
    other = Population.around(nn.Linear(4, 3), 2, sigma=1.0)
    other.load_state_dict(pop.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(other(x), pop(x))
    mo.save(tmp_path / "pop.safetensors", population=pop)
    third = Population.around(nn.Linear(4, 3), 2, sigma=1.0)
    mo.load(tmp_path / "pop.safetensors", population=third)
    assert torch.equal(third(x), pop(x))
    assert len(third) == 10
    with pytest.raises(ValueError, match="no noise with a seed"):
        other.load_state_dict({"mean": net.state_dict()})


def test_losses_take_data_of_each_member_and_randomness():
    pop = Population.around(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), 6, sigma=0.1)
    x, y = torch.randn(6, 8, 4), torch.randn(8, 3)
    losses = pop.losses(lambda net, x, y: F.mse_loss(net(x), y), x, y, in_dims=(0, None))
    assert losses.shape == (6,)
    assert not losses.requires_grad
    pop.mean.eval()
    expected = torch.stack([F.mse_loss(member(each), y) for member, each in zip(pop, x, strict=True)])
    torch.testing.assert_close(pop.losses(lambda net, x, y: F.mse_loss(net(x), y), x, y, in_dims=(0, None)), expected)
    assert pop.mean.training is False


def test_threads_may_call_one_population():
    pop, x = (
        Population.around(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), 40, sigma=0.1),
        torch.randn(5, 4),
    )
    expected, outputs = pop(x), []

    def work():
        outputs.extend(pop(x) if at % 2 else pop[3](x).detach() for at in range(6))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 24
    for output in outputs:
        torch.testing.assert_close(output, expected if output.dim() == 3 else expected[3], rtol=1e-5, atol=1e-6)
    assert torch.equal(copy.deepcopy(pop)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(pop))(x), expected)


def test_what_does_not_fit_is_refused():
    pop = Population.around(nn.Linear(4, 3), 6, sigma=0.1)
    assert isinstance(pop, PopulationAround)
    assert repr(pop) == "PopulationAround(6 x Linear, 15 parameters each, sigma=0.1, rank=1, generation=0)"
    with pytest.raises(ValueError, match="one slice for each of 6 members"):
        pop(torch.randn(5, 4), in_dims=0)
    with pytest.raises(ValueError, match="2 entries for 1 arguments"):
        pop(torch.randn(5, 4), in_dims=(None, 0))
    with pytest.raises(ValueError, match=r"end it with .mean"):
        pop.losses(lambda net: net(torch.ones(4)))
    with pytest.raises(IndexError, match="no member 6"):
        pop[6]
    before = pop.mean.weight.clone()
    for wrong in (torch.ones(5), torch.full((6,), math.nan)):
        with pytest.raises(ValueError, match="one finite number for each of 6"):
            pop.update(wrong)
    assert torch.equal(pop.mean.weight, before)
    assert pop.generation == 0
    for wrong in ({"sigma": 0.0}, {"sigma": 0.1, "rank": 0}, {"sigma": math.inf}):
        with pytest.raises(ValueError, match="above zero"):
            Population.around(nn.Linear(2, 2), 4, **wrong)


def test_optimizers_refuse_members_that_are_not_stored():
    around = Population.around(nn.Sequential(nn.Linear(2, 2)), 8, sigma=0.1)
    with pytest.raises(TypeError, match="stores no members that an optimizer could step; move its mean by `update`"):
        mo.Optimizer(around, mo.m.LR(0.1))
