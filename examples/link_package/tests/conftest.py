"""What may be expected of the links of this package, for `pytest --moduli-links softsign`."""

from moduli import m
from moduli.testing import Case
from softsign import SoftSign


def move_by_hand(params, grads, memory, step):
    """Move parameters by the formula of the docstring."""
    for param, grad in zip(params, grads, strict=True):
        param -= 0.05 * grad / (1 + grad.abs())


def pytest_moduli_case(link):
    """Give SoftSign a larger step size, and the formula that it must equal."""
    if link is SoftSign:
        return Case("SoftSign", lambda: [SoftSign(), m.LR(0.05)], steps=1500, tolerance=1e-2, reference=move_by_hand)
    return None
