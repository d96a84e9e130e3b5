"""Laws about parameters and populations: dtype, memory format, odd shapes and missing gradients."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..optim import ChainError, Module, Need, Optimizer, closure
from ..population import Population
from . import _problems as kit
from ._problems import Case, NotApplicable

_MEMBERS = 3
_STEPS = 4
_RATES = torch.linspace(1.0, 0.5, _MEMBERS, dtype=torch.float64)


def _identify(param: Tensor) -> tuple[object, ...]:
    return id(param), param.dtype, param.device, tuple(param.shape), param.stride(), param.data_ptr()


@kit.law
def formats(case: Case) -> None:
    """Parameters keep dtype, device, strides and memory; strided ones move as contiguous ones do."""
    if case.members:
        raise NotApplicable("a population stores its parameters itself")
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        plain = kit.problem(case, ((3, 2), (1, 2, 2, 2)), dtype=dtype)
        strided = kit.problem(case, ((3, 2), (1, 2, 2, 2)), dtype=dtype)
        strided.subject = [
            nn.Parameter(strided.params[0].detach().T.contiguous().T),
            nn.Parameter(strided.params[1].detach().to(memory_format=torch.channels_last)),
        ]
        before = [_identify(param) for param in strided.params]
        kit.run(case, strided, 3)
        same = [_identify(param) for param in strided.params] == before
        kit.expect(same, f"a {dtype} parameter changed its dtype, strides or memory")
        kit.run(case, plain, 3)
        kit.expect_same(f"with strided {dtype} parameters", strided.params, plain.params, tolerance)


@kit.law
def shapes(case: Case) -> None:
    """0-d and empty parameters are taken, and empty ones change nothing."""
    with_empty, without = kit.problem(case, ((), (0,), (3,), (2, 0))), kit.problem(case, ((), (3,)))
    start = kit.snapshot(without.params)
    for at in (with_empty, without):
        kit.run(case, at, 3)
    others = [with_empty.params[0], with_empty.params[2]]
    kit.expect_finite("a 0-d or ordinary parameter", others)
    if not case.random:
        kit.expect_same("with an empty parameter beside them", others, without.params, 1e-10)
    kit.expect(not case.target or kit.have_moved(start, others), "nothing moved beside an empty parameter")


@kit.law
def complex_numbers(case: Case) -> None:
    """Complex parameters stay complex and finite; the loss goes down where the link is an optimizer."""
    if not case.complex:
        raise NotApplicable("it takes no complex parameters")
    first, last = _run_in(case, torch.complex128, 10)
    if case.target and not case.random:
        kit.expect(last < first, f"the loss went from {first:.4g} to {last:.4g} in 10 steps")


@kit.law
def half(case: Case) -> None:
    """Half-precision parameters stay half and finite."""
    if not case.half:
        raise NotApplicable("it takes no half-precision parameters")
    for dtype in (torch.float16, torch.bfloat16):
        _run_in(case, dtype, 3)


def _run_in(case: Case, dtype: torch.dtype, steps: int) -> tuple[float, float]:
    """Return the losses before and after some steps; raise LawError if parameters do not move or change their dtype."""
    at = kit.problem(case, dtype=dtype)
    start, first = kit.snapshot(at.params), at.value()
    kit.run(case, at, steps)
    kit.expect(all(param.dtype is dtype for param in at.params), f"a {dtype} parameter changed its dtype")
    kit.expect_finite(f"a {dtype} parameter", at.params)
    kit.expect(not case.target or kit.have_moved(start, at.params), f"{dtype} parameters did not move")
    return first, at.value()


@kit.law
def frozen(case: Case) -> None:
    """Frozen and unused parameters do not move, and the others move as without them."""
    alone, among = kit.problem(case), kit.problem(case)
    still = nn.Parameter(torch.full((2, 2), 3.0, dtype=torch.float64), requires_grad=False)
    unused = nn.Parameter(torch.full((3,), 5.0, dtype=torch.float64))
    kit.run(case, alone, 4)
    opt = kit.optimizer(case, [among.params[0], still, unused, among.params[1]])
    kit.step(case, opt, among, 4)
    kit.expect(bool((still == 3.0).all()), "a parameter with requires_grad=False moved")
    # A link that draws a direction for every parameter moves unused ones too, but the result must be finite.
    if case.random:
        kit.expect_finite("beside an unused parameter something", (*among.params, unused))
        return
    kit.expect(bool((unused == 5.0).all()), "a parameter that the loss does not depend on (its grad is None) moved")
    kit.expect_same("beside frozen and unused parameters", among.params, alone.params, 1e-10)


@kit.law
def thawed(case: Case) -> None:
    """A parameter that is unfrozen later starts fresh; freezing one again keeps it still."""
    at = kit.problem(case)
    at.params[1].requires_grad_(False)
    opt = kit.optimizer(case, at.subject)
    kit.step(case, opt, at)
    start = kit.snapshot(at.params)
    at.params[1].requires_grad_(True)
    kit.step(case, opt, at, 2)
    kit.expect_finite("after unfreezing a parameter", at.params)
    kit.expect(not case.target or kit.have_moved(start[1:], at.params[1:]), "an unfrozen parameter did not move")
    at.params[0].requires_grad_(False)
    start = kit.snapshot(at.params)
    kit.step(case, opt, at)
    kit.expect(not kit.have_moved(start[:1], at.params[:1]), "a parameter that was frozen between steps moved")


def _model(case: Case, index: int, dtype: torch.dtype) -> kit.LawModel:
    at = kit.problem(case, dtype=dtype)
    with torch.no_grad():
        for param in at.params:
            param.mul_(1 + 0.3 * index)
    return kit.LawModel(at, at.params)


def _make_stacked(
    case: Case, members: int, per_member: bool, dtype: torch.dtype, steps: int = 2
) -> tuple[Population, Optimizer]:
    """Return a population and its optimizer, after some steps."""
    torch.manual_seed(0)
    pop = Population.from_modules([_model(case, i, dtype) for i in range(members)])
    try:
        opt = Optimizer(pop, *_make_links(case, _RATES if per_member else None))
    except ChainError as refused:
        raise NotApplicable(f"a population can't give it what it needs: {refused}") from refused
    for _ in range(steps):
        opt.step(closure(lambda: pop.losses(lambda net: net())))
    return pop, opt


def _make_links(case: Case, rates: Tensor | float | None) -> list[Module]:
    """Return new links with learning rates multiplied by `rates`."""
    links = case.links()
    for link in kit.all_links(links) if rates is not None else ():
        if isinstance(link.defaults.get("lr"), float):
            link.defaults["lr"] = link.defaults["lr"] * rates
    return links


@kit.law
def population(case: Case) -> None:
    """On a population it does what N separate optimizers do, with one learning rate and with one per member."""
    if not case.population:
        raise NotApplicable("it does not run on a population as N separate optimizers would")
    links = case.links()
    if case.random:
        raise NotApplicable("separate optimizers draw other random numbers")
    if Need.MEMBERS in kit.needs(links):
        raise NotApplicable("it couples the members")
    has_rate = any(isinstance(link.defaults.get("lr"), float) for link in kit.all_links(links))
    for per_member in (False, True) if has_rate else (False,):
        _compare(case, per_member, torch.float64, 1e-10)
    _compare(case, has_rate, torch.float32, 1e-4)


def _compare(case: Case, per_member: bool, dtype: torch.dtype, tolerance: float) -> None:
    together, _ = _make_stacked(case, _MEMBERS, per_member, dtype, _STEPS)
    for i in range(_MEMBERS):
        alone = _train_alone(case, per_member, i, dtype)
        member = [leaf.detach()[i] for leaf in together.parameters()]
        if kit.same(member, alone, tolerance) is None:
            continue
        # Eigenvectors of equal eigenvalues depend on the last digit, so the tolerance grows with the effect of that digit.
        moved = _train_alone(case, per_member, i, dtype, nudge=torch.finfo(dtype).eps)
        noise = max(float((a - b).abs().max()) for a, b in zip(alone, moved, strict=True) if a.numel())
        how = " with a learning rate of its own" if per_member else ""
        what = f"member {i}{how} is not where it would be by itself ({dtype}):"
        kit.expect_same(what, member, alone, max(tolerance, 100 * noise))


def _train_alone(case: Case, per_member: bool, i: int, dtype: torch.dtype, nudge: float = 0.0) -> list[torch.Tensor]:
    """Return the parameters of a member that is trained alone, from its start times 1 + nudge."""
    model = _model(case, i, dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + nudge)
    one = Optimizer(model, *_make_links(case, float(_RATES[i]) if per_member else None))
    for _ in range(_STEPS):
        one.step(closure(model))
    return [param.detach() for param in model.parameters()]


@kit.law
def operations(case: Case) -> None:
    """The number of operations of a step on a population does not depend on its size, unless `explain()` says so."""
    if not case.population:
        raise NotApplicable("it does not run on a population as N separate optimizers would")
    wanted = kit.needs(case.links())
    if Need.MEMBERS in wanted or Need.CLOSURE in wanted:
        raise NotApplicable("it couples the members, or decides how often they are evaluated")
    (few, said), (many, _) = (_count_operations(case, count) for count in (2, 6))
    loops = "member by member" in said
    kit.expect(loops != (few == many), f"2 members take {few} operations, 6 members {many}; explain() says: {said}")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _count_operations(case: Case, members: int) -> tuple[int, str]:
    """Return the number of operations of two steps after the first, and the text of `explain()`."""
    pop, opt = _make_stacked(case, members, False, torch.float64)
    with _Operations() as counter:  # type: ignore[no-untyped-call]
        for _ in range(2):
            opt.step(closure(lambda: pop.losses(lambda net: net())))
    return counter.count, str(opt.explain())
