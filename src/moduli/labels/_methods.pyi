from . import _elementwise

class Methods:
    ...
