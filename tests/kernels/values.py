"""Special values for tests of operations, and the operations that round once."""

import math

# Each of these rounds once, in C and in torch, so results must agree to the last bit.
# (sqrt is not among them: torch's is not correctly rounded in float32.)
EXACT = ["neg", "abs", "sign", "square", "reciprocal", "relu", "floor", "ceil", "trunc", "round", "clamp", "isfinite"]
EXACT += ["nan_to_num_given", "masked_fill", "number_minus", "number_over", "clamp_low", "ones_like"]
EXACT_2 = [
    "add",
    "sub",
    "mul",
    "div",
    "maximum",
    "minimum",
    "copysign",
    "where",
    "lt",
    "ge",
    "logical_and",
    "fmax",
    "le",
]

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-3, 20.0, -20.0, 100.0, -100.0, 0.25, math.pi, 7.0]
SPECIAL += [math.inf, -math.inf, math.nan, 1e-30, -1e-30, 1e30, 65519.0, 6e-8]
# torch's vectorised fmod gives NaN for these, so only functions of one argument get them.
SUBNORMAL = [1e-40, -3e-42, 1e-310]
DIVIDING = {"fmod", "remainder", "floor_divide"}
