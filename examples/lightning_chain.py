"""Lightning: log the settings of a chain of links, and train a population of models.

`LearningRateMonitor` reads the learning rate from the optimizer's groups; all other settings are read from the links. The second
module has a population, with one loss for each member; the trainer logs the smallest and their standard deviation.
"""

import sys
import warnings

import torch
from torch import nn

try:
    import lightning
except ImportError:
    print("this example needs lightning: pip install lightning")
    sys.exit(0)

import moduli as mo
from moduli import m

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
Y = X.sin().sum(1, keepdim=True)


class Reporter(lightning.Callback):
    """Prints the logged values at the end of every epoch, and the settings of each link."""

    def on_train_epoch_end(self, trainer, pl_module):
        """Print one line per epoch."""
        opt = trainer.optimizers[0]
        settings = {
            f"{type(link).__name__}.{key}": value for link in opt.modules for key, value in link.defaults.items()
        }
        logged = {key: f"{float(value):.3f}" for key, value in trainer.callback_metrics.items()}
        print(f"epoch {trainer.current_epoch}: {logged} {settings}")


class One(lightning.LightningModule):
    """One network that is trained by a chain."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        """Return the loss of one step."""
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        """Return the optimizer."""
        return mo.Optimizer(self.net, m.ClipNorm(1.0), m.Adam(beta1=0.8), m.LR(1e-2))


class Many(lightning.LightningModule):
    """Sixteen networks as one population; the optimizer evaluates them all at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.pop = mo.Population.of(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), 16)

    def training_step(self, batch, index):
        """Return the loss of one step."""
        x, y = batch
        losses = self.optimizers().optimizer.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        self.log_dict({"best": losses.min(), "spread": losses.std()})

    def configure_optimizers(self):
        """Return the optimizer."""
        return mo.Optimizer(self.pop, m.Adam(), m.LR(torch.logspace(-3, -1, 16)))


def main():
    """Train both modules."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=32)
    for module in (One(), Many()):
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Reporter()],
        )
        trainer.fit(module, loader)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Lightning warns about the number of data loader workers
    main()
