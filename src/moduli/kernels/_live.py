"""The compiled part of `live`: what it reads of the interpreter and of torch, and the C."""

from __future__ import annotations

import ctypes
import operator
import sys
from array import array
from functools import lru_cache
from typing import Any

from torch import Tensor

from . import _backend
from ._compiler import Library, Unavailable, build
from ._emit import headers
from ._runtime import Runtime
from ._tensors import layout_of_tensors, question

__all__ = ["Native", "native"]

_NAME = sys.intern("requires_grad")

_SOURCE = r"""
typedef void *(*m_item)(void *, int64_t);
typedef void *(*m_two)(void *, void *);
typedef void (*m_one)(void *);
typedef int64_t (*m_size)(void *);
typedef int32_t (*m_ask)(void *, void *);
typedef struct {
  m_item of_list; m_two dict_of, attribute; m_one release; m_size size;
  void *requires_grad, *yes;
  m_ask data_ptr, dim, sizes, dtype, is_contiguous;
  int64_t tensor, keys;
} m_api;
typedef struct { uint64_t type, keys, dtype, dim, shape, pointer, flag; } m_fact;
typedef struct {
  const m_api *api;
  int64_t count_modules, count_dicts, count_empties, count_tensors;
  void *modules, *dicts, *empties, *tensors; /* lists, which the Python side holds */
  const uint64_t *kinds, *states, *tags;
  const m_fact *facts;
  const int64_t *shapes;
} m_guard;
#define AT(p, offset) (*(void **)((char *)(p) + (offset)))
#define TAG(dict) (*(uint64_t *)((char *)(dict) + 24))

/* 1 where nothing changed. `own` is the dict of the root, whose version is the first tag. The caller holds the GIL. */
int64_t moduli_guard(void *own, const m_guard *g, int64_t flags) {
  const m_api *api = g->api;
  if (TAG(own) != g->tags[0]) return 0;
  for (int64_t i = 0; i < g->count_dicts; i++) if (TAG(api->of_list(g->dicts, i)) != g->tags[i + 1]) return 0;
  for (int64_t i = 0; i < g->count_modules; i++) {
    void *module = api->of_list(g->modules, i);
    if ((uint64_t)AT(module, 8) != g->kinds[i]) return 0;
    void *state = api->dict_of(module, 0);
    if (!state) return -1;
    api->release(state);
    if ((uint64_t)state != g->states[i]) return 0;
  }
  for (int64_t i = 0; i < g->count_empties; i++) if (api->size(api->of_list(g->empties, i)) != 0) return 0;
  const int64_t *shape = g->shapes;
  for (int64_t i = 0; i < g->count_tensors; i++) {
    const m_fact *fact = g->facts + i;
    char *object = api->of_list(g->tensors, i);
    if ((uint64_t)AT(object, 8) != fact->type) return 0;
    void *tensor = object + api->tensor;
    if ((uint64_t)AT(AT(object, api->tensor), api->keys) != fact->keys) return 0;
    int64_t dim = -1;
    int64_t *sizes = 0;
    int32_t dtype = -1;
    _Bool contiguous = 0;
    void *data = 0;
    if (api->dtype(tensor, &dtype) || (uint64_t)dtype != fact->dtype) return 0;
    if (api->dim(tensor, &dim) || dim != (int64_t)fact->dim || api->sizes(tensor, &sizes)) return 0;
    for (int64_t k = 0; k < dim; k++) if (sizes[k] != shape[k]) return 0;
    shape += dim;
    if (api->is_contiguous(tensor, &contiguous) || !contiguous) return 0;
    if (api->data_ptr(tensor, &data) || (uint64_t)data != fact->pointer) return 0;
    if (flags) {
      void *value = api->attribute(object, api->requires_grad);
      if (!value) return -1;
      api->release(value);
      if ((value == api->yes) != (int)fact->flag) return 0;
    }
  }
  return 1;
}

#define SUM(T, NAME)                                                                                           \
  static void NAME(const T *x, const T *y, T *o, int64_t n, T s, T t) {                                        \
    if (!y) for (int64_t k = 0; k < n; k++) o[k] = s * x[k];                                                   \
    else if (s == 1 && t == 1) for (int64_t k = 0; k < n; k++) o[k] = x[k] + y[k];                                  \
    else if (s == 1 && t == -1) for (int64_t k = 0; k < n; k++) o[k] = x[k] - y[k];                            \
    else if (s == 1) for (int64_t k = 0; k < n; k++) o[k] = x[k] + t * y[k];                                   \
    else if (t == 1) for (int64_t k = 0; k < n; k++) o[k] = y[k] + s * x[k];                                   \
    else for (int64_t k = 0; k < n; k++) o[k] = s * x[k] + t * y[k];                                           \
  }
SUM(double, sum_double)
SUM(float, sum_float)

typedef struct { int64_t code, n, total; const int64_t *sizes; const uint64_t *x, *y; const m_guard *of_x, *of_y; } m_job;

/* out = s x + t y, or s x without y. A table of addresses of tensors, or, without a table, one vector. */
void moduli_blend(const m_job *job, uint64_t x, uint64_t y, double s, double t, uint64_t out, int32_t threads) {
  const int64_t size = job->code == 0 ? 8 : 4;
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
#endif
  {
    int64_t first = 0, end = job->total;
#ifdef _OPENMP
    first = job->total * omp_get_thread_num() / omp_get_num_threads();
    end = job->total * (omp_get_thread_num() + 1) / omp_get_num_threads();
#endif
    for (int64_t i = 0, at = 0; i < job->n && at < end; at += job->sizes[i++]) {
      const int64_t from = at > first ? at : first, to = at + job->sizes[i] < end ? at + job->sizes[i] : end;
      if (from >= to) continue;
      const uint64_t px = (job->x ? job->x[i] + (from - at) * size : x + from * size);
      const uint64_t py = (job->y ? job->y[i] + (from - at) * size : y ? y + from * size : 0);
      const uint64_t po = out + from * size;
      if (job->code == 0) sum_double((void *)px, (void *)py, (void *)po, to - from, s, t);
      else sum_float((void *)px, (void *)py, (void *)po, to - from, (float)s, (float)t);
    }
  }
}

/* The same if the guarded models are what they were; 1 where it was computed. The caller holds the GIL. */
int64_t moduli_guarded(const m_job *job, void *own_x, void *own_y, uint64_t x, uint64_t y, double s, double t,
                       uint64_t out) {
  if (job->of_x && moduli_guard(own_x, job->of_x, 1) != 1) return 0;
  if (job->of_y && moduli_guard(own_y, job->of_y, 0) != 1) return 0;
  moduli_blend(job, x, y, s, t, out, 1);
  return 1;
}
"""


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


class Native:
    """The compiled functions, and what they need to know of the interpreter and of torch."""

    def __init__(self, library: Library, api: array[int]) -> None:
        self.library, self.api = library, api
        address, held = ctypes.c_void_p, ctypes.py_object
        # It reads Python objects, so it must be called with the GIL held: hence PyDLL.
        self.guard: Any = ctypes.PyDLL(str(library.path)).moduli_guard
        self.guard.argtypes = [held, address, ctypes.c_int64]
        self.guard.restype = ctypes.c_int64
        number = ctypes.c_double
        self.blend: Any = library.handle.moduli_blend
        self.blend.argtypes = [address, address, address, number, number, address, ctypes.c_int32]
        self.blend.restype = None
        self.guarded: Any = ctypes.PyDLL(str(library.path)).moduli_guarded
        self.guarded.argtypes = [address, held, held, address, address, number, number, address]
        self.guarded.restype = ctypes.c_int64
        self._dtype: Any = ctypes.CFUNCTYPE(ctypes.c_int32, address, address)(api[10])

    def dtype_of(self, tensor: Tensor) -> int:
        """The number that torch's C interface has for the dtype of a tensor."""
        code = ctypes.c_int32(-1)
        self._dtype(id(tensor) + self.api[12], ctypes.addressof(code))
        return code.value

    @staticmethod
    def changes(held: dict[str, Any]) -> int:
        """A number that is another one after every change of a dict."""
        return _word(id(held) + 24)


def _counts_changes() -> bool:
    """Whether this interpreter counts the changes of a dict where the compiled check looks for it."""
    if sys.implementation.name != "cpython" or object.__basicsize__ != 16 or not (3, 11) <= sys.version_info < (3, 14):
        return False

    class Holder:
        pass

    holder = Holder()
    for target in ({"a": 1}, holder.__dict__):
        seen = [_word(id(target) + 24)]
        actions: list[Any] = [
            lambda held: held.__setitem__("b", 2),
            lambda held: held.__setitem__("b", object()),
            lambda held: held.update(c=3),
            lambda held: held.setdefault("d", 4),
            lambda held: held.pop("c"),
            lambda held: operator.delitem(held, "b"),
            lambda held: held.clear(),
        ]
        for action in actions:
            action(target)
            seen.append(_word(id(target) + 24))
        target.get("d"), list(target), len(target)
        if len(set(seen)) != len(seen) or _word(id(target) + 24) != seen[-1]:
            return False
    state = holder.__dict__
    before = _word(id(state) + 24)
    holder.x = 1  # type: ignore[attr-defined]
    between = _word(id(state) + 24)
    holder.x = 2  # type: ignore[attr-defined]
    return holder.__dict__ is state and len({before, between, _word(id(state) + 24)}) == 3


@lru_cache(maxsize=1)
def _api() -> array[int] | None:
    """Addresses for the compiled check, or None where the interpreter or torch are laid out otherwise."""
    layout = layout_of_tensors()
    asks = [question(name) for name in ("get_data_ptr", "get_dim", "get_sizes", "get_dtype", "is_contiguous")]
    if layout is None or 0 in asks or not _counts_changes():
        return None
    python = ctypes.pythonapi
    functions: list[Any] = [
        python.PyList_GetItem,
        python.PyObject_GenericGetDict,
        python.PyObject_GetAttr,
        python.Py_DecRef,
        python.PyObject_Size,
    ]
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return array("Q", [*addresses, id(_NAME), id(True), *asks, layout[6], layout[7]])


@lru_cache(maxsize=1)
def _loaded(shared: Runtime) -> Native | None:
    api = _api()
    if api is None:
        return None
    try:
        return Native(build(headers() + _SOURCE), api)
    except Unavailable:
        return None


def native() -> Native | None:
    """The compiled functions, where they can be had."""
    if _backend.mode() == "eager":
        return None
    shared = _backend.native()
    return None if isinstance(shared, str) else _loaded(shared)
