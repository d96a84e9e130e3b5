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
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
QUICK = ["tests/test_package.py", "tests/test_device.py", "tests/labels/test_space.py", "tests/optim/test_optimizer.py"]


def main(argv: list[str]) -> int:
    """Build, install, use; the first thing that fails ends it."""
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
    """Everything, in a folder of its own."""
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
    current = "from moduli.cli import _catalogue as c; assert c.entries() == c.describe(), 'run make catalogue, and build again'"
    run([python, "-c", current], use)

    consumer = use / "program.py"
    shutil.copy(ROOT / "tools" / "consumer" / "program.py", consumer)
    run([python, consumer], use)
    run([python, "-m", "mypy", "--strict", consumer], use)
    (use / "pyrightconfig.json").write_text('{"include": ["program.py"], "typeCheckingMode": "standard"}')
    run([python, "-m", "pyright", "--pythonpath", python], use)

    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sdist", filter="data")
    (unpacked,) = (folder / "sdist").iterdir()
    run([*pip, f"{unpacked}[dev]"], folder)
    run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], unpacked)


def blocks(page: Path) -> list[str]:
    """The Python of a page, as one program."""
    return ["\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.S | re.M))]


def make_environment(folder: Path) -> Path:
    """A fresh environment; its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(command: list[object], where: Path) -> None:
    """Run a command away from the checkout and from what the shell would add to the path."""
    print("$", *[str(part).replace(str(where), ".") for part in command], flush=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([str(part) for part in command], cwd=where, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
