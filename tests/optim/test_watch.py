"""Statistics of a step: norms computed inside a fused pass equal those of a chain that is run link by link."""

import copy

import pytest
import torch

import moduli as mo
from moduli import Optimizer, Population, kernels, m, presets
from moduli.layout import UnknownNameError


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(dtype)


def backward(net, scale=1.0):
    net.zero_grad()
    x = torch.linspace(-1, 1, 12).reshape(3, 4).to(next(net.parameters()).dtype)
    loss = scale * net(x).square().sum()
    loss.backward()
    return loss.detach()


def norm(tensors):
    return torch.cat([t.detach().double().flatten() for t in tensors]).norm().item()


CHAIN = [lambda: m.ClipNorm(0.5), m.Adam, lambda: m.WeightDecay(0.1), lambda: m.LR(1e-2)]


@pytest.mark.parametrize("fuse", ["auto", False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_norms_are_those_of_the_chain_link_by_link(fuse, dtype):
    net = make_net(dtype)
    optimizer = Optimizer(net, *(make() for make in CHAIN), fuse=fuse)
    log = optimizer.watch()
    assert log() == {}
    tolerance = {"rel": 1e-6 if dtype is not torch.bfloat16 else 2e-2}
    for step in range(3):
        # The reference runs the chain truncated after each of its links.
        nets = [copy.deepcopy(net) for _ in CHAIN]
        loss = backward(net, scale=3.0)
        optimizer_state = optimizer.state_dict()
        before = [param.detach().clone() for param in net.parameters()]
        expected = []
        for k, cut in enumerate(nets):
            partial = Optimizer(cut, *(make() for make in CHAIN[: k + 1]), fuse=fuse)
            if step:
                partial.load_state_dict(optimizer_state, strict=False)
            for param, source in zip(cut.parameters(), net.parameters(), strict=True):
                param.grad = source.grad.clone()
            start = [param.detach().clone() for param in cut.parameters()]
            partial.step()
            expected.append(norm([a - b for a, b in zip(cut.parameters(), start, strict=True)]))
        grads = norm([param.grad for param in net.parameters()])
        optimizer.step(loss=loss)
        numbers = log()
        assert numbers["step"] == step + 1
        assert numbers["loss"] == pytest.approx(loss.item())
        assert numbers["lr"] == 1e-2
        assert numbers["grad_norm"] == pytest.approx(grads, **tolerance)
        assert numbers["norm/0.ClipNorm"] == pytest.approx(min(0.5, grads), **tolerance)
        assert numbers["clipped/0.ClipNorm"] == float(grads > 0.5)
        moved = norm([a - b for a, b in zip(net.parameters(), before, strict=True)])
        if dtype is not torch.bfloat16:  # bfloat16 rounds the moves
            for path, size in zip(("0.ClipNorm", "1.Adam", "2.WeightDecay", "3.LR"), expected, strict=True):
                assert numbers[f"norm/{path}"] == pytest.approx(size, rel=1e-4), path
            assert numbers["update_norm"] == pytest.approx(moved, rel=1e-4)
        assert numbers["update_ratio"] == pytest.approx(numbers["update_norm"] / numbers["param_norm"])
        assert numbers["gain/3.LR"] == pytest.approx(1e-2, **tolerance)


@pytest.mark.parametrize("form", ["foreach", "plain"])
def test_every_form_of_a_pass_gives_the_same_sums(monkeypatch, form):
    def run():
        net = make_net(torch.float32)
        optimizer = Optimizer(net, *(make() for make in CHAIN))
        log = optimizer.watch(by="parameter")
        backward(net)
        optimizer.step()
        return log()

    expected = run()
    monkeypatch.setenv("MODULI_KERNELS", form)
    kernels.reset()
    try:
        assert run() == pytest.approx(expected, rel=1e-5)
    finally:
        monkeypatch.undo()
        kernels.reset()


def test_watching_changes_no_parameter_and_can_be_stopped():
    nets = [make_net(), make_net()]
    optimizers = [Optimizer(net, *(make() for make in CHAIN)) for net in nets]
    log = optimizers[0].watch()
    for step in range(4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            backward(net)
            optimizer.step()
        if step == 1:
            log.close()
    assert log()["step"] == 2
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    with optimizers[0].watch() as again:
        backward(nets[0])
        optimizers[0].step()
    assert again()["step"] == 5
    assert optimizers[0].binding.watch is None


def test_norms_by_group_parameter_and_pattern():
    net = make_net()
    optimizer = Optimizer(net, m.Adam(), m.LR(1e-2), groups={"*.bias": {"lr": 1e-3}})
    backward(net)
    weights, biases = ([p.grad for n, p in net.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    log = optimizer.watch(by="group")
    optimizer.step()
    numbers = log()
    assert {numbers["lr/0"], numbers["lr/1"]} == {1e-2, 1e-3}
    assert sorted([numbers["grad_norm/group0"], numbers["grad_norm/group1"]]) == pytest.approx(
        sorted([norm(weights), norm(biases)])
    )
    log = optimizer.watch(by={"heads": "2.*"})
    optimizer.step()
    assert log()["grad_norm/heads"] == pytest.approx(norm([p.grad for p in net[2].parameters()]))
    log = optimizer.watch(by="parameter")
    optimizer.step()
    assert log()["grad_norm/0.bias"] == pytest.approx(norm([net[0].bias.grad]))
    with pytest.raises(UnknownNameError, match="did you mean"):
        optimizer.watch(by=["0.wieght"])


def test_unfused_links_and_scalars_of_their_state_are_watched():
    net = make_net()
    optimizer = Optimizer(net, presets.muon(lr=1e-2))
    log = optimizer.watch()
    backward(net)
    optimizer.step()
    numbers = log()
    assert numbers["update_norm"] > 0
    assert any("Orthogonalize" in name for name in numbers)

    optimizer = Optimizer(make := make_net(), presets.prodigy())
    log = optimizer.watch()
    backward(make)
    optimizer.step()
    assert any(name.startswith("state/") for name in log())

    net = make_net()
    x = torch.linspace(-1, 1, 12).reshape(3, 4).double()
    optimizer = Optimizer(net, m.LBFGS(), m.StrongWolfe())
    log = optimizer.watch()
    optimizer.step(mo.closure(lambda: net(x).square().sum()))
    numbers = log()
    assert numbers["evaluations"] >= 2
    assert numbers["update_norm"] > 0
    assert numbers["grad_norm"] > 0


def test_a_population_and_parameters_without_gradients():
    population = Population.of(make_net(), 3)
    optimizer = Optimizer(population, m.Adam(), m.LR(1e-2))
    log = optimizer.watch()
    optimizer.step(mo.closure(lambda: population.losses(lambda f: f(torch.ones(2, 4).double()).square().sum())))
    numbers = log()
    moved = norm([population.matrix])
    assert numbers["update_norm"] == pytest.approx(1e-2 * population.matrix.numel() ** 0.5, rel=1e-3)
    assert moved > 0
    with pytest.raises(ValueError, match="a population is one matrix"):
        optimizer.watch(by="group")

    net = make_net()
    optimizer = Optimizer(net, m.Adam(), m.LR(1e-2))
    log = optimizer.watch()
    backward(net)
    net[0].weight.grad = None
    optimizer.step()
    assert log()["grad_norm"] == pytest.approx(norm([p.grad for p in net.parameters() if p.grad is not None]))


def test_a_copy_is_not_watched_and_values_are_read_late():
    net = make_net()
    optimizer = Optimizer(net, m.Adam(), m.LR(1e-2))
    log = optimizer.watch()
    backward(net)
    optimizer.step()
    assert copy.deepcopy(optimizer).binding.watch is None
    assert optimizer.binding.watch is log
