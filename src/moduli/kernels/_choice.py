"""Which form runs a graph: the first of an ordered list that can."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._c import CForm
from ._foreach import ForeachForm
from ._forms import Form, Outputs, Situation
from ._graph import COMPUTE, Graph
from ._operations import NoFormError
from ._plain import PlainForm
from ._triton import TritonForm

#: The fastest first. The last takes everything.
FORMS: tuple[type[Form], ...] = (CForm, TritonForm, ForeachForm, PlainForm)


def choose_form(graph: Graph, outputs: Outputs, situation: Situation) -> Form:
    """Return the best form for one signature of dtypes on one device.

    Args:
        graph: The graph.
        outputs: The outputs of the graph.
        situation: The device and the settings.
    """
    plain = situation.plain or _find_plain(graph, outputs, situation)
    if plain is not None:
        return PlainForm(graph, outputs, plain)
    why = ""
    for kind in FORMS:
        if not kind.concerns(situation):
            continue
        problem = kind.find_problem(graph, situation)
        if problem is None:
            try:
                return kind(graph, outputs, why)
            except NoFormError as missing:
                problem = str(missing)
        why = (
            problem if situation.device.type == "cpu" else f"the tensors are on {situation.device.type}, and {problem}"
        )
    raise RuntimeError(f"no form runs this graph: {why}")  # the plain one does


def _find_plain(graph: Graph, outputs: Outputs, situation: Situation) -> str | None:
    """Return why only torch itself can compute the values of a graph; None if other forms can."""
    if situation.device.type == "meta":
        return "tensors on the meta device hold no data"
    live = [graph.nodes[index] for index in graph.find_needed()]
    strange = {node.dtype for node in live} | {node.compute for node in live} | {dtype for _, dtype, _ in outputs}
    strange -= set(COMPUTE)
    if strange:
        return f"values of dtype {describe_dtypes(sorted(strange, key=str))} run as torch runs them"
    return "MODULI_KERNELS=plain" if situation.setting == "plain" else None


def describe_dtypes(dtypes: Sequence[torch.dtype]) -> str:
    """Return dtypes as text without the prefix "torch."."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
