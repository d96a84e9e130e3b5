"""HTML for notebooks: frames, tables, boxes and spark lines with inline styles, no scripts, and every text escaped.

Colours are those of the page, so that light and dark both work.
"""

import math
from collections.abc import Sequence
from html import escape
from typing import Final

CELL: Final = "padding:2px 8px;text-align:right;border:1px solid rgba(128,128,128,.35)"
HEAD: Final = CELL + ";font-weight:600;background:rgba(128,128,128,.15)"
FRAME: Final = "font-family:monospace;font-size:90%;color:inherit"
_MOST_ROWS: Final = 60


def write_frame(title: str, *parts: str) -> str:
    """Return a frame with a title, which is escaped, above parts that are HTML already."""
    return f'<div style="{FRAME}"><div>{escape(title)}</div>{"".join(parts)}</div>'


def write_html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, labelled: bool = False) -> str:
    """Return texts as a table, of which at most 60 rows are written.

    Args:
        heads: The headings.
        rows: The cells.
        labelled: Whether the first cell of each row is a heading, too.

    Returns:
        HTML.

    >>> write_html_table(["name"], [["<a>"]]).count("&lt;a&gt;")
    1
    """
    lines = ["".join(f'<th style="{HEAD}">{escape(head)}</th>' for head in heads)]
    for row in rows[:_MOST_ROWS]:
        tags = ["th" if labelled and not at else "td" for at in range(len(row))]
        cells = zip(tags, row, strict=True)
        lines.append("".join(f'<{t} style="{HEAD if t == "th" else CELL}">{escape(cell)}</{t}>' for t, cell in cells))
    more = len(rows) - _MOST_ROWS
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    end = f"<div>and {more} more</div>" if more > 0 else ""
    return f'<table style="border-collapse:collapse;margin:4px 0">{body}</table>{end}'


def write_boxes(boxes: Sequence[tuple[str, str]]) -> str:
    """Return pairs of a title and a text as boxes in a row, with arrows between them."""
    style = "border:1px solid rgba(128,128,128,.6);border-radius:6px;padding:4px 8px;max-width:22em"
    parts = [
        f'<div style="{style}"><b>{escape(title)}</b><div style="opacity:.75">{escape(text)}</div></div>'
        for title, text in boxes
    ]
    row = "display:flex;flex-wrap:wrap;gap:6px;align-items:center;margin:4px 0"
    return f'<div style="{row}">{"<span>&rarr;</span>".join(parts)}</div>'


def draw_spark(values: Sequence[float], width: int = 240, height: int = 36) -> str:
    """Return a line through the values as a small SVG; values that are not finite are left out.

    Args:
        values: The heights of the line, at equal distances.
        width: The width of the picture in pixels.
        height: Its height.

    Returns:
        An SVG element, or an empty text if no value is finite.

    >>> draw_spark([1.0, 3.0, 2.0]).count("<polyline")
    1
    """
    points = [(at, value) for at, value in enumerate(values) if math.isfinite(value)]
    if not points:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    x_scale, y_scale = width / max(len(values) - 1, 1), (height - 4) / ((high - low) or 1.0)
    line = " ".join(f"{at * x_scale:.1f},{height - 2 - (value - low) * y_scale:.1f}" for at, value in points)
    return (
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<polyline points="{line}" style="fill:none;stroke:currentColor;stroke-width:1.5"/></svg>'
    )
