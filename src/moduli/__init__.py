"""Models as values: tensors that know their axes, and what is built from them."""

__version__ = "0.1.0"

__all__ = ["__version__"]
