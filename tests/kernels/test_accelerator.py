"""A fake accelerator: nothing is read back from it, nothing strays to the CPU, and launches do not grow with tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moduli import kernels

FREE = ("empty", "new_empty", "view", "detach", "alias", "as_strided", "split", "_to_copy", "lift_fresh", "reshape")


class Launches(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        if any(x.device.type == "cuda" for x in tensors) and not func.overloadpacket.__name__.startswith(FREE):
            self.names.append(func.overloadpacket.__name__)
        return result


def clipped_adam(p, g, m, v, norm, lr, beta1, beta2, eps, step, decay):
    g = g * (1.0 / (norm + 1e-6)).clamp(max=1.0)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g * (1 - beta2))
    update = m / (1 - beta1**step) / (v.sqrt() * (1 - beta2**step) ** -0.5 + eps)
    p.sub_(lr * (update + decay * p))


@pytest.mark.parametrize("setting", ["auto", "foreach"])
def test_a_step_is_a_few_launches_and_reads_nothing_back(monkeypatch, setting):
    monkeypatch.setenv("MODULI_KERNELS", setting)
    counts = []
    for count in (4, 400):
        fused = kernels.fuse(clipped_adam)
        with FakeTensorMode(), torch.no_grad():
            lists = [[torch.empty(8, 3, device="cuda") for _ in range(count)] for _ in range(4)]
            for step in (1, 2):
                with Launches() as seen:
                    norm = kernels.norm(lists[1])
                    fused(*lists, norm, 1e-3, 0.9, 0.999, 1e-8, step, 0.01)
            assert norm.device.type == "cuda"
            assert fused.explain(*lists, norm, 1e-3, 0.9, 0.999, 1e-8, 1, 0.01).form == "foreach"
        counts.append(len(seen.names))
    assert counts[0] == counts[1] <= 24, seen.names


def test_other_results_stay_there(monkeypatch):
    fused = kernels.fuse(lambda x, y, a: torch.where(x > a, x, y) + a)
    with FakeTensorMode(), torch.no_grad():
        xs, ys = ([torch.empty(n, device="cuda") for n in (3, 5)] for _ in range(2))
        for scalar in (2.0, torch.empty((), device="cuda", dtype=torch.float64)):
            got = fused(xs, ys, scalar)
            assert [t.device.type for t in got] == ["cuda", "cuda"]
            assert fused(xs, ys, scalar, flat=True).shape == (8,)
        with pytest.raises(ValueError, match="move one"):
            fused(xs, [torch.empty(3), torch.empty(5)], 2.0)


def test_a_counting_mode_sees_foreach_operations(backend):
    fused = kernels.fuse(lambda x, y: x * 2 + y)
    xs = [torch.ones(3), torch.ones(4)]
    with Launches():
        got = fused(xs, xs)
        form = fused.explain(xs, xs).form
    assert torch.equal(got[1], torch.full((4,), 3.0))
    assert form == ("plain" if backend == "plain" else "foreach")
