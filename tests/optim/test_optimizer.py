"""The optimizer: accepted parameters, errors at construction, steps, fusing, and `explain`."""

import gc
import weakref

import pytest
import torch

import moduli as mo
from moduli import m
from moduli.optim import ChainError, ClosureError, Need, Optimizer
from moduli.optim import Module as Link
from optim.helpers import Backtrack, Half, Momentum, Newton, Noise, Vector, WantsLoss


def parameter(*values, dtype=torch.float64):
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


# ---------------------------------------------------------------- construction


def test_parameters_are_taken_in_every_form():
    net = torch.nn.Linear(2, 1)
    for params in (
        net,
        net.parameters(),
        net.named_parameters(),
        list(net.parameters()),
        [{"params": net.parameters()}],
        [{"params": list(net.named_parameters()), "lr": 0.5}],
        {"params": [net.weight]} and [{"params": net.weight}, {"params": net.bias}],
    ):
        opt = Optimizer(params, m.LR(0.1))
        assert isinstance(opt, torch.optim.Optimizer)
        assert sum(len(group["params"]) for group in opt.param_groups) == 2
    assert Optimizer(net, m.LR(0.1)).model is net


def test_construction_errors():
    w = parameter(1.0)
    with pytest.raises(ChainError, match="at least one link"):
        Optimizer([w])
    with pytest.raises(TypeError, match=r"should be an iterable of Tensors"):
        Optimizer(w, Half())
    with pytest.raises(ValueError, match="empty parameter list"):
        Optimizer([], Half())
    with pytest.raises(ValueError, match="empty parameter list"):
        Optimizer(torch.nn.ReLU(), Half())
    with pytest.raises(ValueError, match="reduce is 'max'"):
        Optimizer([w], Half(), reduce="max")
    with pytest.raises(ValueError, match="non-leaf"):
        Optimizer([w * 2], Half())
    with pytest.raises(TypeError, match="got LR"):
        Optimizer([w], m.LR)


def test_a_failed_construction_claims_no_link():
    w, link = parameter(1.0), Half()
    with pytest.raises(ValueError, match="twice"):
        Optimizer([w, w], link)
    Optimizer([w], link)


def test_duplicate_names_are_refused():
    a, b = parameter(1.0), parameter(2.0)
    opt = Optimizer([("a", a)], Half())
    with pytest.raises(ValueError, match="two parameters are named 'a'"):
        opt.add_param_group({"params": [("a", b)]})
    assert len(opt.param_groups) == 1
    with pytest.raises(ValueError, match="two parameters are named 'x'"):
        Optimizer([("x", a), ("x", b)], Half())


def test_population_links_need_a_population():
    class Swarm(Link):
        needs = frozenset({Need.MEMBERS})
        members = True

        def apply(self, objective):
            return objective

    with pytest.raises(ChainError, match="Swarm moves the members of a population"):
        Optimizer([parameter(1.0)], Swarm())


# ---------------------------------------------------------------- stepping


def test_a_step_without_closure_uses_the_gradients_and_leaves_them():
    w = parameter(1.0, 2.0)
    w.grad = torch.ones_like(w)
    opt = Optimizer([w], Half(0.5), m.LR(0.5))
    assert opt.step() is None
    assert w.tolist() == [0.75, 1.75]
    assert w.grad.tolist() == [1.0, 1.0]
    assert (opt.num_evaluations, opt.current_step) == (1, 1)


def test_a_loss_that_is_passed_serves_links_that_need_only_the_loss():
    w = parameter(1.0)
    w.grad = torch.ones_like(w)
    opt = Optimizer([w], WantsLoss(), m.LR(0.5))
    with pytest.raises(
        ClosureError, match=r"WantsLoss needs the loss, so step needs a closure \(or step\(loss=loss\)\)"
    ):
        opt.step()
    assert opt.step(loss=torch.tensor(3.0)).item() == 3.0
    assert opt.attrs["loss seen"].item() == 3.0
    with pytest.raises(ClosureError, match="Backtrack needs"):
        Optimizer([parameter(1.0)], Backtrack()).step(loss=torch.tensor(3.0))


def test_extra_arguments_reach_the_links():
    class Reads(Link):
        def apply(self, objective):
            objective.attrs["read"] = objective.storage["full_closure"]
            return objective

    w = parameter(1.0)
    opt = Optimizer([w], Reads(), m.LR(0.1))
    opt.step(mo.closure(lambda: w.sum()), full_closure=3)
    assert opt.attrs["read"] == 3


def test_parameters_without_gradient_stay_as_torch_leaves_them():
    ours, theirs = [parameter(1.0), parameter(1.0)], [parameter(1.0), parameter(1.0)]
    opt = Optimizer(ours, m.Adam(), m.LR(0.1))
    other = torch.optim.Adam(theirs, lr=0.1)
    for t in range(6):
        for params in (ours, theirs):
            params[0].grad = torch.ones_like(params[0])
            params[1].grad = torch.ones_like(params[1]) if t % 2 else None
        opt.step()
        other.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("fuse", ["auto", False])
def test_unfused_links_beside_absent_gradients(fuse):
    a, b = parameter(1.0), parameter(1.0)
    opt = Optimizer([a, b], Momentum(), Noise(), m.LR(0.1), fuse=fuse)
    opt.step(mo.closure(lambda: a.sum()))
    assert b.item() == 1.0
    assert a.item() != 1.0


def test_parameters_may_be_frozen_thawed_swapped_and_added_between_steps():
    a, b = parameter(1.0), parameter(1.0)
    opt = Optimizer([a, b], Momentum(momentum=0.5), m.LR(1.0))
    step = lambda: opt.step(mo.closure(lambda: (a + b).sum()))  # noqa: E731
    step()
    b.requires_grad_(False)
    step()
    assert (a.item(), b.item()) == (-1.5, 0.0)
    b.requires_grad_(True)
    step()
    assert (a.item(), b.item()) == (-3.25, -1.5)
    a.data = torch.tensor([10.0], dtype=torch.float64)  # the parameter has new memory
    step()
    assert a.item() == 10 - 1.875
    c = parameter(0.0)
    opt.add_param_group({"params": [c], "lr": 2.0})
    opt.step(mo.closure(lambda: (a + b + c).sum()))
    assert c.item() == -2.0


def test_attributes_published_by_links_are_on_the_optimizer():
    w = parameter(3.0)
    opt = Optimizer([w], Backtrack())
    opt.step(mo.closure(lambda: (w**2).sum()))
    assert opt.attrs["size"] == 0.5


def test_nothing_is_updated_twice_in_one_pass_and_after_it():
    seen = []

    class Hooked(Link):
        def apply(self, objective):
            objective.post_step_hooks.append(lambda o, links: seen.append((o.updates[0].clone(), len(links))))
            return objective

    w = parameter(1.0)
    opt = Optimizer([w], Hooked(), Half(0.5), m.LR(0.5))
    opt.step(mo.closure(lambda: w.sum()))
    assert w.item() == 0.75
    assert [(u.item(), n) for u, n in seen] == [(0.25, 3)]


def test_links_are_found_by_name_and_path():
    opt = Optimizer([parameter(1.0)], Half(), Momentum(), Half())
    assert isinstance(opt.link("momentum"), Momentum)
    assert opt.link("2.Half") is opt.modules[2]
    with pytest.raises(ValueError, match="2 links are called 'Half'"):
        opt.link("Half")
    with pytest.raises(ValueError, match="0 links are called 'Adam'"):
        opt.link("Adam")
    assert repr(opt).startswith("Optimizer(Half(factor=0.5), Momentum(")


def test_reset_starts_again():
    def path(reset):
        w = parameter(1.0, -1.0)
        opt = Optimizer([w], m.Adam(), m.LR(0.1))
        for _ in range(3):
            opt.step(mo.closure(lambda: (w**4).sum()))
        if reset:
            opt.reset()
            w.data.copy_(parameter(1.0, -1.0).data)
            for _ in range(3):
                opt.step(mo.closure(lambda: (w**4).sum()))
        return w.detach()

    assert torch.equal(path(False), path(True))


def test_an_optimizer_is_collected():
    w = parameter(1.0)
    opt = Optimizer([w], m.Adam(), Momentum(), Noise(), m.LR(0.1))
    opt.step(mo.closure(lambda: w.sum()))
    gone = weakref.ref(opt)
    gc.collect()
    gc.disable()
    try:
        del opt
        assert gone() is None  # there are no reference cycles, so it is freed without the collector
    finally:
        gc.enable()


# ---------------------------------------------------------------- fusing


def test_explain_says_what_runs_together_and_why_not():
    opt = Optimizer([parameter(1.0, 2.0)], Half(), Momentum(), Vector(), Noise(), Newton(), m.LR(1.0))
    assert opt.explain() == (
        "1 parameter, 2 numbers\n"
        "one pass:\n"
        "  Half      needs the gradient\n"
        "  Momentum  needs the gradient\n"
        "Vector      needs the gradient; on its own: its hooks are not declared pointwise\n"
        "Noise       needs the gradient; on its own: its hooks are not declared pointwise\n"
        "Newton      needs the Hessian, the gradient; on its own: it works on the objective, not on tensors\n"
        "one pass, which also moves the parameters:\n"
        "  LR        needs the gradient"
    )
    plain = Optimizer([parameter(1.0)], Half(), m.LR(1.0), fuse=False)
    assert "one by one (fuse=False):" in plain.explain()
    assert mo.Optimizer([parameter(1.0)], Momentum(), m.LR(1.0)).explain().count("one pass") == 1


def test_explain_says_which_form_ran_and_why(monkeypatch):
    weight, bias = parameter(*map(float, range(5000))), parameter(3.0)
    opt = Optimizer([weight, bias], Momentum(), m.LR(1.0))
    assert "one pass, which" in opt.explain()  # no step was made yet
    monkeypatch.setenv("MODULI_KERNELS", "foreach")
    weight.grad, bias.grad = torch.ones_like(weight), torch.ones_like(bias)
    opt.step()
    assert "one pass (foreach), which" in opt.explain()
    assert "because MODULI_KERNELS=foreach" in opt.explain()
    weight.grad = torch.ones_like(bias).expand(5000)  # kernels do not take expanded tensors
    opt.step()
    assert "one pass (mixed), which" in opt.explain()
    assert "plain: the function itself, tensor by tensor, for 1 of 2 tensors" in opt.explain()
    monkeypatch.setenv("MODULI_KERNELS", "plain")
    weight.grad = torch.ones_like(weight)
    opt.step()
    assert "one pass (plain), which" in opt.explain()


def test_explain_says_why_a_link_is_not_fused():
    from moduli.optim.segments import explain_unfused

    inner = Half()
    inner.set_child("inner", Half())
    assert explain_unfused(inner) == "it has inner links (inner)"

    class Slow(Half):
        def __init__(self):
            super().__init__()
            self.update_freq = 3

    class Own(Half):
        def multi_tensor_apply(self, tensors, *rest):
            return tensors

    class Flat(Half):
        def __init__(self):
            super().__init__()
            self.concat_params = True

    class Looks(Half):
        def __init__(self):
            super().__init__()
            self.uses_loss = True

    assert explain_unfused(Slow()) == "it learns at every 3th step only"
    assert explain_unfused(Own()) == "it overrides multi_tensor_apply"
    assert explain_unfused(Flat()) == "it works on one vector of all parameters"
    assert explain_unfused(Looks()) == "it uses the loss"
    assert explain_unfused(Half()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_equals_plain_over_mixed_parameters(dtype):
    def path(fuse):
        torch.manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(3, 2, dtype=dtype)),
            torch.nn.Parameter(torch.randn(4, dtype=torch.float64)),
            torch.nn.Parameter(torch.randn((), dtype=dtype)),
            torch.nn.Parameter(torch.randn(2, 3, dtype=dtype).T),
            torch.nn.Parameter(torch.randn(3, dtype=torch.complex128)),
            torch.nn.Parameter(torch.empty(0, dtype=dtype)),
        ]
        groups = [{"params": params[:2], "lr": 0.2}, {"params": params[2:], "beta1": 0.5}]
        opt = Optimizer(groups, Half(0.7), m.Adam(), Noise(), Momentum(), m.LR(0.1), fuse=fuse)
        for t in range(4):
            for i, p in enumerate(params):
                p.grad = None if (i + t) % 5 == 4 else (p.detach() * (1 + i) + 0.1)
            opt.step()
        return [p.detach() for p in params]

    for a, b in zip(path("auto"), path(False), strict=True):
        assert torch.allclose(a, b, rtol=1e-12 if a.dtype in (torch.float64, torch.complex128) else 1e-5)


def test_state_changed_by_hand_is_used_by_the_fused_pass():
    w = parameter(0.0)
    opt = Optimizer([w], Momentum(momentum=1.0), m.LR(1.0))
    opt.step(mo.closure(lambda: w.sum()))
    opt.link("Momentum").state[w]["buffer"] = torch.full((1,), 10.0, dtype=torch.float64)
    opt.step(mo.closure(lambda: w.sum()))
    assert w.item() == -12.0
    adam = Optimizer([parameter(1.0)], m.Adam(), m.LR(1.0))
    (p,) = adam.param_groups[0]["params"]
    for _ in range(3):
        adam.step(mo.closure(lambda: p.sum()))
    assert adam.link("Adam").state[p]["step"] == 3


def test_a_link_that_is_not_pointwise_says_so():
    class Liar(Half):
        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            return tensor / tensor.norm()

    w = parameter(1.0, 2.0)
    opt = Optimizer([w], Liar())
    with pytest.raises(Exception, match=r"(?i)pointwise|reduc"):
        opt.step(mo.closure(lambda: w.sum()))
    assert w.tolist() == [1.0, 2.0]

    class Late(Half):
        def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
            state["early"] = torch.zeros_like(tensor)

        def single_tensor_update(self, tensor, param, grad, loss, state, setting):
            state["late"] = tensor.clone()

    with pytest.raises(mo.kernels.NotPointwiseError, match="Late makes the state 'late' while learning"):
        Optimizer([w], Late()).step(mo.closure(lambda: w.sum()))


def test_hundreds_of_tensors_are_one_call():
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(300)]
    for p in params:
        p.grad = torch.ones(3)
    opt = Optimizer(params, m.Adam(), m.LR(0.1))
    for _ in range(3):
        opt.step()
    (run,) = opt._plan.list_segments()
    assert len(run._cohorts) == 1
    assert torch.allclose(params[7], torch.full((3,), 0.7))
