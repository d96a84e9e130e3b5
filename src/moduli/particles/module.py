"""`NytoModule`: a module that owns labelled tensors and is a value; and products of modules."""

from __future__ import annotations

from moduli import nn as _nn

from ._particle import ParticleMethods
from ._product import ParamProduct as ParamProduct
from ._product import binary_lambda_wrapper as binary_lambda_wrapper
from ._product import module_to_product as module_to_product
from ._product import product_assign_to_module as product_assign_to_module
from ._product import product_to_module as product_to_module
from ._product import unary_lambda_wrapper as unary_lambda_wrapper


class NytoModule(ParticleMethods, _nn.Module):
    """A module that is also a value: it can be added, scaled, cloned and drawn at random, and its structure has versions.

    It is a `moduli.nn.Module`, hence a `torch.nn.Module`. The result of an operation is a new module of the same class,
    whose parameters are leaves; siblings follow a structural edit when they are touched or used next.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> class Net(NytoModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.w = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))
        >>> (2 * Net()).w
        Parameter containing:
        tensor([0., 2., 4.], requires_grad=True)
    """
