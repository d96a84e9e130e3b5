"""The installed package: version, typing marker, which modules importing it loads, and its public names."""

import ast
import json
import subprocess
import sys
from importlib import import_module, metadata, resources

import pytest

import moduli

# The slowest imports among the modules that moduli uses.
HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "scipy", "sklearn", "networkx", "xarray", "ray", "rich", "typer")


def test_version_is_the_installed_one():
    assert moduli.__version__ == metadata.version("moduli")


def test_typing_marker_is_shipped():
    assert resources.files("moduli").joinpath("py.typed").is_file()


def list_modules_after(*programs: str) -> list[set[str]]:
    """Return the modules that one new process has loaded after each program."""
    lines = ["import json, sys, torch", "before = set(sys.modules)"]
    for program in programs:
        lines += [program, "print(json.dumps(sorted(set(sys.modules) - before)))"]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=600, check=True
    )
    return [set(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def test_packages_are_imported_when_they_are_used():
    """Check the modules that importing, labels, training and minimising load, in one process."""
    imported, labelled, trained, minimized = list_modules_after(
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


def read_declared_names() -> dict[str, tuple[str, str]]:
    """Return for each public name the module and the name there, as `__init__` declares them to type checkers."""
    tree = ast.parse(resources.files("moduli").joinpath("__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    sources = {"Module": ("moduli.particles", "NytoModule")}
    for node in block.body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            module = f"moduli.{node.module}" if node.module else "moduli"
            names = import_module(module).__all__ if alias.name == "*" else [alias.asname or alias.name]
            sources.update({name: (module, name) for name in names if not name.startswith("_")})
    return sources


def test_public_names_are_those_declared_to_type_checkers():
    sources = read_declared_names()
    assert sorted(moduli.__all__) == sorted({*sources, "__version__"})
    for name, (module, attribute) in sources.items():
        expected = (
            import_module(f"moduli.{attribute}") if module == "moduli" else getattr(import_module(module), attribute)
        )
        assert getattr(moduli, name) is expected, name


def test_dir_lists_all_public_names():
    assert set(moduli.__all__) <= set(dir(moduli))
    with pytest.raises(AttributeError, match="module 'moduli' has no attribute 'zeroes'"):
        moduli.zeroes


def test_a_star_import_gives_everything():
    names: dict[str, object] = {}
    exec("from moduli import *", names)
    assert set(moduli.__all__) <= set(names)


@pytest.mark.parametrize("collects", [True, False])
def test_loading_a_package_restores_garbage_collection(collects):
    program = (
        f"import gc, moduli; gc.{'enable' if collects else 'disable'}(); moduli.minimize; moduli.labels; "
        "print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == str(collects)
