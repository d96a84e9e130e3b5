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
* `Guard`: a block that ends well, or leaves tensors and states as they were; `allow_interrupts` inside of it;
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

import typing as _typing

from ._difference import Difference as Difference
from ._difference import diff as diff
from ._guard import Guard as Guard
from ._guard import allow_interrupts as allow_interrupts
from ._layout import BufferEntry as BufferEntry
from ._layout import Entry as Entry
from ._layout import Group as Group
from ._layout import Layout as Layout
from ._layout import LayoutError as LayoutError
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
from ._scan import Source as Source
from ._scan import addresses as addresses
from ._scan import layout_and_tensors as layout_and_tensors
from ._scan import layout_of as layout_of
from ._scan import map_tensors as map_tensors
from ._structure import ModuleEntry as ModuleEntry
from ._structure import Reading as Reading
from ._structure import Structure as Structure
from ._structure import read as read

if not _typing.TYPE_CHECKING:  # which takes a name that is imported as itself for public
    __all__ = sorted(name for name in globals() if not name.startswith("_"))
