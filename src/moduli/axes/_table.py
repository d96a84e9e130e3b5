"""`ModelAxes` as a table, and as HTML."""

from __future__ import annotations

import html

from .._html import write_frame
from ._factors import find_owner, list_names
from ._model_axes import ModelAxes, ModelAxis, ParameterAxes

_MOST_PLACES = 8


def write_table(axes: ModelAxes) -> str:
    """Return the parameters with their axes, then the axes with their places, then operations without a rule."""
    lines = []
    names = ["parameter", *axes.parameters]
    dims = ["axes", *(" ".join(_show(each)) for each in axes.parameters.values())]
    roles = ["role", *(each.role for each in axes.parameters.values())]
    first, second = _measure(names), _measure(dims)
    for row in zip(names, dims, roles, strict=True):
        lines.append(f"{row[0]:{first}}  {row[1]:{second}}  {row[2]}".rstrip())
    width = max(_measure(["axis", *axes]), first)
    lines += ["", f"{'axis':{width}}  size  where"]
    lines += [f"{axis.name:{width}}  {axis.size:4}  {_describe(axis)}" for axis in axes.axes.values()]
    if axes.unknown:
        lines += ["", "operations without a rule, which fix the axes that reach them:"]
        lines += [f"  @mo.axes.rule({name!r})  # write this function to free them" for name in axes.unknown]
    return "\n".join(lines)


def _show(each: ParameterAxes) -> list[str]:
    return [each.show(axis, find_owner(each.name)) for axis in range(len(each))]


def _measure(words: list[str]) -> int:
    return max(map(len, words))


def _describe(axis: ModelAxis) -> str:
    places = [f"{name} {position}" for name, position in axis.places[:_MOST_PLACES]]
    rest = len(axis.places) - len(places)
    text = ", ".join(places) + (f" and {rest} more" if rest else "")
    return f"{'free' if axis.free else f'fixed, {axis.reasons[0]}'}: {text}"


def write_html(axes: ModelAxes) -> str:
    """Return the table as HTML, in which every free axis has a colour."""
    free = [axis.name for axis in axes.free]
    hues = {name: round(360 * position / max(len(free), 1)) for position, name in enumerate(free)}
    rows = []
    for name, each in axes.parameters.items():
        cells = []
        for position, factors in enumerate(each.dims):
            text = html.escape(each.show(position))
            for word in sorted(set(list_names(factors)), key=len, reverse=True):
                text = text.replace(html.escape(f"{word}="), f"{_mark(word, hues)}=")
            cells.append(text)
        rows.append(f"<tr><td>{html.escape(name)}</td><td>{', '.join(cells)}</td><td>{each.role}</td></tr>")
    axis_rows = [
        f"<tr><td>{_mark(axis.name, hues)}</td><td>{axis.size}</td><td>{html.escape(_describe(axis))}</td></tr>"
        for axis in axes.axes.values()
    ]
    return write_frame(
        f"ModelAxes: {len(axes.parameters)} parameters, {len(free)} free axes",
        "<table><tr><th>parameter</th><th>axes</th><th>role</th></tr>" + "".join(rows) + "</table>",
        "<table><tr><th>axis</th><th>size</th><th>where</th></tr>" + "".join(axis_rows) + "</table>",
    )


def _mark(name: str, hues: dict[str, int]) -> str:
    if name not in hues:
        return html.escape(name)
    return f'<span style="background:hsl({hues[name]},70%,85%);color:#000">{html.escape(name)}</span>'
