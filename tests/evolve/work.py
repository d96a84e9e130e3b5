"""Fitness functions that other processes import, some of which fail."""

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
    """A fitness that fails the first `times` times for members whose first number is `bad`; it leaves a file for each call."""

    def __init__(self, kind, directory, bad=2.0, times=1):
        self.kind, self.directory, self.bad, self.times = kind, str(directory), bad, times

    def __call__(self, row):
        (Path(self.directory) / f"{float(row[0])}-{time.monotonic_ns()}-{os.getpid()}").touch()
        if float(row[0]) == self.bad and self.count_calls(self.bad) <= self.times:
            if self.kind == "raise":
                raise ArithmeticError("no such model")
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return float(row.sum())

    def count_calls(self, value):
        """Return the number of calls for members whose first number is `value`."""
        return len(list(Path(self.directory).glob(f"{value}-*")))


def bowl(net):
    """Return the squared distance from three of the prediction of a linear model for ones."""
    return (net(torch.ones(2)) - 3).square().sum()


class Counted:
    """A fitness of a network that leaves a file for each call, and with `kill` ends its process at the first call."""

    def __init__(self, directory, x, y, kill=False):
        self.directory, self.x, self.y, self.kill = str(directory), x, y, kill

    def __call__(self, net):
        first = not any(Path(self.directory).iterdir())
        (Path(self.directory) / f"{time.monotonic_ns()}-{os.getpid()}").touch()
        if self.kill and first:
            os.kill(os.getpid(), signal.SIGKILL)
        return (net(self.x) - self.y).square().mean()


class Opaque(Counted):
    """The same fitness as a Python number, which `torch.vmap` does not support."""

    def __call__(self, net):
        return float(super().__call__(net))
