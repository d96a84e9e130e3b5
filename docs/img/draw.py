"""Draws the picture of the README from the race that is kept beside it.

    python docs/img/draw.py              draw race.svg, if race.jsonl or what draws it has changed since
    python docs/img/draw.py FILE.jsonl   keep the race of this file first (`make picture` races, and does this)

Timings and libraries differ from machine to machine, and with them the bytes of a picture; so it carries the fingerprint of what it
was drawn from, and is left alone as long as that is the same.
"""

import hashlib
import json
import re
import sys
from pathlib import Path

from moduli import lab

HERE = Path(__file__).resolve().parent
KEPT, PICTURE = HERE / "race.jsonl", HERE / "race.svg"


def fingerprint() -> str:
    """Of the race that is kept and of the code that draws it."""
    package = Path(str(lab.__file__)).parent
    sources = [KEPT, *(package / f"_{name}.py" for name in ("picture", "statistics"))]
    return hashlib.blake2b(b"\0".join(path.read_bytes() for path in sources), digest_size=8).hexdigest()


def is_fresh() -> bool:
    """Whether the picture was drawn from what there is now."""
    found = (
        re.search(r"<!-- drawn from ([0-9a-f]+) -->", PICTURE.read_text(encoding="utf-8")) if PICTURE.exists() else None
    )
    return found is not None and found[1] == fingerprint()


def keep(path: Path) -> None:
    """Keep of a race what the picture shows: one line per run, with the steps of its curve and where it went in the plane."""
    results = lab.Results.read(path)
    header = {key: value for key, value in results.header.items() if key not in ("started", "machine", "command")}
    flat = next((p["name"] for p in header["problems"] if p["window"]), None)
    first = header["seeds"][0]
    lines = [header, *(_kept(run, run["problem"] == flat and run["seed"] == first) for run in results.runs)]
    KEPT.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")


def _kept(run: dict, drawn: bool) -> dict:
    names = ("kind", "problem", "contender", "source", "seed", "reason", "evaluations")
    out = {name: run[name] for name in names}
    out["value"], out["seconds"] = _short(run["value"]), None
    # Where the best value did not change the staircase has no corner.
    history = [[e, 0, _short(v)] for e, _, v in run["history"]]
    corners = [p for i, p in enumerate(history) if i in (0, len(history) - 1) or p[2] != history[i - 1][2]]
    out["history"] = corners
    if drawn and "path" in run:
        out["path"] = [[_short(x) for x in point] for point in run["path"]]
    if drawn and "cloud" in run:
        out["cloud"] = [run["cloud"][len(run["cloud"]) // 4]]
    return out


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def draw() -> bool:
    """Draw the picture, unless it is fresh; tells whether it was drawn."""
    if is_fresh():
        return False
    text = lab.picture(lab.Results.read(KEPT))
    PICTURE.write_text(text.replace("</svg>", f"<!-- drawn from {fingerprint()} --></svg>"), encoding="utf-8")
    return True


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep(Path(sys.argv[1]))
    print(f"{PICTURE.name}: {'drawn' if draw() else 'is up to date'}")
