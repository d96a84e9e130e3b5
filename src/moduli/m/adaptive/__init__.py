"""Adaptive first-order links: steps scaled by what updates were like so far."""

from ._adagrad import Adagrad
from ._adam import Adam
from ._lion import Lion
from ._rmsprop import RMSprop

__all__ = ["Adagrad", "Adam", "Lion", "RMSprop"]
