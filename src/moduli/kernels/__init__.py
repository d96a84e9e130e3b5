"""One pass over many tensors.

Whole-model arithmetic and optimizer steps are pointwise functions applied to long lists of tensors. Five nouns:

* a **role** is one list of tensors (parameters, gradients, first moments); element i of every role has the same
  number of elements;
* a **scalar** is a number for the whole call (a learning rate), free to change without compiling again;
* a **fused** function (`fuse`) is an ordinary Python function of one tensor per role and scalars, run over whole lists:
  in place, into new storage, or into storage that is given;
* a **form** is how it runs: `c` (a kernel compiled from the traced function), `triton` (a kernel generated for a GPU, one
  launch for all tensors), `foreach` (torch's foreach operations) or `plain` (the function itself, tensor by tensor). All
  forms give the same result; `explain` says which one runs and why, read from the plan that runs;
* a **reduction** (`sum`, `dot`, `norm`, `amax`) turns lists into one number, accumulated in double.

Read them in this order:

* `_trace` (a function becomes a graph; `_purity` says what it may read besides its arguments), `_graph`, `_operations` (each
  operation in all languages);
* `_forms` (what a form is; `_choice` has the list), `_plain`, `_foreach` (with `_foreach_call`, the functions of torch, and
  `_cuts`, groups of tensors), `_c` with `_emit_c`;
* `_lists` (what lists of tensors look like), `_runs` (tensors as runs of elements), `_plan`, `_checks` and `_prepare` (which make
  a plan), `_call` (which runs it), `_bound` (a call that is repeated);
* `_reduce` (with `_torch_reduce` and `_over_processes`); `_memory`;
* `_emit_triton` (the graph as a Triton kernel), `_triton_table` (the addresses it reads) and `_triton` (launches, reductions).

`MODULI_KERNELS` chooses: `auto` (compile where possible), `c` or `triton` (compile or raise), `foreach` (never compile;
`eager` is its old name) or `plain`. Compiled kernels are kept in a directory that only the user can write to
(`MODULI_KERNELS_CACHE`).
"""

from ._backend import KernelError, reset
from ._bound import Bound
from ._explain import Explanation, explain
from ._fuse import Fused, fuse
from ._memory import allocate_large, find_temporaries, pause_collection
from ._over_processes import over_processes, reducing_over
from ._purity import SelfRecorder
from ._reduce import amax, dot, norm, sum
from ._squares import PartialSquares, record_square
from ._stochastic import round_stochastically
from ._trace import NotPointwiseError
from ._triton import Launch, watch_launches

__all__ = [
    "fuse",
    "Fused",
    "Bound",
    "sum",
    "dot",
    "norm",
    "amax",
    "round_stochastically",
    "record_square",
    "PartialSquares",
    "explain",
    "Explanation",
    "reset",
    "KernelError",
    "NotPointwiseError",
    "over_processes",
    "reducing_over",
    "pause_collection",
    "allocate_large",
    "find_temporaries",
    "SelfRecorder",
    "Launch",
    "watch_launches",
]
