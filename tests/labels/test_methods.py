"""The methods declared for type checkers are the methods there are, with the same parameters."""

import ast
import inspect
from pathlib import Path

import moduli.labels._tensor as module
from moduli.labels import Tensor

STUB = Path(module.__file__).with_name("_methods.pyi")


def declared():
    (methods,) = (node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in methods.body if isinstance(node, ast.FunctionDef)}


def attached():
    """What the files of the room gave to Tensor: everything that its own class body does not define."""
    tree = ast.parse(Path(module.__file__).read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Tensor")
    own = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    found = {}
    for name, value in vars(Tensor).items():
        if name not in own and (inspect.isfunction(value) or isinstance(value, property)):
            found[name] = value
    return found


def test_every_method_is_declared_and_every_declaration_exists():
    assert set(declared()) == set(attached())


def test_parameters_are_declared_as_they_are():
    for name, node in declared().items():
        function = attached()[name]
        if isinstance(function, property):
            continue
        arguments = node.args
        stub = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)][1:]
        real = [
            p.name
            for p in list(inspect.signature(function).parameters.values())[1:]
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        assert stub == real, name
