"""A model shared by the tests of particles."""

from torch import nn

import moduli as mo


class Net(mo.Module):
    """Two linear layers, one of them inside of a plain container."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.body(x))
