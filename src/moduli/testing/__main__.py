"""`python -m moduli.testing gpu`: what can be shown on the accelerator of this machine, as a report to paste."""

import sys

from ._gpu import report

if __name__ == "__main__":
    raise SystemExit(report() if sys.argv[1:] == ["gpu"] else "usage: python -m moduli.testing gpu")
