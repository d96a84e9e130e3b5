"""Thousands of models as one matrix.

A `Population` is many particles of one structure, stacked. Its nouns:

* the **storage** is one N x P matrix for each group (dtype and device) of the layout: `pop.matrices`, or `pop.matrix` where
  there is one group. It is live: writing to it changes the members, and the other way round;
* `pop.named_parameters()` and `pop.parameters()` are the same storage as one **leaf** of shape (N, *shape) per parameter,
  the same objects at every call, with `requires_grad` and `.grad`: what optimizers update in place.
  `pop.named_buffers()` are the stacked buffers, each member having its own;
* a **member**, `pop[i]`, is a module whose parameters and buffers are views of row i. Its structure is the population's:
  edits of it are refused. `pop.template` is one such module without a row, `pop.layout` the layout of a member;
* a **part**, `pop[i:j]`, is a population that shares the storage; `pop[mask]` and `pop[indices]` are copies;
* a **call** evaluates all members: `pop(x)`, `pop.losses(fn, *args)` -> (N,), `pop.gradients(fn, *args)` -> a Population,
  `pop.losses_and_gradients`. `vectorize=` sets the method, and `pop.explain(x)` says which one was chosen and why;
* **arithmetic** is that of particles, by whole-matrix operations, with numbers, one number per member (N,), single
  particles and vectors (P,); in-place forms write into the storage;
* **fitness** is one number per member, lower is better: `sort`, `top`, `tournament`, `roulette` (and `selection`, which
  gives indices); `crossover`, `mutate`, `replace` and `migrate` make and exchange members;
* a **seed** belongs to a member: `pop.seeds(generator)` returns (N,) of them for `mutate`, `crossover`, `rand` and `randn`,
  whose numbers depend only on a member's seed and the position of a parameter, whatever the chunking.

* an **ensemble**: `pop.predict(x)` has the mean of the members' outputs, with error bars; `pop.best(losses)`,
  `pop.to_modules()` and `pop.to_ensemble()` return modules for use elsewhere;
* a **shard**: `pop.shard(mesh)` spreads the members over processes; each stores its rows (`pop.sharding` says which);
* **around** a model: `Population.around(net, n, sigma=, rank=)` is a population that is never stored, a mean and low-rank noise;
* a **host**: `pop.host(executor)` puts the members on the workers of a Ray cluster, where they are evaluated and trained.

`state_dict` and `load_state_dict` work by the template's names with stacked tensors; `to`, `train`, `eval`, `clone`,
`deepcopy` and `pickle` work as for modules.

Example:
    >>> import torch
    >>> from torch import nn
    >>> from moduli.population import Population
    >>> pop = Population.of(nn.Linear, 8, 3, 1)
    >>> x, y = torch.randn(16, 3), torch.randn(16, 1)
    >>> losses, step = pop.losses_and_gradients(lambda net: (net(x) - y).square().mean())
    >>> pop -= 0.1 * step
    >>> best = pop.top(losses, 2)
    >>> len(best.crossover(best[[1, 0]]).mutate(rate=0.5, scale=0.01))
    2
"""

from . import selection
from ._around import PopulationAround
from ._ensemble import EnsembleModule, EnsemblePrediction
from ._hosted import HostedPopulation
from ._low_rank_call import FunctionOfMember, call_low_rank
from ._population import Population
from ._shard import Shard

__all__ = [
    "EnsembleModule",
    "EnsemblePrediction",
    "FunctionOfMember",
    "HostedPopulation",
    "Population",
    "PopulationAround",
    "Shard",
    "call_low_rank",
    "selection",
]
