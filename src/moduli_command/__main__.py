"""`python -m moduli_command` is the `moduli` command, without importing torch where none is needed."""

from . import main

if __name__ == "__main__":
    main()
