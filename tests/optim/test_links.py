"""Links: state, settings, children, chains, and links that drive other links."""

import copy
from collections import deque

import pytest
import torch

import moduli as mo
from moduli import m, optim
from moduli.optim import Chain, ChainError, Module, Objective, Optimizer, maybe_chain
from moduli.optim import functional as F
from optim.helpers import Backtrack, Half, Momentum, Noise, Stop, Terminate, Vector, WantsLoss


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


def objective(*params, grads=None):
    out = Objective(list(params))
    out.grads = [torch.ones_like(p) if grads is None else grads[i] for i, p in enumerate(params)]
    return out


# ---------------------------------------------------------------- state


def test_state_is_made_in_every_documented_form():
    a, b = parameter(1.0, 2.0), parameter(3.0)
    a.grad = torch.full_like(a, 5.0)
    link = Half()
    assert [t.tolist() for t in link.get_state([a, b], "zeros")] == [[0.0, 0.0], [0.0]]
    assert [t.tolist() for t in link.get_state([a, b], "p", init="param")] == [[1.0, 2.0], [3.0]]
    assert [t.tolist() for t in link.get_state([a, b], "g", init="grad")] == [[5.0, 5.0], [0.0]]
    assert link.get_state([a, b], "n", init=7) == [7, 7]
    initial = torch.ones(1)
    buffers = link.get_state([a, b], "t", init=initial)
    assert buffers[0] is not initial
    assert buffers[0] is not buffers[1]
    assert link.get_state([a, b], "each", init=[1, 2]) == [1, 2]
    assert link.get_state([a, b], "x", "y", init=[10, torch.ones_like])[0] == [10, 10]
    assert link.get_state([a, b], ["x"]) == [[10, 10]]
    assert link.get_state([a, b], "x", cls=deque) == deque([10, 10])
    assert link.get_state([a, b], "p")[0] is link.state[a]["p"]
    a.data.zero_()
    assert link.state[a]["p"].tolist() == [1.0, 2.0]  # a copy, not the parameter
    with pytest.raises(KeyError, match="Half has no state 'missing'"):
        link.get_state([a], "missing", must_exist=True)


def test_state_is_written_and_cleared():
    a, b = parameter(1.0), parameter(2.0)
    link = Half()
    link.store([a, b], "x", [1, 2])
    link.store([a, b], ["y", "z"], [[3, 4], [5, 6]])
    assert dict(link.state[a]) == {"x": 1, "y": 3, "z": 5}
    link.clear_state_keys("x", "y")
    assert dict(link.state[b]) == {"z": 6}


def test_counters_and_generators():
    link = Half()
    assert [link.increment_counter("n", 3) for _ in range(3)] == [3, 4, 5]
    assert link.get_generator("cpu", None) is None
    generator = link.get_generator("cpu", 1)
    torch.rand(1, generator=generator)
    link.reset()
    assert link.get_generator("cpu", 1) is generator  # a reset keeps the generator
    assert "n" not in link.global_state


def test_settings_of_a_link():
    a, b = parameter(1.0), parameter(2.0)
    link = Half(0.5).set_param_groups([{"params": a, "factor": 0.25}])
    assert link.get_settings([a, b], "factor") == [0.25, 0.5]
    assert link.get_settings([a, b], ["factor"]) == [[0.25, 0.5]]
    with pytest.raises(ValueError, match="Half has no setting 'beta'"):
        link.set_param_groups([{"params": a, "beta": 1.0}])
    with pytest.raises(ValueError, match="needs 'params'"):
        link.set_param_groups({"factor": 1.0})
    with pytest.raises(ValueError, match="Half: factor is NaN"):
        Half(float("nan"))


def test_arguments_are_explained():
    with pytest.raises(TypeError, match=r"Adam\(0.001\): a step size is a link of its own: Adam\(\), LR\(0.001\)"):
        m.Adam(1e-3)
    with pytest.raises(TypeError, match="Adam has no setting 'lr' "):
        m.Adam(lr=1e-3)
    with pytest.raises(TypeError, match="is a link; pass links to set_child"):
        Module.__init__(Half(), {"x": Half()})
    with pytest.raises(ValueError, match="update_freq is 0"):
        optim.TensorTransform({}, update_freq=0)


# ---------------------------------------------------------------- children


def test_children_are_set_chained_and_stepped():
    parent = Half()
    parent.set_child("a", [Half(), Half()])
    parent.set_child("b", Momentum())
    assert isinstance(parent.children["a"], Chain)
    assert isinstance(parent.children["b"], Momentum)
    parent.set_child("a", None)
    assert list(parent.children) == ["b"]
    with pytest.warns(UserWarning, match="the child 'b' is replaced"):
        parent.set_child("b", Half())
    with pytest.raises(KeyError, match="Half has no child 'c'; it has b"):
        parent.inner_step("c", objective(parameter(1.0)))
    current = objective(parameter(1.0))
    assert parent.inner_step("c", current, must_exist=False) is current


class Inside(optim.TensorTransform):
    """A link that runs its child on a buffer of another shape."""

    def __init__(self, inner, *, show_objective=True):
        super().__init__()
        self.set_child("inner", inner)
        self.show = show_objective

    def update_states(self, objective, states, settings): ...

    def apply_states(self, objective, states, settings):
        wide = [torch.stack([u, u]) for u in objective.get_updates()]
        out = self.inner_step_tensors("inner", wide, clone=True, objective=objective if self.show else None)
        objective.updates = [t.mean(0) for t in out]
        return objective

    def apply(self, objective):
        return self.apply_states(objective, [], [])


def test_children_on_other_shapes_keep_state_and_inherit_settings():
    w = parameter(1.0, 2.0)
    opt = Optimizer([{"params": [w], "lr": 0.0}], Inside([Momentum(), m.LR(1.0)]))
    opt.step(mo.closure(lambda: w.sum()))
    assert w.tolist() == [1.0, 2.0]  # the group's lr=0 reaches the link inside
    opt.param_groups[0]["lr"] = 1.0
    opt.step(mo.closure(lambda: w.sum()))
    assert w.tolist() == [1.0 - 1.9, 2.0 - 1.9]  # and its momentum has both gradients


def test_children_on_other_shapes_are_saved():
    def run(split):
        w = parameter(1.0, 2.0)
        opt = Optimizer([w], Inside(Momentum()), m.LR(0.1))
        for i in range(6):
            if i == split:
                state = copy.deepcopy(opt.state_dict())
                v = torch.nn.Parameter(w.detach().clone())
                w, opt = v, Optimizer([v], Inside(Momentum()), m.LR(0.1))
                opt.load_state_dict(state)
            opt.step(mo.closure(lambda: (w**2).sum()))
        return w.detach()

    assert torch.equal(run(None), run(3))


def test_tensors_of_a_child_without_it():
    tensors = [torch.ones(2)]
    assert Half().inner_step_tensors("no", tensors, clone=True, must_exist=False) is tensors
    parent = Half()
    parent.set_child("in", Half())
    out = parent.inner_step_tensors("in", tensors, clone=True)
    assert out[0].tolist() == [0.5, 0.5]
    assert tensors[0].tolist() == [1.0, 1.0]
    w = parameter(1.0, 1.0)
    own = parent.inner_step_tensors("in", [torch.ones(2, dtype=torch.float64)], clone=False, params=[w])
    assert own[0].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="either an objective, or grads"):
        F.step_tensors(Half(), tensors, grads=tensors, objective=objective(parameter(1.0, 1.0)))


class SeesGradient(optim.TensorTransform):
    elementwise = True

    def __init__(self):
        super().__init__(uses_grad=True)

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor - grad


def test_a_transformed_update_is_not_taken_for_the_gradient():
    (out,) = F.step_tensors([Half(), SeesGradient()], [torch.ones(2)])
    assert out.tolist() == [-0.5, -0.5]


def test_projected_buffers():
    w = parameter(1.0, 2.0)
    parent = Half()
    parent.set_child("inner", [Momentum(), m.Adam()])
    parent.inner_step_tensors("inner", [torch.ones(2)], clone=True, params=[w])
    grads = parent.get_child_projected_buffers("inner", "grad", [w])
    assert len(grads) == 2
    assert grads[0][0] is parent.children["inner"].children["module_0"].state[w]["buffer"]
    both = parent.get_child_projected_buffers("inner", ["grad", "grad_sq"], [w])
    assert len(both) == 3
    assert parent.get_child_projected_buffers("inner", "inverse", [w]) == []
    stood = Half()
    stood.set_child("inner", Momentum())
    stood.inner_step_tensors("inner", [torch.ones(3), torch.ones(1)], clone=True)
    assert [t.shape for t in stood.get_child_projected_buffers("inner", "grad")[0]] == [(3,), (1,)]


def test_projected_buffers_in_lists():
    class History(Module):
        def __init__(self):
            super().__init__()
            self.add_projected_keys("grad", "old")

        def update(self, objective):
            for p, u in zip(objective.params, objective.get_updates(), strict=True):
                self.state[p].setdefault("old", deque(maxlen=2)).append(u.clone())

        def apply(self, objective):
            return objective

    a, b = parameter(1.0), parameter(2.0, 3.0)
    parent = Half()
    parent.set_child("h", History())
    for _ in range(3):
        parent.inner_step("h", objective(a, b))
    projected = parent.get_child_projected_buffers("h", "grad", [a, b])
    assert [[t.shape for t in row] for row in projected] == [[(1,), (2,)], [(1,), (2,)]]


# ---------------------------------------------------------------- chains


def test_chains_are_opened_and_lone_links_stay():
    chain = Chain(Half(), [Half(), Chain(Half(), Half())])
    assert len(chain.get_children_sequence()) == 4
    link = Half()
    assert maybe_chain([link]) is link
    assert len(Optimizer([parameter(1.0)], chain, [Half()]).modules) == 5
    with pytest.raises(TypeError, match=r"made of links, got Half"):
        Chain(Half)
    with pytest.raises(TypeError, match="made of links, got int"):
        Chain(3)


def test_update_then_apply_of_a_chain_is_one_step():
    torch.manual_seed(0)
    grads = [[torch.randn(3, dtype=torch.float64)] for _ in range(4)]
    w = parameter(0.0, 0.0, 0.0)
    whole, apart = Chain(Momentum(), m.Adam(), Momentum()), Chain(Momentum(), m.Adam(), Momentum())
    for grad in grads:
        one, two = objective(w, grads=grad), objective(w, grads=grad)
        expected = whole.step(one).updates
        apart.update(two)
        assert two.updates is None  # `update` leaves the updates as they are
        updates = apart.apply(two).updates
        again = objective(w, grads=grad)
        assert torch.allclose(updates[0], expected[0], rtol=1e-14, atol=0)
        assert torch.allclose(
            apart.apply(again).updates[0], expected[0], rtol=1e-14, atol=0
        )  # apply may be called again


def test_update_of_a_chain_moves_nothing():
    w = parameter(2.0)
    fn = mo.closure(lambda: (w**2).sum())
    objective = Objective([w], fn)
    Chain(Half(), Backtrack(), Momentum()).update(objective)
    assert w.item() == 2.0
    assert not objective.skip_update
    assert objective.post_step_hooks == []


def test_stop_is_scoped_to_its_chain():
    w = parameter(1.0)

    class Holds(Module):
        def __init__(self, *links):
            super().__init__()
            self.set_child("inner", [*links])

        def apply(self, objective):
            return self.inner_step("inner", objective)

    opt = Optimizer([w], Holds(Half(), Stop(), Half()), Half())
    opt.step(mo.closure(lambda: w.sum()))
    assert w.item() == 0.75  # inner half, stop, outer half
    v = parameter(1.0)
    Optimizer([v], Half(), Stop(), Half()).step(mo.closure(lambda: v.sum()))
    assert v.item() == 0.5


def test_an_optimizer_terminates_when_any_link_does():
    w = parameter(1.0)

    class Never(Module):
        def apply(self, objective):
            if objective.should_terminate is None:
                objective.should_terminate = False
            return objective

    opt = Optimizer([w], Terminate("first"), Never(), Terminate("second"), Terminate("first"), Half())
    assert not opt.should_terminate
    opt.step(mo.closure(lambda: w.sum()))
    assert opt.should_terminate
    assert opt.reasons == ["first", "second"]
    opt.reset()
    assert (opt.should_terminate, opt.reasons) == (False, [])


def test_links_used_twice_are_refused():
    link = Half()
    with pytest.raises(ChainError, match="the same Half is used twice"):
        Optimizer([parameter(1.0)], link, link)
    parent = Half()
    parent.set_child("inner", link)
    with pytest.raises(ChainError, match="the same Half is used twice"):
        Optimizer([parameter(1.0)], parent, link)
    first = Optimizer([parameter(1.0)], link)
    with pytest.raises(ChainError, match="already belongs to another optimizer"):
        Optimizer([parameter(1.0)], link)
    Optimizer([parameter(1.0)], copy.deepcopy(link))
    del first
    Optimizer([parameter(1.0)], link)  # its first optimizer was deleted


def test_children_given_later_belong_to_the_optimizer():
    w = parameter(1.0)
    parent = Inside(Half())
    opt = Optimizer([{"params": [w], "lr": 0.5}], parent, m.LR(1.0))
    late = m.LR(1.0)
    parent.set_child("more", late)
    assert late.settings[w]["lr"] == 0.5
    assert any(path.endswith("more.LR") for path in opt.state_dict()["links"])
    with pytest.raises(ChainError, match="used twice"):
        parent.set_child("again", late)
    assert list(parent.children) == ["inner", "more"]


def test_update_freq_runs_update_at_every_other_step():
    class Slow(optim.TensorTransform):
        def __init__(self):
            super().__init__(update_freq=2)

        def single_tensor_update(self, tensor, param, grad, loss, state, setting):
            state["seen"] = state.get("seen", 0) + 1

        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            return tensor

    w = parameter(1.0)
    link = Slow()
    opt = Optimizer([w], link)
    for _ in range(5):
        opt.step(mo.closure(lambda: w.sum()))
    assert link.state[w]["seen"] == 3


def test_inner_links_run_between_update_and_apply():
    class Outer(optim.TensorTransform):
        def single_tensor_update(self, tensor, param, grad, loss, state, setting):
            state["updated"] = tensor.clone()

        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            state["applied"] = tensor.clone()
            return tensor

    w = parameter(1.0)
    link = Outer(inner=Half())
    Optimizer([w], link).step(mo.closure(lambda: w.sum()))
    assert link.state[w]["updated"].item() == 1.0
    assert link.state[w]["applied"].item() == 0.5


def test_update_and_apply_use_the_states_that_are_passed():
    w = parameter(1.0, 2.0)
    first, second = [{}], [{}]
    link = m.Adam()
    for states in (first, second, first):
        F.update(objective(w), link, states)
        out = F.apply(objective(w), link, states)
    assert (first[0]["step"], second[0]["step"]) == (2, 1)
    assert torch.allclose(out.updates[0], torch.ones(2, dtype=torch.float64))
    assert not link.state[w]


def test_a_link_that_returns_no_objective_is_refused():
    class Forgot(Module):
        def apply(self, objective):
            pass

    w = parameter(1.0)
    with pytest.raises(TypeError, match="apply must return the objective"):
        Optimizer([w], Forgot()).step(mo.closure(lambda: w.sum()))

    class Nothing(optim.TensorTransform):
        pass

    with pytest.raises(TypeError, match="Nothing has neither single_tensor_apply"):
        Optimizer([w], Nothing()).step(mo.closure(lambda: w.sum()))


def test_uses_loss_and_grad():
    class Sees(optim.TensorTransform):
        def __init__(self):
            super().__init__(uses_grad=True, uses_loss=True)

        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            return tensor * 0 + grad * loss

    w = parameter(2.0)
    opt = Optimizer([w], Half(), Sees(), m.LR(0.1))
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert w.item() == pytest.approx(2 - 0.1 * 4 * 4)


def test_only_one_hessian_under_a_link():
    from moduli.linalg import Diagonal

    class Curved(Half):
        def get_H(self, objective):
            return Diagonal(torch.ones(1))

    parent = Half()
    parent.set_child("a", Curved())
    assert parent.get_H(objective(parameter(1.0))) is not None
    parent.set_child("b", Curved())
    with pytest.raises(ChainError, match="2 children with a Hessian"):
        parent.get_H(objective(parameter(1.0)))
    assert Half().get_H(objective(parameter(1.0))) is None


def test_one_vector_has_one_setting():
    a, b = parameter(1.0), parameter(2.0)
    with pytest.raises(ValueError, match="Vector has one value of beta for all parameters"):
        Optimizer([{"params": [a], "beta": 0.5}, {"params": [b]}], Vector())


def test_a_vector_starts_afresh_when_a_parameter_joins():
    a, b = parameter(1.0), parameter(2.0)
    b.requires_grad_(False)
    opt = Optimizer([a, b], Vector(), m.LR(0.1))
    opt.step(mo.closure(lambda: (a * a * b * b).sum()))
    b.requires_grad_(True)
    opt.step(mo.closure(lambda: (a * a * b * b).sum()))
    assert opt.link("Vector").state[a]["buffer"].shape == (2,)


def test_repr_and_links():
    parent = Half()
    parent.set_child("inner", [Momentum(), Half(0.25)])
    assert "momentum=0.9" in repr(parent.children["inner"].children["module_0"])
    assert [path for path, _ in parent.links()] == [
        "",
        "inner.Chain",
        "inner.Chain/module_0.Momentum",
        "inner.Chain/module_1.Half",
    ]
    assert WantsLoss().all_needs() == {optim.Need.LOSS}
    assert repr(Noise()) == "Noise()"
