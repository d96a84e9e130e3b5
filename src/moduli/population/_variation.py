from ._core import Core
class Variation(Core):
    __slots__ = ()
