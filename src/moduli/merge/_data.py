"""Merging with data: averages weighted by Fisher information, and the statistics of batch normalisation.

Fisher weights give each parameter to the models whose predictions depend on it. The equations of sections 2 and 3 of the paper,
entry by entry, with weights λ_i:

    (1) F_i = E_x E_{y ~ p(y | x, θ_i)} (∂ log p(y | x, θ_i) / ∂θ_i)², the diagonal of the Fisher information;
    (2) θ = Σ_i λ_i F_i θ_i / Σ_i λ_i F_i.

Reference:
    Matena and Raffel, "Merging models with Fisher-weighted averaging", NeurIPS 2022, arXiv:2111.09832.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._texts import shorten
from ..layout import copy_module
from ._activations import run_batch
from ._averages import share_out, weighted_sum
from ._call import list_models
from ._coefficients import Coefficient, per_model
from ._driver import Buffers, Integers, ModelT, Recipe, Row, run
from ._models import MergeError, describe_tensor

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def fisher(
    models: Sequence[ModelT],
    fishers: Sequence[Mapping[str, Tensor]],
    weights: Sequence[Coefficient] | None = None,
    *,
    floor: float = 1e-20,
    buffers: Buffers = "first",
    integers: Integers = "equal",
) -> ModelT:
    """Average models entry by entry, weighted by their Fisher information (Matena and Raffel).

    For each entry, θ = Σᵢ λᵢ Fᵢ θᵢ / Σᵢ λᵢ Fᵢ: the mode of the product of Gaussian posteriors with precisions Fᵢ. A name that
    none of the Fishers holds, such as that of a frozen parameter, is averaged with the weights λᵢ.

    Args:
        models: Modules, or state dicts. The first decides form, structure and dtypes of the result.
        fishers: For each model the diagonal of its Fisher information by parameter name, the result of `fisher_information`.
        weights: λᵢ, one coefficient per model: a number of at least 0, or numbers by glob pattern. Equal by default.
        floor: The lower bound of Fisher information. Entries where all models are below it are averaged.
        buffers: Whether floating buffers are the first model's or merged too.
        integers: Whether tensors of integers must be equal; they are the first model's in any case.

    Raises:
        MergeError: If structures, Fishers or weights do not fit, a Fisher is negative, or values are NaN.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> a, b = {"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([4.0, 4.0])}
        >>> merge.fisher([a, b], [{"w": torch.tensor([1.0, 3.0])}, {"w": torch.tensor([1.0, 1.0])}])
        {'w': tensor([2., 1.])}

    Reference:
        Matena and Raffel, "Merging models with Fisher-weighted averaging", NeurIPS 2022, arXiv:2111.09832.
    """
    models = list_models(models)
    fishers = list(fishers)
    if len(fishers) != len(models):
        raise MergeError(f"there are {len(fishers)} fishers for {len(models)} models; give one per model")
    first: Any = models[0]
    names = dict(first.named_parameters(remove_duplicate=False)) if isinstance(first, nn.Module) else first
    for index, each in enumerate(fishers):
        odd = next((name for name in each if not all(name in table for table in (names, *fishers))), None)
        if odd is not None:
            raise MergeError(
                f"fishers[{index}] holds {shorten(odd)}, which is no parameter, or not in all of the others"
            )
    each_weight = per_model(weights, len(models), "weights", low=0.0)
    if not floor > 0:
        raise MergeError(f"floor is {floor}; it must be greater than 0, because an average divides by it")

    def kernel(name: str, row: Row) -> Tensor:
        numbers = [weight(name) for weight in each_weight]
        shares = share_out(numbers, name)
        if name not in fishers[0]:
            return weighted_sum(row, shares)
        result, information = torch.zeros_like(row[0]), torch.zeros_like(row[0].real)
        for index, number in enumerate(numbers):
            if number != 0:
                own = row.reorder(index, fishers[index][name])
                share = _information(own, row[index], f"fishers[{index}][{shorten(name)}]", floor)
                result.addcmul_(row[index], share.to(result.dtype), value=number)
                information.add_(share, alpha=number)
        return result.div_(information)  # (2)

    return run(Recipe(kernel, each_weight), models, buffers=buffers, integers=integers)


def _information(value: Tensor, parameter: Tensor, what: str, floor: float) -> Tensor:
    if value.shape != parameter.shape:
        raise MergeError(f"{what} is {describe_tensor(value)}, but the parameter has shape {tuple(parameter.shape)}")
    value = value.detach().to(device=parameter.device, dtype=parameter.real.dtype)
    if bool((value < 0).any()) or not bool(torch.isfinite(value).all()):
        raise MergeError(f"{what} has negative, infinite or NaN entries; Fisher information is an average of squares")
    return value.clamp(min=floor)


def fisher_information(
    model: ModuleT, data: Iterable[Any], loss: Callable[[ModuleT, Any], Tensor]
) -> dict[str, Tensor]:
    """Estimate the diagonal of a model's Fisher information: the mean of squared gradients, example by example.

    For each entry, F = (1/n) Σ_k (∂ℓ_k/∂θ)² over n examples with negative log-likelihoods ℓ_k. With the labels of the data in
    ℓ_k it is the empirical Fisher; with labels drawn from the model's own predictions it estimates the Fisher proper.
    Gradients are squared example by example, since they would cancel in the gradient of a batch's mean: each example costs one
    backward pass.

    Args:
        model: A module, which is not changed. A copy in evaluation mode is used.
        data: Batches, which are passed to `loss`.
        loss: `loss(model, batch)`: the negative log-likelihood of each example in a vector, or of a single one as a scalar.

    Returns:
        F by parameter name, for every name of every parameter that requires gradients; float32, or float64 for such parameters.

    Raises:
        MergeError: If there is no example, no parameter requires gradients, or the loss has another form.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(net.weight)
        >>> data = [torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0]])]
        >>> merge.fisher_information(net, data, lambda net, x: 0.5 * (net(x) - 1).square().sum(1))
        {'weight': tensor([[2.]])}

    Reference:
        Matena and Raffel, "Merging models with Fisher-weighted averaging", NeurIPS 2022, arXiv:2111.09832 (section 3).
    """
    model = copy_module(model).eval()
    parameters = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        raise MergeError("no parameter of the model requires gradients, so there is nothing to estimate")
    totals = [torch.zeros_like(each, dtype=torch.promote_types(each.real.dtype, torch.float32)) for each in parameters]
    examples = 0
    for batch in data:
        with torch.enable_grad():
            losses = _check_losses(loss(model, batch))
            for index in range(len(losses)):
                _add_squares(totals, losses[index], parameters)
            examples += len(losses)
    if examples == 0:
        raise MergeError("data holds no example, so there is nothing to estimate; an iterator may be used up")
    information = {id(parameter): total.div_(examples) for parameter, total in zip(parameters, totals, strict=True)}
    named = model.named_parameters(remove_duplicate=False)
    return {name: information[id(parameter)] for name, parameter in named if id(parameter) in information}


def _check_losses(losses: Any) -> Tensor:
    """Return losses as a vector; raise MergeError unless they are real numbers computed from the model."""
    if not isinstance(losses, Tensor) or losses.ndim > 1 or losses.is_complex() or not losses.requires_grad:
        what = describe_tensor(losses) if isinstance(losses, Tensor) else type(losses).__name__
        form = "one real number per example, computed from the model: a vector (reduction='none'), or a scalar"
        raise MergeError(f"loss gave {what}; it must give {form}")
    return losses.reshape(-1)


def _add_squares(totals: Sequence[Tensor], loss: Tensor, parameters: Sequence[Tensor]) -> None:
    """Add the squared gradients of one loss: one term of (1)."""
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise MergeError("loss(model, batch) does not depend on the model given; use its first argument")
    for total, gradient in zip(totals, gradients, strict=True):
        if gradient is not None:
            total.add_(gradient.detach().abs().to(total.dtype).square())


def reestimate_batch_norm(
    model: ModuleT, data: Iterable[Any], *, forward: Callable[[ModuleT, Any], Any] | None = None
) -> ModuleT:
    """Measure the running statistics of batch normalisation again, on data.

    They become the averages of the means and variances of each layer's inputs over all batches, with equal weights.
    Only batch normalisation is in training mode for this: dropout and the like are off.

    Args:
        model: A module, which is not changed.
        data: Batches: tensors, or tuples and lists whose first item is the input.
        forward: `forward(model, batch)` runs the model on a batch. By default the batch, or its first item, is its only
            argument.

    Returns:
        A copy with the new statistics; everything else, modes included, is that of the model.

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
    measured, result = copy_module(model).eval(), copy_module(model)
    layers, others = (_find_statistics(net) for net in (measured, result))
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the cumulative average
        layer.train()
    batches = 0
    with torch.no_grad():
        for batch in data if layers else ():
            batches += 1
            run_batch(measured, batch, forward)
    if batches == 0 and layers:
        raise MergeError("data holds no batch, so there is nothing to measure; if it is an iterator, it may be used up")
    for layer, other in zip(layers, others, strict=True):
        other.load_state_dict(layer.state_dict())
    return result


def _find_statistics(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, _BATCH_NORMS) and each.running_mean is not None]
