"""An optimizer as HTML, and the numbers recorded by its watch as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._figures import make_axes
from .._html import write_boxes, write_frame

if TYPE_CHECKING:
    from . import Optimizer


def write_html(optimizer: Optimizer) -> str:
    """Return HTML of the chain as boxes with their settings, and the size of the state."""
    params = optimizer.list_params()
    size = 0
    for _, link in optimizer._links:
        states = [*link.state.values(), link.global_state]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    numbers = sum(param.numel() for param in params)
    title = (
        f"Optimizer: {len(params)} parameter{'s' * (len(params) != 1)}, {numbers:,} numbers, {size:,} bytes of state"
    )
    boxes = []
    for link in optimizer.modules:
        name, _, settings = repr(link).partition("(")
        boxes.append((name, settings.removesuffix(")")))
    return write_frame(f"{title}, step {optimizer.current_step}", write_boxes(boxes))


def draw_history(optimizer: Optimizer, names: Sequence[str] | None) -> Any:
    """Return a figure with a panel for each number that the optimizer's watch has recorded."""
    watch = optimizer.binding.watch
    if watch is None or watch.history is None:
        raise ValueError("nothing was kept: watch the steps by opt.watch(history=True), and draw afterwards")
    if not watch.history:
        raise ValueError("there was no step since opt.watch(history=True)")
    recorded = list(dict.fromkeys(name for record in watch.history for name in record))
    wanted = (
        [name for name in ("loss", "grad_norm", "update_norm", "lr") if name in recorded] if names is None else names
    )
    absent = [name for name in wanted if name not in recorded]
    if absent or not wanted:
        raise ValueError(f"{absent} was not kept; there is {', '.join(recorded)}")
    panels = make_axes(None, (6.4, 1.2 + 1.6 * len(wanted)), len(wanted), sharex=True, squeeze=False)[:, 0]
    for panel, name in zip(panels, wanted, strict=True):
        rows = [(record["step"], record[name]) for record in watch.history if name in record]
        panel.plot(*zip(*rows, strict=True))
        panel.set(ylabel=name)
    panels[-1].set(xlabel="step")
    return panels[0].figure
