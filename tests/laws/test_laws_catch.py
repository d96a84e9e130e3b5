"""Every law fails for a link that breaks it, with an error that names the law and the link."""

import pytest
import torch

from laws.registry import Row, collect
from moduli import m, optim
from moduli.optim import Module, Need, TensorTransform
from moduli.testing import LAWS, Case, LawError, check_law, check_link


class Pointwise(TensorTransform):
    elementwise = True

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor


class Uphill(Pointwise):
    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return -tensor


class Lying(Pointwise):
    """Computes something else when it is not fused."""

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * (1.01 if isinstance(param, torch.nn.Parameter) else 1.0)


class PerTensor(TensorTransform):
    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor / (tensor.norm() + 1)


class ReadsGrad(Module):
    """Reads .grad instead of the gradients of the objective."""

    def apply(self, objective):
        objective.get_grads()
        objective.updates = [p.grad * (2.0 if objective.closure is None else 1.0) for p in objective.params]
        return objective


class Reallocates(Module):
    def apply(self, objective):
        for p, u in zip(objective.params, objective.get_updates(), strict=True):
            p.data = p.data - u
        objective.skip_update = True
        return objective


class NoEmpty(TensorTransform):
    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor / tensor.numel() if tensor.numel() else tensor.reshape(-1)[0]


class MovesAll(Module):
    def apply(self, objective):
        with torch.no_grad():
            for p in objective.params:
                p.sub_(0.1)
        return objective


class Overflows(TensorTransform):
    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * 1e30


class Hidden(TensorTransform):
    """Stores its statistics outside the state."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        self.seen += 1
        return tensor / self.seen


class OwnDefaults(TensorTransform):
    def __init__(self, *, factor=0.5):
        super().__init__({"factor": factor})

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * self.defaults["factor"]


class EveryNumber(Pointwise):
    static = ()

    def __init__(self, *, factor=0.5):
        super().__init__({"factor": factor})

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * setting["factor"]

    def measure(self, tensors, params, grads, settings, members):
        return {"tag": f"{settings[0]['factor']:.6f}"}


class LeavesThemThere(Module):
    needs = frozenset({Need.GRADIENT, Need.CLOSURE})

    def apply(self, objective):
        updates = objective.get_updates()
        with torch.no_grad():
            for p, u in zip(objective.params, updates, strict=True):
                p.sub_(u)
        objective.get_loss(backward=False, at_x0=False)
        objective.skip_update = True
        return objective


class Hoards(TensorTransform):
    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        state.setdefault("all", []).append(tensor.clone())
        return tensor


class TakesNan(TensorTransform):
    def __init__(self, *, factor=0.5):
        super().__init__({"factor": 0.5})
        self.defaults["factor"] = factor

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * setting["factor"]


class TakesAnything(TensorTransform):
    def __init__(self, **kwargs):
        super().__init__({})

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor

    def set_param_groups(self, param_groups):
        return self


class CountsMembers(TensorTransform):
    """Declares itself pointwise, but depends on the number of elements, which differs in a population."""

    elementwise = True

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * setting["size"]

    def measure(self, tensors, params, grads, settings, members):
        return {"size": 1.0 / sum(t.numel() for t in tensors)}


class TouchesUpdate(TensorTransform):
    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        tensor.mul_(0.5)

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor


class LearnsLate(TensorTransform):
    def single_tensor_initialize(self, tensor, param, grad, loss, state, setting):
        state["count"] = 0

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        state["count"] += 1
        return tensor


class ScalesInUpdate(Module):
    def update(self, objective):
        objective.updates = [0.5 * update for update in objective.get_updates()]

    def apply(self, objective):
        return objective


class CountsInApply(Module):
    def apply(self, objective):
        self.increment_counter("applied", 1)
        return objective


class FirstGroup(TensorTransform):
    def __init__(self, *, factor=0.5):
        super().__init__({"factor": factor})

    def multi_tensor_apply(self, tensors, params, grads, loss, states, settings):
        return [tensor * settings[0]["factor"] for tensor in tensors]


class OnlyNumbers(FirstGroup):
    def __init__(self, *, factor=0.5):
        self.bigger = factor + 1
        super().__init__(factor=factor)


class CutsGraph(TensorTransform):
    differentiable = True

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor * tensor.detach()


def slow(link):
    return lambda: [link(), m.LR(0.1)]


BROKEN = [
    ("optimum", slow(Uphill), {}),
    ("reference", slow(Pointwise), {"reference": lambda p: torch.optim.SGD(p, lr=0.11)}),
    ("fused_eager", lambda: [optim.Chain(Pointwise(), Lying()), m.LR(0.1)], {}),
    ("fused_c", lambda: [Lying(), m.LR(0.1)], {}),
    ("pieces", slow(PerTensor), {}),
    ("closures", slow(ReadsGrad), {}),
    ("formats", slow(Reallocates), {}),
    ("frozen", slow(MovesAll), {}),
    ("half", slow(Overflows), {}),
    ("saved", slow(Hidden), {}),
    ("loaded_in_place", slow(Hidden), {}),
    ("groups", slow(OwnDefaults), {}),
    ("per_group", slow(FirstGroup), {}),
    ("functions", slow(OwnDefaults), {}),
    ("learning", slow(TouchesUpdate), {}),
    ("learning", slow(ScalesInUpdate), {}),
    ("applying", slow(LearnsLate), {}),
    ("applying", slow(CountsInApply), {}),
    ("differentiable", slow(CutsGraph), {}),
    ("no_rebuild", slow(EveryNumber), {}),
    ("errors", slow(LeavesThemThere), {"closure": True}),
    ("leaks", slow(Hoards), {}),
    ("nan", slow(TakesNan), {}),
    ("unknown", slow(TakesAnything), {}),
    ("population", slow(CountsMembers), {}),
]


@pytest.mark.parametrize(("law", "make", "options"), BROKEN, ids=[law for law, _, _ in BROKEN])
def test_a_law_catches_the_link_that_breaks_it(law, make, options):
    with pytest.raises(LawError, match=f"culprit breaks the law {law!r}: "):
        check_link(make, name="culprit", laws=[law], **options)


@pytest.mark.parametrize("law", LAWS)
def test_a_correct_link_passes_every_law(law):
    case = Case("good", lambda: [Pointwise(), m.LR(0.2)], reference=lambda p: torch.optim.SGD(p, lr=0.2))
    assert check_law(case, law) is None


def test_a_link_that_crashes_breaks_the_law_it_crashes_under():
    class Crashes(Pointwise):
        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            raise ArithmeticError("no buffer")

    with pytest.raises(LawError, match="Crashes breaks the law 'pieces': ArithmeticError: no buffer"):
        check_link(Crashes, laws=["pieces"])


def test_all_broken_laws_are_reported():
    with pytest.raises(LawError) as caught:
        check_link(
            slow(LearnsLate), name="culprit", laws=["applying", "learning", "optimum", "per_group"], tolerance=-1
        )
    assert [line.split("law ")[1].split(":")[0] for line in str(caught.value).splitlines()] == [
        "'applying'",
        "'optimum'",
    ]


def test_a_number_that_is_read_once_is_refused_by_name():
    with pytest.raises(TypeError, match="OnlyNumbers: factor can't be a function of the step"):
        OnlyNumbers(factor=lambda step: 0.5)


def test_reports_and_reasons():
    report = check_link(slow(Pointwise), laws=["reference", "pieces", "half"], skip={"half": "why not"})
    assert report.held == ("pieces",)
    assert report.skipped == {"reference": "it has no reference", "half": "why not"}
    assert str(report).splitlines()[0] == "Pointwise | LR: 1 law holds, 2 do not apply"
    with pytest.raises(ValueError, match="there is no law 'gravity'"):
        check_link(slow(Pointwise), laws=["gravity"])
    with pytest.raises(ValueError, match="target is 'moon'"):
        check_link(slow(Pointwise), target="moon")
    assert check_link(Pointwise, laws=["unknown"]).name == "Pointwise"


def test_rows_are_collected(tmp_path):
    assert collect(tmp_path) == []
    text = "from laws.registry import Row\nfrom moduli import m\nROWS = [Row('a', lambda: [m.LR(0.1)])]\n"
    (tmp_path / "one.py").write_text(text)
    (row,) = collect(tmp_path)
    assert isinstance(row, Row)
    (tmp_path / "two.py").write_text(text)
    with pytest.raises(ValueError, match="two rows are called 'a'"):
        collect(tmp_path)
