"""The law book's table: one row per link (or chain) puts it under every law.

A file in `rows/` has a list `ROWS`; each `Row` says what may be expected of one link (see `moduli.testing.Case`).
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
    """A reference for `Row` from the update of one tensor: `step(param, grad, memory, t) -> update`, t from 1."""

    def move(params: Sequence[Tensor], grads: Sequence[Tensor], memory: dict[Any, Any], t: int) -> None:
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            param.data.sub_(step(param.data, grad, memory.setdefault(i, {}), t))

    return move


def formula_of_closure(
    move: Callable[[list[Tensor], Callable[[], Tensor], dict[str, Any]], None],
) -> type[torch.optim.Optimizer]:
    """A reference for `Row` from a step of all parameters: `move(params, evaluate, memory)` writes into them.

    `evaluate()` is the loss where they are now, and leaves their gradients in `.grad`.
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
    """All rows of all files, in the order of their names; a name used twice is an error."""
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
