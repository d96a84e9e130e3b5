"""Batch normalisation after a merge: its statistics belong to the activations of the merged weights."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ._errors import MergeError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def reestimate_batch_norm(
    model: ModuleT, data: Iterable[Any], *, forward: Callable[[ModuleT, Any], Any] | None = None
) -> ModuleT:
    """Measure the running statistics of batch normalisation anew, on data.

    They become the averages over all batches of the means and variances that each layer sees, every batch counting the same.
    Only batch normalisation is in training mode meanwhile: dropout and the like are off, as in use.

    Args:
        model: A module, which is not changed.
        data: Batches: tensors, or tuples and lists whose first item is the input.
        forward: How to run the model on a batch: `forward(model, batch)`. By default the batch, or its first item, is its only
            argument.

    Returns:
        A copy with the new statistics, and everything else, modes included, as in the model.

    Raises:
        MergeError: If there are statistics to measure, but no batch.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> net = torch.nn.BatchNorm1d(1)
        >>> fresh = merge.reestimate_batch_norm(net, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [7.0]])])
        >>> fresh.running_mean, fresh.running_var, net.running_mean
        (tensor([4.]), tensor([2.]), tensor([0.]))

    Reference:
        Izmailov et al., "Averaging weights leads to wider optima and better generalization", UAI 2018, arXiv:1803.05407
        (section 3.2).
    """
    result = copy.deepcopy(model)
    layers = [each for each in result.modules() if isinstance(each, _BATCH_NORMS) and each.running_mean is not None]
    if not layers:
        return result
    modes = [(each, each.training) for each in result.modules()]
    momenta = [(layer, layer.momentum) for layer in layers]
    result.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the cumulative average
        layer.train()
    batches = 0
    with torch.no_grad():
        for batch in data:
            batches += 1
            if forward is not None:
                forward(result, batch)
            else:
                result(_input(batch))
    if batches == 0:
        raise MergeError("data holds no batch, so there is nothing to measure; if it is an iterator, it may be used up")
    for layer, momentum in momenta:
        layer.momentum = momentum
    for each, mode in modes:
        each.training = mode
    return result


def _input(batch: object) -> object:
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, tuple | list) and batch:
        return batch[0]
    raise MergeError(
        f"a batch is {type(batch).__name__}, and how to run the model on it is not known; "
        "say so, for example forward=lambda net, batch: net(batch['x'])"
    )
