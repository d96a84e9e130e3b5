"""A population as an ensemble: mean and spread of the members' outputs, and copies of members as modules."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._calls import Calls


@dataclass(frozen=True, eq=False)
class EnsemblePrediction:
    """The outputs of the members of an ensemble for the same inputs.

    Attributes:
        outputs: One output for each member, along the first axis.
        classes: Whether the last axis holds scores of classes (logits).

    Example:
        >>> import torch
        >>> from moduli.population import EnsemblePrediction
        >>> prediction = EnsemblePrediction(torch.tensor([[1.0], [3.0]]))
        >>> prediction.mean, prediction.std
        (tensor([2.]), tensor([1.4142]))
    """

    outputs: Tensor
    classes: bool = False

    def __repr__(self) -> str:
        kind = ", classes" if self.classes else ""
        return (
            f"EnsemblePrediction({len(self.outputs)} members, outputs of shape {tuple(self.outputs.shape[1:])}{kind})"
        )

    @property
    def mean(self) -> Tensor:
        """The mean over members; for classifiers, of the probabilities of classes."""
        return self._read_values().mean(0)

    @property
    def variance(self) -> Tensor:
        """The variance over members, with n - 1; for classifiers, of the probabilities."""
        return self._read_values().var(0)

    @property
    def std(self) -> Tensor:
        """The standard deviation over members: an error bar."""
        return self.variance.sqrt()

    def quantile(self, q: float | Sequence[float]) -> Tensor:
        """Return quantiles over members, for classifiers of the probabilities; several of them along a new first axis.

        Args:
            q: A number from 0 to 1, or several.
        """
        at = torch.as_tensor(q, dtype=self.outputs.dtype, device=self.outputs.device)
        return torch.quantile(self._read_values(), at, dim=0)

    @property
    def votes(self) -> Tensor:
        """The share of members that choose each class, if outputs are scores of classes."""
        self._require_classes("votes")
        chosen = nn.functional.one_hot(self.outputs.argmax(-1), self.outputs.shape[-1])
        return chosen.to(self.outputs.dtype).mean(0)

    @property
    def disagreement(self) -> Tensor:
        """The disagreement of members: for classifiers the mutual information of class and member in nats, else `std`.

        Mutual information is the entropy of the mean probabilities minus the mean entropy of the members' probabilities.
        """
        if not self.classes:
            return self.std
        each = self.outputs.log_softmax(-1)
        mean = self.mean
        whole = -(mean * mean.clamp(min=torch.finfo(mean.dtype).tiny).log()).sum(-1)
        return (whole + (each.exp() * each).sum(-1).mean(0)).clamp(min=0)

    def find_calibration(self, labels: Tensor, bins: int = 10) -> Tensor:
        """Return a table of confidence and accuracy: a row (confidence, accuracy, share of inputs) for each non-empty bin.

        `find_calibration_error` is the mean over this table. Confidence is the largest of the mean probabilities.

        Args:
            labels: The right class of each input.
            bins: The number of intervals of confidence.

        Raises:
            ValueError: If outputs are no scores of classes, or the labels do not fit.
        """
        self._require_classes("a calibration")
        confidence, chosen = self.mean.max(-1)
        if labels.shape != chosen.shape:
            raise ValueError(
                f"there are labels of shape {tuple(labels.shape)} for outputs of {tuple(chosen.shape)} classes"
            )
        confidence, right = confidence.reshape(-1), (chosen == labels).reshape(-1).to(confidence.dtype)
        place = (confidence * bins).long().clamp(max=bins - 1)
        rows = [
            torch.stack([confidence[inside].mean(), right[inside].mean(), inside.to(right.dtype).mean()])
            for inside in (place == at for at in range(bins))
            if bool(inside.any())
        ]
        return torch.stack(rows)

    def find_calibration_error(self, labels: Tensor, bins: int = 10) -> Tensor:
        """Return the expected calibration error: the mean of |confidence - accuracy| over the inputs, by bins of confidence.

        Args:
            labels: The right class of each input.
            bins: How many intervals of confidence.

        Example:
            >>> import torch
            >>> from moduli.population import EnsemblePrediction
            >>> sure = EnsemblePrediction(torch.tensor([[[9.0, 0.0], [9.0, 0.0]]]), classes=True)
            >>> sure.find_calibration_error(torch.tensor([0, 1]))
            tensor(0.4999)

        References:
            M. P. Naeini, G. F. Cooper, M. Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning", AAAI 2015.
        """
        confidence, accuracy, part = self.find_calibration(labels, bins).unbind(1)
        return ((confidence - accuracy).abs() * part).sum()

    def _read_values(self) -> Tensor:
        return self.outputs.softmax(-1) if self.classes else self.outputs

    def _require_classes(self, what: str) -> None:
        if not self.classes:
            raise ValueError(
                f"{what} are of classifiers: pop.predict(x, classes=True) says that outputs are scores of classes"
            )


class EnsembleModule(nn.Module):
    """Several models as one module, which any tool that takes modules can export.

    Args:
        members: The models.
        mean: Whether to return the mean of the outputs, instead of all outputs along a new first axis.
        classes: Whether outputs are scores of classes (logits); the mean is then that of probabilities.
    """

    def __init__(self, members: Sequence[nn.Module], mean: bool = False, classes: bool = False) -> None:
        super().__init__()
        self.members, self.mean, self.classes = nn.ModuleList(members), mean, classes

    def forward(self, x: Any, *more: Any) -> Tensor:
        """Call every model, and stack or average the outputs."""
        outputs = torch.stack([member(x, *more) for member in self.members])
        if not self.mean:
            return outputs
        return (outputs.softmax(-1) if self.classes else outputs).mean(0)


class Ensembles(Calls):
    """The methods of a population that treat it as an ensemble."""

    def predict(self, *args: Any, classes: bool = False, **how: Any) -> EnsemblePrediction:
        """Call every member without gradients, and return the outputs with their mean, spread and votes.

        Layers such as dropout and batch normalisation follow the members' mode: call `pop.eval()` before.

        Args:
            *args: Arguments of the model.
            classes: Whether outputs are scores of classes (logits) along their last axis.
            **how: `in_dims`, `vectorize`, `chunk_size` and `randomness`, as in a call.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from moduli.population import Population
            >>> result = Population.of(nn.Linear, 8, 3, 2).predict(torch.ones(5, 3))
            >>> result.mean.shape, result.std.shape, result.quantile([0.05, 0.95]).shape
            (torch.Size([5, 2]), torch.Size([5, 2]), torch.Size([2, 5, 2]))
        """
        with torch.no_grad():
            outputs = self(*args, **how)
        if not isinstance(outputs, Tensor):
            raise TypeError(f"members return a {type(outputs).__name__}; predict takes models that return one tensor")
        return EnsemblePrediction(outputs, classes)

    def best(self, losses: Tensor) -> nn.Module:
        """Return a copy of the member with the lowest loss.

        Args:
            losses: One number for each member; NaN counts as the worst.

        Raises:
            ValueError: If there is not one number for each member, or none is a number.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 3, 2, 1)
            >>> torch.equal(pop.best(torch.tensor([2.0, 1.0, float("nan")])).weight, pop[1].weight)
            True
        """
        if losses.shape != (self._count,) or bool(losses.isnan().all()):
            raise ValueError(
                f"best takes one number for each of {self._count} members, of shape {tuple(losses.shape)} here"
            )
        return self.to_module(int(losses.detach().nan_to_num(nan=torch.inf).argmin()))

    def to_module(self, member: int) -> nn.Module:
        """Return a copy of one member, which is an ordinary module.

        Args:
            member: The index of the member.
        """
        module: nn.Module = copy.deepcopy(self[member])  # type: ignore[index]
        return module

    def to_modules(self) -> list[nn.Module]:
        """Return copies of all members, which are ordinary modules.

        Example:
            >>> from torch import nn
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 3, 2, 1)
            >>> Population.from_modules(pop.to_modules()).distance(pop)
            tensor([0., 0., 0.])
        """
        return [self.to_module(at) for at in range(self._count)]

    def to_ensemble(self, mean: bool = False, *, classes: bool = False) -> EnsembleModule:
        """Return all members as one module, to be exported by `torch.export.export`, or by `torch.onnx.export(dynamo=True)`.

        Args:
            mean: Whether it returns the mean of the outputs, instead of all outputs along a new first axis.
            classes: Whether members return scores of classes (logits), so that the mean is that of their probabilities.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from moduli.population import Population
            >>> pop, x = Population.of(nn.Linear, 3, 2, 1), torch.ones(4, 2)
            >>> torch.allclose(torch.export.export(pop.to_ensemble(), (x,)).module()(x), pop(x))
            True
        """
        return EnsembleModule(self.to_modules(), mean, classes)
