"""Recipes that make one model of several.

A **recipe** merges the tensors that several models have under one name, name by name. Every one here takes live modules and
gives a new module, or takes state dicts and gives a new state dict:

* of any models: `linear` (any weighted average or sum), `lerp` and `slerp` (between two, along a line or an arc),
  `soup`, `greedy_soup` and `greedy_ingredients` (the average of all, or of those that improve the score), `fisher` (weighted by
  `fisher_information`);
* of models fine-tuned from one base, by their task vectors: `task_vector`, `task_arithmetic` (add and subtract them), `ties`
  (trim, elect signs, average values of that sign), `dare` (drop entries at random, rescale), `della` (drop small ones more
  often), `breadcrumbs` (drop the smallest and the largest), `sce` (select the entries that vary most), `stock` (an interpolation
  ratio from their angles);
* on the sphere of directions: `karcher`, `multislerp`, `nuslerp`;
* by selecting entries of one model or another: `nearswap`, `arcee_fusion`, `ram`;
* of models trained from different initial values: `align` first (or `align=` of any recipe) puts the units of one model into the
  order of the other's, `repair` restores the statistics of units after the merge, and `path` measures the loss between two models.

With paths of checkpoints and `out=`, each of them merges files (`moduli.io.merge_files`):
``merge.ties("base/", ["math/", "code/"], out="merged/", density=0.5)``. `search` finds coefficients by the score of the model.
`make_recipe` makes a recipe by its name (`list_recipes`), `run` and `stream` apply one to models or mappings; `recipe` decorates
user-defined recipes.

Rules of all recipes:

* **The first model decides**: the result has its form, names, order, dtypes, devices, trainability and ties, and copies of its
  tensors that are not merged. Inputs are never changed, and share nothing with the result.
* **A coefficient** (`Coefficient`) is a number, or a mapping from glob patterns of names to numbers. A name without a number
  raises, and so does a pattern that matches no name.
* **Precision**: tensors are combined in float32 (or complex64), those of float64 and complex128 in their own dtype, and rounded
  once at the end. NaN and infinity raise, and so does a result that its dtype cannot represent.
* **Tensors that are equal in all models are copied bit for bit** by every recipe whose coefficients make it an average.
* **Integers** and truth values are never averaged. They are the first's and must be equal in all models, except for batch
  normalisation's counters (`Integers`).
* **Floating buffers** are the first's unless `buffers="merge"` (`Buffers`). Batch normalisation needs
  `reestimate_batch_norm` either way. In a state dict only its statistics are recognised as buffers; patterns declare others.
* **Memory**: one name at a time, with a few tensors of its size beside the result. Mappings that read from a file work.

Example:
    >>> import torch
    >>> from moduli import merge
    >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> c = merge.lerp(a, b, {"bias": 0.0, "*": 0.5})
    >>> torch.equal(c.bias, a.bias), torch.allclose(c.weight, (a.weight + b.weight) / 2)
    (True, True)
"""

import typing as _typing

from ._align import align as align
from ._align import align_all as align_all
from ._align import match_units as match_units
from ._align import permute_units as permute_units
from ._angles import karcher as karcher
from ._angles import multislerp as multislerp
from ._angles import nuslerp as nuslerp
from ._angles import slerp as slerp
from ._angles import stock as stock
from ._averages import greedy_ingredients as greedy_ingredients
from ._averages import greedy_soup as greedy_soup
from ._averages import lerp as lerp
from ._averages import linear as linear
from ._averages import soup as soup
from ._averages import task_arithmetic as task_arithmetic
from ._averages import task_vector as task_vector
from ._call import RECIPES as RECIPES
from ._call import find_recipe as find_recipe
from ._call import list_recipes as list_recipes
from ._call import make_recipe as make_recipe
from ._call import recipe as recipe
from ._choice import arcee_fusion as arcee_fusion
from ._choice import nearswap as nearswap
from ._choice import ram as ram
from ._coefficients import Coefficient as Coefficient
from ._coefficients import layered as layered
from ._data import fisher as fisher
from ._data import fisher_information as fisher_information
from ._data import reestimate_batch_norm as reestimate_batch_norm
from ._driver import Buffers as Buffers
from ._driver import Integers as Integers
from ._driver import Policy as Policy
from ._driver import Recipe as Recipe
from ._driver import Row as Row
from ._driver import run as run
from ._driver import stream as stream
from ._models import MergeError as MergeError
from ._models import Model as Model
from ._path import LossPath as LossPath
from ._path import path as path
from ._repair import repair as repair
from ._search import Groups as Groups
from ._search import MergeSearch as MergeSearch
from ._search import search as search
from ._sparse import breadcrumbs as breadcrumbs
from ._sparse import dare as dare
from ._sparse import della as della
from ._sparse import sce as sce
from ._ties import Elect as Elect
from ._ties import ties as ties

if not _typing.TYPE_CHECKING:  # type checkers take `import X as X` as public and reject a computed `__all__`
    __all__ = sorted(name for name in globals() if not name.startswith("_"))
