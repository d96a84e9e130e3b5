"""The layout of a model: what its parameters are called, how large they are, and where each sits in a flat vector.

A `Layout` is the only place where structure is turned into numbers. It belongs to any `torch.nn.Module` and to any list
or dict of tensors; whatever adds, stacks, optimises or stores models asks `layout_of` for it:

* `Entry`: one parameter: name, shape, dtype, device, position, and the other names it is tied to;
* `BufferEntry`: the same for a buffer, with its persistence instead of a position;
* `Group`: the parameters that share a dtype and a device, hence one flat vector;
* `Layout.fingerprint`: equal for equal structures, in any process on any machine;
* `diff`: the first difference between two structures, as a sentence;
* `read`: a live module tree, read at one moment: its `Structure` (the layout, and every module in it), parameters,
  buffers and modules. Two readings have the same structure exactly if nothing looks different: whatever asks "is this
  module what it was?" asks `read`;
* `map_tensors`: a nested value, as links keep them, with every tensor in it replaced;
* tensors that several processes hold in pieces (DTensors): `is_sharded`, `piece_of` and `make_whole`, `cut_like` and
  `piece_like` for the ways back.

A layout never goes stale: it is immutable, and `layout_of` compares the live module with what it remembers on every
call, so an edit anywhere in the tree gives another layout at the next one.

Example:
    >>> import torch
    >>> from moduli.layout import layout_of
    >>> layout = layout_of(torch.nn.Linear(3, 2))
    >>> for entry in layout:
    ...     print(entry.name, entry.shape, entry.offset)
    weight (2, 3) 0
    bias (2,) 6
"""

from ._difference import Difference, diff
from ._layout import BufferEntry, Entry, Group, Layout, LayoutError
from ._nested import map_tensors
from ._pieces import (
    Box,
    any_sharded,
    cut,
    cut_like,
    find_box,
    find_group,
    gather_objects,
    is_sharded,
    make_whole,
    memory_of,
    piece_like,
    piece_of,
    show_pieces,
)
from ._scan import Source, addresses, layout_and_tensors, layout_of
from ._structure import ModuleEntry, Reading, Structure, read

__all__ = [
    "Layout",
    "Entry",
    "BufferEntry",
    "Group",
    "LayoutError",
    "Source",
    "layout_of",
    "layout_and_tensors",
    "addresses",
    "read",
    "Reading",
    "Structure",
    "ModuleEntry",
    "Difference",
    "diff",
    "map_tensors",
    "Box",
    "any_sharded",
    "cut",
    "cut_like",
    "find_box",
    "find_group",
    "gather_objects",
    "is_sharded",
    "make_whole",
    "memory_of",
    "piece_like",
    "piece_of",
    "show_pieces",
]
