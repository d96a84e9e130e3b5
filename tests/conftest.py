"""Settings shared by every test: one torch thread per worker, and hypothesis without deadlines."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Derandomised, so that a red build is red for everybody; deadlines measure the machine, not the code.
settings.register_profile(
    "moduli", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("moduli")

# Minutes each, for what seldom breaks: killed writers, processes in pools. `make test-all` runs them.
LONG = (
    "tests/io/test_crash.py",
    "tests/io/test_hostile.py",
    "tests/io/test_resume.py",
    "tests/evolve/test_executors.py",
    "tests/evolve/test_search.py",
    "tests/m/test_second_products.py",
    "tests/m/test_members.py",
)
# Of these, one test in so many; both numbers are prime to the number of laws, so that every law meets some row.
SHARES = {"tests/laws/test_laws.py": 8, "tests/evolve/test_laws.py": 5}


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="also the tests that take minutes, and every pair of the law book"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("--all") or any("::" in str(argument) for argument in config.args):
        return
    kept, left, seen = [], [], dict.fromkeys(SHARES, 0)
    for item in items:
        path = item.nodeid.split("::")[0]
        if path in SHARES:
            seen[path] += 1
            (kept if seen[path] % SHARES[path] == 0 else left).append(item)
        else:
            (left if path in LONG else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
