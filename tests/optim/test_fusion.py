"""Every form of a fused step detects changes of parameters, gradients and state between steps."""

import os
import threading
import warnings

import pytest
import torch

from moduli import Optimizer, m, optim

FORMS = ["c", "foreach", "plain"]


def chain():
    return [m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(0.01)]


def make(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, 3, generator=generator)) for _ in range(count)]


def give_gradients(params, step, skip=()):
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(params):
        p.grad = None if i in skip else torch.randn(4, 3, generator=generator).to(p.dtype).reshape(p.shape)


def train(change, *, fuse="auto", skip=lambda step: (), steps=6):
    params = make()
    opt = Optimizer(params, *chain(), fuse=fuse)
    for step in range(steps):
        give_gradients(params, step, skip(step))
        opt.step()
        if step == 2:
            change(params, opt)
    return [p.detach().clone() for p in params]


def swap_data(params, opt):
    params[1].data = torch.full_like(params[1], 0.5)


def set_storage(params, opt):
    with torch.no_grad():
        params[1].set_(torch.full((4, 3), 0.5))


def swap_objects(params, opt):
    torch.utils.swap_tensors(params[1], torch.nn.Parameter(torch.full((4, 3), 0.5)))


def resize_storage(params, opt):
    params[1].untyped_storage().resize_(1 << 16)


def transpose_data(params, opt):
    params[1].data = torch.full((3, 4), 0.5).t()


def move_moments(params, opt):
    state = opt.link("Adam").state
    for p in params:
        state[p]["exp_avg"].data = state[p]["exp_avg"].data * 2


def set_moments(params, opt):
    state = opt.link("Adam").state
    for p in params:
        state[p]["exp_avg"].set_(state[p]["exp_avg"] * 2)


def replace_moments(params, opt):
    state = opt.link("Adam").state
    for p in params:
        state[p]["exp_avg_sq"] = state[p]["exp_avg_sq"] * 2


def freeze(params, opt):
    params[1].requires_grad_(False)


def change_settings(params, opt):
    opt.param_groups[0]["lr"] = 0.5


CHANGES = [
    swap_data,
    set_storage,
    swap_objects,
    resize_storage,
    transpose_data,
    move_moments,
    set_moments,
    replace_moments,
    freeze,
    change_settings,
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_has_the_effect_it_has_unfused(monkeypatch, form, change):
    monkeypatch.setenv("MODULI_KERNELS", form)
    got, want = train(change), train(change, fuse=False)
    unchanged = train(lambda params, opt: None, fuse=False)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)
    if change is not resize_storage:
        assert any(not torch.allclose(a, b) for a, b in zip(want, unchanged, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_missing_at_some_steps(monkeypatch, form):
    monkeypatch.setenv("MODULI_KERNELS", form)

    def skip(step):
        return {1: (0,), 2: (0, 1, 2), 4: (2,)}.get(step, ())

    got = train(lambda params, opt: None, skip=skip)
    want = train(lambda params, opt: None, skip=skip, fuse=False)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_any_layout_and_dtype_step_as_unfused(monkeypatch, form):
    monkeypatch.setenv("MODULI_KERNELS", form)
    kinds = [
        lambda g: g,
        lambda g: g[:1].expand(4, 3),
        lambda g: g.t().contiguous().t(),
        lambda g: torch.cat([g, g], 1)[:, ::2],
        lambda g: torch._neg_view(g),
        lambda g: g.to_sparse(),
    ]
    results = []
    for fuse in ("auto", False):
        params = make()
        opt = Optimizer(params, *chain(), fuse=fuse)
        for step in range(2 * len(kinds)):
            give_gradients(params, step)
            params[1].grad = kinds[step % len(kinds)](params[1].grad)
            opt.step()
        results.append([p.detach().clone() for p in params])
    for g, w in zip(*results, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_moments_whose_memory_was_replaced_are_not_written_to_freed_memory(monkeypatch):
    # The replacement may go undetected, but freed memory must not be written.
    monkeypatch.setenv("MODULI_KERNELS", "c")
    params = [torch.nn.Parameter(torch.randn(1 << 16)) for _ in range(8)]
    opt = Optimizer(params, *chain())
    for step in range(12):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        if step == 0:
            moments = [opt.link("Adam").state[p]["exp_avg"] for p in params]
        elif step > 2:
            for moment in moments:
                moment.data = torch.full_like(moment, 7.0)
            guards = [torch.full_like(moment, 3.0) for moment in moments]  # likely at the address of the freed moments
            opt.step()
            assert all(bool((guard == 3.0).all()) for guard in guards)
    assert all(bool(p.isfinite().all()) for p in params)


@pytest.mark.parametrize("form", FORMS)
def test_eight_optimizers_in_eight_threads(monkeypatch, form):
    monkeypatch.setenv("MODULI_KERNELS", form)
    want = train(lambda params, opt: None)
    results = {}

    def work(i):
        results[i] = train(lambda params, opt: None)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for trained in results.values():
        for g, w in zip(trained, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("form", FORMS)
def test_a_forked_child_can_step(monkeypatch, form):
    monkeypatch.setenv("MODULI_KERNELS", form)
    params = make()
    opt = Optimizer(params, *chain())
    give_gradients(params, 0)
    opt.step()
    give_gradients(params, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about a fork while threads run
        child = os.fork()
    if child == 0:
        try:
            opt.step()
            done = all(bool(p.isfinite().all()) for p in params)
        finally:
            os._exit(0 if done else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_freed_moment_is_refused_also_many_steps_after_it_was_handed_out(monkeypatch):
    """A program with a reference to a moment may free its storage later; the next step raises, where torch would crash."""
    monkeypatch.setenv("MODULI_KERNELS", "c")
    param = torch.nn.Parameter(torch.ones(5000))
    link = m.Adam()
    opt = Optimizer([param], link, m.LR(0.1))
    for _ in range(2):
        param.grad = torch.ones(5000)
        opt.step()
    moment = next(
        value for value in link.state[param].values() if isinstance(value, torch.Tensor) and value.numel() == 5000
    )
    for _ in range(3):
        opt.step()
    moment.untyped_storage().resize_(0)
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match="resized to 0"):
        opt.step()
    assert torch.equal(param, before)


class FromFirst(optim.BufferTransform):
    """The update minus the first one, whose state starts from the update itself."""

    elementwise = True
    counts = True

    def begin(self, tensor, state, setting):
        state["first"] = tensor.clone()

    def transform(self, tensor, state, setting):
        return tensor - state["first"]


STARTS = {
    "Adan": m.Adan,
    "RMSprop": lambda: m.RMSprop(init="update"),
    "EMA": lambda: m.EMA(0.9, ema_init="update"),
    "ClipValueGrowth": m.ClipValueGrowth,
    "ClipValueByEMA": lambda: m.ClipValueByEMA(init="update"),
    "own": FromFirst,
}
BEFORE = {
    "ClipNorm": lambda: m.ClipNorm(0.1),
    "ClipValue": lambda: m.ClipValue(0.1),
    "decay": lambda: m.WeightDecay(1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_states_that_start_from_the_update_start_from_that_of_their_link(start, before, dtype):
    results = []
    for fuse in ("auto", False):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(4, 3, dtype=dtype))])
        opt = Optimizer(model, before(), start(), m.LR(0.1), fuse=fuse)
        for step in range(4):
            if step == 2:  # it begins later than the others
                model.append(torch.nn.Parameter(torch.ones(4, 3, dtype=dtype)))
            give_gradients(list(model), step)
            opt.step()
        results.append([p.detach().clone() for p in model])
    for g, w in zip(*results, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_only_states_that_start_from_an_update_delay_the_fused_pass():
    for links, passes in (([m.ClipNorm(1.0), m.Adam()], 1), ([m.Adan()], 1), ([m.ClipNorm(1.0), m.Adan()], 0)):
        params = make()
        opt = Optimizer(params, *links, m.LR(0.1))
        for step, expected in enumerate((passes, 1)):
            give_gradients(params, step)
            opt.step()
            assert len([each for segment in opt._plan.list_segments() for each in segment.explain()]) == expected
