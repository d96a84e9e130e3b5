"""Training frameworks drive an optimizer as they drive torch's own: the same parameters at the end."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m, presets

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def same(first, second):
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def batches():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=4)


def trainer(lightning, tmp_path, **options):
    return lightning.Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **{"logger": False, **options},
    )


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_in_both_modes(automatic, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self, make):
            super().__init__()
            self.automatic_optimization = automatic
            self.net, self.make = net(), make

        def training_step(self, batch, _):
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            if automatic:
                return loss
            opt = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            return None

        def configure_optimizers(self):
            return self.make(self.net)

    ours, theirs = (
        Lit(lambda model: mo.Optimizer(model, presets.adamw(1e-2))),
        Lit(lambda model: torch.optim.AdamW(model.parameters(), 1e-2)),
    )
    for module in (ours, theirs):
        trainer(lightning, tmp_path, max_epochs=3).fit(module, batches())
    same(ours.net, theirs.net)
    assert not torch.equal(ours.net[0].weight, net()[0].weight)


def test_lightning_monitors_rates_by_the_names_of_groups(tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, _):
            x, y = batch
            return (self.net(x) - y).square().mean()

        def configure_optimizers(self):
            groups = [
                {"params": self.net[0].parameters(), "name": "body"},
                {"params": self.net[2].parameters(), "lr": 0.5, "name": "head"},
            ]
            opt = mo.Optimizer(groups, m.LR(0.25))
            return [opt], [torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)]

    monitor = LearningRateMonitor(logging_interval="epoch")
    logger = CSVLogger(tmp_path)
    trainer(lightning, tmp_path, max_epochs=2, callbacks=[monitor], logger=logger).fit(Lit(), batches())
    assert {key.rpartition("/")[2]: values for key, values in monitor.lrs.items()} == {
        "body": [0.25, 0.125],
        "head": [0.5, 0.25],
    }


def test_trainer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, labels):
            out = self.net(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    data = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]

    def train(make, steps, resume=None):
        model = Model()
        opt = make(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 1 / (1 + t))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / type(opt).__module__.partition(".")[0]),
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            save_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
            seed=0,
        )
        run = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(opt, scheduler))
        run.train(resume_from_checkpoint=resume)
        return model

    ours = train(lambda model: mo.Optimizer(model, presets.adamw(1e-2)), 8)
    same(ours, train(lambda model: torch.optim.AdamW(model.parameters(), 1e-2), 8))
    resumed = train(
        lambda model: mo.Optimizer(model, presets.adamw(1e-2)), 8, str(tmp_path / "moduli" / "checkpoint-4")
    )
    for a, b in zip(ours.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_deepcopied_model_and_optimizer_step_alike():
    """Early stopping and population-based tuners copy the model and the optimizer together."""
    model = net()
    opt = mo.Optimizer(model, presets.adamw(1e-2))
    loss = mo.closure(lambda: (model(X) - Y).square().mean())
    opt.step(loss)
    twin, other = copy.deepcopy((model, opt))
    opt.step(loss)
    other.step(mo.closure(lambda: (twin(X) - Y).square().mean()))
    same(model, twin)
