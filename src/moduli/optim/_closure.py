"""Closures: the three forms in which users write the objective, and their evaluation."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .._torch import run_backward
from ..layout import Guard, allow_interrupts
from ..population import Population
from ._needs import PASS_LOSS, ClosureError

_grad = operator.attrgetter("grad")


class Closure:
    """A loss function as a closure: `closure(backward=True)` returns the loss and writes `.grad` if requested. See `closure`.

    Example:
        >>> import torch, moduli as mo
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> loss = mo.closure(lambda: (w**2).sum())
        >>> loss(backward=False).item(), w.grad
        (9.0, None)
    """

    def __init__(self, fn: Callable[..., Any], *, fixed: bool = False) -> None:
        self.fn = fn
        self.fixed = fixed
        self.of_model = _takes_model(fn)
        self.model: Any = None

    def __call__(self, backward: bool = True) -> Any:
        """Return the detached loss, after `backward` where that is wanted."""
        if not backward:
            return run_without_graph(self.value).detach()
        with torch.enable_grad():
            loss = self.value()
            run_backward(loss if loss.dim() == 0 else loss.sum())
        return loss.detach()

    def value(self) -> Any:
        """Return the loss, with its graph where grad mode is on."""
        if not self.of_model:
            return self.fn()
        if self.model is None:
            raise ClosureError("the loss is a function of the model; give the optimizer the model: Optimizer(net, ...)")
        return self.model.losses(self.fn) if isinstance(self.model, Population) else self.fn(self.model)


def _takes_model(fn: Callable[..., Any]) -> bool:
    """Return whether a function needs one argument; `lambda x=x: ...` needs none, since it only captures a loop variable."""
    if type(fn) is FunctionType and not hasattr(
        fn, "__wrapped__"
    ):  # usually a new lambda at every step, so this is fast
        needed = fn.__code__.co_argcount - len(fn.__defaults__ or ())
        if needed < 2 and not fn.__code__.co_kwonlyargcount:
            return needed == 1
    try:
        signature = inspect.signature(fn)
    except ValueError:  # a builtin function without a signature
        return False
    for arguments in ((), (None,)):
        with suppress(TypeError):
            signature.bind(*arguments)
            return bool(arguments)
    raise TypeError(f"closure takes a function of nothing, or of the model; this one takes {signature}")


def closure(fn: Callable[..., Any], *, fixed: bool = False) -> Closure:
    """Make a closure from a plain loss function, so that a step can evaluate it with or without a gradient.

    The optimizer clears old gradients itself, so programs need not call `zero_grad`.

    Args:
        fn: A function without arguments that returns the loss: a 0-d tensor; a vector of residuals for least-squares
            links; the losses of all members for a population. Or a function of the model, `lambda net: loss(net(x), y)`,
            for an optimizer that was given the module or the population: links that try many models at once then
            evaluate them in one call.
        fixed: Whether the function is the same at every step (the same batch, no dropout). The next step then reuses the
            loss and gradient of the point that a line search has accepted, instead of evaluating it again.

    Returns:
        The closure, for `optimizer.step`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = mo.Optimizer([w], m.LR(0.25))
        >>> opt.step(mo.closure(lambda: (w**2).sum())), w.data
        (tensor(9.), tensor([1.5000]))
    """
    return Closure(fn, fixed=fixed)


def run_without_graph(evaluate: Callable[[], Any]) -> Any:
    """Return a value-only evaluation, for which autograd saves nothing.

    A loss that differentiates inside (a physics-informed net) fails without a graph: it is evaluated with grad mode on.
    """
    try:
        with torch.no_grad():
            return evaluate()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return evaluate()


def _kind(fn: Callable[..., Any]) -> str:
    """Return "keyword" if the function takes `backward`, so that it can be evaluated for its value only; otherwise "no"."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # a builtin function without a signature
        return "no"
    has_keyword = any(
        parameter.name == "backward" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )
    return "keyword" if has_keyword else "no"


class Evaluator:
    """A user's closure of any form behind one interface, with a count of its evaluations."""

    start: Tensor | None = (
        None  # the loss at the start of the step, if a link replaced the closure and evaluated this one there
    )

    def __init__(self, source: Callable[..., Any], negated: bool = False) -> None:
        self.source = source
        self.closure = source if isinstance(source, Closure) else None
        self.fn = source.value if isinstance(source, Closure) else None
        self.fixed = bool(getattr(source, "fixed", False))
        self.kind = "function" if self.fn is not None else _kind(source)
        self.count = 0
        self.negated = negated
        self.turned = False  # whether gradients are negated for the links (maximize)
        self.scope: Callable[[], Any] = nullcontext

    def _sign(self, loss: Any) -> Any:
        return -loss if self.negated and loss is not None else loss

    def _call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of an evaluation under the autocast that the step was called in; links run without autocast."""
        with self.scope(), allow_interrupts():
            return fn(*args, **kwargs)

    def ask(self) -> Any:
        """Return the loss, without requesting gradients, in the current grad mode."""
        self.count += 1
        if self.kind == "keyword":
            return self._call(self.source, backward=False)
        return self._call(self.fn or self.source)

    def value(self) -> Any:
        """Return the loss alone, without a graph unless the closure always builds one."""
        if self.kind == "no":
            with torch.enable_grad():
                return self._sign(self.ask())
        return self._sign(run_without_graph(self.ask))

    def graph(self) -> Any:
        """Return the loss with its graph."""
        if self.kind == "no":
            raise ClosureError(f"this chain differentiates the loss, but the closure calls backward(): {PASS_LOSS}")
        self.turned = self.negated
        with torch.enable_grad():
            loss = self._sign(self.ask())
        if isinstance(loss, Tensor) and not loss.requires_grad:
            raise ClosureError("this chain differentiates the loss, but the closure returned one without a graph")
        return loss

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """Return the loss, or None where the closure returns none; write gradients to `.grad`, negated to maximize."""
        first, self.count = self.count == 0, self.count + 1
        # The first evaluation of a user's closure may accumulate into gradients from before the step.
        if self.fn is not None or not first:
            for param in params:
                param.grad = None
        with torch.enable_grad():
            if self.fn is None:
                loss = self._ask_user(params, scalar)
            else:
                loss = self._call(self.fn)
                reduced = scalar(loss)
                if not reduced.requires_grad:
                    raise ClosureError("the loss does not depend on any parameter that requires a gradient")
                with allow_interrupts():
                    run_backward(reduced)
        if self.negated:
            negate_gradients(params)
            self.turned = True
        return self._sign(loss)

    def _ask_user(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """Return the loss of a closure that calls backward, that returns a loss with a graph, or that leaves gradients."""
        before = list(map(_grad, params))
        versions = _read_versions(before)
        loss = self._call(self.source)
        after = list(map(_grad, params))
        same = all(map(operator.is_, before, after))
        if not same or versions != _read_versions(after):
            return loss
        if isinstance(loss, Tensor) and loss.requires_grad:
            for param in params:
                param.grad = None
            try:  # `backward`, not `torch.autograd.grad`, which DistributedDataParallel does not average
                with allow_interrupts():
                    run_backward(scalar(loss))
            except RuntimeError as error:
                for param, grad in zip(params, after, strict=True):
                    param.grad = grad
                # torch raises this for a loss that was differentiated before the step; its gradients are in `.grad`.
                if "second time" not in str(error):
                    raise
        elif loss is not None and all(grad is None for grad in after):
            raise ClosureError(f"the closure returned a loss without a graph, and there is no gradient: {PASS_LOSS}")
        return loss


def _read_versions(grads: Sequence[Tensor | None]) -> list[int | None]:
    """Return the version of each gradient, which every write increments."""
    return [None if grad is None else grad._version for grad in grads]


def negate_gradients(params: Iterable[Tensor]) -> None:
    """Negate `.grad` of each parameter."""
    for param in params:
        if param.grad is not None:
            param.grad = -param.grad


@contextmanager
def hold_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    """Clear gradients for a block, in which a user's closure may call backward or zero them, and restore them at its end."""
    with Guard() as guard:
        guard.gradients(params)
        for param in params:
            param.grad = None
        yield
        guard.restore()


class FormEvaluator(Evaluator):
    """An evaluator for links that work on another form of the model's parameters (gathered tensors, matrices of members).

    Before each evaluation the values of that form are written to the parameters; after it the gradients are converted back.

    Args:
        inner: The evaluator of the closure.
        leaves: The parameters with respect to which it differentiates.
        push: Writes the values of the form to the parameters.
        gather: Writes the gradients of the parameters to the form.

    Attributes:
        ask_value: Evaluates the loss alone, where that differs from the closure's `value`.
    """

    def __init__(
        self, inner: Evaluator, leaves: Sequence[Tensor], push: Callable[[], object], gather: Callable[[], object]
    ) -> None:
        self.inner, self.leaves, self.push, self.gather = inner, leaves, push, gather
        self.ask_value: Callable[[], Any] = inner.value
        self.source, self.closure, self.fn = inner.source, inner.closure, inner.fn
        self.fixed, self.kind = False, inner.kind

    @property
    def count(self) -> int:  # type: ignore[override]
        """The number of evaluations."""
        return self.inner.count

    def graph(self) -> Any:
        """Raise ClosureError: the graph of the loss has the parameters as leaves, and not their other form."""
        raise ClosureError("a loss of parameters in pieces, or of a population's matrix, can be differentiated once")

    def value(self) -> Any:
        """Return the loss, without requesting gradients."""
        self.push()
        with hold_gradients(self.leaves):
            return self.ask_value()

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """Return the loss; write gradients to `.grad` of the parameters and of their form."""
        self.push()
        loss = self.inner.gradient(self.leaves, scalar)
        self.gather()
        return loss


def add_up(value: Any, members: int | None, residuals: bool) -> Tensor:
    """Return the number to differentiate: the loss, half the squared residuals, or the sum over members.

    Args:
        value: The value that the closure returned.
        members: The number of members of a population; None for one model.
        residuals: Whether a vector is one of residuals.
    """
    loss = value if isinstance(value, Tensor) else getattr(value, "data", None)  # a labelled tensor
    if not isinstance(loss, Tensor) or not (loss is value or hasattr(value, "dims")):
        raise ClosureError(f"the closure returned a {type(value).__name__}; return the loss as a 0-d tensor")
    if members is not None:
        return check_losses(loss, members).sum()
    if loss.dim() == 0:
        return loss
    if residuals:
        return 0.5 * (loss.conj() * loss).real.sum() if loss.is_complex() else 0.5 * loss.square().sum()
    if loss.numel() == 1:
        return loss.reshape(())
    raise ClosureError(f"the closure returned a tensor of shape {tuple(loss.shape)}; take its mean or sum")


def check_losses(loss: Any, members: int) -> Tensor:
    """Return the losses of a population; raise ClosureError unless there is one per member."""
    if not isinstance(loss, Tensor) or loss.dim() != 1 or loss.numel() != members:
        what = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ClosureError(f"the closure returned a {what} for {members} members; return one loss per member")
    return loss
