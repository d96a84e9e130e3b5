/* What every kernel shares: reading tensors off lists, asking for huge pages, and the reductions. */
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
  void *(*item)(void *, ptrdiff_t);   /* PyTuple_GetItem */
  void *(*type)(void *);              /* PyObject_Type */
  void (*release)(void *);            /* Py_DecRef */
  void *(*entry)(void *, void *);     /* PyDict_GetItem */
  void *(*attribute)(void *, void *); /* PyObject_GetAttr */
  void (*clear)(void);                /* PyErr_Clear */
  int (*read)(void *, m_dltensor *);
  void *tensor, *parameter;
} m_python;

/* Describes tuples of tensors: each one's device, dtype, axes, shape and strides go to `facts`, its address to `now`.
   With `known` it compares instead, and a bit tells for each tuple whether an address differs from `before` (one bit for
   all beyond the 62nd). -1 where a tensor is of another type, has no memory, or is not as it was known. The caller holds the
   GIL and the tuples. */
int64_t moduli_read(void *lists, int64_t count, const int64_t *lengths, const m_python *py, const int64_t *known,
                    int64_t *facts, uint64_t *now, const uint64_t *before) {
  int64_t moved = 0;
  for (int64_t r = 0; r < count; r++) {
    void *list = py->item(lists, r);
    const int64_t n = lengths[r];
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

/* What a warm call is compared with: never changed after it was made. */
typedef struct {
  int64_t count, n;         /* lists that are given, and tensors in each */
  const int64_t *lengths;
  const int64_t *known;     /* their facts */
  const uint64_t *before;   /* where they were */
  const uint64_t *extents;  /* bytes of each tensor of each list */
  const int64_t *written;   /* for each list whether the kernel writes it */
  int64_t ranges;           /* what the kernel writes: disjoint, sorted */
  const uint64_t *begin, *end;
  int64_t columns;          /* of the kernel's table */
  const uint64_t *fixed;    /* the addresses of columns that do not move */
  const int64_t *source;    /* for each column the list it is, or -1 for a fixed one */
} m_warm;

/* Writes the addresses of lists to `now` and the kernel's table to `table`. 0 where the lists look as they did, what is
   written is where it was, and nothing that is read lies in it; otherwise a plan has to be found. */
int64_t moduli_bind(void *lists, const m_python *py, const m_warm *warm, uint64_t *now, uint64_t *table) {
  const int64_t n = warm->n;
  const int64_t moved = moduli_read(lists, warm->count, warm->lengths, py, warm->known, NULL, now, warm->before);
  if (moved < 0) return -1;
  for (int64_t r = 0; moved && r < warm->count; r++) {
    if (!(moved >> (r < 62 ? r : 62) & 1)) continue;
    if (warm->written[r]) return -2;
    for (int64_t i = 0; i < n; i++) {
      const uint64_t start = now[r * n + i], stop = start + warm->extents[r * n + i];
      if (start == warm->before[r * n + i] || start == stop) continue;
      int64_t low = 0, high = warm->ranges;
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (warm->end[middle] <= start) low = middle + 1; else high = middle;
      }
      if (low < warm->ranges && warm->begin[low] < stop) return -3;
    }
  }
  for (int64_t c = 0; c < warm->columns; c++)
    table[c] = warm->source[c] < 0 ? warm->fixed[c] : (uint64_t)(uintptr_t)(now + warm->source[c] * n);
  return 0;
}

/* The first of some names that does not stand for the same object any more, or -1. A holder is a dictionary, or an object
   whose attribute it is; a value of NULL is none. */
int64_t moduli_same(int64_t count, const m_python *py, void *const *holders, void *const *names, void *const *values,
                    const int64_t *attributes) {
  for (int64_t i = 0; i < count; i++) {
    void *now = attributes[i] ? py->attribute(holders[i], names[i]) : py->entry(holders[i], names[i]);
    if (attributes[i] && now) py->release(now);
    if (attributes[i] && !now) py->clear();
    if (now != values[i]) return i;
  }
  return -1;
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
#define SQUARES(NAME, T) \
  static double NAME(const T *x, int64_t n, double scale) { \
    double s[LANES] __attribute__((aligned(64))) = {0.0}; \
    int64_t k = 0; \
    for (; k + LANES <= n; k += LANES) \
      for (int l = 0; l < LANES; l++) { const double v = x[k + l] * scale; s[l] += v * v; } \
    for (int l = 0; k < n; k++, l++) { const double v = x[k] * scale; s[l] += v * v; } \
    for (int half = LANES / 2; half; half /= 2) \
      for (int l = 0; l < half; l++) s[l] += s[l + half]; \
    return s[0]; \
  }
SQUARES(m_squares_double, double)
SQUARES(m_squares_float, float)

static void m_chunk(int32_t kind, int32_t cx, int32_t cy, uint64_t px, uint64_t py, int64_t from, int64_t to,
                    double scale, double *out) {
  if (kind == 2 && cx <= 1) {
    out[0] = cx ? m_squares_float((const float *)px + from, to - from, scale)
                : m_squares_double((const double *)px + from, to - from, scale);
    out[1] = 0.0;
    return;
  }
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
static double m_reduce(int32_t kind, int32_t cx, int32_t cy, int64_t n, const uint64_t *px, const uint64_t *py,
                     const int64_t *sizes, const int64_t *firsts, double scale, double *partial, int32_t threads) {
  const int64_t chunks = firsts[n], share = (chunks + threads - 1) / threads;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (threads > 1)
#endif
  for (int64_t part = 0; part < threads; part++) {
    const int64_t end = (part + 1) * share < chunks ? (part + 1) * share : chunks;
    for (int64_t q = part * share, i = 0; q < end; q++) {
      while (firsts[i + 1] <= q) i++;
      const int64_t from = (q - firsts[i]) * CHUNK, to = from + CHUNK < sizes[i] ? from + CHUNK : sizes[i];
      m_chunk(kind, cx, cy, px[i], py[i], from, to, scale, partial + 2 * q);
    }
  }
  double s = kind == 4 ? -INFINITY : 0.0, c = 0.0;
  for (int64_t q = 0; q < chunks; q++) {
    if (kind >= 4) s = (partial[2 * q] > s || partial[2 * q] != partial[2 * q]) ? partial[2 * q] : s;
    else { m_two_sum(&s, &c, partial[2 * q]); c += partial[2 * q + 1]; }
  }
  /* Beside an infinity the error terms are NaN; the plain sum is then already right. */
  return isfinite(s) && isfinite(c) ? s + c : s;
}

/* The root of the sum of squares (6), of elements scaled by a power of two where squares overflow or underflow; or one of the
   other kinds. */
double moduli_reduce(int32_t kind, int32_t cx, int32_t cy, int64_t n, const uint64_t *px, const uint64_t *py,
                     const int64_t *sizes, const int64_t *firsts, double scale, double *partial, int32_t threads) {
  if (kind != 6) return m_reduce(kind, cx, cy, n, px, py, sizes, firsts, scale, partial, threads);
  const double total = m_reduce(2, cx, cy, n, px, py, sizes, firsts, 1.0, partial, threads);
  if ((total > 1e-280 && total < 1e300) || total != total) return sqrt(total);
  const double largest = m_reduce(5, cx, cy, n, px, py, sizes, firsts, 1.0, partial, threads);
  if (largest == 0.0 || !isfinite(largest)) return largest;
  int exponent;
  frexp(largest, &exponent);
  const double by = ldexp(1.0, exponent > 1000 ? -1000 : exponent < -1000 ? 1000 : -exponent);
  return sqrt(m_reduce(2, cx, cy, n, px, py, sizes, firsts, by, partial, threads)) / by;
}
