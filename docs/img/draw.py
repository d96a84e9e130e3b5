"""Draw race.svg, the picture of docs/index.md, from the race in race.jsonl.

    python docs/img/draw.py              draw race.svg, if race.jsonl or the code that draws it has changed
    python docs/img/draw.py FILE.jsonl   first copy the race of this file to race.jsonl (`make picture` runs a race and does this)

The bytes of a picture depend on the versions of libraries. So the picture contains a fingerprint of its sources, and is drawn
again only if the fingerprint has changed.
"""

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KEPT, PICTURE = HERE / "race.jsonl", HERE / "race.svg"
LAB = HERE.parent.parent / "src" / "moduli" / "lab"


def fingerprint() -> str:
    """Return a hash of the stored race and of the code that draws it."""
    sources = [KEPT, *(LAB / f"_{name}.py" for name in ("report", "results", "statistics", "paper", "scores"))]
    return hashlib.blake2b(b"\0".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()


def is_fresh() -> bool:
    """Whether the picture was drawn from the present sources. It does not import torch."""
    text = PICTURE.read_text(encoding="utf-8") if PICTURE.exists() else ""
    match = re.search(r"<!-- drawn from ([0-9a-f]+) -->", text)
    return match is not None and match[1] == fingerprint()


def draw() -> bool:
    """Draw the picture unless it is fresh, and return whether it was drawn."""
    if is_fresh():
        return False
    PICTURE.write_text(drawn(), encoding="utf-8")
    return True


def drawn() -> str:
    """Return the picture of the stored race."""
    from moduli import lab

    with tempfile.TemporaryDirectory() as folder:
        text = lab.write_picture(lab.Results.read(KEPT), Path(folder) / "race.svg").read_text(encoding="utf-8")
    return text.replace("</svg>", f"<!-- drawn from {fingerprint()} --></svg>")


def keep(path: Path) -> None:
    """Store the part of a race that the picture needs: curves and paths of one problem, and when each run solved the others."""
    from moduli import lab
    from moduli.lab._statistics import costs

    results = lab.Results.read(path)
    header = {**results.header, "started": "", "machine": {}, "command": []}
    flat = next((problem["name"] for problem in header["problems"] if problem["window"]), header["problems"][0]["name"])
    solved = {}
    for source, evaluations in costs(results, 1e-3).items():
        keys = ((problem["name"], source, seed) for problem in header["problems"] for seed in header["seeds"])
        solved |= dict(zip(keys, evaluations, strict=True))
    lines = [header]
    for run in results.runs:
        drawn = run["problem"] == flat
        names = ("kind", "problem", "contender", "source", "seed", "reason", "value", "evaluations")
        line: dict[str, Any] = {name: run[name] for name in names}
        history = [[e, 0, v] for e, _, v in run["history"]]
        # A staircase is stored by its corners. Where no curve is drawn, only the corner at which the problem was solved is stored.
        at = solved[lab.Results.key(run)]
        corner = [h[2] != history[i - 1][2] if drawn else max(1, h[0]) == at for i, h in enumerate(history)]
        line["history"] = [h for i, h in enumerate(history) if i in (0, len(history) - 1) or corner[i]]
        if drawn and run["seed"] == header["seeds"][0]:
            line |= {"path": run["path"]} if "path" in run else {}
            if "cloud" in run:
                frame = len(run["cloud"]) // 4
                line |= {"cloud": [run["cloud"][frame]], "generations": [run["generations"][frame]]}
        lines.append({**line, "seconds": None, "gradients": None, "steps": None, "detail": "", "traceback": ""})
    KEPT.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    print(f"{PICTURE.name}: {'drawn' if draw() else 'is up to date'}")
