"""The ask-and-tell searches of `moduli.evolve`, which the links of `moduli.m` drive too."""
