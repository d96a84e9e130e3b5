"""`FILE.py:Name` in chains: parsed, printed, run and refused; and labelled closures of one function."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moduli import lab
from moduli.cli._race import _parse_contender, _read_race
from moduli.lab import ParsedChain, parse

FILE = """
from moduli import m, optim

class SoftSign(optim.UpdateTransform):
    elementwise = True
    limit: float = 1.0

    def transform(self, tensor, state, setting):
        return tensor * setting["limit"] / (tensor.abs() + setting["limit"])

def chain(lr=0.1):
    return optim.Chain(SoftSign(), m.LR(lr))

def make(model, lr=0.1):
    import torch
    return torch.optim.SGD(model.parameters(), lr=lr)

def number():
    return 4
"""


@pytest.fixture
def file(tmp_path):
    folder = tmp_path / "my links"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "mine.py").write_text(FILE)
    (tmp_path / "torn.py").write_text("1 / 0")
    return tmp_path / "mine.py"


def hash_run(source):
    """Return a hash of the result of a chain after thirty evaluations."""
    return lab.run(lab.problems.get("rosenbrock"), lab.contender(source), 0, budget=30)["digest"]


@pytest.mark.parametrize(
    ("in_file", "plain"),
    [("{}:chain(lr=0.01)", "{}:SoftSign | LR(0.01)"), ("{}:make(lr=0.001)", "torch.SGD(lr=0.001)")],
)
def test_names_in_files_run_as_the_links_they_define(file, in_file, plain):
    assert hash_run(in_file.format(file)) == hash_run(plain.format(file))
    spaced = repr(f"{file.parent}/my links/mine.py:SoftSign") + "(limit=2.0) | LR(0.01)"
    assert (
        hash_run(spaced)
        == hash_run(f"{file}:SoftSign(limit=2.0) | LR(0.01)")
        != hash_run(f"{file}:SoftSign | LR(0.01)")
    )


NAMES = st.from_regex(r"[a-zé~][\w.+-]{0,5}/?[\w ]{1,6}\.py:[A-Za-z_]\w{0,5}", fullmatch=True)


@given(NAMES, st.sampled_from(["{}", "Alternate({}, Adam) | LR(0.1)", "LR(1, name='a.py:b') | {}", "A([{}])"]))
def test_chains_with_names_in_files_are_parsed_from_their_text(name, form):
    chain = parse(form.format(repr(name) + "()"))
    assert name in chain.references
    assert parse(str(chain)) == chain
    assert isinstance(chain, ParsedChain)


def test_strings_are_not_taken_for_references_and_columns_are_correct():
    assert parse("LR(1, name='x.py:Y')").references == []
    chain = parse("ClipNorm(1) | a-b/c.py:X(0.5, key=2) | LR(0.1)")
    assert [link.column for link in chain.links] == [1, 15, 40]
    assert chain.links[1].name == "a-b/c.py:X"


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ("{}:Nothing", "has no 'Nothing'; it has SoftSign"),
        ("{}:number", "returned 4, not links"),
        ("{}:m", "in a chain there are classes of links"),
        ("{}:SoftSign(limt=1)", "did you mean 'limit'"),
        ("{}:make | LR(1)", "is a whole optimizer"),
        ("{}:make(0.1)", "are given by name"),
        ("Online({}:make)", "is a function of the model and cannot be an argument"),
        ("{}no.py:X", "there is no file"),
        ("{}/../torn.py:X", "raised ZeroDivisionError"),
    ],
)
def test_names_in_files_that_are_no_links_are_refused(file, chain, message):
    with pytest.raises(lab.ChainSyntaxError, match=message):
        lab.contender(chain.format(file).replace("mine.py/../", ""))


def test_labels_are_distinguished_from_files(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    for text, label in (
        ("mine.py:SoftSign | LR(0.1)", "mine.py:SoftSign | LR(0.1)"),
        ("mine: mine.py:SoftSign | LR(0.1)", "mine"),
        ("mine.py: Adam | LR(0.1)", "mine.py"),
        (f"{file}:SoftSign | LR(0.1)", f"{file}:SoftSign | LR(0.1)"),
    ):
        assert _parse_contender(text).label == label


def test_reading_results_runs_no_file_that_the_command_does_not_name(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "mine.py:SoftSign | LR(0.1)"
    lab.race(["sphere-10"], [source], seeds=1, budget=3, workers=0, file="race.jsonl")
    lines = (tmp_path / "race.jsonl").read_text().replace("mine.py", "evil.py")
    (tmp_path / "race.jsonl").write_text(lines)
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()\n" + FILE)
    evil = source.replace("mine", "evil")
    with pytest.raises(Exception) as ended:
        _read_race(tmp_path / "race.jsonl", [], [])
    assert ended.value.exit_code == 2
    assert not (tmp_path / "ran").exists()
    spec = _read_race(tmp_path / "race.jsonl", [], [evil])
    assert [each.source for each in spec["contenders"]] == [evil]
    assert (tmp_path / "ran").exists()


def descend(rate):
    return lambda model: torch.optim.SGD(model.parameters(), lr=rate)


def test_labelled_closures_are_separate_contenders(tmp_path):
    field = [lab.contender(descend(rate), label=f"rate {rate}") for rate in (0.1, 0.2)]
    field.append(lab.contender(field[0], label="again"))
    results = lab.race(["sphere-10"], field, seeds=2, budget=10, workers=0, file=tmp_path / "race.jsonl")
    assert [row["contender"] for row in lab.summary(results)] == ["rate 0.1", "rate 0.2", "again"]
    values = [row["median"] for row in lab.summary(results)]
    assert values[0] == values[2] != values[1]
    resumed = lab.race(["sphere-10"], field, seeds=2, budget=10, workers=0, file=tmp_path / "race.jsonl", resume=True)
    assert json.dumps(resumed.runs) == json.dumps(results.runs)
    with pytest.raises(ValueError, match=r"none twice.*label="):
        lab.race(["sphere-10"], [descend(0.1), descend(0.2)], seeds=1, budget=10, workers=0)
