"""What goes wrong in a merge."""


class MergeError(ValueError):
    """Models that cannot be merged, or a coefficient that does not fit them. No model was changed.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> merge.linear([torch.nn.Linear(3, 2), torch.nn.Linear(4, 2)])
        Traceback (most recent call last):
        ...
        moduli.merge._errors.MergeError: 'weight' is torch.float32 of shape (2, 3) in models[0] and ...
    """
