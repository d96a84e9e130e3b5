"""Optimizers that raise, hang or kill their process, importable by the processes of a race, and a normal one."""

import ctypes
import os
import signal
import time

import torch


class Rogue:
    def __init__(self, model, act):
        self.parameters, self.act, self.steps = list(model.parameters()), act, 0

    def step(self, closure):
        closure()
        self.steps += 1
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= 0.1 * parameter.grad
        if self.steps == 5:
            self.act(self)


def tame(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def raising(model):
    def act(_):
        raise ZeroDivisionError("by design")

    return Rogue(model, act)


def swallowing(model):
    """Return an optimizer that catches every exception of its closure and continues."""

    class Swallowing:
        def step(self, closure):
            try:  # noqa: SIM105
                closure()
            except Exception:  # noqa: BLE001
                pass

    return Swallowing()


def hanging(model):
    return Rogue(model, lambda _: time.sleep(10_000))


def dying(model):
    return Rogue(model, lambda _: os.kill(os.getpid(), signal.SIGKILL))


def faulting(model):
    return Rogue(model, lambda _: ctypes.string_at(0))


def exiting(model):
    return Rogue(model, lambda _: os._exit(7))


def diverging(model):
    return torch.optim.SGD(model.parameters(), lr=1e9)


def idle(model):
    class Done:
        def step(self, closure):
            return None

    return Done()


def stubborn(model):
    """Return an optimizer that ignores SIGTERM and loops forever."""

    def act(_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass

    return Rogue(model, act)


def talking(model):
    def act(_):
        print("noise on standard output " * 1000)

    return Rogue(model, act)
