"""Both back ends, and a cache of compiled kernels that belongs to the test session."""

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
    """Every law holds for compiled kernels and without a compiler."""
    monkeypatch.setenv("MODULI_KERNELS", request.param)
    return request.param


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has compiled nothing yet, with a cache of its own."""
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("MODULI_KERNELS_CACHE", str(path))
    kernels.reset()
    yield path
    monkeypatch.undo()
    kernels.reset()
