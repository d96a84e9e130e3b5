"""Build moduli as it would be released, and use the result as others would.

    python tools/check_release.py               the wheel: README, command line, a typed consumer; the sdist: its quick tests
    python tools/check_release.py --tests tests  all tests of the sdist

The wheel is installed in a fresh environment, away from this checkout; nothing of the checkout can be imported there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
QUICK = ["tests/test_package.py", "tests/test_device.py", "tests/labels/test_space.py", "tests/optim/test_optimizer.py"]


def main(argv: list[str]) -> int:
    """Build a release, install it and use it; the first failure raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="*", default=QUICK, help="which tests of the sdist to run")
    parser.add_argument("--keep", action="store_true", help="leave the folder it was done in")
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="moduli-release-"))
    try:
        check(folder, [name for name in options.tests if (ROOT / name).exists()])
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("the release can be used")
    return 0


def check(folder: Path, tests: list[str]) -> None:
    """Build, install and check wheel and sdist in a new folder."""
    check_papers()
    python = make_environment(folder / "env")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", CONSTRAINTS]
    run([*pip, "torch"], folder)
    run([*pip, "build", "mypy", "pyright[nodejs]"], folder)
    run([python, "-m", "build", "--outdir", folder / "dist", ROOT], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    run([*pip, f"{wheel}[lab]"], folder)

    use = folder / "use"
    use.mkdir()
    for number, block in enumerate(blocks(ROOT / "README.md")):
        (use / f"readme{number}.py").write_text(block)
    run([python, use / "readme0.py"], use)
    for command in (
        ["--version"],
        ["--help"],
        ["links", "adam"],
        ["race", "beale", "--with", "adam", "--budget", "50"],
    ):
        run([python, "-m", "moduli", *command], use)

    consumer = use / "program.py"
    shutil.copy(ROOT / "tools" / "consumer" / "program.py", consumer)
    run([python, consumer], use)
    run([python, "-m", "mypy", "--strict", consumer], use)
    (use / "pyrightconfig.json").write_text('{"include": ["program.py"], "typeCheckingMode": "strict"}')
    run([python, "-m", "pyright", "--pythonpath", python], use)

    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    run([*pip, f"{unpacked}[dev]"], folder)
    run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], unpacked)


PAPERS = ("LICENSE", "CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")


def check_papers(root: Path = ROOT) -> None:
    """Raise SystemExit if documents are missing, versions differ, or the changelog does not begin with breaking changes."""
    faults = [f"{name} is missing" for name in PAPERS if not (root / name).is_file()]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    packed = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    faults += [f"{name} is not in the sdist" for name in PAPERS if name not in packed]
    if not faults:
        cited = re.search(r"^version: (\S+)$", (root / "CITATION.cff").read_text(encoding="utf-8"), flags=re.M)
        if cited is None or cited[1] != version:
            faults.append(f"CITATION.cff cites another version than {version}")
        newest = (root / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]
        if not re.match(rf"(Unreleased|{re.escape(version)}\b)", newest):
            faults.append(f"CHANGELOG.md does not begin with {version} or Unreleased")
        titles = re.findall(r"^### (.*)$", newest, flags=re.M)
        first = next((number for number, title in enumerate(titles) if not title.startswith("Changed")), len(titles))
        if titles[:1] != ["Changed: what breaks"] or any(title.startswith("Changed") for title in titles[first:]):
            faults.append("CHANGELOG.md: the newest version does not begin with what breaks, and all that is changed")
        if "## Deprecation" not in (root / "CONTRIBUTING.md").read_text(encoding="utf-8"):
            faults.append("CONTRIBUTING.md has no deprecation policy")
    if faults:
        raise SystemExit("not to be released:\n  " + "\n  ".join(faults))


def blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page, joined to one program."""
    return ["\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M))]


def make_environment(folder: Path) -> Path:
    """Make an environment and return its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(command: list[object], where: Path) -> None:
    """Run a command in a folder outside of the checkout, without PYTHONPATH and VIRTUAL_ENV."""
    print("$", *[str(part).replace(str(where), ".") for part in command], flush=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([str(part) for part in command], cwd=where, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
