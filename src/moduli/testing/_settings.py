"""Laws about settings: groups and schedules are obeyed, new numbers need no new kernel, and invalid values raise."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..optim import Module, Optimizer, Schedule
from . import _problems as kit
from ._problems import Case, LawError, NotApplicable


def _list_settings(links: Sequence[Module]) -> Iterator[tuple[Module, str, Any]]:
    """Iterate over (link, setting, value) of every number or boolean setting, once for each class."""
    seen = set()
    for link in kit.all_links(links):
        for key, value in link.defaults.items():
            setting = (type(link), key)
            if setting not in seen and isinstance(value, bool | int | float):
                seen.add(setting)
                yield link, key, value


def list_numbers(links: Sequence[Module]) -> list[tuple[str, str, float]]:
    """Return (class, setting, value) of every setting that is a real number and may change."""
    return [
        (type(link).__name__, key, value)
        for link, key, value in _list_settings(links)
        if type(value) is float and key not in getattr(link, "static", ())
    ]


def _require_numbers(case: Case) -> list[tuple[str, str, float]]:
    """Return `list_numbers` of a case; raise NotApplicable if there are none."""
    numbers = list_numbers(case.links())
    if not numbers:
        raise NotApplicable("it has no numbers to set")
    return numbers


def _perturb(value: Any) -> Any:
    """Return another value: a smaller number, which is inside of limits such as 1 for a momentum."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return 0.9 * value if value else 0.01


def _find_other(link: Module, key: str, value: float) -> float:
    """Return a number near by that the link accepts for a setting."""
    for other in (_perturb(value), 1.1 * value):
        with contextlib.suppress(ValueError):
            link.check_setting(key, other)
            return float(other)
    raise LawError(f"{type(link).__name__} accepts no other {key} near {value:g}")


def named_links(links: Sequence[Module], name: str) -> Iterator[Module]:
    """Iterate over the links of this class, also inside of other links."""
    return (link for link in kit.all_links(links) if type(link).__name__ == name)


def _set_default(opt: Optimizer, name: str, key: str, value: Any, before: Any = None) -> None:
    """Change a setting of the links of a class, or only of those whose value is `before`."""
    for link in named_links(opt.modules, name):
        if before is None or link.defaults[key] == before:
            link.defaults[key] = value
    # The optimizer's groups have the old value, which is dropped.
    for group in opt.param_groups:
        group.pop(key, None)


@kit.law
def groups(case: Case) -> None:
    """A setting in the optimizer's groups or in the link's groups acts like the same default."""
    for name, key, value in _require_numbers(case):
        new = _find_other(next(named_links(case.links(), name)), key, value)
        second, third = kit.problem(case), kit.problem(case)
        own = [{"params": third.params, key: new}]

        def set_by_link(opt: Optimizer, name: str = name, own: Any = own) -> None:
            for link in named_links(opt.modules, name):
                link.set_param_groups(own)

        expected = kit.trial(case, change=functools.partial(_set_default, name=name, key=key, value=new))
        by_group = kit.trial(case, second, [{"params": second.params, f"{name}.{key}": new}])
        by_link = kit.trial(case, third, change=set_by_link)
        for where, got in (("the optimizer's group", by_group), ("set_param_groups", by_link)):
            kit.expect_same(f"{name}.{key}={new:g} given by {where} is not obeyed:", got, expected, 1e-12)


@kit.law
def per_group(case: Case) -> None:
    """A setting of one group is obeyed for its parameters, or raises an error that names it."""
    if case.members:
        raise NotApplicable("a population says itself what its parameters are")
    listed = list(_list_settings(case.links()))
    if not listed:
        raise NotApplicable("it has no settings")

    def trial(first: int, settings: dict[str, Any]) -> list[Tensor]:
        """Return the parameters after three steps, with settings for those from `first` on."""
        # The loss is separable, so that one parameter does not affect another.
        at = kit.problem(case, ((3, 2), (4,), (2, 3)), kind="bowl")
        others = [{"params": at.params[:first]}] if first else []
        return kit.trial(case, at, [*others, {"params": at.params[first:], **settings}])

    plain = trial(0, {})
    for link, key, value in listed:
        name, new = type(link).__name__, _perturb(value)
        setting = {f"{name}.{key}": new}
        with contextlib.suppress(ValueError):  # the link does not accept the value
            if not kit.have_moved(plain[1:], trial(0, setting)[1:]):
                continue
            try:
                partly = trial(1, setting)
            except ValueError as error:
                named = key in str(error) and name in str(error)
                kit.expect(named, f"{name}.{key} of one group is refused without naming both: {error}")
                continue
            kit.expect(kit.have_moved(plain, partly), f"{name}.{key}={new} of the second group is ignored")


def _arguments(link: Module, key: str, value: Any) -> dict[str, Any] | None:
    """Return keyword arguments of another such link with one setting changed; None if its signature does not show them."""
    params = inspect.signature(type(link)).parameters
    named = [p for p in params.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = {p.name for p in params.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD} - {key}
    if key not in [p.name for p in named] or not required <= link.defaults.keys():
        return None
    return {**{name: link.defaults[name] for name in required}, key: value}


@kit.law
def functions(case: Case) -> None:
    """A constant function of the step acts like the number, or raises an error by name when it is passed."""
    listed = [row for row in _list_settings(case.links()) if not isinstance(row[2], bool)]
    if not listed:
        raise NotApplicable("it has no numbers to set")
    plain = kit.trial(case)
    for link, key, value in listed:
        name, function = type(link).__name__, Schedule(lambda step, value=value: value)  # type: ignore[misc]
        arguments = _arguments(link, key, function.fn)
        if arguments is not None:
            try:
                cast("Any", type(link))(**arguments)
            except (TypeError, ValueError) as error:
                named = name in str(error) and key in str(error)
                kit.expect(named, f"{name}({key}=a function) is refused without naming both: {error}")
                continue

        schedule = functools.partial(_set_default, name=name, key=key, value=function, before=value)
        try:
            got = kit.trial(case, change=schedule)
        except (TypeError, RuntimeError) as error:
            raise LawError(f"{name}.{key} as a function: {type(error).__name__}: {error}") from error
        kit.expect_same(f"{name}.{key} as a function that is always {value}:", got, plain, 1e-12)


@kit.law
def split_groups(case: Case) -> None:
    """Parameters in two groups with equal settings move as in one; settings of one group do not reach another."""
    apart = kit.problem(case)
    separate = kit.trial(case, apart, [{"params": [param]} for param in apart.params])
    kit.expect_same("with each parameter in a group of its own", separate, kit.trial(case), 1e-12)
    if "lr" not in kit.optimizer(case, kit.problem(case).subject).param_groups[0]:
        return
    still = kit.problem(case)
    start = kit.snapshot(still.params)
    try:
        opt = kit.optimizer(case, [{"params": [still.params[0]], "lr": 0.0}, {"params": [still.params[1]]}])
        kit.step(case, opt, still)
        if torch.equal(start[1], still.params[1].detach()):
            kit.step(case, opt, still)  # the first step of some links only measures
    except ValueError as error:
        if "one vector" in str(error) or "all parameters" in str(error):
            return  # a link over all parameters says that it has one value for all
        raise
    kit.expect(torch.equal(start[0], still.params[0].detach()), "a parameter with lr=0 in its group moved")
    kit.expect(not case.target or kit.have_moved(start[1:], still.params[1:]), "lr=0 of one group stopped another")


@kit.law
def schedulers(case: Case) -> None:
    """A scheduler of torch, a function of the step, and numbers written by hand into the group do the same."""
    if not any("lr" in link.defaults for link in kit.all_links(case.links())):
        raise NotApplicable("it has no learning rate")
    base = kit.optimizer(case, kit.problem(case).subject).param_groups[0].get("lr")
    if not isinstance(base, float | int):
        raise NotApplicable("its links have different learning rates, or schedules")

    def schedule(opt: Optimizer) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        opt.register_step_post_hook(lambda *_: scheduler.step())

    def write(opt: Optimizer) -> None:
        rates = iter([base, base / 2, base / 4])
        opt.register_step_pre_hook(lambda *_: opt.param_groups[0].update(lr=next(rates)))

    expected = kit.trial(case, change=write)
    kit.expect_same("under a scheduler", kit.trial(case, change=schedule), expected, 1e-12)
    at = kit.problem(case)
    scheduled = kit.trial(case, at, [{"params": at.params, "lr": lambda t: base * 0.5**t}])
    kit.expect_same("with the learning rate a function of the step", scheduled, expected, 1e-12)


def _count_kernels(opt: Optimizer) -> int:
    """Return the number of kernels that the optimizer's fused runs have made."""
    return sum(map(len, opt._plan._traced.values())) if opt._plan is not None else 0


@kit.law
def no_rebuild(case: Case) -> None:
    """A new number for a setting never makes a new kernel."""
    numbers = _require_numbers(case)
    at = kit.problem(case)
    opt = kit.run(case, at, 3)
    before = _count_kernels(opt)
    for i in range(3):
        for name, key, value in numbers:
            opt.param_groups[0][f"{name.lower()}.{key}"] = value * (1 - 0.01 * (i + 1))
        kit.step(case, opt, at)
    after = _count_kernels(opt)
    kit.expect(after <= before, f"changing numbers made {after - before} more kernels ({before} before)")


@kit.law
def nan(case: Case) -> None:
    """A NaN setting raises in the constructor, in groups and in the link's groups, with a sentence."""
    for name, key, _ in _require_numbers(case):
        _check_refusals(case, name, key, math.nan)


@kit.law
def unknown(case: Case) -> None:
    """Unknown settings raise an error that names them."""
    opt = kit.optimizer(case, kit.problem(case).subject)
    for name in {type(link).__name__ for link in kit.all_links(opt.modules)}:
        _check_refusals(case, name, "no_such_setting", 1.0)


def _check_refusals(case: Case, name: str, key: str, value: float) -> None:
    """Raise LawError unless a setting of a link raises wherever it can be passed, with sentences that name both."""
    at = kit.problem(case)
    opt = kit.optimizer(case, at.subject)
    link = next(named_links(opt.modules, name))
    addressed = f"{name.lower()}.{key}"
    start = kit.snapshot(at.params)

    def step() -> None:
        opt.param_groups[0][addressed] = value
        kit.step(case, opt, at)

    _expect_refusal(
        f"{name}.set_param_groups with {key}={value}",
        lambda: link.set_param_groups([{"params": at.params, key: value}]),
        (name, key),
    )
    group = [{"params": at.params, addressed: value}]
    _expect_refusal(f"a group with {name}.{key}={value}", lambda: kit.optimizer(case, group), (name, key))
    _expect_refusal(f"a step with {name}.{key}={value}", step, (key,))
    kit.expect_same(f"a step refused for {name}.{key}={value} moved something:", at.params, start)
    params = inspect.signature(type(link)).parameters
    free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in params.values())
    arguments = _arguments(link, key, value) if key in params or free else {key: value}
    if arguments is not None:
        _expect_refusal(f"{name}({key}={value})", lambda: type(link)(**arguments), (name,))


def _expect_refusal(what: str, do: Callable[[], Any], words: tuple[str, ...]) -> None:
    try:
        do()
    except NotApplicable:
        return  # a population takes no groups, right or wrong
    except (TypeError, ValueError) as error:
        for word in words:
            kit.expect(word.lower() in str(error).lower(), f"{what} is refused without naming {word!r}: {error}")
    else:
        raise LawError(f"{what} is accepted")
