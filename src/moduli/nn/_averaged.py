"""Averages of models over training, by label."""

from types import SimpleNamespace
from typing import Any

import torch  # noqa: F401 - for the examples
from torch import nn
from torch.optim import swa_utils

from moduli.layout import align, layout_and_tensors, layout_of


class AveragedModel(swa_utils.AveragedModel):
    """`torch.optim.swa_utils.AveragedModel`, which pairs labelled tensors by label.

    Torch's own class pairs parameters by position, which is right for the model that the average was made from. Another model
    may have its labels in another order; other labels raise. The arguments are torch's.

    Example:
        >>> import moduli as mo
        >>> a, b = mo.Module(), mo.Module()
        >>> a.w, b.w = mo.tensor([1.0, 2.0], c=["r", "g"]), mo.tensor([4.0, 3.0], c=["g", "r"])
        >>> average = mo.nn.AveragedModel(a)
        >>> average.update_parameters(a), average.update_parameters(b)
        (None, None)
        >>> average.module.w.detach()
        Tensor(c: r=2., g=3.)
    """

    def update_parameters(self, model: nn.Module) -> None:
        """Add a model to the average.

        Raises:
            AxesError: If a tensor of the model has other labels.
        """
        own: Any = self.module
        layout, tensors = layout_and_tensors(model)
        alignment = align(layout_of(own), layout)
        if alignment is None:
            super().update_parameters(model)
            return
        parameters = alignment.reorder_parameters([tensor.detach() for tensor in tensors])
        buffers = alignment.reorder_buffers(list(model.buffers()))
        ordered: Any = SimpleNamespace(parameters=lambda: iter(parameters), buffers=lambda: iter(buffers))
        super().update_parameters(ordered)
