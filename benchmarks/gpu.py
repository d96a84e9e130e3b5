"""The first-order table on an accelerator: launches, bytes, host synchronisations, and times where there is one.

    python benchmarks/gpu.py

On a machine without an accelerator the counted part is printed: launches, copies and allocations per step by fake tensors,
beside torch's foreach and fused forms, and the time that the bytes take at the bandwidth of common cards.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from laws.fake_device import Launches
from moduli import kernels
from moduli._torch import open_fake_device
from moduli.testing._gpu import make_parameters, name_device, report, step_own, step_torchs

CARDS = {"A100 80 GB": 2039, "H100 SXM": 3350, "MI300X": 5300, "RTX 4090": 1008, "L4": 300}  # GB/s
SHAPES = {"4 of 2048x2048": [(2048, 2048)] * 4, "100 of 64x64": [(64, 64)] * 100}


def torch_fused(params):
    optimizer = torch.optim.AdamW(params, fused=True)

    def step():
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()

    return step


def count_step(make, shapes, form):
    """Return the launches, copies and allocations of a third step on fake GPU tensors, and of generated kernels.

    Args:
        make: A function of the parameters that returns a step.
        shapes: The shapes of the parameters.
        form: The value of `MODULI_KERNELS`.
    """
    with mock.patch.dict("os.environ", MODULI_KERNELS=form), open_fake_device("cuda"):
        step = make(make_parameters(shapes, "cuda"))
        step()
        with Launches():
            step()  # under a mode a step has another plan
        with Launches() as seen, kernels.watch_launches() as generated:
            step()
    return seen.cost, generated


def count() -> None:
    print("\ncounted on fake tensors, per step of clip + Adam + decay + lr (nothing was launched):")
    print(f"  {'':24}{'launches':>10}{'copies':>8}{'allocated':>11}{'bytes':>16}")
    for name, shapes in SHAPES.items():
        print(f"  {name}")
        least = 32 * sum(torch.Size(shape).numel() for shape in shapes)
        rows = [("triton", step_own, "triton"), ("foreach", step_own, "foreach")]
        rows += [("torch, foreach", step_torchs, "foreach"), ("torch, fused", torch_fused, "foreach")]
        for label, make, form in rows:
            cost, generated = count_step(make, shapes, form)
            moved = sum(launch.bytes for launch in generated)
            size = f"{moved:,} ({moved / least:.2f} of the least)" if generated else ""
            launches = len(generated) + len(cost.launches)
            print(f"    {label:22}{launches:>10}{len(cost.copies):>8}{cost.allocated:>11}  {size}")


def expected() -> None:
    print(
        "\nexpected milliseconds per step of clip + Adam + decay + lr, by bytes over bandwidth (32 bytes per element):"
    )
    print(f"  {'':12}" + "".join(f"{card:>14}" for card in CARDS))
    for label, elements in (("10 M", 10e6), ("124 M", 124e6), ("1.5 B", 1.5e9)):
        times = "".join(f"{32 * elements / (bandwidth * 1e9) * 1e3:>14.3f}" for bandwidth in CARDS.values())
        print(f"  {label:12}{times}")
    print("  torch's fused AdamW with clipping moves 40 bytes: the clipped gradients are written and read again.")


def main() -> None:
    report()
    if name_device() is None:
        count()
    expected()


if __name__ == "__main__":
    main()
