"""Which forms may run here: the setting, the compiled kernels of this process, and the one warning.

And the C that every kernel shares: reading tensors off lists, asking for huge pages, and the reductions.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from .._torch import find_tensor_reader
from . import _compiler
from ._compiler import Library, Unavailable, build
from ._emit_c import HALF, HEADERS

T = TypeVar("T")

_MODES = ("auto", "c", "triton", "foreach", "plain")
_GRAIN = 16384

CODES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
KINDS = {"sum": 0, "dot": 1, "squares": 2, "absolutes": 3, "amax": 4, "largest": 5}


_lock = threading.RLock()
_kernels: dict[str, Kernel | str] = {}
_shared: Runtime | str | None = None
_warned: set[str] = set()
_forked = False


class KernelError(RuntimeError):
    """`MODULI_KERNELS=c` (or `triton`) asks for compiled kernels and this one can't be compiled; the message says why.

    Example:
        >>> issubclass(KernelError, RuntimeError)
        True
    """


class Kernel:
    """A compiled function: its entry point, its source text and the library it lives in."""

    __slots__ = ("library", "run", "source")

    def __init__(self, source: str, library: Library) -> None:
        self.source = source
        self.library = library
        self.run: Any = library.handle.moduli_run
        address, integer = ctypes.c_void_p, ctypes.c_int64
        self.run.argtypes = [integer, address, address, address, address, ctypes.c_int32]
        self.run.restype = None


class Runtime:
    """The shared library, with its functions typed."""

    CHUNK = 16384

    def __init__(self, library: Library) -> None:
        self.library = library
        address, integer = ctypes.c_void_p, ctypes.c_int64
        self.reduce: Any = library.handle.moduli_reduce
        self.reduce.argtypes = [*([ctypes.c_int32] * 3), integer, *([address] * 4), ctypes.c_double, address]
        self.reduce.argtypes += [ctypes.c_int32]
        self.reduce.restype = ctypes.c_double
        self.huge: Any = library.handle.moduli_huge
        self.huge.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self.huge.restype = None
        # This one reads Python objects, so it must be called with the GIL held: hence PyDLL.
        self._read: Any = ctypes.PyDLL(str(library.path)).moduli_read
        self._read.argtypes = [ctypes.py_object, ctypes.py_object, integer, *([address] * 6)]
        self._read.restype = integer
        found = find_tensor_reader()
        self._reader = None if found is None else array("Q", [*found, id(torch.Tensor), id(torch.nn.Parameter)])

    def facts(self, lists: Sequence[tuple[torch.Tensor, ...]]) -> array[int] | None:
        """What these tensors look like, for `compare`; None where the reader can't take them."""
        axes = sum(tensor.dim() for tensors in lists for tensor in tensors)
        count = sum(map(len, lists))
        facts = array("q", bytes(8 * max(1, 2 * count + 2 * axes)))
        blank = array("Q", bytes(8 * max(1, count)))
        found = self._call(lists, (), array("q", map(len, lists)), None, facts.buffer_info()[0], blank, blank)
        return facts if found == 0 else None

    def compare(
        self,
        lists: Sequence[tuple[torch.Tensor, ...]],
        trusted: Sequence[tuple[torch.Tensor, ...]],
        lengths: array[int],
        facts: array[int],
        before: array[int],
    ) -> tuple[int, array[int]]:
        """(-1 where a tensor is not what it was, else a bit for each list that moved; the addresses now).

        A list of negative length that holds the very tensors of its trusted one is where it was.
        """
        now = array("Q", bytes(8 * len(before)))
        return self._call(lists, trusted, lengths, facts.buffer_info()[0], None, now, before), now

    def _call(
        self,
        lists: Sequence[Any],
        trusted: Sequence[Any],
        lengths: array[int],
        known: Any,
        facts: Any,
        *places: array[int],
    ) -> int:
        if self._reader is None:
            return -1
        held, addresses = tuple(lists), [place.buffer_info()[0] for place in (lengths, self._reader, *places)]
        try:
            return int(self._read(held, tuple(trusted), len(held), *addresses[:2], known, facts, *addresses[2:]))
        except (RuntimeError, BufferError, TypeError):  # torch's reader says so of what it can't describe
            return -1


def mode() -> str:
    """The value of `MODULI_KERNELS`: auto (compile where possible), c or triton (or raise), foreach, plain."""
    value = os.environ.get("MODULI_KERNELS", "auto")
    value = "foreach" if value == "eager" else value  # the name it had
    if value not in _MODES:
        raise ValueError(f"MODULI_KERNELS is {value!r}; set it to one of {', '.join(_MODES)}, or unset it")
    return value


def threads(elements: int) -> int:
    """How many threads a pass over so many elements is worth."""
    if _forked:
        return 1
    return min(torch.get_num_threads(), max(1, elements // _GRAIN))


def _after_fork() -> None:
    global _forked, _lock
    # OpenMP's threads do not exist in a forked child, and GNU's runtime waits for them for ever.
    _forked = True
    # Another thread of the parent may have held the lock, to compile; it does not exist here to release it.
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def runtime() -> Runtime | str:
    """The shared library, or the reason why there is none."""
    global _shared
    if _shared is None:
        with _lock:
            if _shared is None:
                _shared = _try(_load_shared)
    return _shared


def _load_shared() -> Runtime:
    return Runtime(build(HEADERS + HALF + _SOURCE, ["moduli_read", "moduli_huge", "moduli_reduce"]))


def kernel(source: str) -> Kernel | str:
    """The compiled kernel of this source, or the reason why there is none. A failure is not tried again."""
    with _lock:
        found = _kernels.get(source)
        if found is None:
            shared = runtime()
            found = shared if isinstance(shared, str) else _try(lambda: Kernel(source, build(source, ["moduli_run"])))
            _kernels[source] = found
        return found


def _try(make: Callable[[], T]) -> T | str:
    try:
        return make()
    except Unavailable as problem:
        warn_once("a compiler", str(problem))
        return str(problem)


def list_built() -> list[Kernel]:
    """The kernels of this process."""
    with _lock:
        return [found for found in _kernels.values() if isinstance(found, Kernel)]


def warn_once(what: str, problem: str) -> None:
    """Say that something is done without, unless it was said or the user asked for an error."""
    if what in _warned or mode() in ("c", "triton"):
        return
    _warned.add(what)
    warnings.warn(
        f"moduli.kernels runs without {what}, with the same results but slower: {problem}",
        RuntimeWarning,
        stacklevel=2,
    )


def reset() -> None:
    """Forget compiled kernels and failures, so that the next call looks again (after installing a compiler, say).

    Example:
        >>> from moduli import kernels
        >>> kernels.reset()
    """
    global _shared
    with _lock:
        _kernels.clear()
        _shared = None
        _warned.clear()
        _compiler.reset()


_SOURCE = r"""
#ifdef __linux__
#include <sys/mman.h>
#endif
/* DLPack's DLTensor, and its function that describes a Python tensor without taking a reference. */
typedef struct {
  void *data;
  int32_t device_type, device_id, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} m_dltensor;
typedef struct {
  void *(*item)(void *, ptrdiff_t); /* PyTuple_GetItem */
  void *(*type)(void *);            /* PyObject_Type */
  void (*release)(void *);          /* Py_DecRef */
  int (*read)(void *, m_dltensor *);
  void *tensor, *parameter;
} m_python;

/* Describes tuples of tensors: each one's device, dtype, axes, shape and strides go to `facts`, its address to `now`.
   With `known` it compares instead, and a bit tells for each tuple whether an address differs from `before` (one bit for
   all beyond the 62nd). A tuple of negative length which holds the same objects as the trusted one is not looked at: it is
   where it was. -1 where a tensor is of another type, has no memory, or is not as it was known. The caller holds the GIL
   and the tuples. */
int64_t moduli_read(void *lists, void *trusted, int64_t count, const int64_t *lengths, const m_python *py,
                    const int64_t *known, int64_t *facts, uint64_t *now, const uint64_t *before) {
  int64_t moved = 0;
  for (int64_t r = 0; r < count; r++) {
    void *list = py->item(lists, r);
    const int64_t n = lengths[r] < 0 ? -lengths[r] : lengths[r];
    void *own = lengths[r] < 0 ? py->item(trusted, r) : NULL;
    int64_t same = 0;
    while (own && same < n && py->item(list, same) == py->item(own, same)) same++;
    if (own && same == n) {
      for (int64_t i = 0; i < n; i++) known += 2 + 2 * known[1];
      memcpy(now, before, (size_t)n * 8);
      now += n;
      before += n;
      continue;
    }
    for (int64_t i = 0; i < n; i++) {
      void *object = py->item(list, i);
      void *type = py->type(object);
      py->release(type);
      if (type != py->tensor && type != py->parameter) return -1;
      m_dltensor t;
      if (py->read(object, &t)) return -1;
      if (t.lanes != 1) return -1;
      const int64_t kind = ((int64_t)t.device_type << 32 | t.device_id) << 16 | t.code << 8 | t.bits, axes = t.ndim;
      int64_t numel = 1;
      for (int64_t k = 0; k < axes; k++) numel *= t.shape[k];
      if (numel && !t.data) return -1; /* a tensor of zeros that was never written */
      if (known) {
        if (known[0] != kind || known[1] != axes) return -1;
        if (memcmp(known + 2, t.shape, 8 * (size_t)axes) || memcmp(known + 2 + axes, t.strides, 8 * (size_t)axes))
          return -1;
        known += 2 + 2 * axes;
      } else {
        facts[0] = kind;
        facts[1] = axes;
        memcpy(facts + 2, t.shape, 8 * (size_t)axes);
        memcpy(facts + 2 + axes, t.strides, 8 * (size_t)axes);
        facts += 2 + 2 * axes;
      }
      now[i] = (uint64_t)(uintptr_t)t.data + t.byte_offset;
    }
    if (known && memcmp(now, before, (size_t)n * 8) != 0) moved |= (int64_t)1 << (r < 62 ? r : 62);
    now += n;
    before += n;
  }
  return moved;
}

/* Fresh memory in pages of 2 MB: the first write to it then costs one fault instead of 512. */
void moduli_huge(uint64_t address, uint64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uint64_t page = 4096, from = (address + page - 1) / page * page, to = (address + bytes) / page * page;
  if (to > from) madvise((void *)(uintptr_t)from, to - from, MADV_HUGEPAGE);
#else
  (void)address; (void)bytes;
#endif
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
  else if (code == 2) for (int64_t j = 0; j < m; j++) x[j] = m_from_float16(h[j]);
  else for (int64_t j = 0; j < m; j++) x[j] = m_from_bfloat16(h[j]);
}
/* s + c is the sum exactly up to the rounding of c (Knuth's TwoSum). */
static inline void m_two_sum(double *s, double *c, double x) {
  const double t = *s + x, z = t - *s;
  *c += (*s - (t - z)) + (x - z);
  *s = t;
}

/* Sums of squares need no compensation, so they are read once, straight into the lanes. */
#define SQUARES(T) \
  for (; k + LANES <= to; k += LANES) \
    for (int l = 0; l < LANES; l++) { const double v = ((const T *)px)[k + l] * scale; s[l] += v * v; }

static void m_chunk(int32_t kind, int32_t cx, int32_t cy, uint64_t px, uint64_t py, int64_t from, int64_t to,
                    double scale, double *out) {
  double x[BLOCK] __attribute__((aligned(64))), y[BLOCK] __attribute__((aligned(64)));
  double s[LANES] __attribute__((aligned(64))), c[LANES] __attribute__((aligned(64)));
  const double pad = kind == 4 ? -INFINITY : 0.0;
  for (int l = 0; l < LANES; l++) { s[l] = pad; c[l] = 0.0; }
  int64_t k = from;
  if (kind == 2 && cx == 0) SQUARES(double)
  else if (kind == 2 && cx == 1) SQUARES(float)
  for (; k < to; k += BLOCK) {
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
