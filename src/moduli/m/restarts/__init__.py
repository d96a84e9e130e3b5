"""Forgetting what was learnt."""

from ._restarts import BirginMartinezRestart, PowellRestart, RestartEvery, RestartOnStuck, RestartStrategy

__all__ = ["BirginMartinezRestart", "PowellRestart", "RestartEvery", "RestartOnStuck", "RestartStrategy"]
