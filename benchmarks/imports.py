"""What importing moduli costs.

CPU time of fresh processes that take turns: `import moduli` (which imports torch) over `import torch` alone; then what the
first optimizer and the first `minimize` add to that. Bytecode is written and used, as it is of an installed package.
"""

import os
import statistics
import subprocess
import sys

TURNS = 7
PROGRAMS = {
    "import torch": "import torch",
    "import moduli": "import moduli",
    "first optimizer": "import torch, moduli as mo; mo.Optimizer([torch.ones(2, requires_grad=True)], mo.m.Adam())",
    "first minimize": "import torch, moduli as mo; mo.minimize(lambda x: (x * x).sum(), torch.ones(2))",
}


def cpu_time(program: str) -> float:
    """Return the seconds of user and system time that a new interpreter takes for a program."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    before = os.times()
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def table() -> list[dict]:
    taken = {name: [] for name in PROGRAMS}
    for turn in range(TURNS + 1):
        for name, program in PROGRAMS.items():
            seconds = cpu_time(program)
            if turn:  # the first turn writes bytecode and fills the file cache
                taken[name].append(seconds)
    torch_alone = taken.pop("import torch")
    rows = []
    for name, seconds in taken.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds, torch_alone, strict=True))
        bar = 1.2 if name == "import moduli" else None
        ok = bar is None or ratio <= bar
        rows.append({"name": f"{name} / import torch", "value": ratio, "bar": bar, "unit": "x", "ok": ok})
    added = statistics.median(
        first - alone for first, alone in zip(taken["first minimize"], taken["import moduli"], strict=True)
    )
    rows.append(
        {"name": "first minimize after import moduli", "value": added, "bar": 0.3, "unit": "s", "ok": added <= 0.3}
    )
    return rows


if __name__ == "__main__":
    for row in table():
        print(f"{row['name']}: {row['value']:.3f} {row['unit']} (bar {row['bar']})")
