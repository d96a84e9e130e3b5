"""Guards: registered values are restored unless the block succeeds, and signals wait for the end of a deferred block."""

import collections
import os
import signal
import threading

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m
from moduli.layout import Guard, allow_interrupts
from moduli.optim import Module, TensorTransform


class Stop(Exception):
    pass


def make_state():
    generator = torch.Generator().manual_seed(3)
    return {
        "step": 1,
        "average": torch.ones(2),
        "history": collections.deque([torch.zeros(1)], maxlen=3),
        "nested": {"list": [1, torch.full((2,), 5.0)], "pair": (torch.tensor(7.0), 2)},
        "generator": generator,
    }


def change(state):
    state["step"] += 1
    state["average"].mul_(3)
    state["history"].append(torch.ones(1))
    state["history"][0].add_(1)
    state["nested"]["list"].pop(0)
    state["nested"]["list"][0].neg_()
    state["nested"]["pair"][0].add_(1)
    state["new"] = state.pop("step")
    torch.rand(1, generator=state["generator"])


def test_states_and_tensors_are_restored():
    state, w = make_state(), nn.Parameter(torch.ones(2))
    average, generator_state = state["average"], state["generator"].get_state()
    memory = w.data_ptr()
    with pytest.raises(Stop), Guard() as guard:
        guard.states(state)
        guard.tensors([w])
        change(state)
        w.data = torch.zeros(3)
        torch.set_grad_enabled(False)
        raise Stop
    assert torch.is_grad_enabled()
    assert list(state) == ["step", "average", "history", "nested", "generator"]
    assert state["step"] == 1
    assert state["average"] is average
    assert average.tolist() == [1, 1]
    assert [t.tolist() for t in state["history"]] == [[0]]
    assert state["history"].maxlen == 3
    assert state["nested"]["list"][0] == 1
    assert state["nested"]["list"][1].tolist() == [5, 5]
    assert state["nested"]["pair"][0] == 7
    assert torch.equal(state["generator"].get_state(), generator_state)
    assert w.tolist() == [1, 1]
    assert w.data_ptr() == memory


def test_a_block_that_succeeds_keeps_its_writes():
    w, row = torch.ones(2), {"a": 1}
    with Guard() as guard:
        guard.tensors([w])
        guard.mappings(row)
        w.add_(1)
        row["a"] = 2
    assert w.tolist() == [2, 2]
    assert row == {"a": 2}
    with pytest.raises(Stop), Guard() as guard:
        guard.tensors([w])
        w.add_(1)
        guard.commit()
        raise Stop
    assert w.tolist() == [3, 3]


def test_an_unwritten_tensor_keeps_its_version():
    w = torch.ones(2)
    version = w._version
    with pytest.raises(Stop), Guard() as guard:
        guard.tensors([w])
        raise Stop
    assert w._version == version


def test_a_failing_undo_is_noted_on_the_error_and_the_others_still_run():
    w = torch.ones(1)
    with pytest.raises(Stop) as error, Guard() as guard:
        guard.tensors([w])
        guard.add(lambda: 1 / 0)
        w.zero_()
        raise Stop
    assert w == 1
    assert "ZeroDivisionError" in error.value.__notes__[0]


@pytest.fixture
def calls():
    numbers = []

    def raise_stop(number, frame):
        numbers.append(number)
        raise Stop(str(number))

    before = {number: signal.signal(number, raise_stop) for number in (signal.SIGUSR1, signal.SIGALRM)}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_wait_for_the_end_of_a_deferred_block(calls):
    done, handler = [], signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Stop, match=str(int(signal.SIGUSR1))), Guard(deferred=True):
        signal.raise_signal(signal.SIGUSR1)
        with Guard(deferred=True):
            os.kill(os.getpid(), signal.SIGUSR1)
        done.append(1)
    assert done == [1]
    assert calls == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_guard_that_keeps_its_handler_installed_calls_the_replaced_one(calls):
    handler = signal.getsignal(signal.SIGUSR1)
    with Guard(deferred="often"):
        pass
    assert signal.getsignal(signal.SIGUSR1) is not handler
    for _ in range(2):
        with pytest.raises(Stop):
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Stop), Guard(deferred=True):
            signal.raise_signal(signal.SIGUSR1)
    assert len(calls) == 4
    signal.signal(signal.SIGUSR1, handler)  # a program may restore its handler at any time
    with pytest.raises(Stop), Guard(deferred="often"):
        signal.raise_signal(signal.SIGUSR1)
    assert len(calls) == 5


def test_every_handler_runs_though_the_first_raises(calls):
    with pytest.raises(Stop), Guard(deferred=True):
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGALRM)
    assert calls == [signal.SIGUSR1, signal.SIGALRM]


def test_signals_are_handled_where_interrupts_are_allowed(calls):
    w = torch.ones(1)
    with pytest.raises(Stop), Guard(deferred=True) as guard:
        guard.tensors([w])
        w.zero_()
        with allow_interrupts():
            with Guard(deferred=True):
                pass
            signal.raise_signal(signal.SIGUSR1)
            w.add_(5)
    assert w == 1
    with pytest.raises(Stop), Guard(deferred=True) as guard:
        guard.tensors([w])
        w.zero_()
        signal.raise_signal(signal.SIGUSR1)
        with allow_interrupts():  # pending signals are handled first
            w.add_(5)
    assert w == 1
    with pytest.raises(Stop), Guard(deferred=True):
        with allow_interrupts(), Guard(deferred=True):
            pass
        signal.raise_signal(signal.SIGUSR1)  # deferred again
        w.add_(1)
    assert w == 2


def test_a_handler_installed_inside_the_block_stays(calls):
    handler = signal.getsignal(signal.SIGUSR1)

    def other(number, frame):
        pass

    with Guard(deferred=True), allow_interrupts():
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other
    signal.signal(signal.SIGUSR1, handler)


def test_guards_in_other_threads_do_not_defer_signals(calls):
    inside, go = threading.Event(), threading.Event()

    def work():
        with Guard(deferred=True):
            inside.set()
            go.wait(600)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(600)
    with pytest.raises(Stop):
        signal.raise_signal(signal.SIGUSR1)
    go.set()
    thread.join()


# -- steps ---------------------------------------------------------------------------------------------------------------


class Raises(Module):
    """A link that raises at one step."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def apply(self, objective):
        self.global_state["count"] = self.global_state.get("count", 0) + 1
        if objective.current_step == self.at:
            raise Stop
        return objective


class Moves(Module):
    """A link that writes to the parameters directly."""

    def apply(self, objective):
        for param in objective.params:
            param.mul_(0.5)
        return objective


class Late(TensorTransform):
    """A link whose average is allocated at its first step."""

    def single_tensor_update(self, tensor, param, grad, loss, state, setting):
        state["average"] = tensor.clone() if "average" not in state else state["average"].lerp_(tensor, 0.5)

    def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        return tensor


def freeze(opt):
    return {
        key: {name: torch.as_tensor(value).clone() for name, value in row.items()}
        for key, row in opt.named_state_dict()["state"].items()
    }


@pytest.mark.parametrize(("at", "fuse"), [(0, "auto"), (0, False), (2, False)])
def test_a_link_that_raises_changes_neither_parameters_nor_state(at, fuse):
    w = nn.Parameter(torch.ones(3))
    moves = [Moves()] if fuse is False else []
    opt = mo.Optimizer([w], *moves, m.HeavyBall(0.9), Late(), Raises(at), m.LR(0.1), fuse=fuse)
    for _ in range(at):
        w.grad = torch.ones(3)
        opt.step()
    before, state = w.detach().clone(), freeze(opt)
    links = {path: link["global"] for path, link in opt.state_dict()["links"].items()}
    w.grad = torch.ones(3)
    with pytest.raises(Stop):
        opt.step()
    assert torch.equal(w, before)
    assert opt.current_step == at
    after = freeze(opt)
    assert after.keys() == state.keys()
    assert all(torch.equal(after[k][name], value) for k, row in state.items() for name, value in row.items())
    assert {path: link["global"] for path, link in opt.state_dict()["links"].items()} == links


def test_signals_interrupt_a_closure_but_not_an_update(calls):
    w = nn.Parameter(torch.ones(3))
    events = []

    class Signals(Module):
        def apply(self, objective):
            signal.raise_signal(signal.SIGUSR1)
            events.append("link")
            return objective

    def loss():
        signal.raise_signal(signal.SIGUSR1)
        events.append("closure")
        return (w**2).sum()

    with pytest.raises(Stop):
        mo.Optimizer([w], m.Adam(), m.LR(0.1)).step(mo.closure(loss))
    assert not events
    assert torch.equal(w, torch.ones(3))
    w.grad = torch.ones(3)
    opt = mo.Optimizer([w], Signals(), m.LR(0.5))
    with pytest.raises(Stop):
        opt.step()
    assert events == ["link"]
    assert torch.equal(w, torch.full((3,), 0.5))
    assert opt.current_step == 1
