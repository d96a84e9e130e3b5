"""Ray Tune: trials report the settings of a chain, and each trial trains a population.

Each trial trains sixteen networks together, whose learning rates are spread around that of the trial, and reports the
best loss, the learning rate of the best member, and all settings of the chain. `python examples/ray_tune_chain.py` runs Ray on this
machine, `python examples/ray_tune_chain.py auto` uses a cluster.
"""

import sys

import torch
from torch import nn

try:
    import ray
    from ray import tune
except ImportError:
    print("this example needs Ray Tune: pip install 'ray[tune]'")
    sys.exit(0)

import moduli as mo
from moduli import m


def train(config):
    """Run one trial."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x.sin().sum(1, keepdim=True)
    pop = mo.Population.of(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), 16)
    rates = config["lr"] * torch.logspace(-1, 1, 16)
    opt = mo.Optimizer(pop, m.ClipNorm(1.0), m.Adam(beta1=config["beta1"]), m.LR(rates))
    for step in range(60):
        losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        if step % 20 == 19:
            settings = {
                f"{type(link).__name__}.{key}": value
                for link in opt.modules
                for key, value in link.defaults.items()
                if isinstance(value, int | float)
            }
            best = int(losses.argmin())
            tune.report({"loss": float(losses[best]), "best lr": float(rates[best]), **settings})


def main(address=None):
    """Run two trials and print the best result."""
    ray.init(address or "local", include_dashboard=False, log_to_driver=False)
    space = {"lr": tune.grid_search([1e-3, 1e-2]), "beta1": 0.9}
    results = tune.Tuner(train, param_space=space, tune_config=tune.TuneConfig(metric="loss", mode="min")).fit()
    best = results.get_best_result()
    print(f"loss {best.metrics['loss']:.4f} with lr {best.metrics['best lr']:.2g}, beta1 {best.metrics['Adam.beta1']}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
