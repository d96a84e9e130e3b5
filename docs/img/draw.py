"""Draws the picture of the README from the race that is kept beside it.

    python docs/img/draw.py              draw race.svg, if race.jsonl or what draws it has changed since
    python docs/img/draw.py FILE.jsonl   keep the race of this file first (`make picture` races, and does this)

Libraries differ from machine to machine, and with them the bytes of a picture; so it carries the fingerprint of what it was drawn
from, and is left alone as long as that is the same.
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
    """Of the race that is kept and of the code that draws it."""
    sources = [KEPT, *(LAB / f"_{name}.py" for name in ("report", "results", "paper", "scores"))]
    return hashlib.blake2b(b"\0".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()


def is_fresh() -> bool:
    """Whether the picture was drawn from what there is now. Answered without torch, in no time."""
    text = PICTURE.read_text(encoding="utf-8") if PICTURE.exists() else ""
    found = re.search(r"<!-- drawn from ([0-9a-f]+) -->", text)
    return found is not None and found[1] == fingerprint()


def draw() -> bool:
    """Draw the picture, unless it is fresh; tells whether it was drawn."""
    if is_fresh():
        return False
    PICTURE.write_text(drawn(), encoding="utf-8")
    return True


def drawn() -> str:
    """The picture of the race that is kept."""
    from moduli import lab

    with tempfile.TemporaryDirectory() as folder:
        text = lab.write_picture(lab.Results.read(KEPT), Path(folder) / "race.svg").read_text(encoding="utf-8")
    return text.replace("</svg>", f"<!-- drawn from {fingerprint()} --></svg>")


def keep(path: Path) -> None:
    """Keep of a race what the picture shows: the curves and paths of one problem, and when each run had solved the others."""
    from moduli import lab
    from moduli.lab._results import costs

    results = lab.Results.read(path)
    header = {**results.header, "started": "", "machine": {}, "command": []}
    flat = next((problem["name"] for problem in header["problems"] if problem["window"]), header["problems"][0]["name"])
    solved = {}
    for source, found in costs(results, 1e-3).items():
        keys = ((problem["name"], source, seed) for problem in header["problems"] for seed in header["seeds"])
        solved |= dict(zip(keys, found, strict=True))
    lines = [header]
    for run in results.runs:
        drawn = run["problem"] == flat
        names = ("kind", "problem", "contender", "source", "seed", "reason", "value", "evaluations")
        line: dict[str, Any] = {name: run[name] for name in names}
        history = [[e, 0, v] for e, _, v in run["history"]]
        # Of a staircase only the corners are kept; where no curve is drawn, only the one at which the problem was solved.
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
