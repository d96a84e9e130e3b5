"""Draw the picture of docs/merge.md: `python docs/img/draw_barrier.py [--measure]`.

`barrier.svg` shows the loss along the segment between two networks that were trained on handwritten digits from two seeds, before
and after alignment. The losses are read from barrier.json; --measure trains the networks and writes this file again.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FONT = 'font-family="sans-serif" font-size="12"'
COLOURS = {"as they are": "#e45756", "aligned": "#4c78a8", "aligned and repaired": "#54a24b"}
WIDTHS = (32, 512)


def measure() -> dict[str, dict[str, list[float]]]:
    """Return the losses at eleven points of the segment, by width and by the preparation of the second network."""
    import torch
    import torch.nn.functional as F

    from moduli import merge

    sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
    from align import make_mlp, read_digits, train

    x, y = read_digits()
    losses_by_width = {}
    for width in WIDTHS:
        nets = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            nets.append(train(make_mlp(width), seed))
        one, other = nets
        aligned = merge.align(other, one, example=x[:8])

        def loss(net):
            return float(F.cross_entropy(net(x), y))

        places = [at / 10 for at in range(11)]
        repaired = [
            loss(merge.repair(merge.lerp(one, aligned, t), [x], [one, aligned], [1 - t, t])) if 0 < t < 1
            else loss(merge.lerp(one, aligned, t)) for t in places
        ]  # fmt: skip
        curves = {
            name: [loss(merge.lerp(one, each, t)) for t in places]
            for name, each in zip(COLOURS, (other, aligned), strict=False)
        }
        losses_by_width[str(width)] = {**curves, "aligned and repaired": repaired}
    return losses_by_width


def draw(losses_by_width: dict[str, dict[str, list[float]]]) -> str:
    """Return the picture: one panel for each width."""
    parts = []
    for panel, (width, curves) in enumerate(losses_by_width.items()):
        left, top, wide, high = 60 + 330 * panel, 40, 240, 160
        most = max(max(losses) for losses in curves.values())
        parts.append(f'<text x="{left}" y="24" fill="currentColor" {FONT}>width {width}</text>')
        parts.append(
            f'<path d="M{left},{top}v{high}h{wide}" fill="none" stroke="currentColor" stroke-width="1" opacity="0.6"/>'
        )
        for name, losses in curves.items():
            points = " ".join(
                f"{left + wide * at / (len(losses) - 1):.1f},{top + high * (1 - loss / most):.1f}"
                for at, loss in enumerate(losses)
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        for value in (0.0, most):
            y = top + high * (1 - value / most) + 4
            parts.append(
                f'<text x="{left - 8}" y="{y:.0f}" text-anchor="end" fill="currentColor" {FONT}>{value:.2f}</text>'
            )
        for text, x in (("one network", left), ("the other", left + wide)):
            parts.append(
                f'<text x="{x}" y="{top + high + 18}" text-anchor="middle" fill="currentColor" {FONT}>{text}</text>'
            )
    x = 60
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="236" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="246" fill="currentColor" {FONT}>{name}</text>')
        x += 40 + 8 * len(name)
    size = 'width="680" height="260" viewBox="0 0 680 260"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{"".join(parts)}</svg>\n'


def main() -> None:
    """Write the picture."""
    data = HERE / "barrier.json"
    if "--measure" in sys.argv[1:]:
        data.write_text(json.dumps(measure(), indent=1) + "\n")
    (HERE / "barrier.svg").write_text(draw(json.loads(data.read_text())))


if __name__ == "__main__":
    main()
