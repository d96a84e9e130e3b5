"""What a link says where it is given arguments that it does not take."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from typing import Any

__all__ = ["LinkType"]


class LinkType(ABCMeta):
    """Explains the commonest mistake: a positional argument where a link takes keywords."""

    @property
    def __signature__(cls) -> inspect.Signature:
        # Tools look at the type's own call first, which takes anything.
        known = inspect.signature(cls.__init__)  # type: ignore[misc]
        return known.replace(parameters=list(known.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            signature = inspect.signature(cls.__init__)  # type: ignore[misc]
            try:
                signature.bind(None, *args, **kwargs)
            except TypeError:
                raise TypeError(_explain_arguments(cls, signature, args, kwargs, error)) from None
            raise


def _explain_arguments(
    cls: type, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError
) -> str:
    name = cls.__name__
    kinds = inspect.Parameter
    known = [p for p in signature.parameters.values() if p.name != "self"]
    keywords = [p.name for p in known if p.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    positional = [p for p in known if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    unknown = [key for key in kwargs if key not in keywords]
    if unknown:
        return f"{name} has no setting {unknown[0]!r}; it takes {', '.join(keywords) or 'no arguments'}"
    if len(args) > len(positional):
        text = ", ".join(map(repr, args))
        hint = f"its settings are keywords: {', '.join(keywords) or 'none'}"
        if len(args) == 1 and isinstance(args[0], float | int) and "lr" not in keywords:
            hint = f"a step size is a link of its own: {name}(), LR({args[0]!r}); {hint}"
        return f"{name}({text}): {hint}"
    return f"{name}: {error}"
