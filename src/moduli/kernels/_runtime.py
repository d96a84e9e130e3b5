"""The C that every kernel shares: reading pointers off lists, finding overlaps, and the reductions."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ._compiler import Library, build
from ._emit import HALF, headers
from ._tensors import layout_of_tensors

__all__ = ["CODES", "KINDS", "Runtime", "runtime"]

CODES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
KINDS = {"sum": 0, "dot": 1, "squares": 2, "absolutes": 3, "amax": 4, "largest": 5}

_SOURCE = r"""
#include <stdlib.h>
typedef void *(*m_item)(void *, ptrdiff_t);
typedef void *(*m_pointer)(void *);

/* Which lists moved since the last call (a bit for each), and their pointers now. The caller holds the GIL. */
int64_t moduli_pointers(void *lists, int64_t count, int64_t n, m_item of_tuple, m_item of_list, m_pointer pointer,
                        uint64_t *now, const uint64_t *before) {
  int64_t moved = 0;
  for (int64_t r = 0; r < count; r++) {
    void *list = of_tuple(lists, r);
    for (int64_t i = 0; i < n; i++) now[r * n + i] = (uint64_t)(uintptr_t)pointer(of_list(list, i));
    if (memcmp(now + r * n, before + r * n, (size_t)n * 8) != 0) moved |= (int64_t)1 << r;
  }
  return moved;
}

typedef struct { uint64_t type, keys, dtype; } m_fact;
typedef int32_t (*m_ask)(void *, void *);
typedef struct { m_item of_tuple, of_list; m_ask data_ptr, numel, dtype, is_contiguous; int64_t tensor, keys; } m_torch;
#define AT(p, offset) (*(void **)((char *)(p) + (offset)))

/* The same for lists of contiguous tensors, each list of one type, dtype and set of dispatch keys: -1 where a tensor is
   not what it was. Prefetching hides that the tensors are scattered over the heap; a wrong prefetch does no harm. */
int64_t moduli_check(void *lists, int64_t count, int64_t n, const m_torch *torch, const m_fact *facts,
                     const int64_t *sizes, uint64_t *now, const uint64_t *before) {
  int64_t moved = 0;
  for (int64_t r = 0; r < count; r++) {
    void *list = torch->of_tuple(lists, r);
    const m_fact fact = facts[r];
    for (int64_t i = 0; i < n; i++) {
      if (i + 32 < n) __builtin_prefetch(torch->of_list(list, i + 32));
      if (i + 20 < n) {
        const char *ahead = torch->of_list(list, i + 20);
        if ((uint64_t)AT(ahead, sizeof(void *)) != fact.type) return -1;
        for (int k = 0; k < 256; k += 64) __builtin_prefetch((const char *)AT(ahead, torch->tensor) + k);
      }
      if (i + 10 < n) {
        const char *ahead = torch->of_list(list, i + 10);
        if ((uint64_t)AT(ahead, sizeof(void *)) != fact.type) return -1;
        __builtin_prefetch(AT(AT(ahead, torch->tensor), 16));
        __builtin_prefetch((const void *)before[r * n + i + 10], 1);
      }
      char *object = torch->of_list(list, i);
      if ((uint64_t)AT(object, sizeof(void *)) != fact.type) return -1;
      void *tensor = object + torch->tensor; /* an at::Tensor is one pointer, and this is where it lies */
      if ((uint64_t)AT(AT(object, torch->tensor), torch->keys) != fact.keys) return -1;
      int64_t numel = -1;
      int32_t dtype = -1;
      _Bool contiguous = 0;
      void *data = 0;
      if (torch->numel(tensor, &numel) || numel != sizes[i]) return -1;
      if (torch->dtype(tensor, &dtype) || (uint64_t)dtype != fact.dtype) return -1;
      if (torch->is_contiguous(tensor, &contiguous) || !contiguous) return -1;
      if (torch->data_ptr(tensor, &data)) return -1;
      now[r * n + i] = (uint64_t)(uintptr_t)data;
    }
    if (memcmp(now + r * n, before + r * n, (size_t)n * 8) != 0) moved |= (int64_t)1 << r;
  }
  return moved;
}

typedef struct { uint64_t start, end; int64_t index; } m_range;
static int m_order(const void *a, const void *b) {
  const uint64_t x = ((const m_range *)a)->start, y = ((const m_range *)b)->start;
  return (x > y) - (x < y);
}

/* Sorts what is written; the number of ranges, or -1 where two of them overlap. */
int64_t moduli_written(int64_t count, int64_t n, const uint64_t *const *tables, const int64_t *const *extents,
                       m_range *ranges) {
  int64_t m = 0;
  for (int64_t r = 0; r < count; r++)
    for (int64_t i = 0; i < n; i++)
      if (extents[r][i] > 0)
        ranges[m++] = (m_range){tables[r][i], tables[r][i] + (uint64_t)extents[r][i], i};
  int sorted = 1;
  for (int64_t k = 1; k < m && sorted; k++) sorted = ranges[k - 1].start <= ranges[k].start;
  if (!sorted) qsort(ranges, (size_t)m, sizeof(m_range), m_order);
  for (int64_t k = 1; k < m; k++) if (ranges[k].start < ranges[k - 1].end) return -1;
  return m;
}

/* 1 where something read overlaps something written; 2 where it only ever is the same range of the same tensor i. */
int32_t moduli_clash(int64_t m, const m_range *ranges, int64_t n, const uint64_t *table, const int64_t *extents) {
  int32_t exact = 0;
  for (int64_t i = 0; i < n; i++) {
    if (extents[i] <= 0) continue;
    const uint64_t start = table[i], end = start + (uint64_t)extents[i];
    int64_t lo = 0, hi = m; /* the written ranges are disjoint: only those that end after `start` can clash */
    while (lo < hi) {
      const int64_t k = (lo + hi) / 2;
      if (ranges[k].end <= start) lo = k + 1; else hi = k;
    }
    if (lo == m || ranges[lo].start >= end) continue;
    if (ranges[lo].start != start || ranges[lo].end != end || ranges[lo].index != i) return 1;
    exact = 2;
  }
  return exact;
}

#define BLOCK 256
#define CHUNK 16384
#define LANES 16
static void m_load(int32_t code, uint64_t base, int64_t k, int64_t m, double *x) {
  const double *d = (const double *)base + k;
  const float *f = (const float *)base + k;
  const uint16_t *h = (const uint16_t *)base + k;
  if (code == 0) for (int64_t j = 0; j < m; j++) x[j] = d[j];
  else if (code == 1) for (int64_t j = 0; j < m; j++) x[j] = f[j];
  else if (code == 2) for (int64_t j = 0; j < m; j++) x[j] = m_from_half(h[j]);
  else for (int64_t j = 0; j < m; j++) x[j] = m_from_bfloat(h[j]);
}
/* s + c is the sum exactly up to the rounding of c (Knuth's TwoSum). */
static inline void m_two_sum(double *s, double *c, double x) {
  const double t = *s + x, z = t - *s;
  *c += (*s - (t - z)) + (x - z);
  *s = t;
}

static void m_chunk(int32_t kind, int32_t cx, int32_t cy, uint64_t px, uint64_t py, int64_t from, int64_t to,
                    double scale, double *out) {
  double x[BLOCK] __attribute__((aligned(64))), y[BLOCK] __attribute__((aligned(64)));
  double s[LANES] __attribute__((aligned(64))), c[LANES] __attribute__((aligned(64)));
  const double pad = kind == 4 ? -INFINITY : 0.0;
  for (int l = 0; l < LANES; l++) { s[l] = pad; c[l] = 0.0; }
  for (int64_t k = from; k < to; k += BLOCK) {
    const int64_t m = to - k < BLOCK ? to - k : BLOCK;
    const int64_t padded = (m + LANES - 1) / LANES * LANES;
    m_load(cx, px, k, m, x);
    for (int64_t j = m; j < padded; j++) x[j] = pad;
    if (kind == 1) {
      m_load(cy, py, k, m, y);
      for (int64_t j = m; j < padded; j++) y[j] = 0.0;
      /* x*y = p + e exactly, so the dot product is as accurate as the sum (Ogita, Rump and Oishi, 2005). */
      for (int64_t j = 0; j < padded; j++) {
        const double p = x[j] * y[j];
        y[j] = fma(x[j], y[j], -p);
        x[j] = p;
      }
      for (int64_t j = 0; j < padded; j += LANES)
        for (int l = 0; l < LANES; l++) c[l] += y[j + l];
    }
    if (kind <= 1) {
      for (int64_t j = 0; j < padded; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) {
          const double v = x[j + l], a = s[l], t = a + v, z = t - a;
          c[l] += (a - (t - z)) + (v - z);
          s[l] = t;
        }
    } else if (kind == 2) {
      for (int64_t j = 0; j < padded; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) { const double v = x[j + l] * scale; s[l] += v * v; }
    } else if (kind == 3) {
      for (int64_t j = 0; j < padded; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) s[l] += fabs(x[j + l]);
    } else {
      if (kind == 5) for (int64_t j = 0; j < padded; j++) x[j] = fabs(x[j]);
      for (int64_t j = 0; j < padded; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++) { const double v = x[j + l]; s[l] = (v > s[l] || v != v) ? v : s[l]; }
    }
  }
  double total = s[0], rest = 0.0;
  for (int l = 1; l < LANES; l++) {
    if (kind >= 4) total = (s[l] > total || s[l] != s[l]) ? s[l] : total;
    else m_two_sum(&total, &rest, s[l]);
  }
  for (int l = 0; l < LANES; l++) rest += c[l];
  out[0] = total;
  out[1] = rest;
}

/* Chunks are cut the same way whatever the threads, and joined in order: the same bits with any number of them. */
double moduli_reduce(int32_t kind, int32_t cx, int32_t cy, int64_t n, const uint64_t *px, const uint64_t *py,
                     const int64_t *sizes, const int64_t *firsts, double scale, double *partial, int32_t threads) {
  const int64_t chunks = firsts[n];
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
#endif
  for (int64_t q = 0; q < chunks; q++) {
    int64_t i = 0, end = n;
    while (i < end) {
      const int64_t k = (i + end) / 2;
      if (firsts[k + 1] <= q) i = k + 1; else end = k;
    }
    const int64_t from = (q - firsts[i]) * CHUNK, to = from + CHUNK < sizes[i] ? from + CHUNK : sizes[i];
    m_chunk(kind, cx, cy, px[i], py[i], from, to, scale, partial + 2 * q);
  }
  double s = kind == 4 ? -INFINITY : 0.0, c = 0.0;
  for (int64_t q = 0; q < chunks; q++) {
    if (kind >= 4) s = (partial[2 * q] > s || partial[2 * q] != partial[2 * q]) ? partial[2 * q] : s;
    else { m_two_sum(&s, &c, partial[2 * q]); c += partial[2 * q + 1]; }
  }
  /* Beside an infinity the error terms are NaN; the plain sum is then already right. */
  return isfinite(s) && isfinite(c) ? s + c : s;
}
"""


class Runtime:
    """The shared library, with its functions typed."""

    CHUNK = 16384

    def __init__(self, library: Library) -> None:
        self.library = library
        address, integer = ctypes.c_void_p, ctypes.c_int64
        self.written: Any = library.handle.moduli_written
        self.written.argtypes = [integer, integer, address, address, address]
        self.written.restype = integer
        self.clash: Any = library.handle.moduli_clash
        self.clash.argtypes = [integer, address, integer, address, address]
        self.clash.restype = ctypes.c_int32
        self.reduce: Any = library.handle.moduli_reduce
        self.reduce.argtypes = [
            *([ctypes.c_int32] * 3),
            integer,
            *([address] * 4),
            ctypes.c_double,
            address,
            ctypes.c_int32,
        ]
        self.reduce.restype = ctypes.c_double
        # This one reads Python objects, so it must be called with the GIL held: hence PyDLL.
        self._pointers: Any = ctypes.PyDLL(str(library.path)).moduli_pointers
        self._pointers.argtypes = [ctypes.py_object, integer, integer, address, address, address, address, address]
        self._pointers.restype = integer
        self._tuple = ctypes.cast(ctypes.pythonapi.PyTuple_GetItem, address).value
        self._list = ctypes.cast(ctypes.pythonapi.PyList_GetItem, address).value
        self.raw_check: Any = ctypes.PyDLL(str(library.path)).moduli_check
        self.raw_check.argtypes = [ctypes.py_object, integer, integer, *([address] * 5)]
        self.raw_check.restype = integer
        self.torch = layout_of_tensors()
        # torch publishes this address for the code that its own compiler generates.
        found = getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", None)
        self._data_ptr: int | None = found if isinstance(found, int) else None

    def facts(self, lists: Sequence[list[torch.Tensor]]) -> array[int] | None:
        """Type, dispatch keys and dtype of each list, where each has one of each, for the compiled check."""
        found = array("Q")
        if self.torch is None or not lists or len(lists) > 62:
            return None
        for tensors in lists:
            kinds = {(id(type(t)), torch._C._dispatch_keys(t).raw_repr(), t.dtype) for t in tensors}
            if len(kinds) != 1:
                return None
            kind, keys, _ = kinds.pop()
            code = ctypes.c_int32()
            slot = ctypes.c_void_p(id(tensors[0]) + self.torch[6])
            ask = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(self.torch[4])
            ask(slot, ctypes.addressof(code))
            found.extend((kind, keys, code.value))
        return found

    def pointers(self, lists: Sequence[list[torch.Tensor]], n: int, before: array[int]) -> tuple[int, array[int]]:
        """A bit for each list whose pointers differ from `before`, and the pointers now.

        The tensors must have been checked: the address behind this is called without looking at their types.
        """
        if self._data_ptr is None or len(lists) > 62:
            now = array("Q")
            moved = 0
            for position, tensors in enumerate(lists):
                part = array("Q", map(torch.Tensor.data_ptr, tensors))
                moved |= (part != before[position * n : (position + 1) * n]) << min(position, 62)
                now.extend(part)
            return moved, now
        now = array("Q", bytes(8 * n * len(lists)))
        moved = self._pointers(
            tuple(lists),
            len(lists),
            n,
            self._tuple,
            self._list,
            self._data_ptr,
            now.buffer_info()[0],
            before.buffer_info()[0],
        )
        return moved, now


@lru_cache(maxsize=1)
def runtime() -> Runtime:
    """The shared library, built or loaded at first use. Raises `Unavailable`."""
    return Runtime(build(headers() + HALF + _SOURCE))
