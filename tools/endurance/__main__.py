"""Run every endurance check of this folder for its share of the time, and print what it counted.

    python tools/endurance [--seconds 600] [--seed 0] [names ...]

A check is a module here with `run(seconds, seed)`, which returns counts and raises where a promise is broken.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import pathlib
import sys
import time
from types import ModuleType

FOLDER = pathlib.Path(__file__).resolve().parent


def main() -> int:
    """Run the checks; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="the endurance checks")
    parser.add_argument("names", nargs="*", help="which; all by default")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of them together")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    checks = {name: check for name, check in find_checks().items() if not arguments.names or name in arguments.names}
    unknown = set(arguments.names) - checks.keys()
    if unknown or not checks:
        parser.error(f"there is no check {', '.join(sorted(unknown))}; there are {', '.join(find_checks())}")
    failed = 0
    for name, check in checks.items():
        start, options = time.monotonic(), {"seed": arguments.seed} if takes_seed(check) else {}
        try:
            outcome = ", ".join(
                f"{what} {count}" for what, count in check.run(arguments.seconds / len(checks), **options).items()
            )
        except Exception as error:  # noqa: BLE001 - reported, so that the other checks run too
            outcome, failed = f"FAILED: {type(error).__name__}: {error}", failed + 1
        print(f"{name} ({time.monotonic() - start:.0f} s): {outcome}", flush=True)
    return int(failed > 0)


def find_checks() -> dict[str, ModuleType]:
    """Return the modules of this folder that have `run`, by name."""
    sys.path.insert(0, str(FOLDER))
    checks = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            continue
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if callable(getattr(module, "run", None)):
            checks[path.stem] = module
    return checks


def takes_seed(check: ModuleType) -> bool:
    """Whether a check can be given a seed."""
    return "seed" in inspect.signature(check.run).parameters


if __name__ == "__main__":
    sys.exit(main())
