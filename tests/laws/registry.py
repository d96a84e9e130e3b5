"""Collect the rows of the law book: one row per link or chain is checked by every law.

A file in `rows/` has a list `ROWS`; each `Row` describes one link and its properties (see `moduli.testing.Case`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moduli.testing import Case as Row

__all__ = ["Row", "collect", "formula", "formula_of_closure"]


def formula(step: Callable[[Tensor, Tensor, dict[str, Any], int], Tensor]) -> Callable[..., None]:
    """Return a reference for `Row` that subtracts `step(param, grad, memory, t)` from each parameter, with t from 1."""

    def move(params: Sequence[Tensor], grads: Sequence[Tensor], memory: dict[Any, Any], t: int) -> None:
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.data.sub_(step(param.data, grad, memory.setdefault(i, {}), t))

    return move


def formula_of_closure(
    move: Callable[[list[Tensor], Callable[[], Tensor], dict[str, Any]], None],
) -> type[torch.optim.Optimizer]:
    """Return a reference for `Row` whose step is `move(params, evaluate, memory)`, which changes the parameters in place.

    `evaluate()` returns the loss at the current parameters and sets their `.grad`.
    """

    class Formula(torch.optim.Optimizer):
        def __init__(self, params: Sequence[Tensor]) -> None:
            super().__init__(params, {})
            self.memory: dict[str, Any] = {}

        @torch.no_grad()
        def step(self, closure: Callable[[], Tensor]) -> None:
            move(self.param_groups[0]["params"], torch.enable_grad()(closure), self.memory)

    return Formula


def collect(folder: Path = Path(__file__).parent / "rows") -> list[Row]:
    """Return the rows of all files, ordered by file name; raise ValueError if two have one name."""
    rows: dict[str, Row] = {}
    for path in sorted(folder.glob("*.py")):
        module = sys.modules.get(name := f"laws_rows_{path.stem}")
        if module is None or module.__file__ != str(path):
            spec = importlib.util.spec_from_file_location(name, path)
            module = sys.modules[name] = importlib.util.module_from_spec(
                spec
            )  # functions of a row are pickled by its name
            spec.loader.exec_module(module)
        for row in getattr(module, "ROWS", []):
            if row.name in rows:
                raise ValueError(f"two rows are called {row.name!r}; one of them is in {path.name}")
            rows[row.name] = row
    return list(rows.values())
