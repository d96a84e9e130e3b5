"""The law book: every law by name, and the function that puts a link under all of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..lab import parse
from ..lab.catalogue import make_links
from ..optim import Module
from . import _agreement, _endurance, _settings, _subjects  # noqa: F401 - each registers its laws
from ._problems import LAWS, Case, LawError, NotApplicable


@dataclass(frozen=True)
class Report:
    """The result of `check_link`: the laws that hold, and those that do not apply, with the reason.

    Example:
        >>> from moduli.testing import Report
        >>> print(Report("Adam", ("pieces",), {"reference": "it has no reference"}))
        Adam: 1 law holds, 1 does not apply
          reference: it has no reference
    """

    name: str
    held: tuple[str, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        count, left = len(self.held), len(self.skipped)
        head = (
            f"{self.name}: {count} law{'s hold' if count != 1 else ' holds'}, {left} do{'es' * (left == 1)} not apply"
        )
        return "\n".join([head, *(f"  {law}: {why}" for law, why in self.skipped.items())])


def check_law(case: Case, law: str) -> str | None:
    """Check one law for a case.

    Args:
        case: The link and its expected properties.
        law: The name of the law, one of `LAWS`.

    Returns:
        None if the law holds, the reason if it does not apply.

    Raises:
        LawError: The link breaks the law.

    Example:
        >>> from moduli import m
        >>> from moduli.testing import Case, check_law
        >>> check_law(Case("LR", lambda: [m.LR(0.1)]), "reference")
        'it has no reference'
    """
    if law not in LAWS:
        raise ValueError(f"there is no law {law!r}; there are {', '.join(LAWS)}")
    if case.skip and law in case.skip:
        return case.skip[law]
    try:
        LAWS[law](case)
    except NotApplicable as reason:
        return str(reason)
    except LawError as error:
        raise case.fail(law, str(error)) from error
    except Exception as error:
        raise case.fail(law, f"{type(error).__name__}: {error}") from error
    return None


def check_link(
    factory: str | Callable[[], Module | Sequence[Module]],
    *,
    name: str | None = None,
    laws: Iterable[str] | None = None,
    **options: Any,
) -> Report:
    """Check the laws that all links of moduli obey for another link.

    Args:
        factory: Makes the link, or the smallest chain with it that is an optimizer; new links at each call. Or that chain as
            text, ``"SoftSign | LR(0.01)"``, with names of the catalogue, of other packages, and of files (``mine.py:SoftSign``).
        name: The name in messages; by default the class names.
        laws: The laws to check; by default all of them.
        **options: Expected properties, as for `Case`: `target`, `steps`, `tolerance`, `reference`, `closure`, `random`,
            `pieces`, `population`, `complex`, `half`, `members`, `skip`.

    Returns:
        The laws that hold, and those that do not apply, with the reason.

    Raises:
        LawError: Laws are broken; the text names each of them, the link, and what differed.

    Example:
        >>> from moduli import m, optim
        >>> from moduli.testing import check_link
        >>> class Halve(optim.TensorTransform):
        ...     elementwise = True
        ...     def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        ...         return tensor / 2
        >>> report = check_link(lambda: [Halve(), m.LR(0.5)], laws=["optimum", "pieces", "errors", "reference"])
        >>> print(report)
        Halve | LR: 3 laws hold, 1 does not apply
          reference: it has no reference
        >>> print(check_link("Sign | LR(0.01)", laws=["optimum", "pieces"]))
        Sign | LR: 2 laws hold, 0 do not apply
    """
    if isinstance(factory, str):
        factory = partial(make_links, parse(factory))
    title = name if name is not None else " | ".join(type(link).__name__ for link in Case("", factory).links())
    case = Case(title, factory, **options)
    valid: list[str] = []
    skipped: dict[str, str] = {}
    broken: list[LawError] = []
    for law in LAWS if laws is None else laws:
        try:
            reason = check_law(case, law)
        except LawError as error:
            broken.append(error)
            continue
        if reason is None:
            valid.append(law)
        else:
            skipped[law] = reason
    if broken:
        raise LawError("\n".join(map(str, broken))) from broken[0]
    return Report(title, tuple(valid), skipped)
