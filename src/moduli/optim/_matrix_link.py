"""Links that treat parameters as batches of matrices, and the axes of the model that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..axes import ModelAxes, from_labels
from ..layout import suggest_name
from ._vectorize import OutOfPlace, flatten_tensors, unflatten_tensors
from .matrix_view import USES, MatrixView, Words, is_named, list_words, matrix_view, parse_matrix

if TYPE_CHECKING:
    from .module import Module
    from .optimizer import Optimizer


class MatrixLink:
    """The part of a link that treats parameters as batches of matrices, if its optimizer has the axes of the model.

    Its hooks are called with one matrix, under `torch.vmap` over the batch. The state of a parameter is `state["blocks"]`, a
    list with a dictionary for each size of matrix, whose tensors have the batch as their first axis. The link declares
    the arguments `batch` and `matrix`, which are `attributes`.
    """

    if TYPE_CHECKING:
        settings: Any
        uses_params: ClassVar[bool]
        members: ClassVar[Any]
        batch: str | tuple[str, ...] | None
        matrix: str | None

    def attached(self, optimizer: Optimizer) -> None:
        """Raise ValueError if `batch` or `matrix` is given without axes, or names none of them."""
        super().attached(optimizer)  # type: ignore[misc]
        check_words(type(self).__name__, self.batch, self.matrix, optimizer.binding.axes)

    def stacks_alike(self, hook: str) -> bool:
        """Return whether matrices of one shape are stacked for one call; never for the hook that creates state."""
        return self.members == "batched" and hook != "single_tensor_initialize"

    def find_kind(self, param: Tensor) -> Any:
        """Return the view of a parameter as batches of matrices."""
        return self.find_view(param)

    def find_view(self, param: Tensor) -> MatrixView | None:
        """Return the view of a parameter as batches of matrices; None if its shape alone decides."""
        binding = self.settings.binding
        axes: ModelAxes | None = binding.axes
        words = self.batch is not None or self.matrix is not None
        if axes is None:
            if words:
                check_words(type(self).__name__, self.batch, self.matrix, None)
            return None
        name = binding.slots.find_name(param)
        if name is None:
            if words:
                raise ValueError(
                    f"{type(self).__name__}: batch= and matrix= are about parameters, and here are tensors that another link made"
                )
            return None
        cache = self.__dict__.setdefault("_views", {})
        if cache.get("axes") is not axes:
            cache.clear()
            cache["axes"] = axes
        if name not in cache:
            own = axes.of(name)
            plain = not words and own.uses[:1] in (("out",), ("index",)) and "batch" not in own.uses
            cache[name] = None if plain else matrix_view(own, self.batch, self.matrix)
        return cache[name]  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {key: value for key, value in state.items() if key != "_views"}

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Create the state for each matrix.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter, empty.
            setting: Its settings.
        """
        hook = super().single_tensor_initialize  # type: ignore[misc]
        view = self.find_view(param)
        if view is None:
            hook(tensor, param, grad, loss, state, setting)
        else:
            _map_blocks(self, hook, view, (tensor, param, grad), loss, state, setting)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Learn from each matrix.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.
        """
        hook = super().single_tensor_update  # type: ignore[misc]
        view = self.find_view(param)
        if view is None:
            hook(tensor, param, grad, loss, state, setting)
        else:
            _map_blocks(self, hook, view, (tensor, param, grad), loss, state, setting)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        """Return the parameter's update with each matrix transformed.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.
        """
        hook = super().single_tensor_apply  # type: ignore[misc]
        view = self.find_view(param)
        if view is None:
            return hook(tensor, param, grad, loss, state, setting)  # type: ignore[no-any-return]
        blocks = _map_blocks(self, hook, view, (tensor, param, grad), loss, state, setting)
        return view.join([block for block in blocks if block is not None]).to(tensor.dtype)


def take_axes(optimizer: Optimizer, axes: ModelAxes | None) -> ModelAxes | None:
    """Return the axes of an optimizer's parameters: those given, or those of labelled tensors; None if there are none.

    Raises:
        ValueError: If the axes are of another model: a parameter is missing, or has another shape.
    """
    links = [link for _, link in optimizer._links]
    if axes is None:
        axes = find_own_axes(links)
    if axes is None:
        if optimizer.model is None or not any(map(_wants_axes, links)):
            return None
        return from_labels(optimizer.model)
    slots = optimizer.binding.slots
    for param in optimizer.list_params():
        name = slots.find_name(param) or ""
        shape = tuple(param.shape if optimizer.population is None else param.shape[1:])
        try:
            own = axes.of(name)
        except KeyError as error:
            raise ValueError(f"Optimizer: the axes are of another model: {error.args[0]}") from error
        if own.shape != shape:
            raise ValueError(f"Optimizer: {name!r} has shape {shape}, and the axes are of shape {own.shape}")
    return axes


def _wants_axes(link: Module) -> bool:
    """Return whether a link reads the axes of the model, or has words for them."""
    return link.reads_axes or (isinstance(link, MatrixLink) and (link.batch is not None or link.matrix is not None))


def find_own_axes(links: Sequence[Module]) -> ModelAxes | None:
    """Return the axes that were passed to one of the links, or to its filter function; None if there are none."""
    for link in links:
        for holder in (link, getattr(link, "filter", None)):
            axes = getattr(holder, "axes", None)
            if isinstance(axes, ModelAxes):
                return axes
    return None


def check_words(link: str, batch: Words, matrix: str | None, axes: ModelAxes | None) -> None:
    """Raise ValueError if words name no axis of the model, or there are no axes.

    Args:
        link: The name of the link.
        batch: Its argument `batch`.
        matrix: Its argument `matrix`.
        axes: The axes of the model.
    """
    words = [*list_words(batch), *(word for side in (parse_matrix(matrix) if matrix else ()) for word in side)]
    if words and axes is None:
        raise ValueError(
            f"{link}: {', '.join(map(repr, words))} are axes, which the optimizer has to know: "
            "Optimizer(net, ..., axes=mo.axes.trace(net, example))"
        )
    for word in words:
        if axes is not None and word not in USES and not any(is_named(name, word) for name in axes):
            parts = {part for name in axes for part in (name, name.rpartition(".")[2])}
            raise ValueError(f"{link}: the model has no axis {word!r}.{suggest_name(word, sorted(parts))}")


def _map_blocks(
    link: MatrixLink,
    hook: Callable[..., Any],
    view: MatrixView,
    tensors: tuple[Tensor, Tensor, Tensor | None],
    loss: Tensor | None,
    state: Any,
    setting: Any,
) -> list[Tensor | None]:
    """Call a hook once for each size of matrix of a parameter, store the state in "blocks", and return the results.

    Args:
        link: The link.
        hook: Its hook for one matrix.
        view: The parameter as batches of matrices.
        tensors: The update, the parameter and the gradient.
        loss: The loss, for the hook.
        state: The state of the parameter.
        setting: Its settings.
    """
    tensor, param, grad = tensors
    numbers = {key: value for key, value in state.items() if key != "blocks"}
    blocks = view.split(tensor)
    params = view.split(param) if link.uses_params and param.shape == tensor.shape else blocks
    grads = [None] * len(blocks) if grad is None else view.split(grad)
    stored = state.get("blocks") or [{} for _ in blocks]
    results, rows = [], []
    for block, block_param, block_grad, row in zip(blocks, params, grads, stored, strict=True):
        leaves, structure = flatten_tensors(row)
        structure_after: list[Any] = []

        def call(
            matrix: Tensor,
            matrix_param: Tensor,
            matrix_grad: Tensor | None,
            leaves: list[Tensor],
            structure: Any = structure,
            structure_after: list[Any] = structure_after,
        ) -> tuple[Any, list[Tensor]]:
            inner = {**numbers, **unflatten_tensors(leaves, structure)}
            with OutOfPlace():
                result = hook(matrix, matrix_param, matrix_grad, loss, inner, setting)
            own = {key: value for key, value in inner.items() if key not in numbers}
            changed, structure_after[:] = flatten_tensors(own)
            return () if result is None else result, changed

        mapped = torch.vmap(call, (0, 0, None if block_grad is None else 0, 0), randomness="same")
        result, states = mapped(block, block_param, block_grad, list(map(Tensor.clone, leaves)))
        results.append(result if isinstance(result, Tensor) else None)
        # Results that do not depend on the batch are expanded views, but states are written to.
        rows.append(unflatten_tensors([each.contiguous() for each in states], structure_after))
    if any(rows):
        state["blocks"] = rows
    return results
