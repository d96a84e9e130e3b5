"""Figures of matplotlib, which is imported on first use. Figures are returned and never shown."""

from typing import Any


def make_axes(ax: Any = None, size: tuple[float, float] = (4.8, 3.6), rows: int = 1, **options: Any) -> Any:
    """Return the axes to draw into: `ax`, or if it is None those of a new figure.

    Args:
        ax: Axes of matplotlib, or None.
        size: Width and height of a new figure, in inches.
        rows: How many panels a new figure has, one below the other; with several, a list of them is returned.
        **options: Further arguments of matplotlib's `Figure.subplots`.

    Raises:
        ImportError: Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots are drawn by matplotlib, which is not installed: pip install 'moduli[plot]'", name="matplotlib"
        ) from error
    return Figure(figsize=size, layout="constrained").subplots(rows, **options) if ax is None else ax
