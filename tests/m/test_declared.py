"""Links of the catalogue declare their arguments as attributes; classes of others made from them do so where they say it."""

import inspect
from dataclasses import field

import pytest
import torch

from moduli import Optimizer, m


class Louder(m.HeavyBall):
    volume: "Unknown" = 2.0  # noqa: F821

    def apply(self, objective):
        objective = super().apply(objective)
        objective.updates = [self.volume * update for update in objective.updates]
        return objective


class Scaled(m.HeavyBall):
    scale: float = field(default=2.0)

    def apply(self, objective):
        objective = super().apply(objective)
        objective.updates = [self.defaults["scale"] * update for update in objective.updates]
        return objective


@pytest.mark.parametrize("link", [Louder, Scaled])
def test_subclasses_move_as_they_say(link):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    Optimizer([param], link(), m.LR(0.25)).step()
    assert torch.equal(param.detach(), torch.full((2,), 0.5, dtype=torch.float64))


def test_attributes_of_a_subclass_stay_attributes_unless_they_are_fields():
    assert Louder.volume == Louder().volume == 2.0
    assert "volume" not in inspect.signature(Louder).parameters
    assert inspect.signature(Scaled).parameters["scale"].default == 2.0
    assert Scaled(scale=3.0).defaults["scale"] == 3.0
    with pytest.raises(TypeError, match="volume"):
        Louder(volume=3.0)


@pytest.mark.parametrize("wrong", [{"beta1": 1.5}, {"beta2": -0.1}, {"eps": -1e-8}])
def test_memories_and_eps_out_of_range_are_refused_where_a_link_says_nothing_else(wrong):
    with pytest.raises(ValueError, match=f"Adam: {next(iter(wrong))} is"):
        m.Adam(**wrong)
    m.Adam(beta1=lambda step: 0.9, beta2=torch.tensor(0.99), eps=0.0)
