"""The stub `_methods.pyi`: it declares exactly the methods of `Tensor`, with the same parameters."""

import ast
import inspect
from pathlib import Path

import moduli.labels._tensor as module
from moduli.labels import Tensor

STUB = Path(module.__file__).with_name("_methods.pyi")


def read_declared():
    (methods,) = (node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in methods.body if isinstance(node, ast.FunctionDef)}


def read_attached():
    """Return the methods of `Tensor` by name that are attached outside of its class body."""
    tree = ast.parse(Path(module.__file__).read_text())
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Tensor")
    own = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    methods = {}
    for name, value in vars(Tensor).items():
        if name not in own and (inspect.isfunction(value) or isinstance(value, property)):
            methods[name] = value
    return methods


def test_every_method_is_declared_and_every_declaration_exists():
    assert set(read_declared()) == set(read_attached())


def test_parameters_are_declared_as_they_are():
    for name, node in read_declared().items():
        function = read_attached()[name]
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
