"""The public functions of `moduli.kernels`, their documentation, and which modules importing it loads."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moduli import kernels
from moduli.kernels import _backend

MODULES = [name for _, name, _ in pkgutil.iter_modules(kernels.__path__, "moduli.kernels.")]


def test_every_public_name_is_explained():
    for name in kernels.__all__:
        text = getattr(kernels, name).__doc__
        assert text, name
        assert ">>>" in text, name


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(backend, name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_import_loads_no_compiler_of_torch():
    code = (
        "import sys; import moduli.kernels as k, torch; f = k.fuse(lambda x, s: x * s); f([torch.ones(3)], 2.0);"
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules])"
    )
    root = str(Path(kernels.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); {code}"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr


def test_explain_names_the_form_and_the_reason(backend, monkeypatch):
    answer = kernels.explain()
    assert answer.form == backend
    if backend == "c":
        assert "moduli_reduce" in answer.source
        assert answer.path.exists()
        assert "compiler" in str(answer)
    fused = kernels.fuse(lambda x: x + 1)
    assert kernels.explain(fused, [torch.ones(3)]).form == backend
    assert kernels.explain(fused, []).form == "nothing"
    x = torch.ones(10)
    over = kernels.fuse(lambda a, b: a + b, inplace="a")
    assert "overlaps" in str(over.explain([x[:6]], [x[3:9]]))
    assert torch.equal(x, torch.ones(10))
    seen = []
    torch.func.vmap(lambda a: seen.append(str(fused.explain([a]))) or a)(x)
    assert "torch.func transform" in seen[0]


def test_without_torchs_reader_of_tensors(backend, monkeypatch):
    """Without torch's reader, which older versions lack, addresses and shapes are read from each tensor."""
    kernels.reset()
    monkeypatch.setattr("moduli.kernels._runtime.find_tensor_reader", lambda: None)
    fused = kernels.fuse(lambda x, y: x - y, inplace="x")
    xs, ys = [torch.ones(3), torch.ones(4)], [torch.ones(3), torch.ones(4)]
    for _ in range(3):
        fused(xs, ys)
    assert xs[0][0] == -2.0
    xs[0] = torch.full((3,), 5.0)
    fused(xs, ys)
    assert xs[0][0] == 4.0
    assert kernels.dot(xs, ys) == 3 * 4.0 - 3.0 * 4
    assert backend != "c" or _backend.runtime()._reader is None
    xs[1].data = torch.ones(2, 2)
    fused(xs, ys)
    assert torch.equal(xs[1], torch.zeros(2, 2))
    fused(xs, [ys[0], torch._neg_view(ys[1])])
    assert torch.equal(xs[1], torch.ones(2, 2))
    kernels.reset()


def test_torch_compile_runs_the_function(backend):
    fused = kernels.fuse(lambda x, y, a: a * x + y, inplace="x")

    @torch.compile(backend="eager", fullgraph=False)
    def step(xs, ys):
        return fused(xs, ys, 2.0)

    with torch.no_grad():
        xs = [torch.ones(3), torch.ones(2)]
        step(xs, [torch.ones(3), torch.ones(2)])
    assert torch.equal(xs[0], torch.full((3,), 3.0))


def test_the_page_runs(backend):
    """Run the blocks of docs/kernels.md in one namespace; a text block is the output of the block before it."""
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|text)\n(.*?)```", page, flags=re.DOTALL)
    space, printed = {"__name__": "page"}, ""
    for kind, text in blocks:
        if kind == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, "kernels.md", "exec"), space)
            printed = output.getvalue()
        else:
            same = doctest.OutputChecker().check_output(text, printed, doctest.ELLIPSIS)
            assert same, f"printed {printed!r}, and the page has {text!r}"


def test_a_default_device_has_no_effect(backend):
    kernels.reset()
    xs = [torch.ones(3), torch.ones(20_000), torch.ones(2, dtype=torch.float16)]
    with torch.device("meta"):
        got = kernels.fuse(lambda x, s: x * s + 1)(xs, 2.0)
        flat = kernels.fuse(lambda x, s: x * s)(xs, 2.0, flat=True)
        total = kernels.norm(xs)
    assert all(t.device.type == "cpu" and bool((t == 3).all()) for t in got)
    assert flat.device.type == "cpu"
    assert total.device.type == "cpu"


def test_the_first_call_may_be_in_inference_mode(backend):
    kernels.reset()
    with torch.inference_mode():
        assert kernels.fuse(lambda x: x + 1)([torch.ones(3)])[0][0] == 2
    fused = kernels.fuse(lambda x, y: x + y, inplace="x")
    x = torch.ones(3)
    with torch.no_grad():
        for _ in range(3):
            fused([x], [torch.ones(3)])
        with torch.inference_mode():
            frozen = torch.ones(3)
        with pytest.raises(RuntimeError, match="nference tensor"):
            fused([frozen], [torch.ones(3)])
    assert torch.equal(x, torch.full((3,), 4.0))
    assert torch.equal(frozen, torch.ones(3))


def test_stored_plans_detect_other_arguments(backend):
    """With grad mode off a call takes the fastest path; each of these arguments must leave it."""
    fused = kernels.fuse(lambda x, y: x + y, inplace="x")

    def check(xs, ys):
        want = [x + y for x, y in zip(xs, ys, strict=True)]
        fused(xs, ys)
        for x, w in zip(xs, want, strict=True):
            assert torch.equal(x, w.to(x.dtype))

    with torch.no_grad():
        for count in (1, 40):
            for _ in range(2):
                check([torch.ones(6) for _ in range(count)], [torch.ones(6) for _ in range(count)])
            xs = [torch.ones(6) for _ in range(count)]
            check(xs, [torch.ones(6, dtype=torch.float64) for _ in range(count)])
            check(xs, [torch._neg_view(torch.ones(6)) for _ in range(count)])
            check(xs, [torch.ones(12)[::2] for _ in range(count)])
            check(xs, [torch.nn.Parameter(torch.ones(6)) for _ in range(count)])
            check(xs, [torch.ones(2, 3).t().reshape(-1) for _ in range(count)])
            check(xs, [x[:] for x in xs])
            with pytest.raises(TypeError, match="not a tensor"):
                fused(xs, [*xs[:-1], 1.0])
            with pytest.raises(TypeError, match="not a tensor"):
                fused(xs, [None] * count)
            with pytest.raises(ValueError, match="number of elements"):
                fused(xs, [torch.ones(7) for _ in range(count)])
