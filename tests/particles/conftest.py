"""Fixtures shared by the tests of particles."""

import gc

import pytest


@pytest.fixture
def without_gc():
    """Disable the cyclic garbage collector, so that only reference counts free objects."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
