"""States of links in eight bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Module, Objective, TensorTransform

# Steps of the golden ratio and of its generalisation to two dimensions: offsets that fill [0, 1) evenly along each axis.
_ALONG, _OVER = 0.6180339887498949, 0.7548776662466927
_SMALLEST = 4096


class Quantized(Module):
    r"""Stores the state of pointwise links in eight bits per number, in blocks with separate scales.

    A state x of a block with largest magnitude s is kept as the whole number nearest to $127\,\operatorname{sign}(x)
    \sqrt[3]{|x|/s}$, or, where nothing is negative, $255\,\sqrt[4]{x/s}$: more levels near zero, where moments of most
    numbers are. Rounding is dithered by an offset that depends on the place and the step, so that a slow running mean does
    not stick. States are widened for one parameter at a time while the links make their step. Tensors of fewer than 4,096
    numbers (biases, norms) are left as they are: there is little to save, and they are sensitive.

    Args:
        modules: The links, all of them pointwise: `m.Adam()`, `m.Lion()`, `m.HeavyBall(0.9)`.
        bits: Bits per number: 8.
        block: Numbers per scale.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(100, 100))
        >>> link = m.Quantized(m.Adam())
        >>> opt = mo.Optimizer([w], link, m.LR(0.01))
        >>> for _ in range(160):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1), link.memory() < 0.35 * 2 * w.numel() * 4
        (True, True)

    References:
        T. Dettmers, M. Lewis, S. Shleifer, L. Zettlemoyer, "8-bit optimizers via block-wise quantization", ICLR 2022.
    """

    def __init__(self, modules: Chainable, *, bits: int = 8, block: int = 256) -> None:
        super().__init__()
        if bits != 8:
            raise ValueError(f"Quantized: bits is {bits!r}; 8 is what there is")
        if isinstance(block, bool) or not isinstance(block, int) or block < 16:
            raise ValueError(f"Quantized: block is {block!r}; give a whole number, at least 16")
        self.set_child("modules", modules)
        for path, link in self.children["modules"].links():
            if link.children and not isinstance(link, TensorTransform):
                continue  # a chain
            if not isinstance(link, TensorTransform) or not link.elementwise or link.children:
                raise ValueError(
                    f"Quantized: {type(link).__name__}{f' ({path})' if path else ''} is not pointwise; states are widened "
                    "one parameter at a time, so put it outside"
                )
        self.block = block

    def memory(self) -> int:
        """Return the bytes of state that are stored between steps."""
        rows = [row for param in list(self.state) for row in [self.state[param]]]
        return sum(value.nbytes for row in rows for value in row.values() if isinstance(value, Tensor))

    def _links(self) -> list[tuple[str, TensorTransform]]:
        return [(path, link) for path, link in self.children["modules"].links() if isinstance(link, TensorTransform)]

    def step(self, objective: Objective) -> Objective:
        """Widen the state, make the step and narrow the state, one parameter after the other."""
        updates = list(objective.get_updates())
        grads = objective.get_grads() if any(link.uses_grad for _, link in self._links()) else None
        for i, param in enumerate(objective.params):
            if objective.present is not None and not objective.present[i]:
                continue
            one = objective.clone(clone_updates=False, parent=objective)
            one.params, one.updates, one.present = [param], [updates[i]], None
            one.grads = None if grads is None else [grads[i]]
            self._widen(param)
            try:
                for _, link in self._links():
                    one = link.step(one)
            finally:
                self._narrow(param)
            updates[i] = one.get_updates()[0]
        objective.updates = updates
        return objective

    def update(self, objective: Objective) -> None:
        """Let the links learn from a copy of the update."""
        self.step(objective.clone(clone_updates=True))

    def apply(self, objective: Objective) -> Objective:
        """Raise an error: the links run as one step, and their state is narrowed between two steps."""
        raise TypeError(
            "Quantized makes whole steps; a link that learns and applies at different times (a trust region, `Online`) "
            "can't drive it. Put the quantised links outside of it"
        )

    def _widen(self, param: Tensor) -> None:
        row = self.state[param]
        for path, link in self._links():
            for name in row.get(f"{path} names", ()):
                key = f"{path} {name}"
                link.state[param][name] = _widen(row[key], row[f"{key} scale"], row[f"{key} like"], self.block)

    def _narrow(self, param: Tensor) -> None:
        row = self.state[param]
        step = row["step"] = row.get("step", 0) + 1
        for path, link in self._links():
            state, names = link.state[param], []
            for name, value in list(state.items()):
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel() >= _SMALLEST:
                    key = f"{path} {name}"
                    row[key], row[f"{key} scale"] = _narrow(value, self.block, step)
                    row[f"{key} like"] = [list(value.shape), str(value.dtype).removeprefix("torch.")]
                    names.append(name)
                    del state[name]
            if names:
                row[f"{path} names"] = names


def _narrow(value: Tensor, block: int, step: int) -> tuple[Tensor, Tensor]:
    """Return eight bits per number, and a scale per block."""
    wide = value.reshape(-1).to(torch.promote_types(value.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, -wide.numel() % block)).reshape(-1, block)
    scale = padded.abs().amax(1, keepdim=True)
    part = padded.abs() / torch.where(scale > 0, scale, 1.0)
    places = torch.arange(padded.numel(), device=value.device, dtype=torch.float64).reshape(padded.shape)
    offset = ((places * _ALONG + step * _OVER) % 1.0).to(wide.dtype)
    if bool((padded >= 0).all()):
        # A second moment rounded to zero would make a step arbitrarily large: nonzero numbers stay above zero.
        levels = (part**0.25 * 255 + offset).floor().clamp(0, 255)
        levels = torch.where((levels == 0) & (part > 0), 1.0, levels)
        codes = levels.to(torch.uint8)
    else:
        codes = ((part ** (1 / 3) * 127 + offset).floor().clamp(0, 127) * padded.sign()).to(torch.int8)
    return codes.reshape(-1)[: value.numel()].clone(), scale.squeeze(1)


def _widen(codes: Tensor, scale: Tensor, like: Any, block: int) -> Tensor:
    """Return the numbers that eight-bit codes stand for."""
    shape, dtype = like
    part = codes.to(scale.dtype) / (255 if codes.dtype is torch.uint8 else 127)
    power = part**4 if codes.dtype is torch.uint8 else part**3
    scales = scale.repeat_interleave(block)[: codes.numel()]
    return (power * scales).reshape(shape).to(getattr(torch, dtype))
