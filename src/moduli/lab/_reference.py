"""Problems in files of the user: `FILE.py:name`.

The name may refer to

* a `Problem`, or a subclass of it that is made without arguments;
* a function whose arguments all have defaults, numbers or tensors: the arguments are optimized, starting at the defaults, and the
  function returns the loss;
* a function without arguments that returns a `Problem`, or a pair of a module and a function of it that returns the loss.

A function that returns several numbers returns residuals: its problem is one of least squares, the loss is half the sum of
their squares, as in `moduli.minimize`, and a fit has standard errors.
"""

import inspect
import runpy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._texts import shorten
from ..labels import Tensor as Labelled
from .problems import Problem, get


class ProblemFileError(ValueError):
    """A `FILE.py:name` that does not lead to a problem.

    >>> print(ProblemFileError("there is no file wave.py"))
    there is no file wave.py
    """


def split_reference(reference: str) -> tuple[Path, str] | None:
    """Return the file and the name of `FILE.py:name`; None for the name of a problem.

    >>> split_reference("wave.py")
    (PosixPath('wave.py'), 'problem')
    """
    file, colon, name = reference.rpartition(":")
    if not colon:
        return (Path(reference).expanduser(), "problem") if reference.endswith(".py") else None
    return Path(file).expanduser(), name or "problem"


def load_problem(reference: str) -> Problem:
    """Return the problem of `FILE.py:name`. The file is run, as `python FILE.py` would, but not as `__main__`.

    Args:
        reference: The file and the name in it; without a name, ``problem``. Or the name of a problem of `moduli.lab.problems`.

    Raises:
        ProblemFileError: When the file or the name does not exist, or the name refers to something else.
        UnknownProblemError: When there is no problem of this name.

    >>> from pathlib import Path
    >>> _ = Path("bowl.py").write_text("def problem(x=2.0, y=[1.0, 1.0]): return x**2 + (y**2).sum()")
    >>> bowl = load_problem("bowl.py:problem")
    >>> bowl.name, bowl.dimension, bowl.measure(bowl.model(0))
    ('problem', 3, 6.0)
    """
    parts = split_reference(reference)
    if parts is None:
        return get(reference)
    return as_problem(load_object(*parts), parts[1])


def load_object(path: Path, name: str) -> Any:
    """Run a file, as `python FILE.py` would but not as `__main__`, and return its object of a name.

    Args:
        path: The file.
        name: The name.

    Raises:
        ProblemFileError: When the file or the name does not exist.

    >>> _ = Path("number.py").write_text("number = 4")
    >>> load_object(Path("number.py"), "number")
    4
    """
    if not path.is_file():
        raise ProblemFileError(f"there is no file {path} (what you wrote yourself is given as FILE.py:name)")
    namespace = _run_file(path.resolve())
    if name not in namespace:
        public = [key for key, value in namespace.items() if callable(value) and not key.startswith("_")]
        raise ProblemFileError(f"{path} has no {name!r}; it has {', '.join(public) or 'no functions or classes'}")
    return namespace[name]


@cache
def _run_file(path: Path) -> dict[str, Any]:
    """Run a file, once in a process, and return its global names."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # as for a script, modules beside the file can be imported
    return runpy.run_path(str(path), run_name="moduli_problem")


def as_problem(value: Any, name: str = "problem") -> Problem:
    """Return the problem that an object of a user defines.

    Args:
        value: A problem, a class of problems, or a function as the module describes.
        name: What it is called.

    >>> as_problem(lambda a=torch.ones(3): (a**2).sum()).dimension
    3
    """
    if isinstance(value, Problem):
        return value
    if inspect.isclass(value) and issubclass(value, Problem):
        return value()
    if not callable(value):
        raise ProblemFileError(
            f"{name!r} is {shorten(value)}: a problem is a Problem, or a function that returns a loss"
        )
    parameters = inspect.signature(value).parameters
    missing = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    if missing:
        fact = f"{name}({', '.join(missing)}) has arguments without a default"
        raise ProblemFileError(f"{fact}, where the search for them starts: def {name}({missing[0]}=torch.zeros(3))")
    if parameters:
        return WrittenProblem(name, value, {key: parameter.default for key, parameter in parameters.items()})
    result = value()
    if isinstance(result, Problem):
        return result
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module) and callable(result[1]):
        return WrittenProblem(name, value)
    fact = f"{name}() returned {type(result).__name__}"
    raise ProblemFileError(f"{fact}: without arguments it returns a Problem, or a module and a function of it")


class NamedArguments(nn.Module):
    """A model of a few named tensors; called without arguments, it returns them by name.

    >>> sorted(NamedArguments({"a": torch.ones(2), "b": torch.ones(())})())
    ['a', 'b']
    """

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.names = tuple(values)
        for name, value in values.items():
            # A prefix, because a user may call an argument `training` or `forward`.
            self.register_parameter(f"arg_{name}", nn.Parameter(value.detach().clone()))

    def forward(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: getattr(self, f"arg_{name}") for name in self.names}


class WrittenProblem(Problem):
    """A function of tensors that returns a loss, or residuals; or one that returns a module and such a function of it.

    Args:
        name: What it is called.
        written: The function.
        start: The starting values of its arguments; without it, the function has none, and returns a module.

    >>> problem = WrittenProblem("bowl", lambda x: (x**2).sum(), {"x": [3.0, 4.0]})
    >>> problem.measure(problem.model(0))
    25.0
    >>> line = WrittenProblem("line", lambda: (nn.Linear(1, 1), lambda f: f(torch.ones(1)).square().sum()))
    >>> line.dimension
    2
    """

    def __init__(self, name: str, written: Callable[..., Any], start: dict[str, Any] | None = None) -> None:
        self.name, self.written = name, written
        self.summary = (inspect.getdoc(written) or "").split("\n")[0]
        self.start = {key: self._tensor(key, value) for key, value in (start or {}).items()}
        self.dims = {key: value.dims for key, value in (start or {}).items() if isinstance(value, Labelled)}
        self.function = written  # replaced by `model` if `written` returns a module and a function of it
        self.model(0)

    def _tensor(self, key: str, value: Any) -> torch.Tensor:
        try:
            result = torch.as_tensor(value.data if isinstance(value, Labelled) else value)
        except (TypeError, ValueError, RuntimeError) as error:
            fact = f"{self.name}: the default of {key!r} is {shorten(value)}, not a number or a tensor"
            raise ProblemFileError(fact) from error
        return result if result.is_floating_point() or result.is_complex() else result.to(torch.get_default_dtype())

    def model(self, seed: int) -> nn.Module:
        """Return the defaults, with normal noise of size 0.1 added for seeds other than 0; or a new module, made with this seed."""
        if self.start:
            generator, scale = torch.Generator().manual_seed(seed), 0.1 if seed else 0.0
            return NamedArguments(
                {
                    key: value + scale * torch.randn(value.shape, generator=generator, dtype=value.dtype)
                    for key, value in self.start.items()
                }
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, self.function = self.written()
        return model  # type: ignore[no-any-return]

    def loss(self, model: Callable[..., Any]) -> torch.Tensor:
        """Return the value of the function; if it returns residuals, half the sum of their squares."""
        loss = self._call_function(model)
        if not isinstance(loss, torch.Tensor) or loss.numel() == 0:
            what = "an empty tensor" if isinstance(loss, torch.Tensor) else repr(type(loss).__name__)
            raise ProblemFileError(f"{self.name}: a loss is one number as a tensor, or several residuals, not {what}")
        if loss.numel() == 1 and loss.is_complex():
            raise ProblemFileError(
                f"{self.name}: a loss is a real number, not {loss.dtype}; return for instance its abs()"
            )
        return loss.reshape(()) if loss.numel() == 1 else 0.5 * loss.abs().square().sum()

    def residuals(self, model: Callable[..., Any]) -> torch.Tensor | None:
        """Return the values of the function if there are several, otherwise None."""
        values = self._call_function(model)
        if not isinstance(values, torch.Tensor) or values.numel() < 2:
            return None
        return torch.view_as_real(values).reshape(-1) if values.is_complex() else values.reshape(-1)

    def _label(self, values: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return arguments with the labels that their defaults have."""
        return {key: Labelled(value, self.dims[key]) if key in self.dims else value for key, value in values.items()}

    def _call_function(self, model: Callable[..., Any]) -> Any:
        value = self.written(**self._label(model())) if self.start else self.function(model)
        return value.data if isinstance(value, Labelled) else value
