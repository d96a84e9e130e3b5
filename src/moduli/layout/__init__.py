"""The layout of a model: what its parameters are called, how large they are, and where each sits in a flat vector.

A `Layout` is the only place where structure is turned into numbers. It belongs to any `torch.nn.Module` and to any list
or dict of tensors; whatever adds, stacks, optimises or stores models asks `layout_of` for it:

* `Entry`: one parameter: name, shape, dtype, device, position, and the other names it is tied to;
* `BufferEntry`: the same for a buffer, with its persistence instead of a position;
* `Group`: the parameters that share a dtype and a device, hence one flat vector;
* `Axis`: the name and labels of one axis of an entry, where it has any;
* `align`: the gate where two models meet: their labels are equal, or this `Reorder` makes them so, or they are refused
  (`AxesError`); `align_axes` asks for one tensor, `reorder_state` has the state of an optimizer follow its parameter;
* `find_overlap`: the entries that two tensors of different sizes have in common, as an `Overlap`;
* names: `select` and `match_name` by patterns, `public_name`, `unwrapped_name`, `make_rename`; a pattern that matches nothing
  is an error (`UnknownNameError`);
* `Layout.fingerprint`: equal for equal structures, in any process on any machine;
* `diff`: the first difference between two structures, as a sentence;
* `read`: a live module tree, read at one moment: its `Structure` (the layout, and every module in it), parameters,
  buffers and modules. Two readings have the same structure exactly if nothing looks different: whatever asks "is this
  module what it was?" asks `read`;
* `ParameterWatch`: whether a module still has the parameters it had, cheap enough for every step (`SWAPS` counts replaced
  registries for it); `TreeWatch`: whether a reading is still current;
* `REMOVED`: the parameters that edits have taken out of models; `RESIZED`: those that took the place of others with more or
  fewer units, and the `UnitMap` (with a `EntryGain` and a `FreshEntries`) that says how;
* `call_with_tensors`: a call of a module with other tensors in the place of its own;
* weights that pruning and old normalisations compute before every call: `copy_module` copies models that have them,
  `recompute_weights` (with `find_computed` and `compute_weight`) follows parameters that were written;
* `map_tensors`: a nested value, such as the state of a link, with every tensor in it replaced;
* `Guard`: a block that ends well, or leaves tensors and states as they were; `allow_interrupts` inside of it;
* tensors sharded over several processes (DTensors): `is_sharded`, `piece_of` (the local shard) and `make_whole` (gather),
  and the inverse operations `piece_like` and `cut_like`.

A layout never goes stale: it is immutable, and `layout_of` compares the live module with its cached structure on every
call, so after an edit anywhere in the tree the next call returns another layout.

Example:
    >>> import torch
    >>> from moduli.layout import layout_of
    >>> layout = layout_of(torch.nn.Linear(3, 2))
    >>> for entry in layout:
    ...     print(entry.name, entry.shape, entry.offset)
    weight (2, 3) 0
    bias (2,) 6
"""

import typing as _typing

from ._axes import AxesError as AxesError
from ._axes import Reorder as Reorder
from ._axes import align_axes as align_axes
from ._axes import align_tensor as align_tensor
from ._axes import find_labelled_name as find_labelled_name
from ._axes import list_bases as list_bases
from ._call import call_with_tensors as call_with_tensors
from ._computed import compute_weight as compute_weight
from ._computed import copy_module as copy_module
from ._computed import find_computed as find_computed
from ._computed import recompute_weights as recompute_weights
from ._difference import Difference as Difference
from ._difference import diff as diff
from ._entries import read_axes as read_axes
from ._gate import Alignment as Alignment
from ._gate import align as align
from ._gate import reorder_state as reorder_state
from ._guard import Guard as Guard
from ._guard import allow_interrupts as allow_interrupts
from ._layout import Axes as Axes
from ._layout import Axis as Axis
from ._layout import BufferEntry as BufferEntry
from ._layout import Entry as Entry
from ._layout import Group as Group
from ._layout import Layout as Layout
from ._layout import LayoutError as LayoutError
from ._names import TENSOR_BUFFER_PREFIX as TENSOR_BUFFER_PREFIX
from ._names import TENSOR_PARAM_PREFIX as TENSOR_PARAM_PREFIX
from ._names import NameMap as NameMap
from ._names import Rename as Rename
from ._names import UnknownNameError as UnknownNameError
from ._names import check_pattern as check_pattern
from ._names import compile_pattern as compile_pattern
from ._names import list_forms as list_forms
from ._names import list_names as list_names
from ._names import make_rename as make_rename
from ._names import match_name as match_name
from ._names import public_name as public_name
from ._names import refuse_pattern as refuse_pattern
from ._names import select as select
from ._names import suggest_name as suggest_name
from ._names import unwrapped_name as unwrapped_name
from ._overlap import Overlap as Overlap
from ._overlap import find_overlap as find_overlap
from ._pieces import Box as Box
from ._pieces import any_sharded as any_sharded
from ._pieces import cut as cut
from ._pieces import cut_like as cut_like
from ._pieces import find_box as find_box
from ._pieces import find_group as find_group
from ._pieces import gather_objects as gather_objects
from ._pieces import is_expanded as is_expanded
from ._pieces import is_sharded as is_sharded
from ._pieces import make_whole as make_whole
from ._pieces import memory_of as memory_of
from ._pieces import piece_like as piece_like
from ._pieces import piece_of as piece_of
from ._pieces import show_pieces as show_pieces
from ._removed import REMOVED as REMOVED
from ._removed import RemovedParameters as RemovedParameters
from ._removed import list_registered as list_registered
from ._scan import Source as Source
from ._scan import addresses as addresses
from ._scan import layout_and_tensors as layout_and_tensors
from ._scan import layout_of as layout_of
from ._scan import map_tensors as map_tensors
from ._structure import ModuleEntry as ModuleEntry
from ._structure import Reading as Reading
from ._structure import Structure as Structure
from ._structure import read as read
from ._unit_map import RESIZED as RESIZED
from ._unit_map import EntryGain as EntryGain
from ._unit_map import FreshEntries as FreshEntries
from ._unit_map import ResizedParameters as ResizedParameters
from ._unit_map import UnitMap as UnitMap
from ._watch import SWAPS as SWAPS
from ._watch import ParameterWatch as ParameterWatch
from ._watch import RegistrySwaps as RegistrySwaps
from ._watch import TreeWatch as TreeWatch

if not _typing.TYPE_CHECKING:  # type checkers take `import X as X` as public and reject a computed `__all__`
    __all__ = sorted(name for name in globals() if not name.startswith("_"))
