"""Triton's interpreter: kernels run on the CPU, program by program.

These tests need Triton (the `gpu-test` extra) and `TRITON_INTERPRET=1`, which it reads when it is imported: `make test-gpu`.
"""

import importlib.util
import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS", "triton")
