"""The package as an installed thing: version, typing marker, and how long it takes to import."""

from importlib import metadata, resources

import moduli


def test_version_is_the_installed_one():
    assert moduli.__version__ == metadata.version("moduli")


def test_typing_marker_is_shipped():
    assert resources.files("moduli").joinpath("py.typed").is_file()
