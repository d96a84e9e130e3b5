"""Problems of Hock and Schittkowski (1981) with their published starts and optima."""

import math

import torch

D = torch.float64


def _hs(f, x0, best, eq=None, ineq=None, bounds=None):
    """One problem: a function, its start, the published optimum, equations, inequalities (at least zero) and bounds."""
    cons = []
    if eq is not None:
        cons.append({"type": "eq", "fun": lambda x: torch.stack(list(eq(x)))})
    if ineq is not None:
        cons.append({"type": "ineq", "fun": lambda x: torch.stack(list(ineq(x)))})
    return f, torch.tensor(x0, dtype=D), best, cons, bounds


def sq(v):
    return v * v


exp, log, sin, cos, sqrt = torch.exp, torch.log, torch.sin, torch.cos, torch.sqrt

PROBLEMS = {
    1: _hs(lambda x: 100 * sq(x[1] - x[0] ** 2) + sq(1 - x[0]), [-2.0, 1.0], 0.0, bounds=[(None, None), (-1.5, None)]),
    2: _hs(
        lambda x: 100 * sq(x[1] - x[0] ** 2) + sq(1 - x[0]),
        [-2.0, 1.5],
        0.0504261879,
        bounds=[(None, None), (1.5, None)],
    ),
    3: _hs(lambda x: x[1] + 1e-5 * sq(x[1] - x[0]), [10.0, 1.0], 0.0, bounds=[(None, None), (0, None)]),
    4: _hs(lambda x: (x[0] + 1) ** 3 / 3 + x[1], [1.125, 0.125], 8 / 3, bounds=[(1, None), (0, None)]),
    5: _hs(
        lambda x: sin(x[0] + x[1]) + sq(x[0] - x[1]) - 1.5 * x[0] + 2.5 * x[1] + 1,
        [0.0, 0.0],
        -math.sqrt(3) / 2 - math.pi / 3,
        bounds=[(-1.5, 4), (-3, 3)],
    ),
    6: _hs(lambda x: sq(1 - x[0]), [-1.2, 1.0], 0.0, eq=lambda x: [10 * (x[1] - x[0] ** 2)]),
    7: _hs(
        lambda x: log(1 + x[0] ** 2) - x[1], [2.0, 2.0], -math.sqrt(3), eq=lambda x: [sq(1 + x[0] ** 2) + x[1] ** 2 - 4]
    ),
    8: _hs(lambda x: -1 + 0 * x.sum(), [2.0, 1.0], -1.0, eq=lambda x: [x[0] ** 2 + x[1] ** 2 - 25, x[0] * x[1] - 9]),
    9: _hs(
        lambda x: sin(math.pi * x[0] / 12) * cos(math.pi * x[1] / 16),
        [0.0, 0.0],
        -0.5,
        eq=lambda x: [4 * x[0] - 3 * x[1]],
    ),
    10: _hs(
        lambda x: x[0] - x[1], [-10.0, 10.0], -1.0, ineq=lambda x: [-3 * x[0] ** 2 + 2 * x[0] * x[1] - x[1] ** 2 + 1]
    ),
    11: _hs(lambda x: sq(x[0] - 5) + x[1] ** 2 - 25, [4.9, 0.1], -8.498464223, ineq=lambda x: [x[1] - x[0] ** 2]),
    12: _hs(
        lambda x: 0.5 * x[0] ** 2 + x[1] ** 2 - x[0] * x[1] - 7 * x[0] - 7 * x[1],
        [0.0, 0.0],
        -30.0,
        ineq=lambda x: [25 - 4 * x[0] ** 2 - x[1] ** 2],
    ),
    13: _hs(
        lambda x: sq(x[0] - 2) + x[1] ** 2,
        [-2.0, -2.0],
        1.0,
        ineq=lambda x: [(1 - x[0]) ** 3 - x[1]],
        bounds=[(0, None), (0, None)],
    ),
    14: _hs(
        lambda x: sq(x[0] - 2) + sq(x[1] - 1),
        [2.0, 2.0],
        9 - 2.875 * math.sqrt(7),
        eq=lambda x: [x[0] - 2 * x[1] + 1],
        ineq=lambda x: [1 - 0.25 * x[0] ** 2 - x[1] ** 2],
    ),
    15: _hs(
        lambda x: 100 * sq(x[1] - x[0] ** 2) + sq(1 - x[0]),
        [-2.0, 1.0],
        306.5,
        ineq=lambda x: [x[0] * x[1] - 1, x[0] + x[1] ** 2],
        bounds=[(None, 0.5), (None, None)],
    ),
    16: _hs(
        lambda x: 100 * sq(x[1] - x[0] ** 2) + sq(1 - x[0]),
        [-2.0, 1.0],
        0.25,
        ineq=lambda x: [x[0] + x[1] ** 2, x[0] ** 2 + x[1]],
        bounds=[(-2, 0.5), (None, 1)],
    ),
    17: _hs(
        lambda x: 100 * sq(x[1] - x[0] ** 2) + sq(1 - x[0]),
        [-2.0, 1.0],
        1.0,
        ineq=lambda x: [x[1] ** 2 - x[0], x[0] ** 2 - x[1]],
        bounds=[(-2, 0.5), (None, 1)],
    ),
    18: _hs(
        lambda x: 0.01 * x[0] ** 2 + x[1] ** 2,
        [2.0, 2.0],
        5.0,
        ineq=lambda x: [x[0] * x[1] - 25, x[0] ** 2 + x[1] ** 2 - 25],
        bounds=[(2, 50), (0, 50)],
    ),
    19: _hs(
        lambda x: (x[0] - 10) ** 3 + (x[1] - 20) ** 3,
        [20.1, 5.84],
        -6961.81381,
        ineq=lambda x: [sq(x[0] - 5) + sq(x[1] - 5) - 100, 82.81 - sq(x[1] - 5) - sq(x[0] - 6)],
        bounds=[(13, 100), (0, 100)],
    ),
    20: _hs(
        lambda x: 100 * sq(x[1] - x[0] ** 2) + sq(1 - x[0]),
        [-2.0, 1.0],
        81.5 - 25 * math.sqrt(3),
        ineq=lambda x: [x[0] + x[1] ** 2, x[0] ** 2 + x[1], x[0] ** 2 + x[1] ** 2 - 1],
        bounds=[(-0.5, 0.5), (None, None)],
    ),
    21: _hs(
        lambda x: 0.01 * x[0] ** 2 + x[1] ** 2 - 100,
        [-1.0, -1.0],
        -99.96,
        ineq=lambda x: [10 * x[0] - x[1] - 10],
        bounds=[(2, 50), (-50, 50)],
    ),
    22: _hs(lambda x: sq(x[0] - 2) + sq(x[1] - 1), [2.0, 2.0], 1.0, ineq=lambda x: [2 - x[0] - x[1], x[1] - x[0] ** 2]),
    23: _hs(
        lambda x: x[0] ** 2 + x[1] ** 2,
        [3.0, 1.0],
        2.0,
        ineq=lambda x: [
            x[0] + x[1] - 1,
            x[0] ** 2 + x[1] ** 2 - 1,
            9 * x[0] ** 2 + x[1] ** 2 - 9,
            x[0] ** 2 - x[1],
            x[1] ** 2 - x[0],
        ],
        bounds=[(-50, 50), (-50, 50)],
    ),
    24: _hs(
        lambda x: (sq(x[0] - 3) - 9) * x[1] ** 3 / (27 * math.sqrt(3)),
        [1.0, 0.5],
        -1.0,
        ineq=lambda x: [x[0] / math.sqrt(3) - x[1], x[0] + math.sqrt(3) * x[1], 6 - x[0] - math.sqrt(3) * x[1]],
        bounds=[(0, None), (0, None)],
    ),
    26: _hs(
        lambda x: sq(x[0] - x[1]) + (x[1] - x[2]) ** 4,
        [-2.6, 2.0, 2.0],
        0.0,
        eq=lambda x: [(1 + x[1] ** 2) * x[0] + x[2] ** 4 - 3],
    ),
    27: _hs(
        lambda x: 0.01 * sq(x[0] - 1) + sq(x[1] - x[0] ** 2), [2.0, 2.0, 2.0], 0.04, eq=lambda x: [x[0] + x[2] ** 2 + 1]
    ),
    28: _hs(
        lambda x: sq(x[0] + x[1]) + sq(x[1] + x[2]),
        [-4.0, 1.0, 1.0],
        0.0,
        eq=lambda x: [x[0] + 2 * x[1] + 3 * x[2] - 1],
    ),
    29: _hs(
        lambda x: -x[0] * x[1] * x[2],
        [1.0, 1.0, 1.0],
        -16 * math.sqrt(2),
        ineq=lambda x: [48 - x[0] ** 2 - 2 * x[1] ** 2 - 4 * x[2] ** 2],
    ),
    30: _hs(
        lambda x: (x**2).sum(),
        [1.0, 1.0, 1.0],
        1.0,
        ineq=lambda x: [x[0] ** 2 + x[1] ** 2 - 1],
        bounds=[(1, 10), (-10, 10), (-10, 10)],
    ),
    31: _hs(
        lambda x: 9 * x[0] ** 2 + x[1] ** 2 + 9 * x[2] ** 2,
        [1.0, 1.0, 1.0],
        6.0,
        ineq=lambda x: [x[0] * x[1] - 1],
        bounds=[(-10, 10), (1, 10), (-10, 1)],
    ),
    32: _hs(
        lambda x: sq(x[0] + 3 * x[1] + x[2]) + 4 * sq(x[0] - x[1]),
        [0.1, 0.7, 0.2],
        1.0,
        eq=lambda x: [1 - x.sum()],
        ineq=lambda x: [6 * x[1] + 4 * x[2] - x[0] ** 3 - 3],
        bounds=[(0, None)] * 3,
    ),
    33: _hs(
        lambda x: (x[0] - 1) * (x[0] - 2) * (x[0] - 3) + x[2],
        [0.0, 0.0, 3.0],
        math.sqrt(2) - 6,
        ineq=lambda x: [x[2] ** 2 - x[1] ** 2 - x[0] ** 2, (x**2).sum() - 4],
        bounds=[(0, None), (0, None), (0, 5)],
    ),
    34: _hs(
        lambda x: -x[0],
        [0.0, 1.05, 2.9],
        -math.log(math.log(10)),
        ineq=lambda x: [x[1] - exp(x[0]), x[2] - exp(x[1])],
        bounds=[(0, 100), (0, 100), (0, 10)],
    ),
    35: _hs(
        lambda x: (
            9
            - 8 * x[0]
            - 6 * x[1]
            - 4 * x[2]
            + 2 * x[0] ** 2
            + 2 * x[1] ** 2
            + x[2] ** 2
            + 2 * x[0] * x[1]
            + 2 * x[0] * x[2]
        ),
        [0.5, 0.5, 0.5],
        1 / 9,
        ineq=lambda x: [3 - x[0] - x[1] - 2 * x[2]],
        bounds=[(0, None)] * 3,
    ),
    36: _hs(
        lambda x: -x[0] * x[1] * x[2],
        [10.0, 10.0, 10.0],
        -3300.0,
        ineq=lambda x: [72 - x[0] - 2 * x[1] - 2 * x[2]],
        bounds=[(0, 20), (0, 11), (0, 42)],
    ),
    37: _hs(
        lambda x: -x[0] * x[1] * x[2],
        [10.0, 10.0, 10.0],
        -3456.0,
        ineq=lambda x: [72 - x[0] - 2 * x[1] - 2 * x[2], x[0] + 2 * x[1] + 2 * x[2]],
        bounds=[(0, 42)] * 3,
    ),
    38: _hs(
        lambda x: (
            100 * sq(x[1] - x[0] ** 2)
            + sq(1 - x[0])
            + 90 * sq(x[3] - x[2] ** 2)
            + sq(1 - x[2])
            + 10.1 * (sq(x[1] - 1) + sq(x[3] - 1))
            + 19.8 * (x[1] - 1) * (x[3] - 1)
        ),
        [-3.0, -1.0, -3.0, -1.0],
        0.0,
        bounds=[(-10, 10)] * 4,
    ),
    39: _hs(
        lambda x: -x[0],
        [2.0, 2.0, 2.0, 2.0],
        -1.0,
        eq=lambda x: [x[1] - x[0] ** 3 - x[2] ** 2, x[0] ** 2 - x[1] - x[3] ** 2],
    ),
    40: _hs(
        lambda x: -x.prod(),
        [0.8, 0.8, 0.8, 0.8],
        -0.25,
        eq=lambda x: [x[0] ** 3 + x[1] ** 2 - 1, x[0] ** 2 * x[3] - x[2], x[3] ** 2 - x[1]],
    ),
    41: _hs(
        lambda x: 2 - x[0] * x[1] * x[2],
        [2.0, 2.0, 2.0, 2.0],
        52 / 27,
        eq=lambda x: [x[0] + 2 * x[1] + 2 * x[2] - x[3]],
        bounds=[(0, 1), (0, 1), (0, 1), (0, 2)],
    ),
    42: _hs(
        lambda x: sq(x[0] - 1) + sq(x[1] - 2) + sq(x[2] - 3) + sq(x[3] - 4),
        [1.0, 1.0, 1.0, 1.0],
        28 - 10 * math.sqrt(2),
        eq=lambda x: [x[0] - 2, x[2] ** 2 + x[3] ** 2 - 2],
    ),
    43: _hs(
        lambda x: (x**2).sum() + x[2] ** 2 - 5 * x[0] - 5 * x[1] - 21 * x[2] + 7 * x[3],
        [0.0] * 4,
        -44.0,
        ineq=lambda x: [
            8 - (x**2).sum() - x[0] + x[1] - x[2] + x[3],
            10 - (x**2).sum() - x[1] ** 2 - x[3] ** 2 + x[0] + x[3],
            5 - 2 * x[0] ** 2 - x[1] ** 2 - x[2] ** 2 - 2 * x[0] + x[1] + x[3],
        ],
    ),
    45: _hs(lambda x: 2 - x.prod() / 120, [2.0] * 5, 1.0, bounds=[(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]),
    46: _hs(
        lambda x: sq(x[0] - x[1]) + sq(x[2] - 1) + (x[3] - 1) ** 4 + (x[4] - 1) ** 6,
        [math.sqrt(2) / 2, 1.75, 0.5, 2.0, 2.0],
        0.0,
        eq=lambda x: [x[0] ** 2 * x[3] + sin(x[3] - x[4]) - 1, x[1] + x[2] ** 4 * x[3] ** 2 - 2],
    ),
    47: _hs(
        lambda x: sq(x[0] - x[1]) + (x[1] - x[2]) ** 3 + (x[2] - x[3]) ** 4 + (x[3] - x[4]) ** 4,
        [2.0, math.sqrt(2), -1.0, 2 - math.sqrt(2), 0.5],
        0.0,
        eq=lambda x: [x[0] + x[1] ** 2 + x[2] ** 3 - 3, x[1] - x[2] ** 2 + x[3] - 1, x[0] * x[4] - 1],
    ),
    48: _hs(
        lambda x: sq(x[0] - 1) + sq(x[1] - x[2]) + sq(x[3] - x[4]),
        [3.0, 5.0, -3.0, 2.0, -2.0],
        0.0,
        eq=lambda x: [x.sum() - 5, x[2] - 2 * (x[3] + x[4]) + 3],
    ),
    49: _hs(
        lambda x: sq(x[0] - x[1]) + sq(x[2] - 1) + (x[3] - 1) ** 4 + (x[4] - 1) ** 6,
        [10.0, 7.0, 2.0, -3.0, 0.8],
        0.0,
        eq=lambda x: [x[0] + x[1] + x[2] + 4 * x[3] - 7, x[2] + 5 * x[4] - 6],
    ),
    50: _hs(
        lambda x: sq(x[0] - x[1]) + sq(x[1] - x[2]) + (x[2] - x[3]) ** 4 + sq(x[3] - x[4]),
        [35.0, -31.0, 11.0, 5.0, -5.0],
        0.0,
        eq=lambda x: [x[0] + 2 * x[1] + 3 * x[2] - 6, x[1] + 2 * x[2] + 3 * x[3] - 6, x[2] + 2 * x[3] + 3 * x[4] - 6],
    ),
    51: _hs(
        lambda x: sq(x[0] - x[1]) + sq(x[1] + x[2] - 2) + sq(x[3] - 1) + sq(x[4] - 1),
        [2.5, 0.5, 2.0, -1.0, 0.5],
        0.0,
        eq=lambda x: [x[0] + 3 * x[1] - 4, x[2] + x[3] - 2 * x[4], x[1] - x[4]],
    ),
    52: _hs(
        lambda x: sq(4 * x[0] - x[1]) + sq(x[1] + x[2] - 2) + sq(x[3] - 1) + sq(x[4] - 1),
        [2.0] * 5,
        1859 / 349,
        eq=lambda x: [x[0] + 3 * x[1], x[2] + x[3] - 2 * x[4], x[1] - x[4]],
    ),
    53: _hs(
        lambda x: sq(x[0] - x[1]) + sq(x[1] + x[2] - 2) + sq(x[3] - 1) + sq(x[4] - 1),
        [2.0] * 5,
        176 / 43,
        eq=lambda x: [x[0] + 3 * x[1], x[2] + x[3] - 2 * x[4], x[1] - x[4]],
        bounds=[(-10, 10)] * 5,
    ),
    56: _hs(
        lambda x: -x[0] * x[1] * x[2],
        [
            1.0,
            1.0,
            1.0,
            math.asin(math.sqrt(1 / 4.2)),
            math.asin(math.sqrt(1 / 4.2)),
            math.asin(math.sqrt(1 / 4.2)),
            math.asin(math.sqrt(5 / 7.2)),
        ],
        -3.456,
        eq=lambda x: [
            x[0] - 4.2 * sin(x[3]) ** 2,
            x[1] - 4.2 * sin(x[4]) ** 2,
            x[2] - 4.2 * sin(x[5]) ** 2,
            x[0] + 2 * x[1] + 2 * x[2] - 7.2 * sin(x[6]) ** 2,
        ],
    ),
    60: _hs(
        lambda x: sq(x[0] - 1) + sq(x[0] - x[1]) + (x[1] - x[2]) ** 4,
        [2.0, 2.0, 2.0],
        0.03256820025,
        eq=lambda x: [x[0] * (1 + x[1] ** 2) + x[2] ** 4 - 4 - 3 * math.sqrt(2)],
        bounds=[(-10, 10)] * 3,
    ),
    61: _hs(
        lambda x: 4 * x[0] ** 2 + 2 * x[1] ** 2 + 2 * x[2] ** 2 - 33 * x[0] + 16 * x[1] - 24 * x[2],
        [0.0, 0.0, 0.0],
        -143.6461422,
        eq=lambda x: [3 * x[0] - 2 * x[1] ** 2 - 7, 4 * x[0] - x[2] ** 2 - 11],
    ),
    63: _hs(
        lambda x: 1000 - x[0] ** 2 - 2 * x[1] ** 2 - x[2] ** 2 - x[0] * x[1] - x[0] * x[2],
        [2.0, 2.0, 2.0],
        961.7151721,
        eq=lambda x: [8 * x[0] + 14 * x[1] + 7 * x[2] - 56, (x**2).sum() - 25],
        bounds=[(0, None)] * 3,
    ),
    64: _hs(
        lambda x: 5 * x[0] + 50000 / x[0] + 20 * x[1] + 72000 / x[1] + 10 * x[2] + 144000 / x[2],
        [1.0, 1.0, 1.0],
        6299.842428,
        ineq=lambda x: [1 - 4 / x[0] - 32 / x[1] - 120 / x[2]],
        bounds=[(1e-5, None)] * 3,
    ),
    65: _hs(
        lambda x: sq(x[0] - x[1]) + sq(x[0] + x[1] - 10) / 9 + sq(x[2] - 5),
        [-5.0, 5.0, 0.0],
        0.9535288567,
        ineq=lambda x: [48 - (x**2).sum()],
        bounds=[(-4.5, 4.5), (-4.5, 4.5), (-5, 5)],
    ),
    66: _hs(
        lambda x: 0.2 * x[2] - 0.8 * x[0],
        [0.0, 1.05, 2.9],
        0.5181632741,
        ineq=lambda x: [x[1] - exp(x[0]), x[2] - exp(x[1])],
        bounds=[(0, 100), (0, 100), (0, 10)],
    ),
    71: _hs(
        lambda x: x[0] * x[3] * (x[0] + x[1] + x[2]) + x[2],
        [1.0, 5.0, 5.0, 1.0],
        17.0140173,
        eq=lambda x: [(x**2).sum() - 40],
        ineq=lambda x: [x.prod() - 25],
        bounds=[(1, 5)] * 4,
    ),
    76: _hs(
        lambda x: (
            x[0] ** 2
            + 0.5 * x[1] ** 2
            + x[2] ** 2
            + 0.5 * x[3] ** 2
            - x[0] * x[2]
            + x[2] * x[3]
            - x[0]
            - 3 * x[1]
            + x[2]
            - x[3]
        ),
        [0.5] * 4,
        -4.681818181,
        ineq=lambda x: [
            5 - x[0] - 2 * x[1] - x[2] - x[3],
            4 - 3 * x[0] - x[1] - 2 * x[2] + x[3],
            x[1] + 4 * x[2] - 1.5,
        ],
        bounds=[(0, None)] * 4,
    ),
    77: _hs(
        lambda x: sq(x[0] - 1) + sq(x[0] - x[1]) + sq(x[2] - 1) + (x[3] - 1) ** 4 + (x[4] - 1) ** 6,
        [2.0] * 5,
        0.24150513,
        eq=lambda x: [
            x[0] ** 2 * x[3] + sin(x[3] - x[4]) - 2 * math.sqrt(2),
            x[1] + x[2] ** 4 * x[3] ** 2 - 8 - math.sqrt(2),
        ],
    ),
    78: _hs(
        lambda x: x.prod(),
        [-2.0, 1.5, 2.0, -1.0, -1.0],
        -2.91970041,
        eq=lambda x: [(x**2).sum() - 10, x[1] * x[2] - 5 * x[3] * x[4], x[0] ** 3 + x[1] ** 3 + 1],
    ),
    79: _hs(
        lambda x: sq(x[0] - 1) + sq(x[0] - x[1]) + sq(x[1] - x[2]) + (x[2] - x[3]) ** 4 + (x[3] - x[4]) ** 4,
        [2.0] * 5,
        0.0787768209,
        eq=lambda x: [
            x[0] + x[1] ** 2 + x[2] ** 3 - 2 - 3 * math.sqrt(2),
            x[1] - x[2] ** 2 + x[3] + 2 - 2 * math.sqrt(2),
            x[0] * x[4] - 2,
        ],
    ),
    80: _hs(
        lambda x: exp(x.prod()),
        [-2.0, 2.0, 2.0, -1.0, -1.0],
        0.0539498478,
        eq=lambda x: [(x**2).sum() - 10, x[1] * x[2] - 5 * x[3] * x[4], x[0] ** 3 + x[1] ** 3 + 1],
        bounds=[(-2.3, 2.3), (-2.3, 2.3), (-3.2, 3.2), (-3.2, 3.2), (-3.2, 3.2)],
    ),
    81: _hs(
        lambda x: exp(x.prod()) - 0.5 * sq(x[0] ** 3 + x[1] ** 3 + 1),
        [-2.0, 2.0, 2.0, -1.0, -1.0],
        0.0539498478,
        eq=lambda x: [(x**2).sum() - 10, x[1] * x[2] - 5 * x[3] * x[4], x[0] ** 3 + x[1] ** 3 + 1],
        bounds=[(-2.3, 2.3), (-2.3, 2.3), (-3.2, 3.2), (-3.2, 3.2), (-3.2, 3.2)],
    ),
    100: _hs(
        lambda x: (
            sq(x[0] - 10)
            + 5 * sq(x[1] - 12)
            + x[2] ** 4
            + 3 * sq(x[3] - 11)
            + 10 * x[4] ** 6
            + 7 * x[5] ** 2
            + x[6] ** 4
            - 4 * x[5] * x[6]
            - 10 * x[5]
            - 8 * x[6]
        ),
        [1.0, 2.0, 0.0, 4.0, 0.0, 1.0, 1.0],
        680.6300573,
        ineq=lambda x: [
            127 - 2 * x[0] ** 2 - 3 * x[1] ** 4 - x[2] - 4 * x[3] ** 2 - 5 * x[4],
            282 - 7 * x[0] - 3 * x[1] - 10 * x[2] ** 2 - x[3] + x[4],
            196 - 23 * x[0] - x[1] ** 2 - 6 * x[5] ** 2 + 8 * x[6],
            -4 * x[0] ** 2 - x[1] ** 2 + 3 * x[0] * x[1] - 2 * x[2] ** 2 - 5 * x[5] + 11 * x[6],
        ],
    ),
    113: _hs(
        lambda x: (
            x[0] ** 2
            + x[1] ** 2
            + x[0] * x[1]
            - 14 * x[0]
            - 16 * x[1]
            + sq(x[2] - 10)
            + 4 * sq(x[3] - 5)
            + sq(x[4] - 3)
            + 2 * sq(x[5] - 1)
            + 5 * x[6] ** 2
            + 7 * sq(x[7] - 11)
            + 2 * sq(x[8] - 10)
            + sq(x[9] - 7)
            + 45
        ),
        [2.0, 3.0, 5.0, 5.0, 1.0, 2.0, 7.0, 3.0, 6.0, 10.0],
        24.3062091,
        ineq=lambda x: [
            105 - 4 * x[0] - 5 * x[1] + 3 * x[6] - 9 * x[7],
            -10 * x[0] + 8 * x[1] + 17 * x[6] - 2 * x[7],
            8 * x[0] - 2 * x[1] - 5 * x[8] + 2 * x[9] + 12,
            -3 * sq(x[0] - 2) - 4 * sq(x[1] - 3) - 2 * x[2] ** 2 + 7 * x[3] + 120,
            -5 * x[0] ** 2 - 8 * x[1] - sq(x[2] - 6) + 2 * x[3] + 40,
            -0.5 * sq(x[0] - 8) - 2 * sq(x[1] - 4) - 3 * x[4] ** 2 + x[5] + 30,
            -(x[0] ** 2) - 2 * sq(x[1] - 2) + 2 * x[0] * x[1] - 14 * x[4] + 6 * x[5],
            3 * x[0] - 6 * x[1] - 12 * sq(x[8] - 8) + 7 * x[9],
        ],
    ),
}
