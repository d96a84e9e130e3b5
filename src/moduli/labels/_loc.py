"""Reading and writing by label in brackets: ``t.loc["north", "2001":] = 0.0``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ._assign import write_into
from ._index import get
from ._select import isel, sel
from ._tensor import Tensor


class Loc:
    """The entries of a tensor by label; ``t.loc`` makes one.

    A key has labels for the first axes, as in ``t.loc["a", ["p", "q"]]``, or is a mapping of axes to labels, as in
    ``t.loc[{"column": "p"}]``. Labels are those that `sel` takes: one (the axis disappears), a list, a slice with both ends, or a
    mask. Assignment pairs the value with the selected entries by axis and label, and gradients go to both: it writes in place, as
    ``t[...] = value`` does, so a leaf that requires gradients is cloned first.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["a", "b"], column=["p", "q"])
        >>> t.loc["a"], t.loc[:, "q"]
        (Tensor(column: p=1., q=2.), Tensor(row: a=2., b=4.))
        >>> t.loc[{"column": "p"}] = mo.tensor([10.0, 20.0], row=["b", "a"])
        >>> t.loc[:, "p"]
        Tensor(row: a=20., b=10.)
    """

    __slots__ = ("_t",)

    def __init__(self, t: Tensor) -> None:
        self._t = t

    def __getitem__(self, key: Any) -> Tensor:
        return _choose(self._t, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        write_into(self._t, lambda numbers: _choose(numbers, key), value)


def _choose(t: Tensor, key: Any) -> Tensor:
    if _is_mask(key) and key.ndim > 1:
        return get(t, key)
    if not isinstance(key, Mapping):
        key = _spell_out(t, key if isinstance(key, tuple) else (key,))
    by_label = {t._axes.axis(axis): label for axis, label in key.items()}
    masks = {axis: label for axis, label in by_label.items() if _is_mask(label)}
    # Masks are applied first, because a single label drops its axis, which moves the positions of others.
    t = isel(t, masks) if masks else t
    return sel(t, {axis: label for axis, label in by_label.items() if axis not in masks})


def _spell_out(t: Tensor, keys: tuple[Any, ...]) -> dict[int, Any]:
    """Return a key as a mapping of axes to labels."""
    dots = [at for at, key in enumerate(keys) if key is Ellipsis]
    if len(dots) > 1 or len(keys) - len(dots) > t.ndim:
        raise IndexError(
            f"the labels {keys!r} are for more axes than there are, or have more than one '...'; {t._axes.listing()}"
        )
    front = keys[: dots[0]] if dots else keys
    back = keys[dots[0] + 1 :] if dots else ()
    chosen = {**dict(enumerate(front)), **{t.ndim - len(back) + at: key for at, key in enumerate(back)}}
    return {axis: key for axis, key in chosen.items() if not (isinstance(key, slice) and key == slice(None))}


def _is_mask(key: Any) -> bool:
    return isinstance(key, (Tensor, torch.Tensor, np.ndarray)) and key.dtype in (torch.bool, np.bool_)


def loc(t: Tensor) -> Loc:
    """The entries by label, which are read and written in brackets: see `Loc`.

    Example:
        >>> import moduli as mo
        >>> t = mo.zeros(x=["a", "b", "c"])
        >>> t.loc["b":] = 1.0
        >>> t
        Tensor(x: a=0., b=1., c=1.)
    """
    return Loc(t)


Tensor.loc = property(loc, doc=loc.__doc__)  # type: ignore[attr-defined,method-assign,assignment,unused-ignore]
