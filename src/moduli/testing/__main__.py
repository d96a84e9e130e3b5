"""`python -m moduli.testing gpu`: what can be shown on this machine, as a report to paste."""

from __future__ import annotations

import sys

from ._gpu import report

if __name__ == "__main__":
    if sys.argv[1:] != ["gpu"]:
        print(
            "usage: python -m moduli.testing gpu\nChecks and measures on the accelerator of this machine, if it has one."
        )
        raise SystemExit(0 if sys.argv[1:] in ([], ["--help"]) else 2)
    raise SystemExit(report())
