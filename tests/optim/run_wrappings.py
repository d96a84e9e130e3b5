"""Run and check the law of wrappings in several processes."""

import ast

from launching import launch


def run(folder, kind, count, names):
    """Return for each process the differences it reported, by the name of the row.

    Args:
        folder: A directory for the store and the results.
        kind: The wrapping: "ddp", "fsdp1", "fsdp2", "hsdp" or "tp".
        count: The number of processes.
        names: The rows to run; all if empty.
    """
    launch("optim/wrapping_worker.py", count, lambda rank: (folder / "store", folder / f"out{rank}", kind, *names))
    return [ast.literal_eval((folder / f"out{rank}").read_text()) for rank in range(count)]


def check(problems, names):
    """Assert that no process reported a difference and that all rows ran."""
    for each in problems:
        assert {name: what for name, what in each.items() if what is not None} == {}
        assert len(each) >= (len(names) or 300)
