"""The law of wrappings in several processes."""

import ast

from launching import launch


def run(folder, kind, count, names):
    """What each process of the law of wrappings found wrong, by the name of the row."""
    launch("optim/wrapping_worker.py", count, lambda rank: (folder / "store", folder / f"out{rank}", kind, *names))
    return [ast.literal_eval((folder / f"out{rank}").read_text()) for rank in range(count)]


def check(found, names):
    for each in found:
        assert {name: what for name, what in each.items() if what is not None} == {}
        assert len(each) >= (len(names) or 300)
