"""Which tensors of a module are labelled."""

from __future__ import annotations

import torch  # noqa: F401 - for the example
from torch import nn

from moduli.labels import Axes


def labels_of(module: nn.Module) -> dict[str, Axes]:
    """The Spaces of the axes of the labelled tensors that a module owns itself, by name.

    Args:
        module: Any module; one that is not of ours owns none.

    Example:
        >>> from moduli.labels import Space, Tensor
        >>> from moduli.nn import Module, labels_of
        >>> class Gain(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gain = Tensor(torch.tensor([1.0, 2.0]), (Space(["r", "g"], name="c"),))
        >>> list(labels_of(Gain())), labels_of(torch.nn.Linear(1, 1))
        (['gain'], {})
    """
    return {name: axes for name, (_, axes) in vars(module).get("_labelled", {}).items()}
