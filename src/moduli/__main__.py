"""`python -m moduli` is the `moduli` command."""

from .cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
