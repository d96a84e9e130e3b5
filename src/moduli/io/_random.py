"""Random states in checkpoints: those of torch, NumPy and Python that every program shares."""

import random
from typing import Any

import numpy as np
import torch

from ._errors import DamagedFileError


def collect() -> dict[str, Any]:
    """The global random states as a tree."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "state": torch.tensor(numbers, dtype=torch.int64), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def validate(tree: Any) -> Any:
    """Check that a tree holds random states, by giving them to generators made for this.

    Raises:
        DamagedFileError: If it does not.
    """
    try:
        torch.Generator().set_state(tree["torch"])
        random.Random().setstate(_python(tree))
        np.random.RandomState(0).set_state(tree["numpy"])
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError, AttributeError, IndexError) as error:
        raise DamagedFileError(f"its random states are malformed: {error}") from None
    return tree


def restore(tree: Any) -> None:
    """Make the global random states those of a tree that was validated."""
    torch.set_rng_state(tree["torch"])
    random.setstate(_python(tree))
    np.random.set_state(tree["numpy"])
    if "cuda" in tree and torch.cuda.is_available() and len(tree["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(tree["cuda"])


def _python(tree: Any) -> Any:
    state = tree["python"]
    return state["version"], tuple(state["state"].tolist()), state["gauss"]
