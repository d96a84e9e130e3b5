"""The optimizer works with torch's schedulers, gradient scaler, compiler, hooks and functional calls, and with trainers."""

import logging
import subprocess
import sys
import warnings

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import moduli as mo
from moduli import m
from moduli.optim import Optimizer
from optim.helpers import Backtrack, Half, Momentum


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


X = torch.linspace(-1, 1, 30, dtype=torch.float64).view(10, 3)
Y = X.sum(1, keepdim=True).sin()


def loss_of(model):
    return ((model(X) - Y) ** 2).mean()


SCHEDULERS = {
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4]),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda t: 0.9),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
}


def test_the_table_has_all_schedulers_of_torch():
    names = {name for name in schedulers.__all__ if name not in ("LRScheduler", "_LRScheduler")}
    assert names <= set(SCHEDULERS)


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_change_adam_as_they_change_torchs(name, tensor):
    def run(make):
        model = net()
        opt = make(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR warns about its own calls
            scheduler = SCHEDULERS[name](opt)
            for _ in range(8):
                opt.zero_grad()
                loss = loss_of(model)
                loss.backward()
                opt.step()
                scheduler.step(*([loss.item()] if name == "ReduceLROnPlateau" else []))
        return [p.detach() for p in model.parameters()], opt.param_groups[0]

    lr = lambda: torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1  # noqa: E731
    ours, group = run(lambda p: Optimizer(p, m.Adam(), m.LR(lr())))
    theirs, other = run(lambda p: torch.optim.Adam(p, lr=lr(), foreach=False))
    assert float(group["lr"]) == float(other["lr"])
    assert group["betas"] == other["betas"]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_cycled_momentum(name):
    def run(make):
        model = net()
        opt = make(model.parameters())
        scheduler = SCHEDULERS[name](opt)
        for _ in range(8):
            opt.zero_grad()
            loss_of(model).backward()
            opt.step()
            scheduler.step()
        return [p.detach() for p in model.parameters()]

    ours = run(lambda p: Optimizer(p, Momentum(momentum=0.9), m.LR(0.1)))
    theirs = run(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_accumulated_gradients():
    def run(parts):
        model = net()
        opt = Optimizer(model, m.Adam(), m.LR(0.1))
        for _ in range(3):
            opt.zero_grad()
            for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
                (((model(x) - y) ** 2).mean() / parts).backward()
            opt.step()
        return [p.detach() for p in model.parameters()]

    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-12) for a, b in zip(run(1), run(5), strict=True))


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_equals_torchs_adam(unscale):
    def run(make):
        model = net()
        opt = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for t in range(5):
            opt.zero_grad()
            scaler.scale(loss_of(model) * (float("inf") if t == 2 else 1.0)).backward()
            if unscale:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        return [p.detach() for p in model.parameters()], scaler.get_scale(), opt

    ours, scale, opt = run(lambda p: Optimizer(p, m.Adam(), m.LR(0.1)))
    theirs, other, _ = run(lambda p: torch.optim.Adam(p, lr=0.1))
    assert scale == other
    assert opt.current_step == 4  # the step with infinite gradients was skipped
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


def test_hooks_of_torch():
    model = net()
    opt = Optimizer(model, m.Adam(), m.LR(0.1))
    seen = []
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append("before"))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append("after"))
    opt.register_state_dict_post_hook(lambda o, state: {**state, "mine": 1})
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append("load") or None)
    opt.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
    opt.step(mo.closure(lambda: loss_of(model)))
    assert seen == ["before", "after"]
    state = opt.state_dict()
    assert state.pop("mine") == 1
    opt.load_state_dict(state)
    assert seen[2:] == ["load", "loaded"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_the_step(caplog):
    def run(compiled):
        model = net()
        opt = Optimizer(model, m.Adam(), Half(), m.LR(0.1))
        step = torch.compile(opt.step) if compiled else opt.step
        for t in range(4):
            opt.param_groups[0]["lr"] = 0.1 / (t + 1)
            opt.zero_grad()
            loss_of(model).backward()
            step()
        for _ in range(2):
            step(mo.closure(lambda: loss_of(model)))
        return [p.detach() for p in model.parameters()]

    with caplog.at_level(logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled = run(True)
    assert all(torch.equal(a, b) for a, b in zip(compiled, run(False), strict=True))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute"
)  # both warnings come from the tracer
def test_a_step_inside_a_compiled_training_loop():
    def run(compiled):
        model = net()
        opt = Optimizer(model, m.Adam(), m.LR(0.1))

        def iteration():
            opt.zero_grad()
            loss = loss_of(model)
            loss.backward()
            value = loss.detach()
            del loss
            opt.step()
            return value

        iterate = torch.compile(iteration, backend="eager") if compiled else iteration
        return [iterate().item() for _ in range(4)]

    assert run(True) == pytest.approx(run(False), rel=1e-12)


def test_importing_moduli_does_not_import_the_compiler():
    code = "import sys, moduli; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_functional_models():
    model = net()
    params = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    opt = Optimizer(params.items(), m.Adam(), m.LR(0.1))
    loss = lambda: ((torch.func.functional_call(model, params, (X,)) - Y) ** 2).mean()  # noqa: E731
    first = opt.step(mo.closure(loss))
    for _ in range(20):
        last = opt.step(mo.closure(loss))
    assert last < first / 2
    assert opt.state_dict()["param_groups"][0]["params"] == list(params)
    grads = torch.func.grad(lambda p: ((torch.func.functional_call(model, p, (X,)) - Y) ** 2).mean())(
        {name: p.detach() for name, p in params.items()}
    )
    for name, p in params.items():
        p.grad = grads[name]
    opt.step()


def test_averaged_models_of_torch():
    model = net()
    opt = Optimizer(model, m.Adam(), m.LR(0.1))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        opt.step(mo.closure(lambda: loss_of(model)))
        averaged.update_parameters(model)
    assert torch.isfinite(loss_of(averaged))


def test_meta_information_torch_expects():
    opt = Optimizer(net(), m.Adam(), m.LR(0.1))
    assert opt.defaults["lr"] == 0.1
    assert opt.state == {}
    assert len(opt.param_groups) == 1


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self, closure_link):
            super().__init__()
            self.net = net()
            self.closure_link = closure_link

        def training_step(self, batch, _):
            x, y = batch
            return ((self.net(x) - y) ** 2).mean()

        def configure_optimizers(self):
            links = [Half(0.1), Backtrack()] if self.closure_link else [m.Adam(), m.LR(0.1)]
            opt = Optimizer(self.net, *links)
            return opt if self.closure_link else ([opt], [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)])

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=5)

    def fit(module, epochs, **options):
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            **options,
        )
        trainer.fit(module, data)
        return trainer

    module = Lit(False)
    first = loss_of(module.net).item()
    trainer = fit(module, 3, enable_checkpointing=False)
    assert loss_of(module.net).item() < first
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
    path = tmp_path / "run.ckpt"
    trainer.save_checkpoint(path)
    resumed = Lit(False)
    other = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    other.fit(resumed, data, ckpt_path=str(path))
    assert other.optimizers[0].current_step == 8
    searched = Lit(True)
    fit(searched, 2, enable_checkpointing=False)
    assert loss_of(searched.net).item() < first


@pytest.mark.filterwarnings("ignore")
def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    opt = Optimizer(model, m.Adam(), m.LR(0.05))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 5, 0.5)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=5)
    model, opt, data, scheduler = accelerator.prepare(model, opt, data, scheduler)
    first = loss_of(model).item()
    for _ in range(10):
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(((model(x) - y) ** 2).mean())
                accelerator.clip_grad_norm_(model.parameters(), 10.0)
                opt.step()
                scheduler.step()
                opt.zero_grad()
    assert loss_of(model).item() < first
    assert opt.optimizer.current_step == 10
    state = opt.state_dict()
    opt.load_state_dict(state)
