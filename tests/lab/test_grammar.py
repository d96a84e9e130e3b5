"""The grammar of chains: a printed chain is parsed to itself, errors have a column, and no code is run."""

import keyword
import math
import string

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moduli.lab import ChainSyntaxError, Link, ParsedChain, catalogue, contender, parse
from moduli.lab import _grammar as grammar

words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda word: word not in grammar._WORDS and not keyword.iskeyword(word)
)
names = st.lists(words, min_size=1, max_size=3).map(".".join)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.text(max_size=8)
)


def grouped(values):
    return st.one_of(st.lists(values, max_size=3), st.lists(values, max_size=3).map(tuple))


def linked(values):
    keywords = st.lists(st.tuples(words, values), max_size=2, unique_by=lambda pair: pair[0]).map(tuple)
    links = st.builds(Link, names, st.lists(values, max_size=2).map(tuple), keywords)
    return st.lists(links, min_size=1, max_size=3).map(lambda parsed: ParsedChain(tuple(parsed)))


chains = linked(st.recursive(plain, lambda inner: grouped(inner) | linked(inner), max_leaves=6))


@settings(max_examples=40, deadline=None)
@given(chains)
def test_a_printed_chain_is_parsed_to_itself(chain):
    text = str(chain)
    assert parse(text) == chain
    assert str(parse(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=40), st.text(alphabet="AaL.|(),=[]'\"\\ 01e-+_x\n", max_size=40)))
@example("((((((")
@example("A(" * 5000)
@example("A(" + "[" * 5000)
@example("A(1" + "0" * 10000 + ")")
@example("A('\\")
@example("__import__('os').system('true')")
def test_any_text_is_a_chain_or_an_error_with_a_column(text):
    try:
        chain = parse(text)
    except ChainSyntaxError as error:
        column, lines = error.column, str(error).splitlines()
        assert 1 <= column <= len(text) + 1
        if len(lines) == 3:
            assert set(lines[2].strip()) == {"^"}
            assert len(lines[2]) <= len(lines[1]) + 1
    else:
        assert parse(str(chain)) == chain or "nan" in text


@settings(max_examples=80, deadline=None)
@given(st.one_of(chains.map(str), st.text(alphabet=string.printable, max_size=60)))
def test_names_are_only_looked_up_in_the_catalogue(text):
    """A chain that can be built consists of catalogue entries; everything else is refused before anything is constructed."""
    try:
        entry = contender(text)
    except ChainSyntaxError:
        return
    assert all(link.name in catalogue.entries() for link in parse(entry.source).links)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch owned')",
        "eval('1')",
        "torch.optim.Adam",
        "torch.load('x')",
        "torch.Adam.__init__",
        "torch.Optimizer",
        "Adam.__class__",
        "open('owned', 'w')",
        "lambda: 0",
        "Adam(); open('owned', 'w')",
        "LR(exit())",
        "LR(__builtins__)",
    ],
)
def test_code_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChainSyntaxError):
        contender(text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "column", "fact"),
    [
        ("", 1, "at least one link"),
        ("A |", 4, "joined by '|'"),
        ("A B", 3, "joined by '|'"),
        ("A(1", 2, "never closed"),
        ("A(1 2)", 3, "arguments by ','"),
        ("A(x=1, 2)", 9, "positional argument follows keyword"),
        ("A(x=1, x=2)", 8, "given twice"),
        ("A(1.2.3)", 3, "arguments by ','"),
        ("A('x)", 3, "unterminated string"),
        ("A($)", 3, "joined by '|'"),
        ("A([1, )", 7, "does not match"),
        ("True | A", 1, "the name of a link"),
        ("nan | A", 1, "the name of a link"),
        ("A(None=1)", 3, "None"),
        ("A('\\q')", 3, "escape"),
        ("5", 1, "the name of a link"),
        ("Ä(1) | A(b'x')", 10, "no meaning"),
        ("  A(1j)", 5, "no meaning"),
        ("A(**B)", 3, "'**'"),
        ("A(*B)", 3, "no meaning"),
        ("A(x[0])", 3, "no meaning"),
        ("A(-'x')", 3, "no meaning"),
        ("A(1 + 2)", 3, "no meaning"),
        ("A(f'{x}')", 3, "no meaning"),
        ("A()()", 1, "the name of a link"),
        (" A(1) # B", 7, "'#' has no meaning"),
        ("A().b", 1, "the name of a link"),
    ],
)
def test_errors_point_at_the_column(text, column, fact):
    with pytest.raises(ChainSyntaxError) as caught:
        parse(text)
    assert caught.value.column == column
    assert fact in caught.value.fact


def test_values_are_parsed_as_in_python():
    (link,) = parse(
        "A(1, -2.5e-3, +4, .5, 1_000, inf, -inf, nan, 'a\\n', \"b'\", [1, [2]], (1,), (2), (), true, None)"
    ).links
    assert link.args[:7] == (1, -0.0025, 4, 0.5, 1000, math.inf, -math.inf)
    assert math.isnan(link.args[7])
    assert link.args[8:] == ("a\n", "b'", [1, [2]], (1,), 2, (), True, None)
    assert isinstance(link.args[0], int)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Adma | LR(1)", "nothing is called 'Adma'; did you mean '"),
        ("ADAM", "'Adam'"),
        ("torch.adam", "did you mean 'torch.Adam'"),
        ("xyzzy", "`moduli links` lists"),
        ("torch.SGD(lr=0.1, momentun=0.9)", "did you mean 'momentum'?"),
        ("torch.SGD(0.1)", "by name"),
        ("Adam(lr=0.1)", "a step size is a link of its own: Adam | LR(0.1)"),
        ("Adam(1e-3)", "a step size is a link of its own: Adam(), LR(0.001)"),
        ("torch.SGD(lr=0.1) | LR(1)", "stands alone"),
        ("LR(1) | Population(4)", "at the head"),
        ("Population(4)", "needs links"),
        ("Population(0) | LR(1)", "at least one member"),
        ("Population(4, spread=-1) | LR(1)", "spread"),
        ("LR(1, 2)", "its settings are keywords"),
        ("LR(torch.SGD(lr=1))", "cannot be an argument"),
    ],
)
def test_chains_that_cannot_be_built_are_refused_with_the_reason(text, message):
    with pytest.raises(ChainSyntaxError) as caught:
        contender(text)
    assert message in str(caught.value)
    assert "^" in str(caught.value)


def test_the_error_for_a_long_chain_shows_the_text_around_it():
    text = " | ".join(["LR(1)"] * 100) + " | Adma"
    with pytest.raises(ChainSyntaxError) as caught:
        contender(text)
    lines = str(caught.value).splitlines()
    assert len(lines[1]) <= 102
    place = lines[2].index("^")
    assert lines[1][place : place + 4] == "Adma"


def test_a_parsed_chain_steps_like_the_optimizer_built_in_python():
    """Five steps with the built chain equal five steps with the optimizer."""
    import moduli as mo
    from moduli import m

    def end(make):
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        optimizer = make(net)
        for _ in range(5):
            optimizer.step(mo.closure(lambda: net(torch.ones(4, 3)).square().mean()))
        return [p.detach() for p in net.parameters()]

    written = end(lambda net: mo.Optimizer(net, m.Adam(), m.LR(0.1)))
    read = end(lambda net: catalogue.build(parse("Adam | LR(1e-1)"), net)[0])
    assert all(torch.equal(a, b) for a, b in zip(written, read, strict=True))
