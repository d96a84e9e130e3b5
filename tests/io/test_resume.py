"""Resuming in another process: the losses and the state equal those of an uninterrupted run, bit for bit."""

import importlib.util
import sys
from pathlib import Path

import pytest


def load_resume():
    # This directory is called `io` like a standard module, so it cannot be imported by name.
    path = Path(__file__).with_name("resume.py")
    spec = importlib.util.spec_from_file_location("moduli_resume_law", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


resume = load_resume()


@pytest.mark.parametrize("group", ["torch_", "scheduler_", "link_", "population_", ""])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_training_resumed_in_another_process_is_bit_identical(group, tmp_path):
    groups = ("torch_", "scheduler_", "link_", "population_")
    resume.register_links()
    names = [n for n in resume.CASES if (n.startswith(group) if group else not n.startswith(groups))]
    assert names
    resume.check(names, tmp_path)
