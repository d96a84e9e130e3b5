"""From a graph to C: one loop over tables of pointers, with the scalar part computed before it."""

from __future__ import annotations

import torch

from ._graph import Graph
from ._operations import FUNCTIONS_1, C, write_node
from ._stochastic import STOCHASTIC_C

_STORAGE = {
    torch.float64: ("double", "{p}[k]", "{v}"),
    torch.float32: ("float", "{p}[k]", "{v}"),
    torch.float16: ("uint16_t", "m_from_float16({p}[k])", "m_to_float16({v})"),
    torch.bfloat16: ("uint16_t", "m_from_bfloat16({p}[k])", "m_to_bfloat16({v})"),
    torch.bool: ("uint8_t", "({p}[k] != 0)", "(uint8_t)({v})"),
}

# Integer arithmetic instead of a 16-bit float type: it vectorises everywhere and rounds to nearest even as torch does.
HALF = """
typedef union { uint32_t u; float f; } m_bits;
static inline float m_from_bfloat16(uint16_t h) { m_bits b; b.u = (uint32_t)h << 16; return b.f; }
static inline uint16_t m_to_bfloat16(float f) {
  m_bits b; b.f = f;
  uint32_t r = (b.u + 0x7fffu + ((b.u >> 16) & 1u)) >> 16;
  return (uint16_t)((b.u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : r);
}
static inline float m_from_float16(uint16_t h) {
  m_bits b, scale, top;
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
  scale.u = 0x77800000u; /* 2^112 moves the exponent bias of half to that of float, and normalises subnormals */
  b.u = (uint32_t)(h & 0x7fffu) << 13;
  top.u = b.u | 0x7f800000u;
  b.f = b.f * scale.f;
  uint32_t u = (h & 0x7c00u) == 0x7c00u ? top.u : b.u;
  b.u = u | sign;
  return b.f;
}
static inline uint16_t m_to_float16(float f) {
  m_bits b, magic, small;
  b.f = f;
  uint32_t sign = (b.u >> 16) & 0x8000u;
  uint32_t u = b.u & 0x7fffffffu;
  magic.u = 0x3f000000u; /* adding 1/2 lets the FPU round a subnormal half to nearest even */
  small.u = u;
  small.f = small.f + magic.f;
  uint32_t subnormal = small.u - magic.u;
  uint32_t normal = (u + 0xc8000fffu + ((u >> 13) & 1u)) >> 13;
  uint32_t r = u > 0x7f800000u ? 0x7e00u : u >= 0x47800000u ? 0x7c00u : u < 0x38800000u ? subnormal : normal;
  return (uint16_t)(r | sign);
}
"""

# Functions for which glibc has vector forms (libmvec); declaring them so lets the loop stay vectorised.
_VECTOR = {name: "{0}" for name in FUNCTIONS_1 if name not in ("sqrt", "floor", "ceil", "trunc")}
_VECTOR |= dict.fromkeys(("pow", "atan2", "hypot"), "{0}, {0}")

# The number of elements whose squares are summed before they are added to a sum in double precision.
_BLOCK = 2048

#: The beginning of every C source.
HEADERS = "\n".join(f"#include <{name}.h>" for name in ("stdint", "stddef", "string", "math", "float")) + "\n"


def _declare_vector_functions(body: str) -> str:
    lines = []
    for name, args in _VECTOR.items():
        for function, kind in ((name, "double"), (f"{name}f", "float")):
            if f"{function}(" in body:
                lines.append(f'__attribute__((simd("notinbranch"))) extern {kind} {function}({args.format(kind)});')
    return "\n".join(["#ifdef MODULI_VECTOR_MATH", *lines, "#endif\n"])


def emit(graph: Graph, outputs: list[tuple[int, torch.dtype]]) -> str:
    """Return the source of a kernel: roles are read through tables 0..R-1, outputs written through tables R..R+W-1.

    `outputs` pairs the node to store with the dtype of the storage. Raises `NoFormError` for a graph beyond C.
    """
    preamble, loads, body = [], [], []
    for index in graph.find_needed():
        node = graph.nodes[index]
        kind = C.name_type(node.dtype)
        if node.op == "role":
            position = dict(node.args)["position"]
            storage, load, _ = _STORAGE[node.dtype]
            loads.append(f"const {storage} *const r{position} = (const {storage} *)tables[{position}][i];")
            body.append(f"const {kind} t{index} = {load.format(p=f'r{position}')};")
        elif node.op == "scalar":
            preamble.append(f"const double t{index} = s[{dict(node.args)['position']}];")
        elif node.op == "sum_square":
            args = dict(node.args)
            value = f"t{args['self'].index}"
            body.append(f"a{args['slot']} += {value} * {value};")
        else:
            line = f"const {kind} t{index} = {write_node(C, graph, node)};"
            (body if node.vector else preamble).append(line)
    stores = []
    for position, (index, dtype) in enumerate(outputs):
        storage, _, store = _STORAGE[dtype]
        text = C.convert(graph, index, C.name_type(dtype))
        loads.append(f"{storage} *const w{position} = ({storage} *)tables[{graph.roles + position}][i];")
        stores.append(f"w{position}[k] = {store.format(v=text)};")
    inner = "\n        ".join(body + stores)
    before = "\n  ".join(preamble)
    pointers = "\n      ".join(loads)
    loop = f"""
void moduli_run(int64_t n, const uint64_t *const *tables, const int64_t *sizes, const int64_t *starts,
                const double *s, int32_t threads) {{
  {before}
  /* Each thread takes one range of all elements; multiples of 64 keep threads off each other's cache lines. */
  const int64_t share = (starts[n] / threads / 64 + 1) * 64;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t part = 0; part < threads; part++) {{
    const int64_t lo = part * share, hi = lo + share;
    for (int64_t i = 0; i < n; i++) {{
      const int64_t a = lo > starts[i] ? lo - starts[i] : 0;
      const int64_t b = hi - starts[i] < sizes[i] ? hi - starts[i] : sizes[i];
      {pointers}
{_write_loop(graph, inner)}
    }}
  }}
}}
"""
    helpers = (HALF if "float16(" in loop else "") + (STOCHASTIC_C if "m_stochastic_" in loop else "")
    return HEADERS + _declare_vector_functions(loop) + helpers + loop


def _write_loop(graph: Graph, inner: str) -> str:
    """Return the loop over the elements of a run.

    Sums of squares are stored behind the scalars: for each thread and run one number for each slot. Squares are added in the
    precision of the values over a block, which costs little, and blocks in double precision.
    """
    slots = graph.count_squares()
    if not slots:
        return f"""#pragma omp simd
      for (int64_t k = a; k < b; k++) {{
        {inner}
      }}"""
    kind = "double" if torch.float64 in graph.role_dtypes else "float"
    names = [f"a{slot}" for slot in range(slots)]
    return f"""      double *const sums = (double *)s + {max(1, graph.scalars)} + (part * n + i) * {slots};
      for (int64_t first = a; first < b; first += {_BLOCK}) {{
        const int64_t last = first + {_BLOCK} < b ? first + {_BLOCK} : b;
        {kind} {", ".join(f"{name} = 0" for name in names)};
#pragma omp simd reduction(+:{", ".join(names)})
        for (int64_t k = first; k < last; k++) {{
        {inner}
        }}
        {" ".join(f"sums[{slot}] += {name};" for slot, name in enumerate(names))}
      }}"""
