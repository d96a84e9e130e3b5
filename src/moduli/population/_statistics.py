from ._core import Core
class Statistics(Core):
    __slots__ = ()
