"""Fitness functions that other processes find by name, some of them with faults."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch


def sphere(row):
    return row.double().square().sum()


def noisy(row):
    return float(row.sum()) + torch.rand(()).item() + np.random.rand() + random.random()


def slow(row):
    time.sleep(0.05)
    return row.sum()


class Faulty:
    """Goes wrong for members whose first number is `bad`: the first `times` times, counted in a file."""

    def __init__(self, kind, directory, bad=2.0, times=1):
        self.kind, self.directory, self.bad, self.times = kind, str(directory), bad, times

    def __call__(self, row):
        (Path(self.directory) / f"{float(row[0])}-{time.monotonic_ns()}-{os.getpid()}").touch()
        if float(row[0]) == self.bad and self.seen(self.bad) <= self.times:
            if self.kind == "raise":
                raise ArithmeticError("no such model")
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return float(row.sum())

    def seen(self, value):
        return len(list(Path(self.directory).glob(f"{value}-*")))


def bowl(net):
    """The fitness of a linear model: how far its prediction of ones is from three."""
    return (net(torch.ones(2)) - 3).square().sum()


class Counted:
    """A fitness of a network that leaves a file for each call, and ends its process at the first call if that is asked for."""

    def __init__(self, directory, x, y, kill=False):
        self.directory, self.x, self.y, self.kill = str(directory), x, y, kill

    def __call__(self, net):
        first = not any(Path(self.directory).iterdir())
        (Path(self.directory) / f"{time.monotonic_ns()}-{os.getpid()}").touch()
        if self.kill and first:
            os.kill(os.getpid(), signal.SIGKILL)
        return (net(self.x) - self.y).square().mean()


class Opaque(Counted):
    """The same as a number of Python, which `torch.vmap` can't follow."""

    def __call__(self, net):
        return float(super().__call__(net))
