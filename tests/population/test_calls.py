"""Calls that torch.vmap does not support, calls that run out of memory, and sequences evaluated in place."""

import pytest
import torch
from torch import nn

from moduli.population import Population, _evaluator
from moduli.population._evaluator import PopulationEvaluator
from population.helpers import assert_same_members, close, copies


class Item(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        h = self.norm(self.lin(x))
        return h * h.detach().sum().item()


class Branch(Item):
    def forward(self, x):
        h = self.norm(self.lin(x))
        return h if h.sum() > 0 else 2 * h


class Masked(Item):
    def forward(self, x):
        h = self.lin(x)
        return h[h > 0].sum() * torch.rand((), dtype=h.dtype)


@pytest.mark.parametrize("kind", [Item, Branch, Masked])
def test_auto_loops_models_that_vmap_does_not_support(kind):
    pop, x = Population.of(kind, 3).to(torch.float64), torch.randn(4, 3, dtype=torch.float64)
    nets = copies(pop)
    assert not pop.explain(x).startswith("loop")
    with pytest.raises(RuntimeError, match="vmap"):
        pop(x, vectorize="vmap")
    assert_same_members(pop, nets)
    torch.manual_seed(0)
    out = pop(x)
    torch.manual_seed(0)
    close(out, torch.stack([net(x) for net in nets]))
    assert_same_members(pop, nets)
    assert pop.explain(x).startswith("loop: torch.vmap cannot follow the model (")
    torch.manual_seed(0)
    losses, grads = pop.losses_and_gradients(lambda net: net(x).sum())
    torch.manual_seed(0)
    wanted = torch.stack([net(x).sum() for net in nets])
    wanted.sum().backward()
    close(losses, wanted.detach())
    close(dict(grads.named_parameters())["lin.weight"].data, torch.stack([net.lin.weight.grad for net in nets]))
    assert_same_members(pop, nets)


def test_other_errors_are_not_looped():
    calls = []

    class Wrong(Item):
        def forward(self, x):
            calls.append(1)
            raise RuntimeError("no such thing")

    pop = Population.of(Wrong, 3)
    with pytest.raises(RuntimeError, match="no such thing"):
        pop(torch.ones(4, 3))
    assert len(calls) == 1


SHORTAGES = [
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    MemoryError(),
]


@pytest.mark.parametrize("error", SHORTAGES)
@pytest.mark.parametrize("gradients", [False, True])
def test_out_of_memory_names_the_chunk_and_changes_nothing(monkeypatch, error, gradients):
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    pop, x = Population.of(net, 6, init=0.1).to(torch.float64), torch.randn(4, 3, dtype=torch.float64)
    nets, done, real = copies(pop), [], PopulationEvaluator._map

    def short(*args):
        result = real(*args)
        done.append(1)
        if len(done) == 2:
            raise error
        return result

    monkeypatch.setattr(PopulationEvaluator, "_map", short)
    with pytest.raises(MemoryError, match=r"2 of 6 members at a time .* chunk_size below 2"):
        pop.gradients(lambda f: f(x).sum(), chunk_size=2) if gradients else pop(x, chunk_size=2)
    assert len(done) == 2
    assert_same_members(pop, nets)
    close(pop(x, chunk_size=2), torch.stack([net(x) for net in nets]))


def test_out_of_memory_of_sequences(monkeypatch):
    def short(*args):
        raise SHORTAGES[0]

    pop = Population.of(nn.Sequential(nn.Linear(3, 2)), 6)
    monkeypatch.setattr(_evaluator, "run_steps", short)
    monkeypatch.setattr(PopulationEvaluator, "_stack", short)
    for recorded in (False, True):
        with torch.set_grad_enabled(recorded), pytest.raises(MemoryError, match="chunk_size below 6"):
            pop(torch.ones(40, 3))


SEQUENCES = {
    "one": lambda: nn.Sequential(nn.Linear(3, 2)),
    "no bias": lambda: nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2, bias=False), nn.Tanh()),
    "nested": lambda: nn.Sequential(
        nn.Linear(3, 5), nn.Sequential(nn.Sigmoid(), nn.Linear(5, 4)), nn.GELU(), nn.Linear(4, 7), nn.SiLU()
    ),
    "activations": lambda: nn.Sequential(
        nn.Linear(3, 4),
        nn.LeakyReLU(0.2),
        nn.Linear(4, 4),
        nn.ELU(0.5),
        nn.Identity(),
        nn.GELU("tanh"),
        nn.Linear(4, 1),
    ),
    "last": lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU()),
    "tied": lambda: _tied(),
}


def _tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_are_a_loop(name):
    pop, x = Population.of(SEQUENCES[name], 7).to(torch.float64), torch.randn(40, 3, dtype=torch.float64)
    nets, before = copies(pop), x.clone()
    with torch.no_grad():
        wanted = torch.stack([net(x) for net in nets])
        for chunk in (None, 3):
            assert pop.explain(x, chunk_size=chunk).startswith(
                "stacked" if chunk or "GELU" in str(nets[0]) else "sequence"
            )
            close(pop(x, chunk_size=chunk), wanted)
            own = x.expand(7, 40, 3).clone()
            close(pop(own, in_dims=0, chunk_size=chunk), wanted)
            close(pop(own.transpose(0, 1), in_dims=1, chunk_size=chunk), wanted)
            close(pop(x[0], chunk_size=chunk), wanted[:, 0])
            close(pop(x.view(5, 8, 3), chunk_size=chunk), wanted.view(7, 5, 8, -1))
    assert torch.equal(x, before)
    assert_same_members(pop, nets)
    assert pop(x).requires_grad
    close(pop(x).detach(), wanted)


def test_sequences_with_hooks_or_replaced_forwards_are_called():
    pop, x, seen = Population.of(SEQUENCES["nested"], 3), torch.ones(40, 3), []
    with torch.no_grad():
        wanted = pop(x)
        handle = pop.template[0].register_forward_hook(lambda *args: seen.append(1))
        torch.testing.assert_close(pop(x), wanted)
        assert seen
        handle.remove()
        pop.template[1].forward = lambda h: h
        with pytest.raises(RuntimeError):
            pop(x)
        del pop.template[1].forward
        with pytest.raises(RuntimeError):
            pop(torch.ones(40, 4))
        with pytest.raises(RuntimeError):
            pop(torch.ones(6, 2, 4))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert pop(x).dtype is torch.bfloat16
