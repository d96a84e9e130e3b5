"""Make an environment with other releases of torch or of all dependencies, and run the tests in it.

Releases of torch come as wheels for CUDA, whose libraries take gigabytes. The wheel is installed without them; for every
library that is missing an empty one of its name is built, which is enough for what runs on the CPU. Where `TORCH_INDEX` names
an index in the environment, torch is installed from there as it is.

    python tools/torch_venv.py 2.15.0                     # all tests with that torch
    python tools/torch_venv.py minimum                    # with the oldest release of each dependency in pyproject.toml
    python tools/torch_venv.py 2.15.0 -- tests/labels -q  # what follows is for pytest
    python tools/torch_venv.py 2.15.0 --remove            # the environment is no longer needed
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
PURE = ["filelock", "typing-extensions", "sympy", "networkx", "jinja2", "fsspec", "setuptools<81"]
NO_DEVICE = 100  # cudaErrorNoDevice
TESTS = ["pytest", "pytest-xdist", "hypothesis", "safetensors"]
EXTRAS = ("lab", "merge", "pandas", "plot", "xarray", "yaml")
MINIMUM = "minimum"


def main() -> int:
    """Parse the arguments, make the environment unless it exists, and run pytest in it."""
    parser = argparse.ArgumentParser(description="Run the tests with other releases of torch, or of all dependencies.")
    parser.add_argument("version", help=f"the release of torch, as 2.15.0, or '{MINIMUM}' for the oldest of everything")
    parser.add_argument("--remove", action="store_true", help="remove the environment instead")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args()
    place = pathlib.Path(tempfile.gettempdir()) / f"moduli-torch-{options.version}"
    if options.remove:
        shutil.rmtree(place, ignore_errors=True)
        return 0
    python = make(place, options.version)
    settings = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "LD_LIBRARY_PATH": str(place / "stubs")}
    arguments = options.pytest or ["-q", "-n", "auto", "--dist", "worksteal"]
    return subprocess.call([str(python), "-m", "pytest", *arguments], cwd=ROOT, env=settings)


def list_requirements(oldest: bool) -> list[str]:
    """Return what the package and its extras for tests need, without torch.

    Args:
        oldest: Whether each is pinned to the oldest release that pyproject.toml allows.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(item for name in EXTRAS for item in extras[name])]
    needed = [item for item in needed if not item.startswith("torch")]
    return [item.replace(">=", "==") for item in needed] if oldest else needed


def make(place: pathlib.Path, version: str) -> pathlib.Path:
    """Return the interpreter of the environment, which is made unless it is complete."""
    python = place / "bin" / "python"
    if (place / "ready").exists():
        return python
    venv.create(place, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    index = os.environ.get("TORCH_INDEX")
    release = find_oldest_torch() if version == MINIMUM else version
    subprocess.check_call([*pip, "--no-deps", f"torch=={release}", *(["--index-url", index] if index else [])])
    subprocess.check_call([*pip, *PURE, *TESTS, *list_requirements(oldest=version == MINIMUM)])
    # Installed for its metadata and entry points; the tests import the source.
    subprocess.check_call([*pip, "--no-deps", str(ROOT)])
    if not index:
        build_stubs(place)
    (place / "ready").touch()
    return python


def find_oldest_torch() -> str:
    """Return the oldest release of torch that pyproject.toml allows, as pip spells it."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'"torch>=([\d.]+)"', text)
    return version if version.count(".") == 2 else f"{version}.0"


def build_stubs(place: pathlib.Path) -> None:
    """Build a library of empty functions for every library that torch needs and this machine lacks."""
    stubs = place / "stubs"
    stubs.mkdir(exist_ok=True)
    (folder,) = place.glob("lib/python*/site-packages/torch")
    libraries = [*folder.glob("lib/*.so*"), *folder.glob("*.so")]
    present = {library.name for library in libraries}
    present.update(re.findall(r"^\s*(\S+) \(", _output("/sbin/ldconfig", "-p"), re.MULTILINE))
    missing: set[str] = set()
    wanted: set[tuple[str, str]] = set()
    defined: set[str] = set()
    versions: dict[str, set[str]] = {}
    for library in libraries:
        for needed in _output("readelf", "-VW", str(library)).split("File: ")[1:]:
            versions.setdefault(needed.split()[0], set()).update(re.findall(r"Name: (\S+)", needed))
        missing.update(re.findall(r"\(NEEDED\).*\[(.*)\]", _output("readelf", "-dW", str(library))))
        for line in _output("readelf", "--dyn-syms", "-W", str(library)).splitlines():
            bound, _, section, name, *_ = (*line.split()[4:], *[""] * 4)
            if section == "UND" and bound != "WEAK":
                symbol, _, version = name.partition("@")
                wanted.add((symbol, version.lstrip("@")))
            elif section:
                defined.add(name.partition("@")[0])
    # Symbols without a version may be in any library; those of the system's libraries all have versions.
    loose = {symbol for symbol, version in wanted if symbol and not version} - defined
    for number, name in enumerate(sorted(missing - present)):
        symbols = {version: {s for s, v in wanted if v == version} for version in versions.get(name, ())}
        _build(stubs / name, symbols, loose if number == 0 else set())


def _build(library: pathlib.Path, versioned: dict[str, set[str]], loose: set[str]) -> None:
    """Build a library whose functions return the error that there is no device."""
    symbols = sorted(loose.union(*versioned.values()))
    source = library.with_suffix(".c")
    source.write_text(
        "".join(
            f"long {name}(void) {{ return {0 if 'String' in name or 'Name' in name else NO_DEVICE}; }}\n"
            for name in symbols
        )
    )
    script = library.with_suffix(".map")
    script.write_text(
        "".join(f"{version} {{ {'; '.join(sorted(names))}; }};\n" for version, names in versioned.items() if names)
    )
    flags = [f"-Wl,-soname,{library.name}", *([f"-Wl,--version-script={script}"] if script.stat().st_size else [])]
    subprocess.run(["cc", "-w", "-shared", "-fPIC", "-nostdlib", str(source), "-o", str(library), *flags], check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main())
