"""Constants of compiled code, and what an older torch does with labelled tensors."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from moduli.labels import _constant


def test_with_an_older_torch_functions_break_the_graph_with_an_explanation(monkeypatch):
    """Exclude a function from tracing, as `labels` does at import with a torch that does not support constants."""
    monkeypatch.setattr(_constant, "can_hold_constants", lambda: False)

    def double(t):
        return 2 * t

    _constant.refuse_compilation({"double": double})

    def program(x):
        return double(x.sin()).cos()

    x = torch.ones(3)
    counter = CompileCounter()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(program, backend=counter)(x), program(x))
    assert counter.frame_count == 2  # a graph before it, and one after
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="needs torch 2.13"):
        torch.compile(program, backend="eager", fullgraph=True)(x)
