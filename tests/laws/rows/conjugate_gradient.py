"""Conjugate gradients with a tight line search."""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def _row(name):
    return Row(
        name,
        lambda: [getattr(m, name)(), m.StrongWolfe(c2=0.1, a_init="first-order")],
        steps=200,
        tolerance=1e-6,
        closure=True,
        population=False,
    )


ROWS = [
    _row("ConjugateGradient"),
    _row("FletcherReeves"),
    _row("PolakRibiere"),
    _row("HestenesStiefel"),
    _row("DaiYuan"),
    _row("HagerZhang"),
    _row("LiuStorey"),
    _row("ConjugateDescent"),
    _row("DYHS"),
]
