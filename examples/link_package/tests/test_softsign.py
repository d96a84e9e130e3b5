"""The names of this package, as users of moduli meet them."""

import torch

import moduli as mo
from moduli import lab, merge
from moduli.testing import check_link


def test_the_link_obeys_the_laws_by_its_name():
    report = check_link(
        "SoftSign | LR(0.05)", laws=["optimum", "pieces", "errors", "pickled"], steps=1500, tolerance=1e-2
    )
    assert report.held == ("optimum", "pieces", "errors", "pickled")


def test_the_names_run_in_a_race():
    results = lab.race(["ripples"], ["SoftSign | LR(0.1)", "soft_descent(lr=0.02)"], seeds=1, budget=300, workers=0)
    assert all(run["value"] < 1e-3 for run in results.runs)


def test_the_recipe_merges_files(tmp_path):
    for number, value in enumerate((1.0, 2.0, 100.0)):
        mo.save(tmp_path / str(number), {"w": torch.tensor([value])})
    mo.io.merge_files("median", [tmp_path / str(number) for number in range(3)], tmp_path / "out")
    assert mo.io.read(tmp_path / "out").module["w"].item() == 2.0
    assert "median" in merge.list_recipes()
