"""SCE: select what varies most between models, calculate their shares, erase what disagrees with the majority.

With δ_t = θ_t − θ_base, tensor by tensor (section 3.3 of the paper):

    S  entries are selected whose variance over the models is among the greatest, a share `density` of them;
    C  w_t = Σ δ_t² / Σ_s Σ δ_s², over the selected entries;
    E  where the sign of δ_t is not that of Σ_s δ_s, it is erased; the weights of what remains are scaled to one.

Reference:
    Wan et al., "FuseChat: knowledge fusion of chat models", 2024, arXiv:2408.07990.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ._coefficients import Coefficient, Coefficients
from ._linear import widen
from ._paths import recipe
from ._recipe import Buffers, Integers, ModelT, Recipe, Row
from ._trim import count_kept, mask_greatest, view_real


@recipe
def sce(
    base: ModelT,
    models: Sequence[ModelT],
    density: Coefficient = 1.0,
    *,
    scale: Coefficient = 1.0,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Merge task vectors by their own sizes, where models differ most and agree in sign.

    Args:
        base: The module or state dict that all were fine-tuned from. It decides form, structure and dtypes.
        models: The fine-tuned models.
        density: The share of entries that is selected, from 0 to 1: a number, or numbers by glob pattern.
        scale: λ: a number, or numbers by glob pattern.
        buffers: Whether floating buffers are those of `base` or merged too.
        integers: Whether tensors of integers must be equal; they are those of `base` in any case.

    Raises:
        MergeError: If structures or coefficients do not fit, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> base = {"w": torch.zeros(2)}
        >>> merge.sce(base, [{"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([-1.0, 1.0])}])
        {'w': tensor([3., 1.])}

    Reference:
        Wan et al., "FuseChat", 2024, arXiv:2408.07990.
    """
    share, factor = Coefficients(density, "density", low=0.0, high=1.0), Coefficients(scale, "scale")
    count = len(models)

    def kernel(name: str, row: Row) -> Tensor:
        first = row[0]
        base = view_real(first)

        def delta(place: int) -> Tensor:
            return view_real(row[place + 1]) - base

        total, squares = torch.zeros_like(base), torch.zeros_like(base)
        for place in range(count):
            vector = delta(place)
            total.add_(vector)
            squares.addcmul_(vector, vector)
        # Of a single model there is no variance: a share keeps all of it, or nothing.
        keep = count_kept(share(name), base.numel()) if count > 1 else base.numel() * (share(name) > 0)
        selected = mask_greatest(squares - total.square() / count, keep)  # S
        sizes = widen(torch.stack([(delta(place) * selected).square().sum() for place in range(count)]))  # C
        whole = sizes.sum()
        shares = torch.where(whole > 0, sizes / whole, 0.0)
        merged, weights = torch.zeros_like(base), torch.zeros_like(base)
        for place in range(count):
            vector = delta(place).mul_(selected)
            agrees = (vector * total) > 0  # E
            merged.add_(vector.mul_(agrees).mul_(shares[place]))
            weights.add_(agrees * shares[place])
        result = merged.div_(weights.masked_fill_(weights == 0, 1.0)).mul_(factor(name)).add_(base)
        return torch.view_as_complex(result) if first.is_complex() else result

    return cast(ModelT, Recipe(kernel, (share, factor)))
