"""Loading into several objects, all of them or none."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ._errors import CheckpointError
from ._module import ModulePlan


class RandomState:
    """A generator as an object with a state dict."""

    def __init__(self, generator: torch.Generator) -> None:
        self.state_dict, self.load_state_dict = generator.get_state, generator.set_state


class Steps:
    """Objects to load into, and how to put them back."""

    def __init__(self) -> None:
        self._todo: list[tuple[Any, Any, dict[str, Any]]] = []

    def load(self, value: Any, state: Any, **options: Any) -> None:
        self._todo.append((value, state, options))

    def run(self, plans: ModulePlan | None) -> None:
        """Load everything, the module last: of it alone is it known beforehand that it fits."""
        undo: list[tuple[Any, Callable[[], None]]] = []
        try:
            for value, state, options in self._todo:
                undo.append((value, _undo(value)))
                _take(value, state, options)
            if plans is not None:
                plans.apply()
        except BaseException as error:
            stuck = [told for value, back in reversed(undo) if (told := _try_undo(value, back))]
            if not stuck:
                raise
            told = f"it could not be put back: {'; '.join(stuck)}"
            if not isinstance(error, Exception):
                error.add_note(told)
                raise
            raise CheckpointError(f"{error}; and not all of it is as before: {told}") from error


def _try_undo(value: Any, back: Callable[[], None]) -> str:
    """Put an object back; gives what went wrong, if anything did, so that the others are put back in any case."""
    try:
        back()
    except Exception as error:  # noqa: BLE001 - whatever an object says about its own state
        return f"the {type(value).__name__} raised {type(error).__name__}: {error}"
    return ""


def _take(value: Any, state: Any, options: dict[str, Any]) -> None:
    try:
        value.load_state_dict(state, **options)
    except CheckpointError:
        raise
    except Exception as error:  # whatever an object says about a state that is not its own
        raise CheckpointError(
            f"the {type(value).__name__} refuses its state: {type(error).__name__}: {error}"
        ) from error


def _undo(value: Any) -> Callable[[], None]:
    if (
        isinstance(value, torch.optim.Optimizer)
        and type(value).load_state_dict is torch.optim.Optimizer.load_state_dict
    ):
        # Loading gives it new dicts and leaves the old ones and the tensors in them alone.
        held = dict(value.__dict__)

        def put_back() -> None:
            value.__dict__.clear()
            value.__dict__.update(held)

        return put_back
    try:
        state = copy.deepcopy(value.state_dict())
    except Exception as error:  # whatever an object says about its own state
        raise CheckpointError(
            f"the {type(value).__name__} does not give its state, so it could not be put back: "
            f"{type(error).__name__}: {error}"
        ) from error
    return lambda: value.load_state_dict(state)
