"""The version of moduli, where every room can read it."""

__version__ = "0.3.0"
