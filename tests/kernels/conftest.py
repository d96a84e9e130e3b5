"""Fixtures for the forms of kernels, and for a cache of compiled kernels of the test session."""

import pytest

from moduli import kernels


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "cache"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def _private_cache(kernel_cache, monkeypatch):
    monkeypatch.setenv("MODULI_KERNELS_CACHE", str(kernel_cache))
    monkeypatch.delenv("MODULI_KERNELS", raising=False)
    monkeypatch.delenv("CC", raising=False)


@pytest.fixture(params=["c", "foreach", "plain"])
def backend(request, monkeypatch):
    """Set the form of kernels: compiled, foreach or plain."""
    monkeypatch.setenv("MODULI_KERNELS", request.param)
    return request.param


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Make this process forget compiled kernels, and return an empty cache directory."""
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("MODULI_KERNELS_CACHE", str(path))
    kernels.reset()
    yield path
    monkeypatch.undo()
    kernels.reset()
