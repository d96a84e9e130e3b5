"""Operations on updates: pointwise functions and sources."""

from ._clip import Clip
from ._grad import Grad
from ._identity import Identity, Noop
from ._sign import Sign

__all__ = ["Clip", "Grad", "Identity", "Noop", "Sign"]
