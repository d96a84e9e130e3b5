"""From a graph to Triton: one kernel over a table of pointers, whatever the number of tensors.

A program of the kernel works on one chunk of one tensor. The table lives on the device: a row for each tensor (its size and
an address for each role and output) and, for each chunk, the tensor and where in it the chunk begins. A chunk that is full
is loaded and stored without a mask, so that accesses are wide where addresses are aligned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ._graph import Graph
from ._operations import TRITON, NoFormError, write_node
from ._stochastic import STOCHASTIC_TRITON

_STORAGE = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.bool: "tl.int8",
}

_IMPORTS = "import triton\nimport triton.language as tl\n\n\n"
_HEAD = f"{_IMPORTS}@triton.jit\n"


def emit_triton(graph: Graph, outputs: Sequence[tuple[int, torch.dtype]], placed: Collection[int]) -> str:
    """Return the source of a kernel: `kernel(rows, chunks, numbers..., tensors..., ALIGNED, BLOCK)`.

    Numbers are the scalar nodes that are not `placed`, tensors the 0-d tensors on the device among the scalars, from which
    the placed nodes follow. Raises `NoFormError`.

    Args:
        graph: The graph.
        outputs: For each output its node and the dtype of its storage.
        placed: The scalar nodes that are computed on the device.
    """
    parameters, tensors, scalars, body = [], [], [], []
    loaded: dict[int, str] = {}
    for index in graph.find_needed():
        node = graph.nodes[index]
        if node.op == "role":
            position = dict(node.args)["position"]
            loaded[position] = _STORAGE[node.dtype]
            value = f"tl.load(p{position} + at@MASK@)"
            value = f"({value} != 0)" if node.dtype is torch.bool else f"{value}.to({TRITON.name_type(node.dtype)})"
            body.append(f"t{index} = {value}")
        elif node.op == "sum_square":
            args = dict(node.args)
            value = TRITON.convert(graph, args["self"].index, "tl.float64")
            place = f"squares + tl.load(entry) * {graph.count_squares()} + {args['slot']}"
            body.append(f"tl.atomic_add({place}, tl.sum(@KEEP@{value} * {value}@END@, 0))")
        elif node.vector:
            body.append(f"t{index} = {write_node(TRITON, graph, node)}")
        elif index not in placed:
            kind = TRITON.name_type(node.dtype)
            parameters.append(f'n{index}: "fp64"')
            number = f"tl.full((), n{index}, tl.float64)"
            scalars.append(f"t{index} = {number} != 0" if kind == "tl.int1" else f"t{index} = {number}.to({kind})")
        elif node.op == "scalar":
            tensors.append(f"q{index}")
            scalars.append(f"t{index} = tl.load(q{index}).to(tl.float64)")
        else:
            scalars.append(f"t{index} = {write_node(TRITON, graph, node)}")
    for position, (index, dtype) in enumerate(outputs):
        where = graph.roles + position
        loaded[where] = _STORAGE[dtype]
        text = TRITON.convert(graph, index, TRITON.name_type(dtype))
        body.append(f"tl.store(p{where} + at, ({text}).to({_STORAGE[dtype]})@MASK@)")
    columns = graph.roles + len(outputs) + 1
    sums = ["squares"] if graph.count_squares() else []
    lines = [
        f"def kernel({', '.join(['rows', 'chunks', *parameters, *tensors, *sums])}, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):",
        *_find_chunk("tl.program_id(0)", columns, loaded),
        *(f"    {line}" for line in scalars),
        "    if start + BLOCK <= size:",
        *(f"        {_drop_mask(line)}" for line in body),
        "    else:",
        "        mask = at < size",
        *(f"        {_add_mask(line)}" for line in body),
    ]
    head = _HEAD.replace(_IMPORTS, _IMPORTS + STOCHASTIC_TRITON) if "stochastic_" in "".join(body) else _HEAD
    return head + "\n".join(lines) + "\n"


def _drop_mask(line: str) -> str:
    return line.replace("@MASK@", "").replace("@KEEP@", "(").replace("@END@", ")")


def _add_mask(line: str) -> str:
    line = line.replace("@KEEP@", "tl.where(mask, ").replace("@END@", ", 0.0)")
    return line.replace("@MASK@", ", mask=mask, other=0" if "tl.load(" in line else ", mask=mask")


def _find_chunk(chunk: str, columns: int, loaded: dict[int, str], indent: str = "    ") -> list[str]:
    lines = [
        f"entry = chunks + 2 * {chunk}",
        f"row = rows + tl.load(entry) * {columns}",
        "start = tl.multiple_of(tl.load(entry + 1), 16)",
        "size = tl.load(row)",
    ]
    for position, kind in sorted(loaded.items()):
        lines.append(f"p{position} = tl.load(row + {position + 1}).to(tl.pointer_type({kind}))")
    if loaded:
        lines.append("if ALIGNED:")
        lines += [f"    p{position} = tl.multiple_of(p{position}, 16)" for position in sorted(loaded)]
    lines.append("at = start + tl.arange(0, BLOCK)")
    return [indent + line for line in lines]


_STARTS = {"amax": 'float("-inf")'}
_TERMS = {
    "sum": "x0",
    "dot": "x0 * x1",
    "squares": "x0 * x0",
    "absolutes": "tl.abs(x0)",
    "largest": "tl.abs(x0)",
    "amax": "x0",
}


def emit_reduction(kind: str, dtypes: Sequence[torch.dtype], root: bool = False) -> str:
    """Return the source of the first launch of a reduction: each program reduces some chunks, in double.

    `kernel(rows, chunks, partial, count, programs, ALIGNED, BLOCK)`.

    Args:
        kind: The reduction.
        dtypes: The dtype of each list.
        root: Whether each program stores the square root of its result.
    """
    for dtype in dtypes:
        if dtype not in _STORAGE or dtype is torch.bool:
            raise NoFormError(f"a reduction of dtype {str(dtype).removeprefix('torch.')}")
    loaded = {position: _STORAGE[dtype] for position, dtype in enumerate(dtypes)}
    peak = kind in ("largest", "amax")
    start = _STARTS.get(kind, "0.0")
    term = f"tl.where(mask, {_TERMS[kind]}, {start})" if peak else _TERMS[kind]
    full = [f"x{p} = tl.load(p{p} + at).to(tl.float64)" for p in loaded] + [f"term = {_TERMS[kind]}"]
    cut = [f"x{p} = tl.load(p{p} + at, mask=mask, other=0).to(tl.float64)" for p in loaded] + [f"term = {term}"]
    join = "tl.where((term > total) | (term != term), term, total)" if peak else "total + term"
    lines = [
        'def kernel(rows, chunks, partial, count: "i64", programs: "i64", ALIGNED: tl.constexpr, BLOCK: tl.constexpr):',
        "    own = tl.program_id(0).to(tl.int64)",
        f"    total = tl.full((BLOCK,), {start}, tl.float64)",
        "    for chunk in range(own, count, programs):",
        *_find_chunk("chunk", len(dtypes) + 1, loaded, "        "),
        "        if start + BLOCK <= size:",
        *(f"            {line}" for line in full),
        "        else:",
        "            mask = at < size",
        *(f"            {line}" for line in cut),
        f"        total = {join}",
    ]
    if peak:  # NaN if there is one
        lines += [
            "    strange = tl.max((total != total).to(tl.int32), 0)",
            '    tl.store(partial + own, tl.where(strange > 0, float("nan"), tl.max(total, 0)))',
        ]
    else:
        total = "tl.sum(total, 0)"
        lines.append(f"    tl.store(partial + own, {f'lib.sqrt({total})' if root else total})")
    return _HEAD + "\n".join(lines) + "\n"
