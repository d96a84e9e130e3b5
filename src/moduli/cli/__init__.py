"""The `moduli` command.

    moduli race      run optimizers side by side on problems, and write a report
    moduli fit       minimise a problem of your own, with checkpoints
    moduli links     the catalogue of what a chain is made of
    moduli inspect   what a checkpoint holds
    moduli merge     make one model of several

Tables and JSON go to standard output, everything else to standard error. Colours and moving bars are for terminals: they are off
in pipes, and with the environment variable ``NO_COLOR``.

Exit codes: 0 done; 1 the work failed (a damaged file, a fit that diverged, a problem that raised an error); 2 the command
was wrong (an unknown name, a chain that cannot be read, a missing file); 130 interrupted with Ctrl-C, what was finished is kept;
141 the reader of the output is gone (`moduli links | head -1`).
"""

from ._app import app, main

__all__ = ["app", "main"]
