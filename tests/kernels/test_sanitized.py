"""The kernels and their runtime, built with AddressSanitizer and driven through ordinary and hostile calls."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moduli import kernels

PROGRAM = """
import threading, torch
from moduli import kernels
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
def adam(p, g, m, v, lr, step):
    m = torch.lerp(m, g, 0.1)
    v = torch.addcmul(0.999 * v, g, g, value=0.001)
    return p - lr * m / ((v / (1 - 0.999**step)).sqrt() + 1e-8), m, v
fused = kernels.fuse(adam, inplace=("p", "m", "v"), private=["m", "v"])
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for sizes in ([0, 1, 7, 16, 33], [70_001], [3, 200_003, 5]):
        lists = [[torch.randn(n, generator=generator).to(dtype) for n in sizes] for _ in range(4)]
        lists[3] = [t.abs() for t in lists[3]]
        for t in range(1, 4):
            with torch.no_grad():
                fused(*lists, 0.1, t)
            lists[1] = [torch.randn(n, generator=generator).to(dtype) for n in sizes]
            lists[0][0].data = torch.ones(sizes[0], dtype=dtype)
blend = kernels.fuse(lambda a, b, s: a + s * b)
for sizes in ([5, 1, 4099], [2_000_003]):
    xs = [torch.randn(n, generator=generator) for n in sizes]
    flat = blend(xs, xs, 0.5, flat=True)
    torch.testing.assert_close(flat, torch.cat(xs) * 1.5)
    blend(xs, xs, 0.5, out=[torch.empty(n) for n in sizes])
    blend(xs, xs, 0.5, flat=True, offsets=[3 + k + sum(sizes[:k]) for k in range(len(sizes))])
    for reduction in (kernels.sum, kernels.norm, kernels.amax):
        reduction(xs)
    kernels.dot(xs, xs)
mask = kernels.fuse(lambda x: torch.where(x > 0, x, torch.exp(x)))
mask([torch.randn(n, generator=generator) for n in (1, 15, 17, 31)])
over = kernels.fuse(lambda x: torch.exp(x) * 0.5, inplace="x")
for _ in range(5):
    xs = [torch.zeros(100_000) for _ in range(8)]
    worker = threading.Thread(target=xs.clear)
    worker.start()
    over(xs)
    worker.join()
assert kernels.explain().form == "c"
print("clean")
"""


def test_no_access_out_of_bounds(tmp_path):
    run_sanitized(textwrap.dedent(PROGRAM), tmp_path)


def test_threads_share_functions(tmp_path):
    folder = Path(__file__).resolve().parents[2] / "tools" / "endurance"
    lines = f"import sys; sys.path.insert(0, {str(folder)!r}); import threads; threads.run(0.0); print('clean')"
    run_sanitized(lines, tmp_path)


def run_sanitized(program, tmp_path):
    """Run a program whose kernels are built with AddressSanitizer, and assert that it prints "clean"."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    # Without the C++ library the sanitizer can't propagate torch's exceptions.
    libraries = [find_library(compiler, name) for name in ("libasan.so", "libstdc++.so")]
    if not all(Path(library).is_absolute() for library in libraries):
        pytest.skip("gcc has no AddressSanitizer here")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(kernels.__file__).parents[2]),
            "MODULI_KERNELS": "c",
            "MODULI_KERNELS_CACHE": str(cache),
            "CC": f"{compiler} -fsanitize=address -g",
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.strip() == "clean", done.stderr[-4000:]
    for entry in cache.glob("*.so"):
        assert b"__asan_" in entry.read_bytes()


def find_library(compiler, name):
    """Return the path of a library of the compiler, or its bare name if it has none."""
    command = [compiler, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.strip()
