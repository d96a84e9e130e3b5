"""The rules that `tools/check_rooms.py` and `tools/check_names.py` check hold, and the tools find violations."""

from pathlib import Path

import pytest

from launching import load_program

TOOL = Path(__file__).resolve().parent.parent / "tools" / "check_rooms.py"


@pytest.fixture(scope="module")
def rules():
    return load_program(TOOL)


def test_the_source_keeps_the_rules(rules):
    assert list(rules.check(rules.SOURCE)) == []


PRIVATE = {
    "import torch\ntorch._C._set_grad_enabled(True)": "torch._C._set_grad_enabled",
    "from torch._C import _dynamo": "torch._C._dynamo",
    "from torch.utils import _pytree as pytree": "torch.utils._pytree",
    "import torch._dynamo": "torch._dynamo",
    "import importlib\nimportlib.import_module('torch._dynamo')": "torch._dynamo",
    "from torch.autograd import forward_ad as ad\nad._current_level": "torch.autograd.forward_ad._current_level",
    "import sys\nsys.getrefcount(1)": "getrefcount",
    "from sys import getrefcount": "getrefcount",
    "import ctypes\nctypes.c_int.from_address(8)": "from_address",
    "import ctypes\nctypes.pythonapi.Py_IncRef": "pythonapi",
}


@pytest.mark.parametrize("code", PRIVATE)
def test_private_names_are_found(rules, tmp_path, code):
    write(tmp_path, "labels/_a.py", code)
    assert any(PRIVATE[code] in line for line in rules.check(tmp_path / "house"))
    write(tmp_path, "labels/_a.py", "")
    write(tmp_path, "_torch.py", code)
    assert list(rules.check(tmp_path / "house")) == []


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._foreach_add_([], 1)\ntorch.__version__",
        "self = object()\nself._C",
        "from torch import nn\nnn.Module()._parameters\nnn.Module._apply(1, 2)",
        "'torch._C is private'",
    ],
)
def test_documented_and_local_names_may_be_used(rules, tmp_path, code):
    write(tmp_path, "labels/_a.py", code)
    assert list(rules.check(tmp_path / "house")) == []


@pytest.mark.parametrize(
    ("code", "refused"),
    [
        ("from ..optim import Optimizer", False),
        ("from ..optim._vectors import as_real", True),
        ("from ..optim import _vectors", True),
        ("from ..optim.module import Module", False),
        ("from ..optim.module import _helper", True),
        ("import house.optim._vectors", True),
        ("from house.optim._vectors import as_real", True),
        ("from .. import optim", False),
        ("from .._torch import in_transform", False),
        ("from ._b import here", False),
        ("from ..optim.inner import X", False),
    ],
)
def test_private_modules_of_other_packages_are_refused(rules, tmp_path, code, refused):
    for name in ("__init__", "_vectors", "module", "inner/__init__"):
        write(tmp_path, f"optim/{name}.py", "")
    write(tmp_path, "m/_a.py", code)
    assert bool(list(rules.check(tmp_path / "house"))) is refused


@pytest.fixture(scope="module")
def names():
    return load_program(TOOL.with_name("check_names.py"))


def test_names_are_unique_and_words_are_the_fields(names):
    assert list(names.check(names.SOURCE)) == []


def test_repeated_names_and_vague_words_are_found(names, tmp_path):
    write(tmp_path, "evolve/pso.py", "class PSO: ...")
    write(tmp_path, "m/evolution.py", "class PSO: ...")  # an algorithm and its link may have one name
    write(tmp_path, "io/_a.py", "class Plan: ...")
    assert list(names.check(tmp_path / "house")) == []
    write(tmp_path, "labels/_b.py", "class Plan: ...  # for whoever asks")
    assert list(names.check(tmp_path / "house")) == [
        "labels/_b.py:1: 'whoever' names nothing; say what it is",
        "Plan: 2 classes of one name: io/_a.py:1, labels/_b.py:1",
    ]


@pytest.mark.parametrize(
    "name", ["_made", "_checked_views", "_known", "_taken", "briefly", "_directly", "_beyond", "_live"]
)
def test_participles_and_adverbs_are_found(names, tmp_path, name):
    write(tmp_path, "io/_a.py", f"def {name}(): ...")
    assert list(names.check(tmp_path / "house")) == [f"io/_a.py:1: {name!r} is no verb; say what the function does"]


@pytest.mark.parametrize(
    "name", ["_make", "_check_views", "_seed", "apply", "_multiply", "named_parameters", "_need_square"]
)
def test_verbs_and_names_of_torch_may_be_used(names, tmp_path, name):
    write(tmp_path, "io/_a.py", f"def {name}(): ...")
    assert list(names.check(tmp_path / "house")) == []


def write(folder, name, code):
    path = folder / "house" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
