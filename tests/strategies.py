"""Hypothesis strategies for tensors, parameters and modules, shared by all tests.

`modules()` draws trees of `nn.Module` with everything torch allows: nested and shared children, containers, tied
parameters, scalars, empty tensors, several dtypes, buffers of both kinds, and slots that hold None. `edit(data, net)`
makes one random change to such a tree, through the same interfaces a user has.

Values come from a seed that is part of the example, so a failing example is reproducible and shrinks well.
"""

import torch
from hypothesis import strategies as st
from torch import nn

FLOATS = (torch.float32, torch.float64)
ALL_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool)

names = st.sampled_from(["a", "b", "c", "weight", "bias"])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


class Node(nn.Module):
    """An empty module; a call adds the sums of its parameters and the results of its children to the input."""

    def forward(self, x):
        for parameter in self.parameters(recurse=False):
            x = x + parameter.sum()
        for child in self.children():
            x = child(x) if isinstance(child, Node) else x
        return x


@st.composite
def tensors(draw, dtypes=FLOATS, shapes=shapes):
    """Draw a tensor of small integers, which every dtype represents exactly.

    Args:
        draw: Passed by hypothesis.
        dtypes: The dtypes to choose from.
        shapes: The strategy for shapes.
    """
    shape, dtype, seed = draw(shapes), draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


@st.composite
def parameters(draw, dtypes=FLOATS, shapes=shapes):
    """Draw a Parameter, sometimes frozen; dtypes without gradients are always frozen.

    Args:
        draw: Passed by hypothesis.
        dtypes: The dtypes to choose from.
        shapes: The strategy for shapes.
    """
    data = draw(tensors(dtypes, shapes))
    trainable = (data.is_floating_point() or data.is_complex()) and draw(st.integers(0, 3)) > 0
    return nn.Parameter(data, requires_grad=trainable)


@st.composite
def modules(draw, dtypes=FLOATS, max_depth=3, ties=True, buffers=True, gaps=True):
    """Draw a tree of modules.

    Args:
        draw: Passed by hypothesis.
        dtypes: The dtypes of parameters and buffers.
        max_depth: The largest depth of nested children.
        ties: Whether parameters and children may occur under several names.
        buffers: Whether there are buffers.
        gaps: Whether slots for parameters, buffers and children may hold None.
    """
    seen_parameters: list[nn.Parameter] = []
    seen_modules: list[nn.Module] = []

    def grow(depth):
        kind = draw(st.integers(0, 5)) if depth < max_depth else 5
        if kind == 0:
            module = nn.ModuleList(grow(depth + 1) for _ in range(draw(st.integers(0, 2))))
        elif kind == 1:
            module = nn.Linear(draw(st.integers(1, 3)), draw(st.integers(1, 3)), bias=draw(st.booleans()))
        else:
            module = Node()
            fill(module)
            for name in (
                draw(st.lists(names.map("sub_{}".format), max_size=2, unique=True)) if depth < max_depth else ()
            ):
                if gaps and draw(st.integers(0, 7)) == 0:
                    module.register_module(name, None)
                elif ties and seen_modules and draw(st.integers(0, 3)) == 0:
                    # Only finished modules are shared, so that no module contains itself.
                    module.add_module(name, draw(st.sampled_from(seen_modules)))
                else:
                    module.add_module(name, grow(depth + 1))
        seen_modules.append(module)
        return module

    def fill(module):
        for name in draw(st.lists(names, max_size=3, unique=True)):
            if gaps and draw(st.integers(0, 7)) == 0:
                module.register_parameter(name, None)
            elif ties and seen_parameters and draw(st.integers(0, 3)) == 0:
                module.register_parameter(name, draw(st.sampled_from(seen_parameters)))
            else:
                module.register_parameter(name, draw(parameters(dtypes)))
                seen_parameters.append(module._parameters[name])
        for name in draw(st.lists(names.map("buf_{}".format), max_size=2 if buffers else 0, unique=True)):
            gap = gaps and draw(st.integers(0, 7)) == 0
            module.register_buffer(name, None if gap else draw(tensors(dtypes)), persistent=draw(st.booleans()))

    root = Node()
    fill(root)
    for name in draw(st.lists(names.map("sub_{}".format), max_size=3, unique=True)):
        root.add_module(name, grow(1))
    return root


def edit(data, net, dtypes=FLOATS):
    """Make one random change somewhere in a tree of modules; some changes affect only values, or nothing.

    Args:
        data: The `data` strategy of hypothesis.
        net: The tree.
        dtypes: The dtypes of new parameters and buffers.

    Returns:
        The name of the change, one of `EDITS`.
    """
    draw = data.draw
    everywhere = list(net.modules())
    module = draw(st.sampled_from(everywhere), label="module")
    nodes = [m for m in everywhere if isinstance(m, Node)]
    node = draw(st.sampled_from(nodes), label="node")
    live = [(m, name) for m in everywhere for name, p in m._parameters.items() if p is not None]
    owner, name = draw(st.sampled_from(live), label="parameter") if live else (None, None)
    kind = draw(st.sampled_from(EDITS), label="edit")

    if kind == "add parameter":
        node.register_parameter(f"new_{draw(names)}", draw(parameters(dtypes)))
    elif kind == "add child":
        node.add_module(f"sub_{draw(names)}", draw(modules(dtypes, max_depth=1)))
    elif kind == "share child":
        # A module that has no children cannot contain the node that receives it.
        leaves = [m for m in everywhere if not m._modules and m is not node]
        if leaves:
            node.add_module(f"sub_{draw(names)}", draw(st.sampled_from(leaves)))
    elif kind == "delete child" and node._modules:
        delattr(node, draw(st.sampled_from(sorted(node._modules))))
    elif kind == "child to None" and node._modules:
        setattr(node, draw(st.sampled_from(sorted(node._modules))), None)
    elif kind == "append":
        for m in everywhere:
            if isinstance(m, nn.ModuleList):
                m.append(nn.Linear(1, 2))
    elif kind == "set_submodule":
        paths = [path for path, _ in net.named_modules() if path]
        if paths:
            net.set_submodule(draw(st.sampled_from(paths)), nn.Linear(2, 1, bias=False))
    elif kind == "add buffer":
        node.register_buffer(f"buf_{draw(names)}", draw(tensors(dtypes)), persistent=draw(st.booleans()))
    elif kind == "rebind buffers":
        for key, value in list(module._buffers.items()):
            if value is not None:
                setattr(module, key, value.clone() if draw(st.booleans()) else torch.zeros(5))
    elif kind == "delete buffers":
        for key in list(module._buffers):
            delattr(module, key)
    elif kind == "convert":
        module.to(draw(st.sampled_from([torch.float32, torch.float64, torch.float16])))
    elif kind == "load":
        net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=draw(st.booleans()))
    elif owner is not None:
        if kind == "delete parameter":
            delattr(owner, name)
        elif kind == "parameter to None":
            setattr(owner, name, None)
        elif kind == "swap parameter":
            setattr(owner, name, draw(parameters(dtypes)))
        elif kind == "delete and add again":
            shape = owner._parameters[name].shape
            delattr(owner, name)
            owner.register_parameter(name, nn.Parameter(torch.zeros(shape if draw(st.booleans()) else (7,))))
        elif kind == "rename":
            value = owner._parameters.pop(name)
            owner.register_parameter(f"new_{draw(names)}", value)
        elif kind == "swap data":
            owner._parameters[name].data = draw(tensors(dtypes))
        elif kind == "reshape data":
            owner._parameters[name].data = owner._parameters[name].data.reshape(-1)
        elif kind == "tie":
            node.register_parameter(f"new_{draw(names)}", owner._parameters[name])
        elif kind == "untie":
            owner._parameters[name] = nn.Parameter(owner._parameters[name].detach().clone(), requires_grad=False)
        elif kind == "parameter to buffer":
            value = owner._parameters.pop(name)
            owner.register_buffer(name, value.data)
        elif kind == "freeze":
            owner._parameters[name].requires_grad_(False)
        elif kind == "change values":
            owner._parameters[name].data.zero_()
    return kind


EDITS = [
    "add parameter",
    "delete parameter",
    "parameter to None",
    "swap parameter",
    "delete and add again",
    "rename",
    "swap data",
    "reshape data",
    "tie",
    "untie",
    "parameter to buffer",
    "freeze",
    "change values",
    "add child",
    "share child",
    "delete child",
    "child to None",
    "append",
    "set_submodule",
    "add buffer",
    "rebind buffers",
    "delete buffers",
    "convert",
    "load",
]
