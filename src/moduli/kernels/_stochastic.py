"""Stochastic rounding to half precision: one operation, with equal results in every form of a pass.

A value between two numbers of a narrow dtype is rounded to one of them at random, to the nearer one more often, so that the mean
is right. The random number is a hash of four numbers: the position of the element in its tensor, in the order of memory, a seed,
the number of the step, and a second value of the same element, which differs between tensors of one size. It needs no memory and no
generator, and a resumed run draws the same numbers as an uninterrupted one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import register_pointwise

# Multipliers that spread the bits of a counter, and those of a finaliser with little bias (C. Wellons' search of 2018).
_SPREAD_STEP, _SPREAD_SEED = 0x9E3779B1, 0x85EBCA77
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B
_LOW = 0xFFFFFFFF

#: The operation in C: `k` is the position of the element.
STOCHASTIC_C = f"""
static inline uint32_t m_mix(uint32_t h) {{
  h ^= h >> 16; h *= 0x{_MIX_1:x}u; h ^= h >> 15; h *= 0x{_MIX_2:x}u; h ^= h >> 16;
  return h;
}}
static inline uint32_t m_draw(float salt, float seed, float step, uint32_t k) {{
  m_bits b; b.f = salt;
  return m_mix(m_mix(k + (uint32_t)(int32_t)step * 0x{_SPREAD_STEP:x}u + (uint32_t)(int32_t)seed * 0x{_SPREAD_SEED:x}u) ^ b.u);
}}
static inline float m_stochastic_bfloat16(float x, float salt, float seed, float step, uint32_t k) {{
  m_bits b, down; b.f = x;
  down.u = (b.u + (m_draw(salt, seed, step, k) & 0xffffu)) & 0xffff0000u;
  return (b.u & 0x7f800000u) == 0x7f800000u ? x : down.f;
}}
static inline float m_stochastic_float16(float x, float salt, float seed, float step, uint32_t k) {{
  m_bits b, down; b.f = x;
  uint32_t r = m_draw(salt, seed, step, k);
  down.u = (b.u + (r & 0x1fffu)) & 0xffffe000u;
  /* Below 2^-14 the numbers of half precision are 2^-24 apart. */
  float small = floorf(x * 16777216.0f + (float)(r >> 8) * 5.9604645e-08f) * 5.9604645e-08f;
  float y = fabsf(x) < 6.1035156e-05f ? small : down.f;
  return (b.u & 0x7f800000u) == 0x7f800000u ? x : y;
}}
"""

#: The operation in Triton; `at` are the positions of the elements.
STOCHASTIC_TRITON = f"""@triton.jit
def mix(h):
    h = (h ^ (h >> 16)) * 0x{_MIX_1:x}
    h = (h ^ (h >> 15)) * 0x{_MIX_2:x}
    return h ^ (h >> 16)


@triton.jit
def draw(salt, seed, step, at):
    key = step.to(tl.int32).to(tl.uint32) * 0x{_SPREAD_STEP:x} + seed.to(tl.int32).to(tl.uint32) * 0x{_SPREAD_SEED:x}
    return mix(mix(at.to(tl.uint32) + key) ^ salt.to(tl.uint32, bitcast=True))


@triton.jit
def stochastic_bfloat16(x, salt, seed, step, at):
    bits = x.to(tl.uint32, bitcast=True)
    down = ((bits + (draw(salt, seed, step, at) & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, down)


@triton.jit
def stochastic_float16(x, salt, seed, step, at):
    bits = x.to(tl.uint32, bitcast=True)
    r = draw(salt, seed, step, at)
    down = ((bits + (r & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
    small = tl.floor(x * 16777216.0 + (r >> 8).to(tl.float32) * 5.9604645e-08) * 5.9604645e-08
    y = tl.where(tl.abs(x) < 6.1035156e-05, small, down)
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, y)


"""


def round_stochastically(
    x: Tensor, salt: Tensor, seed: Tensor | float, step: Tensor | float, dtype: torch.dtype
) -> Tensor:
    """Return values of single precision rounded to a narrower dtype, up or down at random, so that the mean is right.

    Args:
        x: The values, float32.
        salt: Another value for each element; tensors of one size that differ in it draw independently. Positions are counted in
            the order of its memory.
        seed: An integer below 2^24.
        step: An integer below 2^24, another one for each draw.
        dtype: `torch.bfloat16` or `torch.float16`.

    Returns:
        A float32 tensor with numbers of that dtype. Infinite values and NaN stay.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> x = torch.full((10_000,), 1.001)
        >>> rounded = kernels.round_stochastically(x, x, 0, 1, torch.bfloat16)
        >>> sorted(set(rounded.tolist())), round(rounded.mean().item(), 3)
        ([1.0, 1.0078125], 1.001)
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"values are rounded stochastically to bfloat16 or float16, not to {dtype}")
    seed, step = (
        value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64, device=x.device)
        for value in (seed, step)
    )
    rounded: Tensor = torch.ops.moduli.stochastic_round(x, salt, seed, step, dtype)
    return rounded


def _compute(x: Tensor, salt: Tensor, seed: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result by torch's operations: 64-bit integers, of which the lower 32 bits count."""
    position = torch.empty_like(salt, dtype=torch.int64)
    count = torch.arange(x.numel(), device=x.device)
    position.as_strided((x.numel(),), (1,)).copy_(count)  # in the order of memory: strides are those of a dense tensor
    spread = [step.to(x.device, torch.int64) * _SPREAD_STEP, seed.to(x.device, torch.int64) * _SPREAD_SEED]
    draw = _mix(_mix((position + spread[0] + spread[1]) & _LOW) ^ (_read_bits(salt) & _LOW))
    bits = _read_bits(x)
    dropped = 16 if dtype is torch.bfloat16 else 13
    down = ((bits + (draw & ((1 << dropped) - 1))) >> dropped) << dropped
    rounded = down.to(torch.int32).view(torch.float32)
    if dtype is torch.float16:
        small = torch.floor(x * 2.0**24 + (draw >> 8).float() * 2.0**-24) * 2.0**-24
        rounded = torch.where(x.abs() < 2.0**-14, small, rounded)
    return torch.where(x.isfinite(), rounded, x)


def _read_bits(x: Tensor) -> Tensor:
    return x.to(torch.float32).view(torch.int32).to(torch.int64)


def _mix(h: Tensor) -> Tensor:
    h = ((h ^ (h >> 16)) * _MIX_1) & _LOW
    h = ((h ^ (h >> 15)) * _MIX_2) & _LOW
    return h ^ (h >> 16)


register_pointwise(
    "stochastic_round(Tensor self, Tensor salt, Tensor seed, Tensor step, ScalarType dtype) -> Tensor", _compute
)
