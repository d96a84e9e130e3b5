"""Single operations between two layers: free axes may be permuted, and exactly the expected ones are free."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import moduli as mo
from axes.zoo import Model

# An operation on twelve hidden units, and the sizes of the axes that it leaves free.
OPERATIONS = {
    "repeat_interleave": (lambda h: h.repeat_interleave(2, -1)[..., :12], [6, 2]),
    "repeat_interleave even": (lambda h: h.repeat_interleave(2, -1).unflatten(-1, (12, 2)).sum(-1), [12]),
    "roll": (lambda h: h.roll(1, -1), []),
    "flip": (lambda h: h.flip(-1), []),
    "sort": (lambda h: h.sort(-1)[0], [12]),
    "cumsum": (lambda h: h.cumsum(-1), []),
    "topk": (lambda h: F.pad(h.topk(3, -1)[0], (0, 9)), [12, 9]),
    "argmax": (lambda h: F.one_hot(h.argmax(-1), 12).float(), []),
    "max": (lambda h: h * (h == h.max(-1, keepdim=True)[0]), [12]),
    "pool1d": (lambda h: F.avg_pool1d(h[:, None], 3, 1, 1)[:, 0], []),
    "unfold": (lambda h: h.unfold(-1, 4, 4).flatten(1), []),
    "tile": (lambda h: h.repeat(1, 2)[:, ::2], [6, 2]),
    "stride": (lambda h: torch.cat([h[:, ::2], h[:, 1::2]], -1), [6]),
    "stride3": (lambda h: torch.cat([h[:, ::3], h[:, 1::3], h[:, 2::3]], -1), [4]),
    "diag": (lambda h: torch.diagonal(h[:, :, None] * h[:, None, :], dim1=1, dim2=2), [12]),
    "tril": (lambda h: torch.tril(h[:, :, None] * h[:, None, :]).sum(-1), []),
    "outer": (lambda h: (h[:, :, None] * h[:, None, :]).sum(1), [12]),
    "softmax": (lambda h: h.softmax(-1), [12]),
    "cdist": (lambda h: torch.cdist(h[:, :, None], h[:, :, None]).sum(-1), []),
    "fft": (lambda h: torch.fft.fft(h).real, []),
    "pixel": (lambda h: F.pixel_shuffle(h.view(-1, 12, 1, 1), 2).flatten(1), [3]),
    "unpixel": (lambda h: F.pixel_unshuffle(h.view(-1, 3, 2, 2), 2).flatten(1), [3]),
    "chanshuf": (lambda h: F.channel_shuffle(h.view(-1, 12, 1, 1), 3).flatten(1), []),
    "where": (lambda h: torch.where(torch.arange(12) > 5, h, -h), []),
    "index": (lambda h: h[:, [3, 1, 2, 0, 4, 5, 6, 7, 8, 9, 10, 11]], []),
    "index_select": (lambda h: h.index_select(1, torch.arange(12).flip(0)), []),
    "view6": (lambda h: h.view(-1, 3, 4).transpose(1, 2).reshape(-1, 12), [3, 4]),
    "view mix": (lambda h: (h.view(-1, 3, 4)[:, :, :, None] * h.view(-1, 4, 3)[:, None, :, :]).sum(1).flatten(1), []),
    "cat overlap": (lambda h: torch.cat([h[:, 2:], h[:, :2]], -1) + h, [2]),
    "chunk add": (
        lambda h: torch.cat([h.chunk(3, -1)[0] + h.chunk(3, -1)[1], h.chunk(3, -1)[2], h.chunk(3, -1)[0]], -1),
        [4, 4],
    ),
    "uneven": (lambda h: torch.cat([h[:, :5] * h[:, 5:10], h[:, 10:], h[:, :5]], -1), [5, 2]),
    "layer_norm parts": (lambda h: F.layer_norm(h.view(-1, 3, 4), (4,)).flatten(1), [3, 4]),
    "group_norm": (lambda h: F.group_norm(h, 3), [3, 4]),
    "std": (lambda h: h / h.std(-1, keepdim=True), [12]),
    "var_mean": (lambda h: h - torch.var_mean(h, -1, keepdim=True)[1], [12]),
    "norm": (lambda h: F.normalize(h, dim=-1), [12]),
    "logsumexp": (lambda h: h - h.logsumexp(-1, keepdim=True), [12]),
    "prelu": (lambda h: F.prelu(h, torch.linspace(0, 1, 12)), []),
    "bilin": (lambda h: torch.einsum("bi,bj->bij", h, h).flatten(1)[:, :12], [11]),
    "scatter": (lambda h: torch.zeros(h.shape).scatter_add(1, h.argsort(-1), h), []),
    "gather": (lambda h: h.gather(1, h.argsort(-1)), [12]),
    "embed": (lambda h: F.embedding(h.argmax(-1), torch.eye(12)), []),
    "masked_fill": (lambda h: h.masked_fill(h < 0, 0.0), [12]),
    "inplace": (lambda h: h.clone().mul_(2).add_(torch.arange(12.0)), []),
    "slice write": (
        lambda h: (lambda z: (z.__setitem__((slice(None), slice(0, 4)), h[:, 4:8]), z)[1])(h.clone()),
        [4, 4],
    ),
    "complex": (
        lambda h: torch.view_as_real(torch.view_as_complex(h.view(-1, 6, 2)) * torch.tensor(1j)).flatten(1),
        [6],
    ),
    "addmm": (lambda h: torch.addmm(h, h, torch.ones(12, 12)), [12]),
    "bmm": (lambda h: torch.bmm(h.view(-1, 3, 4), h.view(-1, 4, 3)).flatten(1).repeat(1, 2)[:, :12], []),
    "kron": (lambda h: torch.kron(h[:, :3], torch.ones(1, 4)), [3, 4]),
    "expand": (lambda h: h[:, :1].expand(-1, 12) + h, [11]),
    "cross": (lambda h: torch.linalg.cross(h.view(-1, 4, 3), h.view(-1, 4, 3).roll(1, 1)).flatten(1), []),
    "aminmax": (lambda h: h - h.amin(-1, keepdim=True), [12]),
    "median": (lambda h: h - h.median(-1, keepdim=True)[0], [12]),
    "bucketize": (lambda h: torch.bucketize(h, torch.linspace(-1, 1, 5)).float(), []),
    "searchsorted": (lambda h: torch.searchsorted(h.sort(-1)[0], h).float(), []),
    "index_put": (lambda h: h.clone().index_put_((torch.tensor([0, 1]),), h[2:4]), [12]),
    "index_put col": (
        lambda h: h.clone().index_put_((torch.tensor([0, 1]), torch.tensor([3, 4])), torch.tensor([1.0, 2.0])),
        [],
    ),
    "index_add": (lambda h: h.index_add(1, torch.tensor([0, 5]), h[:, 3:5]), []),
    "select_scatter": (lambda h: h.select_scatter(h[:, 3], 1, 5), []),
    "slice_scatter": (lambda h: h.slice_scatter(h[:, 2:5], 1, 6, 9), []),
    "attn pool": (
        lambda h: F.scaled_dot_product_attention(h.view(-1, 3, 4), h.view(-1, 3, 4), h.view(-1, 3, 4)).flatten(1),
        [3, 4],
    ),
    "attn bias": (
        lambda h: F.scaled_dot_product_attention(
            h.view(-1, 3, 4),
            h.view(-1, 3, 4),
            h.view(-1, 3, 4),
            attn_mask=torch.randn(3, 3, generator=torch.Generator().manual_seed(0)),
        ).flatten(1),
        [4],
    ),
    "upsample": (lambda h: F.interpolate(h.view(-1, 3, 4), scale_factor=2, mode="linear").flatten(1)[:, ::2], [3]),
    "conv": (lambda h: F.conv1d(h.view(-1, 3, 4), torch.ones(3, 1, 3), padding=1, groups=3).flatten(1), [3]),
    "maxpool": (lambda h: F.max_pool1d(h.view(-1, 3, 4), 3, 1, 1).flatten(1), [3]),
    "local_response": (lambda h: F.local_response_norm(h.view(-1, 12, 1), 3).flatten(1), []),
    "instance": (lambda h: F.instance_norm(h.view(-1, 3, 4)).flatten(1), [3, 4]),
    "dropout": (lambda h: F.dropout(h, 0.0), [12]),
    "count": (lambda h: h * h.count_nonzero(-1)[:, None], [12]),
    "nan": (lambda h: h.nan_to_num(), [12]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_leaves_the_expected_axes_free(name):
    operation, sizes = OPERATIONS[name]
    torch.manual_seed(0)
    net = Model(lambda self, x: self.b(operation(self.a(x))), a=nn.Linear(5, 12), b=nn.Linear(12, 4))
    x = torch.randn(6, 5)
    ax = mo.axes.trace(net, x)
    assert mo.axes.check(net, x, axes=ax) < 1e-5
    assert [axis.size for axis in ax.free] == sizes
