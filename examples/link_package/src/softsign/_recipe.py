"""The median of several models, entry by entry."""

from collections.abc import Sequence
from typing import Any

import torch

from moduli import merge


@merge.recipe
def median(models: Sequence[Any], *, buffers: merge.Buffers = "first", integers: merge.Integers = "equal") -> Any:
    """Merge models by the median of each entry, which one outlier among three can't move far.

    Example:
        >>> import torch
        >>> median([{"w": torch.tensor([value])} for value in (1.0, 2.0, 100.0)])
        {'w': tensor([2.])}
    """
    return merge.Recipe(lambda name, row: torch.stack(list(row)).quantile(0.5, dim=0), elementwise=True)
