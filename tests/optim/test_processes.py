"""Two processes compute what one computes, or raise. They are started once and run all checks of `process_worker`."""

import ast
from pathlib import Path

import pytest
import torch

from launching import launch

HERE = Path(__file__).resolve().parent
NAMES = [
    node.name
    for source in ("process_worker.py", "sharded_values.py")
    for node in ast.parse((HERE / source).read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(each, "id", "") == "check" for each in node.decorator_list)
]

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return for each process a dict of the differences it reported, by the name of the check."""
    folder = tmp_path_factory.mktemp("processes")
    launch("optim/process_worker.py", 2, lambda rank: (folder / "store", folder / f"out{rank}"))
    return [ast.literal_eval((folder / f"out{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes(problems, name):
    for by_check in problems:
        assert by_check[name] == []
