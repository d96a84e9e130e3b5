"""Every row is checked by every law, one test each."""

import pytest

from laws.registry import Row, collect
from moduli import m, optim
from moduli.testing import LAWS, check_law
from moduli.testing._endurance import leaks

CHAINS = [
    Row("chain: Adam, LR", lambda: [m.Adam(), m.LR(0.05)]),
    Row("chain: nested", lambda: [optim.Chain(m.Adam(), optim.Chain(m.LR(0.5))), m.LR(0.1)]),
]
ROWS = [*CHAINS, *collect()]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_law(row, law, pytestconfig):
    if law == "leaks" and law not in (row.skip or ()) and not pytestconfig.getoption("--all"):
        leaks(row, steps=200)  # 200 steps show most leaks; `make test-all` makes a thousand
        return
    reason = check_law(row, law)
    if reason is not None:
        pytest.skip(reason)


def test_skipped_laws_exist():
    for row in ROWS:
        assert set(row.skip or ()) <= set(LAWS), f"{row} skips laws that do not exist"
