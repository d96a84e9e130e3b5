"""The package as an installed thing: version, typing marker, what importing it costs, what its front door offers."""

import ast
import json
import subprocess
import sys
from importlib import import_module, metadata, resources

import pytest

import moduli

# What takes longest to import of all that moduli could need some day.
HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "scipy", "sklearn", "networkx", "xarray", "ray", "rich", "typer")


def test_version_is_the_installed_one():
    assert moduli.__version__ == metadata.version("moduli")


def test_typing_marker_is_shipped():
    assert resources.files("moduli").joinpath("py.typed").is_file()


def modules_after(*programs: str) -> list[set[str]]:
    """The modules of one fresh process after each program."""
    lines = ["import json, sys, torch", "before = set(sys.modules)"]
    for program in programs:
        lines += [program, "print(json.dumps(sorted(set(sys.modules) - before)))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=600, check=True
    )
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def test_rooms_are_imported_when_they_are_used():
    """One process, three programs: what each adds to those before."""
    imported, labelled, trained, minimized = modules_after(
        "import moduli as mo",
        "mo.zeros(2)",
        "net = torch.nn.Linear(2, 1)\n"
        "opt = mo.Optimizer(net, mo.m.ClipNorm(1.0), mo.m.Adam(), mo.m.LR(0.1))\n"
        "opt.zero_grad(); net(torch.ones(2)).sum().backward(); opt.step(); opt.load_state_dict(opt.state_dict())",
        "mo.minimize(lambda x: (x * x).sum(), torch.ones(2))",
    )
    assert {name for name in imported if name.startswith("moduli.")} <= {
        "moduli._accessor",
        "moduli._loading",
        "moduli._torch",
        "moduli._version",
    }
    assert len(imported) < 20
    assert {name.split(".")[1] for name in labelled - imported if name.startswith("moduli.")} <= {
        *("labels", "device", "_accessor", "_html", "_loading", "_texts", "_torch", "_version")
    }
    assert not trained & {"moduli.lab", "moduli.cli", "moduli.io", "moduli.merge", "moduli.presets", "moduli.testing"}
    for heavy in HEAVY:
        assert heavy not in minimized, f"{heavy} is imported before it is needed"


def front_door() -> dict[str, tuple[str, str]]:
    """What type checkers are told of each name: the module it comes from and what it is called there."""
    tree = ast.parse(resources.files("moduli").joinpath("__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    told = {"Module": ("moduli.particles", "NytoModule")}
    for node in block.body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            module = f"moduli.{node.module}" if node.module else "moduli"
            names = import_module(module).__all__ if alias.name == "*" else [alias.asname or alias.name]
            told.update({name: (module, name) for name in names if not name.startswith("_")})
    return told


def test_the_front_door_gives_what_type_checkers_are_told():
    told = front_door()
    assert sorted(moduli.__all__) == sorted({*told, "__version__"})
    for name, (module, there) in told.items():
        expected = import_module(f"moduli.{there}") if module == "moduli" else getattr(import_module(module), there)
        assert getattr(moduli, name) is expected, name


def test_the_front_door_lists_all_its_names():
    assert set(moduli.__all__) <= set(dir(moduli))
    with pytest.raises(AttributeError, match="module 'moduli' has no attribute 'zeroes'"):
        moduli.zeroes


def test_a_star_import_gives_everything():
    names: dict[str, object] = {}
    exec("from moduli import *", names)
    assert set(moduli.__all__) <= set(names)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_a_room_was_loaded_as_before(collects):
    program = (
        f"import gc, moduli; gc.{'enable' if collects else 'disable'}(); moduli.minimize; moduli.labels; "
        "print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == str(collects)
