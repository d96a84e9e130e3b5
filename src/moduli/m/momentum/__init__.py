"""Momentum and averaging: updates of several steps as one."""

from ._cautious import Cautious
from ._ema import EMA
from ._heavy_ball import HeavyBall
from ._nag import NAG
from ._schedule_free import ScheduleFree

__all__ = ["Cautious", "EMA", "HeavyBall", "NAG", "ScheduleFree"]
