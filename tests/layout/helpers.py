"""Set-up shared by the tests of layouts: a small network, and checks against torch's listings and fresh readings."""

from torch import nn

from moduli.layout import layout_and_tensors, read


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def check_against_torch(net):
    """Check the layout of a module against torch's own listings of its parameters and buffers, and return it."""
    layout, tensors = layout_and_tensors(net)
    listed = list(net.named_parameters())
    assert layout.names == tuple(name for name, _ in listed)
    assert [id(t) for t in tensors] == [id(p) for _, p in listed]
    every = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    filled, start = {}, 0
    for entry, (name, parameter) in zip(layout, listed, strict=True):
        key = (parameter.dtype, parameter.device)
        offset = filled.get(key, 0)
        assert entry.names == tuple(every[id(parameter)])
        assert (entry.shape, entry.dtype, entry.device) == (parameter.shape, parameter.dtype, parameter.device)
        assert (entry.offset, entry.start, entry.numel) == (offset, start, parameter.numel())
        assert layout.groups[entry.group].dtype is entry.dtype
        assert all(layout[n] is entry and n in layout for n in entry.names)
        filled[key] = offset + parameter.numel()
        start += parameter.numel()
        assert layout[name] is entry
    assert layout.numel == start == sum(group.numel for group in layout.groups)
    assert [(g.dtype, g.device, g.numel) for g in layout.groups] == [(*k, n) for k, n in filled.items()]
    saved = net.state_dict(keep_vars=True)
    assert [b.name for b in layout.buffers] == [name for name, _ in net.named_buffers()]
    for entry, (name, buffer) in zip(layout.buffers, net.named_buffers(), strict=True):
        assert (entry.shape, entry.dtype, entry.device) == (buffer.shape, buffer.dtype, buffer.device)
        assert entry.persistent == (name in saved)
        assert entry.numel == buffer.numel()
    return layout


def check_watch(watch, net):
    """Check that a watch returns None or a fresh reading; return whether it returned a reading."""
    watched, fresh = watch.read(net), read(net)
    if watched is not None:
        assert watched.structure is fresh.structure
        for left, right in zip(watched[1:], fresh[1:], strict=True):
            assert list(map(id, left)) == list(map(id, right))
    return watched is not None
