"""Functions that the tests of hosted populations send to workers of a cluster."""

import time

import moduli as mo
from moduli import m

__all__ = ["adam", "error", "hang", "sphere"]


def adam(pop):
    return mo.Optimizer(pop, m.Adam(), m.LR(0.05))


def error(net, x):
    return (net(x) - 1).square().mean()


def hang(net, x):
    while True:
        time.sleep(1)


def sphere(row):
    return row.square().sum()
